"""Calls of W&B by a program whose W&B process has been ended by a stop signal.

`wandb.init` starts a process of its own (wandb-core, 0.31), and Slurm's TERM ends it, as Slurm signals every process of
a step. The next `log` or `finish` of the program then raises ConnectionResetError, mostly before the save of the step
at which all ranks stop. Here such a call says so and does nothing. W&B has what was logged until then.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from slurm_train.session.signals import StopFlag

_CALLS = ("log", "finish")
_MARK = "is_guarded_by_slurm_train"
# Slurm signals one process after the other.
_PATIENCE_S = 2.0


def guard_calls(stop: StopFlag) -> None:
    """Makes calls of W&B that fail after a stop signal do nothing, if the program has imported it; may be repeated.

    Args:
        stop: of this rank.
    """
    wandb: Any = sys.modules.get("wandb")
    run_class = getattr(wandb, "Run", None)
    if run_class is None or hasattr(run_class, _MARK):
        return
    setattr(run_class, _MARK, True)
    for name in _CALLS:
        setattr(run_class, name, _guarded(getattr(run_class, name), stop))
    if wandb.run is not None:
        # `wandb.init` has set it to the method as it was then.
        wandb.log = wandb.run.log


def _guarded(method: Any, stop: StopFlag) -> Any:
    @functools.wraps(method)
    def call(*values: Any, **settings: Any) -> Any:
        try:
            return method(*values, **settings)
        except Exception as err:
            if not _is_stopped_soon(stop):
                raise
            print(
                f"slurm_train: W&B's process was ended by the stop signal, {method.__name__} does nothing: "
                f"{type(err).__name__}: {err}",
                file=sys.stderr,
            )
            return None

    return call


def _is_stopped_soon(stop: StopFlag) -> bool:
    """Returns whether a stop signal has come to this rank, or comes within two seconds."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not stop.signal_number and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return bool(stop.signal_number)
