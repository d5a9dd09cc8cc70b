"""Between the end of the ranks and the requeue nothing may raise, and nothing may wait for a file server for ever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_WITHIN_S = 30.0
_LEAST_S = 0.5


class BestEffort:
    """Carries out reads and writes that a run can do without.

    What does not come back is left behind in its thread: only reads, and writes that do no harm when they are carried
    out arbitrarily late (a line of the ledger).

    Args:
        say: prints a line for the person.
        within_s: seconds that all of them have together.
    """

    def __init__(self, say: Callable[[str], None], *, within_s: float = _WITHIN_S) -> None:
        self._say, self._deadline_s = say, time.monotonic() + within_s

    def __call__(self, what: str, work: Callable[[], T], default: T, *, asks_slurm: bool = False) -> T:
        """Returns what the work gives, `default` where it raises or does not come back in time.

        Args:
            what: what cannot be read or written then, e.g. "the ledger".
            work: whatever it raises is said.
            default: what is taken for granted then.
            asks_slurm: commands have time limits of their own, and are waited for.
        """
        found: list[T] = []
        failed: list[Exception] = []

        def attempt() -> None:
            try:
                found.append(work())
            except Exception as err:  # a broken line, a full disk, a stale handle: nothing here is worth the run
                failed.append(err)

        if asks_slurm:
            attempt()
        else:
            thread = threading.Thread(target=attempt, daemon=True)
            thread.start()
            thread.join(max(self._deadline_s - time.monotonic(), _LEAST_S))
        if found:
            return found[0]
        why = f"{type(failed[0]).__name__}: {failed[0]}" if failed else "the file system does not answer"
        self._say(f"{what}: {why}; the run goes on without")
        return default


def say(text: str) -> None:
    """Prints a line for the person to stderr (batch.log in a job); a log that is full costs the line, nothing else."""
    try:
        print(f"slurm_train: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # What could not be written stays in the buffer, and would turn the exit code into 120 at the end.
        with contextlib.suppress(OSError):
            sys.stderr = open(os.dup(2), "w", encoding="utf-8", errors="replace")  # noqa: PTH123, SIM115  # a descriptor
