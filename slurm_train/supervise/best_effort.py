"""Lines for the person, and reads and writes that a run can do without: none of them may raise or wait for ever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def say(text: str) -> None:
    """Prints a line for the person to stderr (batch.log in a job); if the log is full, only the line is lost."""
    try:
        print(f"slurm_train: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # The unwritten text stays in the buffer, and would make the exit code 120 at the end.
        with contextlib.suppress(OSError):
            sys.stderr = open(os.dup(2), "w", encoding="utf-8", errors="replace")  # noqa: PTH123, SIM115  # a descriptor


class BestEffort:
    """Carries out reads and writes that a run can do without.

    Between the end of the ranks and the requeue nothing may raise, and nothing may wait for a file server for ever.
    Work that does not return in time stays in its thread. So only reads are allowed, and writes that do no harm when
    they are carried out arbitrarily late (a line of the ledger).

    Args:
        within_s: seconds for all reads and writes together; each has half a second at least.
    """

    def __init__(self, *, within_s: float = 30.0) -> None:
        self._deadline_s = time.monotonic() + within_s

    def __call__(self, subject: str, work: Callable[[], T], default: T, *, asks_slurm: bool = False) -> T:
        """Returns the result of the work, `default` where it raises or does not return in time.

        Args:
            subject: what is read or written, for the message about a failure, e.g. "the ledger".
            work: the read or write; an exception of it is printed.
            default: the result if the work fails.
            asks_slurm: whether it calls Slurm's commands; these have their own time limits, so they are waited for.
        """
        results: list[T] = []
        errors: list[Exception] = []

        def attempt() -> None:
            try:
                results.append(work())
            except Exception as err:  # a broken line, a full disk, a stale handle: nothing here is worth the run
                errors.append(err)

        if asks_slurm:
            attempt()
        else:
            thread = threading.Thread(target=attempt, daemon=True)
            thread.start()
            thread.join(max(self._deadline_s - time.monotonic(), 0.5))
        if results:
            return results[0]
        reason = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "the file system does not answer"
        say(f"{subject}: {reason}; continuing without it")
        return default
