"""Looks at a run's files and asks judges, one after the other, as the watch does in threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.look import LiveFiles, Look
from slurm_train.supervise.watch import Judge


class Eyes:
    """Sees the ranks of attempt 0.

    Args:
        run: the run.
        world_size: ranks.
        clock: seconds, for the readings.
    """

    def __init__(self, run: RunDirectory, *, world_size: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = LiveFiles(run, 0, world_size=world_size, clock=clock, has_watchers=False)

    def look(self, now_s: float | None = None) -> Look:
        """Reads all files; what cannot be read is as it was before.

        Args:
            now_s: the time of the look; None: now.
        """
        for read in self._files.readings.values():
            with contextlib.suppress(OSError):
                read()
        look = self._files.look()
        return look if now_s is None else replace(look, now_s=now_s)

    def ask(self, judge: Judge, now_s: float | None = None) -> None:
        """Asks a judge, and does what it asks for."""
        verdict = judge(self.look(now_s))
        if verdict is not None:
            verdict()
