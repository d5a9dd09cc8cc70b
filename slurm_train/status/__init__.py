"""The status of runs, in one answer for everything that asks: state and reason, what is active, which rank failed."""
