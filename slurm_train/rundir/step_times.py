"""What the ranks' steps took: a histogram for each rank, and windows in which the ranks are compared.

`step_times_<r>.json` of an attempt counts a rank's steps in fixed buckets, a sixteenth of a doubling wide, so a
quantile is right to 2 %. Adding a step costs a microsecond and no memory; a rank that is killed loses what it added
since the last writing. `stragglers.jsonl` has a line for each window of some seconds: seconds per step of every rank,
and who held the others up. Nothing depends on either, so none is made durable. No torch here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_train.rundir.files import append_line, last_lines, make_private, read_json, read_lines, write_atomic
from slurm_train.rundir.layout import RunDirectory

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
    found = [
        _read_times(run.attempt_logs(attempt) / name) for name in names if re.fullmatch(r"step_times_\d+\.json", name)
    ]
    return sorted((times for times in found if times is not None), key=lambda times: times.rank)


def _read_times(path: Path) -> RankTimes | None:
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


_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """What one rank spent a step on in one window, on average."""

    rank: int
    host: str
    own_s: float
    """Everything but the wait for others."""
    wait_s: float
    """Waiting for the others' gradients, once its own were done."""
    data_s: float
    """The part of the own time that waited for data."""
    uneven_s: float
    """How much the own time differs from step to step for this rank alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Why steps take longer than they would have to, in words."""

    kind: str
    """"straggler": some ranks hold the others up; "uneven": now one rank, now another; "data": all wait for data."""
    ranks: tuple[int, ...] = ()
    """Who it is; empty where it is everybody."""
    hosts: tuple[str, ...] = ()
    factor: float = 1.0
    """Stragglers: their own time over the others'."""
    lost_share: float
    """The part of each step that is lost by it, from 0 to 1."""
    sentence: str
    """One line with names and numbers."""
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceWindow:
    """One line of the file."""

    attempt: int
    begin_unix_s: float
    end_unix_s: float
    from_step: int
    to_step: int
    samples: int
    """Steps that were looked at on the rank with the fewest."""
    ranks: tuple[RankPace, ...]
    findings: tuple[Finding, ...] = ()
    """What has held for several windows up to this one."""


def append_window(run: RunDirectory, window: PaceWindow) -> None:
    """Adds a line; a file system that refuses costs a picture, never the run."""
    hosts = [[host, len(list(same))] for host, same in itertools.groupby(rank.host for rank in window.ranks)]
    columns = {name: [_short(getattr(rank, name)) for rank in window.ranks] for name in _COLUMNS}
    line = asdict(window) | {"hosts": hosts, **columns}
    del line["ranks"]
    with contextlib.suppress(OSError):
        append_line(run.stragglers, line)


def read_windows(run: RunDirectory) -> list[PaceWindow]:
    """Returns all windows, oldest first; a line that is none is passed over."""
    return [window for line in read_lines(run.stragglers) if (window := _window_from(line)) is not None]


def newest_window(run: RunDirectory) -> PaceWindow | None:
    """Returns the newest window without reading the others, None before the first."""
    windows = (_window_from(line) for line in reversed(last_lines(run.stragglers)))
    return next((window for window in windows if window is not None), None)


_COLUMNS = ("own_s", "wait_s", "data_s", "uneven_s")


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _window_from(line: Mapping[str, Any]) -> PaceWindow | None:
    try:
        hosts = [str(host) for host, count in line["hosts"] for _ in range(count)]
        columns = zip(hosts, *(map(_finite, line[name]) for name in _COLUMNS), strict=True)
        ranks = tuple(
            RankPace(rank=rank, host=host, **dict(zip(_COLUMNS, values, strict=True)))
            for rank, (host, *values) in enumerate(columns)
        )
        findings = tuple(_finding_from(finding) for finding in line["findings"])
        return PaceWindow(
            **{name: int(line[name]) for name in ("attempt", "from_step", "to_step", "samples")},
            begin_unix_s=_finite(line["begin_unix_s"]),
            end_unix_s=_finite(line["end_unix_s"]),
            ranks=ranks,
            findings=findings,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _finding_from(value: Mapping[str, Any]) -> Finding:
    return Finding(
        kind=str(value["kind"]),
        ranks=tuple(map(int, value["ranks"])),
        hosts=tuple(map(str, value["hosts"])),
        factor=_finite(value["factor"]),
        lost_share=_finite(value["lost_share"]),
        sentence=str(value["sentence"]),
        advice=str(value["advice"]),
    )


def all_findings(windows: Sequence[PaceWindow]) -> list[tuple[PaceWindow, Finding]]:
    """Returns each finding once, with the window in which it was first made."""
    seen: dict[tuple[Any, ...], tuple[PaceWindow, Finding]] = {}
    for window in windows:
        for finding in window.findings:
            seen.setdefault((window.attempt, finding.kind, finding.ranks), (window, finding))
    return list(seen.values())
