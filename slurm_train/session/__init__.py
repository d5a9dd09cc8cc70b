"""One rank's part in a run: its place, signals, stop and checkpoints; for programs with their own training loop.

    from slurm_train import session

    run = session.join()

Importing it needs no torch. Outside of a run everything works and does nothing. What a bridge to a training library
needs beside it (`Switches`, `mix`, `rng_state`, `set_rng_state`) imports torch at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slurm_train.session.client import join
from slurm_train.session.interface import Checkpoint, Session

if TYPE_CHECKING:
    from slurm_train.checkpoint.switches import Switches
    from slurm_train.distributed.seeds import mix, rng_state, set_rng_state

__all__ = ["Checkpoint", "Session", "Switches", "join", "mix", "rng_state", "set_rng_state"]

_WITH_TORCH = {
    "Switches": "slurm_train.checkpoint.switches",
    "mix": "slurm_train.distributed.seeds",
    "rng_state": "slurm_train.distributed.seeds",
    "set_rng_state": "slurm_train.distributed.seeds",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)
