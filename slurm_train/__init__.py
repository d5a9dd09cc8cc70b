"""Slurm-native training for PyTorch.

One line on a login node plans, submits, watches, checkpoints, requeues and finishes a multi-node run.
Importing this package imports neither torch nor Slurm bindings; see `docs/design.md` for the rooms.
"""

__version__ = "0.1.0"
