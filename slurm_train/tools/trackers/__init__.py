"""Trackers get the lines of metrics.jsonl, each in a process of its own beside the ranks; none can touch training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from slurm_train.config.schema import TrackSection
from slurm_train.rundir.paths import RunDirectory


class Tracking:
    """Keeps the trackers of a run going while the body supervises its ranks; loads nothing where none is asked for.

    Args:
        run: the run.
        track: which trackers, and how long they may take.
        env: environment of their processes.
        say: prints a line for the person.
    """

    def __init__(
        self, run: RunDirectory, track: TrackSection, *, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._trackers: Any = None
        if track != TrackSection():
            names = importlib.import_module("slurm_train.tools.trackers.catalogue").asked_trackers(track)
            sidecars = importlib.import_module("slurm_train.tools.trackers.sidecars")
            self._trackers = sidecars.Trackers(run, names, track=track, env=env, say=say)
        self._context: AbstractContextManager[Any] = self._trackers or nullcontext()

    def __enter__(self) -> Tracking:
        self._context.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._context.__exit__(*exc)

    def finish_soon(self) -> None:
        """Announces that no line of metrics will be added any more; returns at once."""
        if self._trackers is not None:
            self._trackers.finish_soon()
