"""Tells the ranks when their job will be ended: a thread of the supervisor asks Slurm and writes it down for them.

The warning before the limit is fixed when a job is submitted, may come a minute early, and is missing in scripts that
were typed by hand. Ranks therefore look at the clock as well; a limit that was extended, or moved by a suspension, is
seen here. Slurm is asked once in ten minutes, and once a minute when the end is near.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from slurm_train.errors import ClusterError
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.notice import Notice, write_notice
from slurm_train.rundir.rounds import newest_round

ReadNotice = Callable[[], Notice]
"""Asks Slurm; raises ClusterError where it does not answer."""
_PAUSE_S = 2.0
_FAR_S, _NEAR_S = 600.0, 60.0
_IS_NEAR_S = 1200.0
_AGAIN_S = 20.0


@contextlib.contextmanager
def keeping_time(run: RunDirectory, attempt: int, *, read: ReadNotice) -> Iterator[None]:
    """Keeps an attempt's notice up to date while the body waits for its ranks.

    Args:
        run: the run.
        attempt: number of the attempt.
        read: asks Slurm.
    """
    done = threading.Event()
    thread = threading.Thread(target=_keep, args=(run, attempt, read, done), name="timekeeper", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def next_look_s(notice: Notice, *, now_unix_s: float) -> float:
    """Returns the seconds after which Slurm is to be asked again."""
    if notice.end_unix_s is None:
        return _FAR_S
    return _NEAR_S if notice.end_unix_s - now_unix_s < _IS_NEAR_S else _FAR_S


def _keep(run: RunDirectory, attempt: int, read: ReadNotice, done: threading.Event) -> None:
    known: Notice | None = None
    told = attempt
    due_s = looked_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        # After a suspension, of which this process was a part, the limit has moved.
        if now_s >= due_s or now_s - looked_s > 5 * _PAUSE_S:
            known = _renew(run, told, read, known)
            due_s = now_s + (_AGAIN_S if known is None else next_look_s(known, now_unix_s=time.time()))
        looked_s = now_s
        if known is not None and (newest := newest_round(run, attempt)) != told:
            # torchrun has started the ranks again, as another attempt, whose folder may not be there yet.
            told = newest if _is_told(run, newest, known) else told
        if done.wait(_PAUSE_S):
            return


def _is_told(run: RunDirectory, attempt: int, notice: Notice) -> bool:
    try:
        write_notice(run, attempt, notice)
    except OSError:
        return False
    return True


def _renew(run: RunDirectory, attempt: int, read: ReadNotice, known: Notice | None) -> Notice | None:
    try:
        found = read()
        if found != known:
            write_notice(run, attempt, found)
        return found
    except (ClusterError, OSError):
        # What was known stays true until somebody answers.
        return known
