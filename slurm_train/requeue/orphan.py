"""Ends a rank that nobody holds any more: its parent is gone, or a newer attempt has taken the run over.

A rank whose slurmstepd was killed cannot be ended by Slurm any more, and one that lives on after its node was lost
would train beside its successor. Both are seen by a thread that sleeps most of the time, so a rank that waits in a
collective for ever leaves as well.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

LOOK_EVERY_S = 1.0
FENCE_EVERY_S = 4.0
"""A zombie must be gone 10 s after its successor began; listing a folder costs the shared file system little. Counted
by the clock, so a process that was stopped meanwhile looks at once when it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """What keeps a rank alive."""

    parent: int
    """Process id of the parent at the start."""
    is_overtaken: Callable[[], bool]
    """Whether a newer attempt of the run exists."""
    on_orphaned: Callable[[], None]
    """Called once when the parent is gone; must end the process."""
    on_overtaken: Callable[[], None]
    """Called once when a newer attempt exists; must end the process and write nothing to the run."""


def watch(
    ties: Ties,
    *,
    every_s: float = LOOK_EVERY_S,
    parent_now: Callable[[], int] = os.getppid,
    clock: Callable[[], float] = time.monotonic,
) -> threading.Thread:
    """Starts the thread that looks after the ties; it ends with the process."""

    def look() -> None:
        pause = threading.Event()
        due_s = clock()
        while True:
            if parent_now() != ties.parent:
                return ties.on_orphaned()
            if clock() >= due_s:
                # A file system that refuses now is asked again in a moment.
                with contextlib.suppress(OSError):
                    if ties.is_overtaken():
                        return ties.on_overtaken()
                    due_s = clock() + FENCE_EVERY_S
            pause.wait(every_s)

    thread = threading.Thread(target=look, name="ties", daemon=True)
    thread.start()
    return thread
