"""What a tracker is: one small interface, and what it is told about a run.

A tracker may raise, hang or die at any moment: it runs in a process of its own (see `follow` and `beside`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Outcome = Literal["finished", "failed", "paused"]
"""How a run stands when its tracker is closed; paused: it will be continued, by Slurm or by a person."""
Line = Mapping[str, Any]
"""A line of metrics.jsonl; it has a "step"."""
# Facts about a line rather than curves.
_NOT_CURVES = frozenset({"step", "attempt", "world_size", "time_unix_s", "samples_digest"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as its tracker is told of it."""

    name: str
    """E.g. "gpt-stdlib/5d2030c7"."""
    key: str
    """Chosen once for this run directory and this tracker, e.g. "5d2030c7-8a1f04"; the same in every attempt."""
    tracker_id: str | None
    """What the tracker calls the run, where it has been asked before."""
    path: Path
    folder: Path
    """Where trackers may write."""
    config: Mapping[str, Any]
    """The frozen configuration."""
    facts: Mapping[str, str]
    """Where the run came from: directory, git commit."""
    group: str | None
    """Id of the sweep that the run belongs to."""

    @property
    def root(self) -> Path:
        """Root of all runs."""
        return self.path.parent.parent


class Tracker(Protocol):
    """One tracker that has a run open. Every method may raise and may take its time."""

    tracker_id: str
    """What it calls the run; stored before the first line is sent, and given back in the next attempt."""
    place: str
    """Where a person finds the run: a URL, or a command."""
    settle_s: float
    """Seconds after which a line that it took can no longer be lost with this process."""

    def log(self, lines: Sequence[Line]) -> None:
        """Takes lines in the order in which they were written; a step may come again after a resume."""

    def close(self, outcome: Outcome) -> None:
        """Sends what is left and says how the run stands; lines that were taken are safe when it returns."""


OpenTracker = Callable[[TrackedRun], Tracker]
"""Starts a tracker; a package that is not installed is a ConfigError."""


def numbers_of(line: Line) -> dict[str, float]:
    """Returns the curves of a line by name."""
    return {
        key: float(value)
        for key, value in line.items()
        if key not in _NOT_CURVES
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


class Rewinds:
    """Sees where a run goes back to an earlier step: after a resume from a checkpoint, or a rollback."""

    def __init__(self) -> None:
        self._step = self._trained = -1

    def is_rewind(self, line: Line) -> bool:
        """Returns whether the steps from this line's on are written anew. An evaluation shares its step's number."""
        step, trains = int(line["step"]), "loss" in line
        goes_back = step < self._step or (trains and step <= self._trained)
        self._step = step
        if trains:
            self._trained = step
        return goes_back
