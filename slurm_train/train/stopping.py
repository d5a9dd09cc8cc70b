"""When a rank stops by the clock or the STOP file, and whether there is time to save where all have stopped.

The request goes out with the next gradient exchange, as after a signal: `train.step` reduces it over the ranks, and
`train.trainer` acts on it at the same boundary on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.rundir.events import append_event
from slurm_train.rundir.timing import Notice, Spent, lead_s, read_measured, read_notice, time_left_s
from slurm_train.train.context import Rank

_READ_NOTICE_EVERY_S = 5.0


class Stopping:
    """One rank's part in stopping by the clock, and in the decision whether there is time to save.

    Args:
        rank: this rank.
        spent: what rank 0 has measured so far; None on the others, which do not look at the clock.
        now: seconds since 1970.
    """

    def __init__(self, rank: Rank, *, spent: Spent | None, now: Callable[[], float] = time.time) -> None:
        self._rank, self._spent, self._now = rank, spent, now
        # Before the first save of this attempt the last one's is the best guess.
        self._before = read_measured(rank.run) if spent is not None else None
        self._notice, self._next_read_s = Notice(), 0.0

    def look(self) -> None:
        """Asks for a stop where the STOP file exists, or the end of the time limit comes near. Rank 0 only."""
        stop = self._rank.stop
        stop.look_at(self._rank.run.stop_file)
        notice = self._read()
        if notice.end_unix_s is None or stop.requested:
            return
        if notice.end_unix_s - self._now() <= lead_s(self._measured, limit_s=notice.limit_s):
            stop.request("clock")

    def decide_save(self, *, step: int) -> tuple[float | None, str]:
        """Decides whether to save where the ranks have stopped, and leaves an event that tells why. Collective.

        Returns:
            Seconds until the ranks are killed, None where that is not known; and why not to save, "" to save.
        """
        return on_rank_zero(dist.group.WORLD, lambda: self._decide_save(step))

    @property
    def _measured(self) -> Spent | None:
        """The longest times of this attempt; before its first save those of the attempt before it."""
        spent = self._spent
        return spent if spent is not None and spent.longest_save_s else self._before

    def _decide_save(self, step: int) -> tuple[float | None, str]:
        (asked_by, since_s), measured = self._rank.stop.ask(), self._measured
        self._next_read_s = 0.0
        left_s = time_left_s(self._read(), asked_by=asked_by, since_s=since_s, now_unix_s=self._now())
        save_s = measured.longest_save_s if measured is not None else None
        # What is not known does not forbid it.
        is_made = left_s is None or not save_s or save_s <= left_s
        facts = {"step": step, "asked_by": asked_by, "left_s": left_s, "save_s": save_s, "saved": is_made}
        append_event(self._rank.run, "stop", attempt=self._rank.attempt, **facts)
        return left_s, "" if is_made else f"{left_s:.0f} s are left and a save takes {save_s:.0f} s"

    def _read(self) -> Notice:
        now = time.monotonic()
        if now >= self._next_read_s:
            self._next_read_s = now + _READ_NOTICE_EVERY_S
            self._notice = read_notice(self._rank.run, self._rank.attempt)
        return self._notice
