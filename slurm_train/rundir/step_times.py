"""How long each rank's steps took: counts in fixed buckets, kept beside the heartbeat, read by `report`.

Adding a step costs a microsecond and no memory. A bucket is a sixteenth of a doubling wide, so a quantile is right to
2 %. The counts are of one attempt; a rank that is killed loses what it added since the last writing. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.private import make_private

_PER_DOUBLING = 16
# From 1 us to 18 hours; what lies outside counts as the nearest.
_LOWEST = -20 * _PER_DOUBLING
_NUM_BUCKETS = 36 * _PER_DOUBLING
_LAST = _NUM_BUCKETS - 1
# Often at first, so that a short attempt leaves something; a thousand ranks write a file system 17 times a second.
_FIRST_AFTER_S, _LONGEST_PAUSE_S = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations by bucket."""

    counts: Mapping[int, int]
    longest_s: float = 0.0

    @property
    def num(self) -> int:
        """How many durations were added."""
        return sum(self.counts.values())

    def quantile_s(self, share: float) -> float:
        """Returns the duration that so many of 1 are not above, 0 where there is none."""
        left = share * self.num
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return min(math.pow(2.0, (bucket + _LOWEST + 0.5) / _PER_DOUBLING), self.longest_s or math.inf)
        return self.longest_s

    def as_json(self) -> dict[str, Any]:
        """Returns what `histogram_of` reads back."""
        return {"counts": {str(bucket): count for bucket, count in self.counts.items()}, "longest_s": self.longest_s}


def histogram_of(value: Mapping[str, Any]) -> Histogram:
    """Returns the histogram in a JSON value.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    counts = {int(bucket): int(count) for bucket, count in value["counts"].items()}
    return Histogram(counts, float(value["longest_s"]))


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank's steps took in one attempt."""

    rank: int
    host: str
    step: Histogram
    """Whole steps, the wait for data and for the other ranks included."""
    data_wait: Histogram
    """The part of them that waited for data."""


class StepTimes:
    """This rank's counts of one attempt.

    Args:
        run: the run.
        attempt: number of the attempt.
        rank: this rank.
        host: its node.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        *,
        rank: int,
        host: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = run.step_times(attempt, rank)
        self._facts = {"rank": rank, "host": host}
        self._steps, self._waits = [0] * _NUM_BUCKETS, [0] * _NUM_BUCKETS
        self._longest_step_s = self._longest_wait_s = 0.0
        self._clock = clock
        self._pause_s = _FIRST_AFTER_S
        self._due_s = clock() + _FIRST_AFTER_S

    def add(self, step_s: float, data_wait_s: float) -> None:
        """Adds a step and the part of it that waited for data."""
        self._steps[_bucket(step_s)] += 1
        self._waits[_bucket(data_wait_s)] += 1
        if step_s > self._longest_step_s:
            self._longest_step_s = step_s
        if data_wait_s > self._longest_wait_s:
            self._longest_wait_s = data_wait_s

    def keep_when_due(self) -> None:
        """Writes the counts now and then; the heartbeat's thread calls it."""
        now = self._clock()
        if now >= self._due_s:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due_s = now + self._pause_s
            self.keep()

    def keep(self) -> None:
        """Writes the counts; a file system that refuses costs a picture, never the run."""
        step = Histogram(_filled(self._steps), self._longest_step_s)
        if not step.counts:
            return
        data_wait = Histogram(_filled(self._waits), self._longest_wait_s)
        value = {**self._facts, "step": step.as_json(), "data_wait": data_wait.as_json()}
        with contextlib.suppress(OSError):
            make_private(self._path.parent)
            write_atomic(self._path, json.dumps(value) + "\n", durable=False)


def read_step_times(run: RunDirectory, attempt: int) -> list[RankTimes]:
    """Returns what the ranks of an attempt have left, by rank; a file that is none is passed over."""
    try:
        names = os.listdir(run.attempt_logs(attempt))  # noqa: PTH208  # names are enough
    except OSError:
        return []
    found = [_read(run.attempt_logs(attempt) / name) for name in names if re.fullmatch(r"step_times_\d+\.json", name)]
    return sorted((times for times in found if times is not None), key=lambda times: times.rank)


def _read(path: Path) -> RankTimes | None:
    value = read_json(path)
    try:
        if value is None:
            return None
        return RankTimes(
            int(value["rank"]), str(value["host"]), histogram_of(value["step"]), histogram_of(value["data_wait"])
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _bucket(seconds: float) -> int:
    if seconds <= 0.0:
        return 0
    bucket = int(math.log2(seconds) * _PER_DOUBLING - _LOWEST)
    return 0 if bucket < 0 else min(bucket, _LAST)


def _filled(counts: list[int]) -> dict[int, int]:
    return {bucket: count for bucket, count in enumerate(counts) if count}
