"""saves.jsonl: one line per checkpoint that was tried: its size, how long training stood still, until when it took.

Rank 0 appends, `report` reads. It is told for people: nothing depends on a line, so none is made durable and a disk
that refuses one costs no run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from slurm_train.rundir.files import append_line, read_lines
from slurm_train.rundir.layout import RunDirectory


class SaveLog:
    """What became of an attempt's saves.

    Args:
        run: the run.
        attempt: number of the attempt.
        now: the time of day.
    """

    def __init__(self, run: RunDirectory, attempt: int, *, now: Callable[[], float] = time.time) -> None:
        self._run, self._attempt, self._now = run, attempt, now
        self._stalls: dict[int, float] = {}

    def stalled(self, step: int, seconds: float) -> None:
        """Takes note of how long the save of a step has kept the training waiting."""
        self._stalls[step] = self._stalls.get(step, 0.0) + seconds

    def ended(self, step: int, *, num_bytes: int, save_s: float, error: str = "") -> None:
        """Writes the line of a save; a step that had been saved before (no bytes, no error) has its line already.

        Args:
            step: which one.
            num_bytes: size of all its files.
            save_s: from its begin until it was durable, or failed.
            error: why it failed.
        """
        stall_s = self._stalls.pop(step, 0.0)
        if not num_bytes and not error:
            return
        line: dict[str, Any] = {
            "attempt": self._attempt,
            "step": step,
            "bytes": num_bytes,
            "stall_s": round(stall_s, 6),
            "save_s": round(save_s, 6),
            "time_unix_s": self._now(),
        }
        with contextlib.suppress(OSError):
            append_line(self._run.saves, line | ({"error": error} if error else {}))


def read_saves(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns the lines in the order in which the saves ended."""
    return [line for line in read_lines(run.saves) if isinstance(line.get("step"), int)]
