"""A rank from its environment to its exit code: its process, what it runs, and torchrun's launcher in front of it."""
