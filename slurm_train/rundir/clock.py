"""A clock that stands still while the process is stopped: a job that Slurm suspends loses no time by it.

`scontrol suspend`, PreemptMode=SUSPEND and gang scheduling stop every process of a job and continue it later. Only a
continued process hears of it, and only by SIGCONT; a program that is merely busy for long does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOK_AFTER_S = 0.25
# Shorter stops are no more than a slow step.
_LEAST_AWAY_S = 2.0


class AwakeClock:
    """Calling it gives seconds that never run backwards; those in which the process was stopped are left out.

    Args:
        was_continued: whether SIGCONT came since it was last asked; where nobody can tell, no time is left out.
        monotonic: seconds that go on whatever happens to the process.
    """

    def __init__(
        self, *, was_continued: Callable[[], bool] = lambda: False, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.away_s = 0.0
        """Seconds that the process was stopped for, as far as noticed."""
        self._was_continued, self._monotonic = was_continued, monotonic
        self._lock = threading.Lock()
        self._last = monotonic()

    def __call__(self) -> float:
        """Returns the time; somebody has to ask at least once a second or two, or busy time cannot be told apart."""
        with self._lock:
            now = self._monotonic()
            gap_s, self._last = now - self._last, now
            # SIGCONT also comes with every TERM of Slurm, without a stop.
            if gap_s > _LOOK_AFTER_S and self._was_continued() and gap_s > _LEAST_AWAY_S:
                self.away_s += gap_s
            return now - self.away_s
