"""One rank's part in a run: its place, its signals, its stop, its checkpoints; for programs that train by themselves.

    from slurm_train import session

    run = session.join()

Importing it needs no torch. Outside of a run everything works and does nothing.
"""

from slurm_train.session.client import Checkpoint, Session, join

__all__ = ["Checkpoint", "Session", "join"]
