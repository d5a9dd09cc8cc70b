"""One attempt of a run, and each of its ranks: its process, what it runs, and torchrun's launcher in front of it."""
