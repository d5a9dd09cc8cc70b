"""Tells the ranks when their job will be ended: a task of the supervisor asks Slurm and writes it down for them.

The warning before the limit is fixed when a job is submitted, may come a minute early, and is missing in scripts that
were typed by hand. Ranks therefore look at the clock as well; a limit that was extended, or moved by a suspension, is
seen here. Slurm is asked once in ten minutes, and once a minute when the end is near.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from slurm_train.errors import ClusterError
from slurm_train.requeue.monitor import Task
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.notice import Notice, write_notice
from slurm_train.rundir.rounds import newest_round

ReadNotice = Callable[[], Notice]
"""Asks Slurm; raises ClusterError where it does not answer."""
_PAUSE_S = 2.0
_FAR_S, _NEAR_S = 600.0, 60.0
_IS_NEAR_S = 1200.0
_AGAIN_S = 20.0


def notice_keeper(run: RunDirectory, attempt: int, *, read: ReadNotice) -> Task:
    """Returns the task that keeps an attempt's notice up to date.

    Args:
        run: the run.
        attempt: number of the attempt.
        read: asks Slurm.
    """
    return Task(name="the notice of the job's end", every_s=_PAUSE_S, look=_Keeper(run, attempt, read).look)


def next_look_s(notice: Notice, *, now_unix_s: float) -> float:
    """Returns the seconds after which Slurm is to be asked again."""
    if notice.end_unix_s is None:
        return _FAR_S
    return _NEAR_S if notice.end_unix_s - now_unix_s < _IS_NEAR_S else _FAR_S


class _Keeper:
    """The task's state."""

    def __init__(self, run: RunDirectory, attempt: int, read: ReadNotice) -> None:
        self._run, self._first, self._written_for, self._read = run, attempt, attempt, read
        self._known: Notice | None = None
        self._due_s = self._looked_s = time.monotonic()

    def look(self) -> None:
        """Asks Slurm where that is due, and writes what has changed."""
        now_s = time.monotonic()
        # After a suspension, of which this process was a part, the limit has moved.
        if now_s >= self._due_s or now_s - self._looked_s > 5 * _PAUSE_S:
            self._due_s = now_s + _AGAIN_S
            # What was known stays true until somebody answers.
            with contextlib.suppress(ClusterError):
                found = self._read()
                if found != self._known:
                    write_notice(self._run, self._written_for, found)
                    self._known = found
                self._due_s = time.monotonic() + next_look_s(found, now_unix_s=time.time())
        self._looked_s = time.monotonic()
        if self._known is not None and (newest := newest_round(self._run, self._first)) != self._written_for:
            # torchrun has started the ranks again, as another attempt, whose folder may not be there yet.
            write_notice(self._run, newest, self._known)
            self._written_for = newest
