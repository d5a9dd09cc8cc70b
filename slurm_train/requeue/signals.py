"""The stop flag: how a rank is asked to save itself and end.

The handlers are installed before torch is imported and set one integer, nothing else: a print or a log call inside a
Python handler re-enters the buffered writer and kills the rank. Slurm sends TERM two or three times within a
millisecond, so asking is idempotent. What happens next is decided by all ranks together at a step boundary.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""USR2: the warning before the time limit (NCCL may catch USR1). TERM: preemption, scancel, `kill`."""


class StopFlag:
    """Whether this process was asked to stop; `requested` is 0 or 1 and never goes back.

    Args:
        clock: seconds that never run backwards, for the pace of looking at the STOP file.
    """

    __slots__ = ("_clock", "_next_look", "requested", "signal_number")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = 0
        self.signal_number = 0
        self._clock = clock
        self._next_look = 0.0

    def request(self) -> None:
        """Asks for a stop; asking twice is asking once."""
        self.requested = 1

    def look_at(self, stop_file: Path, *, every_s: float = 1.0) -> None:
        """Asks for a stop if the file exists; looks at most once in `every_s` seconds."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + every_s
        if stop_file.exists():
            self.requested = 1


def install(flag: StopFlag, *, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
    """Makes these signals set the flag, in this process only; a forked child ignores them.

    A loader worker inherits the handler and gets the same TERM as its parent (Slurm signals every process of the
    step), but the batch it is working on is still needed for the last step.
    """
    own_pid = os.getpid()

    def set_flag(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == own_pid:
            flag.requested = 1
            flag.signal_number = number

    for number in signals:
        signal.signal(number, set_flag)


def ignore_in_worker(*, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
    """Makes a loader worker deaf to stop signals; its parent ends it."""
    for number in (*signals, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
