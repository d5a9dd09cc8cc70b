"""How a training is asked to stop by the clock, and whether the save of a stop can still be made.

Rank 0 looks at the clock; its wish travels with the next step like any other, so all ranks leave at the same step.
Whether to save is rank 0's decision too, made once where all have stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.rundir.events import append_event
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import (
    Measured,
    Notice,
    Spent,
    is_worth_saving,
    lead_s,
    read_measured,
    read_notice,
    time_left_s,
)
from slurm_train.supervise.signals import StopFlag

_READ_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class StopSave:
    """Whether the save of a stop is made."""

    is_made: bool
    left_s: float | None
    """Seconds until the ranks are killed, None where that is not known."""
    why: str
    """In words, for the log; "" where it is made."""


class Stopping:
    """One rank's part in stopping.

    Args:
        run: the run.
        attempt: number of the attempt.
        stop: this rank's wish to stop.
        spent: what rank 0 has measured so far; None on the others, which do not look at the clock.
        group: a gloo group of all ranks.
        now: seconds since 1970.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        *,
        stop: StopFlag,
        spent: Spent | None,
        group: Any,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._attempt, self._stop = run, attempt, stop
        self._spent, self._group, self._now = spent, group, now
        # Before the first save of this attempt the last one's is the best guess.
        self._before = read_measured(run) if spent is not None else None
        self._notice, self._next_read_s = Notice(), 0.0

    def look(self) -> None:
        """Asks for a stop where the file says so, or the end of the time limit comes near. Rank 0 only."""
        self._stop.look_at(self._run.stop_file)
        notice = self._read()
        if notice.end_unix_s is None or self._stop.requested:
            return
        if notice.end_unix_s - self._now() <= lead_s(self.measured, limit_s=notice.limit_s):
            self._stop.request("clock")

    @property
    def measured(self) -> Measured | None:
        """What a stop takes, as slow as this attempt, or before its first save the one before it, has seen it."""
        spent = self._spent
        if spent is None or not spent.longest_save_s:
            return self._before
        return Measured(
            save_s=spent.longest_save_s, step_s=spent.longest_step_s, evaluation_s=spent.longest_evaluation_s
        )

    def decide(self, *, step: int) -> StopSave:
        """Returns whether to save where the ranks have stopped, and leaves an event that tells why. Collective."""
        return on_rank_zero(self._group, lambda: self._decide(step))

    def _decide(self, step: int) -> StopSave:
        ask, measured = self._stop.ask(), self.measured
        self._next_read_s = 0.0
        left_s = time_left_s(ask, self._read(), now_unix_s=self._now())
        save_s = measured.save_s if measured is not None else None
        is_made = is_worth_saving(left_s, save_s=save_s)
        why = "" if is_made else f"{left_s:.0f} s are left and a save takes {save_s:.0f} s"
        append_event(
            self._run,
            "stop",
            attempt=self._attempt,
            step=step,
            asked_by=ask.by,
            left_s=left_s,
            save_s=save_s,
            saved=is_made,
        )
        return StopSave(is_made, left_s, why)

    def _read(self) -> Notice:
        now = time.monotonic()
        if now >= self._next_read_s:
            self._next_read_s = now + _READ_EVERY_S
            self._notice = read_notice(self._run, self._attempt)
        return self._notice
