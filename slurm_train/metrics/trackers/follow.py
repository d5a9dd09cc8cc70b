"""Follows metrics.jsonl and hands its lines to one tracker, until it is told that the run's ranks have ended.

The file is the queue: it is durable, no memory grows while a tracker is slow, and lines that one attempt could not send
are sent by the next. A call that takes too long ends this process (by the kernel's alarm, so that even code that never
gives Python a turn cannot hold it); whoever started it tries again.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from slurm_train.metrics.trackers.state import TrackerState, first_state, new_lines, write_state
from slurm_train.metrics.trackers.tracker import Line, OpenTracker, Outcome, TrackedRun, Tracker
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory

_POLL_S = 1.0
_MOST_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What a follower needs."""

    run: RunDirectory
    name: str
    """Of the tracker."""
    describe: Callable[[TrackerState], TrackedRun]
    open: OpenTracker
    timeout_s: float
    """Longest that a call of the tracker may take."""
    is_over: Callable[[float], bool]
    """Waits so many seconds at most, and returns whether no line will be added any more."""
    clock: Callable[[], float] = time.monotonic


def follow(following: Following) -> None:
    """Sends every line, from where the last process was sure, and closes the tracker when the run has ended."""
    run, name = following.run, following.name
    state = first_state(run, name)
    with time_limit(following.timeout_s):
        tracker = following.open(following.describe(state))
    known = replace(state, tracker_id=tracker.tracker_id, place=tracker.place, problem="", sent_bytes=state.sure_bytes)
    write_state(run, name, known, durable=True)
    follower = _Follower(following, tracker, known)
    while True:
        is_over = following.is_over(0.0)
        if not follower.send_some():
            if is_over:
                break
            following.is_over(_POLL_S)
    with time_limit(following.timeout_s):
        tracker.close(outcome_of(run))
    follower.settle()


class _Follower:
    """Where one process stands in the file.

    Args:
        following: what it needs.
        tracker: the open tracker.
        state: what is on disk of it.
    """

    def __init__(self, following: Following, tracker: Tracker, state: TrackerState) -> None:
        self._following, self._tracker, self._state = following, tracker, state
        self._taken: deque[tuple[float, int]] = deque()

    def send_some(self) -> bool:
        """Sends the next part of the file, and returns whether there was one."""
        lines, end = new_lines(self._following.run.metrics, self._state.sent_bytes)
        for part in _parts(lines):
            with time_limit(self._following.timeout_s):
                self._tracker.log(part)
        now = self._following.clock()
        is_news = end > self._state.sent_bytes
        if is_news:
            self._taken.append((now, end))
        sure = self._state.sure_bytes
        while self._taken and self._taken[0][0] <= now - self._tracker.settle_s:
            sure = self._taken.popleft()[1]
        self._write(replace(self._state, sent_bytes=end, sure_bytes=sure))
        return is_news

    def settle(self) -> None:
        """Notes that nothing that was sent can be lost any more."""
        self._write(replace(self._state, sure_bytes=self._state.sent_bytes))

    def _write(self, state: TrackerState) -> None:
        if state != self._state:
            self._state = state
            write_state(self._following.run, self._following.name, state)


def _parts(lines: list[Line]) -> Iterator[list[Line]]:
    for start in range(0, len(lines), _MOST_LINES):
        yield lines[start : start + _MOST_LINES]


def outcome_of(run: RunDirectory) -> Outcome:
    """Returns how a run stands now."""
    if run.result.exists():
        return "finished"
    newest = (read_ledger(run) or [{}])[-1]
    has_failed = newest.get("action") == "stop" and newest.get("reason") in ("failed", "cancelled")
    return "failed" if has_failed else "paused"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends this process by SIGALRM where the body takes longer."""
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
