"""When a rank stops by the clock or the STOP file, and whether there is time to save after all ranks have stopped.

The request is passed on with the next exchange of the ranks, as after a signal. The trainer reduces it with the
gradients (`train.step`), a user's own program calls `Session.should_stop`; all ranks act on it at the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_train.checkpoint.agreement import Group, on_rank_zero
from slurm_train.rundir.timing import Notice, Spent, lead_s, read_measured, read_notice, time_left_s
from slurm_train.session.rank_run import RankRun

_READ_NOTICE_EVERY_S = 5.0


class Stopping:
    """One rank's part in a stop by the clock, and in the decision whether there is time to save.

    Args:
        rank: this rank.
        spent: what this rank has measured so far.
        group: returns the group of the ranks that decide together; None for one process.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        rank: RankRun,
        *,
        spent: Spent,
        group: Callable[[], Group | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank = rank
        self._spent = spent
        self._group = group
        self._clock = clock
        # Before the first save of this attempt, the times of the previous attempt are the best estimate.
        self._previous = read_measured(rank.run) if rank.place.is_first else None
        self._notice = Notice()
        self._next_read_s = 0.0

    def check_clock(self) -> None:
        """Asks for a stop if the STOP file exists, or the time limit is near; rank 0 looks."""
        if not self._rank.place.is_first:
            return
        stop = self._rank.stop
        stop.check_file(self._rank.run.stop_file)
        notice = self._read()
        if notice.end_unix_s is None or stop.requested:
            return
        if notice.end_unix_s - self._clock() <= lead_s(self._measured, limit_s=notice.limit_s):
            stop.request("clock")

    def decide_save(self, *, step: int) -> tuple[float | None, str]:
        """Decides whether to save after the ranks have stopped, and writes an event with the reason. Collective.

        Returns:
            Seconds until the ranks are killed, None where that is not known; and the reason not to save, "" to save.
        """
        return on_rank_zero(self._group(), lambda: self._decide_save(step))

    def announce(self, *, step: int) -> tuple[str, float | None]:
        """Writes the event of a stop at which the caller decides about the save. Collective.

        Returns:
            How rank 0 was asked, e.g. "TERM", "USR2", "clock" or "file"; and the seconds until the ranks are killed,
            None where that is not known.
        """

        def note() -> tuple[str, float | None]:
            asked_by, left_s, save_s = self._ask()
            self._rank.append_event("stop", step=step, asked_by=asked_by, left_s=left_s, save_s=save_s, saved=True)
            return asked_by, left_s

        return on_rank_zero(self._group(), note)

    @property
    def _measured(self) -> Spent | None:
        """The longest times of this attempt; before its first save those of the previous attempt."""
        return self._spent if self._spent.longest_save_s else self._previous

    def _decide_save(self, step: int) -> tuple[float | None, str]:
        asked_by, left_s, save_s = self._ask()
        # If a time is not known, the save is made.
        is_made = left_s is None or not save_s or save_s <= left_s
        self._rank.append_event("stop", step=step, asked_by=asked_by, left_s=left_s, save_s=save_s, saved=is_made)
        return left_s, "" if is_made else f"{left_s:.0f} s are left and a save takes {save_s:.0f} s"

    def _ask(self) -> tuple[str, float | None, float | None]:
        """Returns how this rank was asked, the seconds until it is killed, and those that a save takes."""
        asked_by, since_s = self._rank.stop.ask()
        measured = self._measured
        self._next_read_s = 0.0
        left_s = time_left_s(self._read(), asked_by=asked_by, since_s=since_s, now_unix_s=self._clock())
        return asked_by, left_s, measured.longest_save_s if measured is not None else None

    def _read(self) -> Notice:
        now_s = time.monotonic()
        if now_s >= self._next_read_s:
            self._next_read_s = now_s + _READ_NOTICE_EVERY_S
            self._notice = read_notice(self._rank.run, self._rank.attempt)
        return self._notice
