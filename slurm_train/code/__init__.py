"""The code that a run takes along: which files, where they are imported from, git's facts, Python, weights of a hub."""
