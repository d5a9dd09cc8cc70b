"""Slurm-native training for PyTorch.

One line on a login node plans, submits, watches, checkpoints, requeues and finishes a multi-node run.
Importing this package imports neither torch nor Slurm bindings; see `docs/design.md` for the rooms. `submit`, `find`,
`Run` and `Sweep` do from Python what the command line does; they are imported when they are first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "Sweep", "find", "submit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("slurm_train.cli.handles"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
