"""One rank's part in a run: its place, signals, stop and checkpoints; for programs with their own training loop.

    from slurm_train import session

    run = session.join()

Importing it needs no torch. Outside of a run everything works and does nothing.
"""

from slurm_train.session.client import join
from slurm_train.session.interface import Checkpoint, Session

__all__ = ["Checkpoint", "Session", "join"]
