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
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_train.rundir.files import append_line, last_lines, listed, make_private, read_json, read_lines, write_atomic
from slurm_train.rundir.paths import RunDirectory

_PER_DOUBLING = 16
# From 1 us to 18 hours; what lies outside counts as the nearest.
_LOWEST = -20 * _PER_DOUBLING
_LAST = 36 * _PER_DOUBLING - 1
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


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank's steps took in one attempt."""

    rank: int
    host: str
    step: Histogram
    """Whole steps, the wait for data and for the other ranks included."""
    data_wait: Histogram
    """The part of them that waited for data."""


class _Counter:
    """Durations that are being counted."""

    def __init__(self) -> None:
        self._counts, self._longest_s = [0] * (_LAST + 1), 0.0

    def add(self, seconds: float) -> None:
        bucket = int(math.log2(seconds) * _PER_DOUBLING - _LOWEST) if seconds > 0.0 else 0
        self._counts[0 if bucket < 0 else min(bucket, _LAST)] += 1
        if seconds > self._longest_s:
            self._longest_s = seconds

    def as_json(self) -> dict[str, Any]:
        counts = {str(bucket): count for bucket, count in enumerate(self._counts) if count}
        return {"counts": counts, "longest_s": self._longest_s}


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
        self._steps, self._waits = _Counter(), _Counter()
        self._clock, self._pause_s = clock, _FIRST_AFTER_S
        self._due_s = clock() + _FIRST_AFTER_S

    def add(self, step_s: float, data_wait_s: float) -> None:
        """Adds a step and the part of it that waited for data."""
        self._steps.add(step_s)
        self._waits.add(data_wait_s)

    def keep_when_due(self) -> None:
        """Writes the counts now and then; the heartbeat's thread calls it."""
        now = self._clock()
        if now >= self._due_s:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due_s = now + self._pause_s
            self.keep()

    def keep(self) -> None:
        """Writes the counts; a file system that refuses costs a picture, never the run."""
        step, data_wait = self._steps.as_json(), self._waits.as_json()
        if step["counts"]:
            with contextlib.suppress(OSError):
                make_private(self._path.parent)
                text = json.dumps({**self._facts, "step": step, "data_wait": data_wait})
                write_atomic(self._path, text + "\n", durable=False)


def read_step_times(run: RunDirectory, attempt: int) -> list[RankTimes]:
    """Returns what the ranks of an attempt have left, by rank; a file that is none is passed over."""
    paths = [path for path in listed(run.attempt_logs(attempt)) if re.fullmatch(r"step_times_\d+\.json", path.name)]
    return sorted((times for path in paths if (times := _read_times(path)) is not None), key=lambda times: times.rank)


def _read_times(path: Path) -> RankTimes | None:
    def histogram(name: str) -> Histogram:
        counts = {int(bucket): int(count) for bucket, count in value[name]["counts"].items()}
        return Histogram(counts, float(value[name]["longest_s"]))

    value = read_json(path) or {}
    try:
        return RankTimes(int(value["rank"]), str(value["host"]), histogram("step"), histogram("data_wait"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
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


_COLUMNS = ("own_s", "wait_s", "data_s", "uneven_s")


def append_window(run: RunDirectory, window: PaceWindow) -> None:
    """Adds a line; a file system that refuses costs a picture, never the run."""
    hosts = [[host, len(list(same))] for host, same in itertools.groupby(rank.host for rank in window.ranks)]
    # Four digits, and columns instead of ranks: a rank of a thousand takes 40 bytes.
    columns = {name: [float(f"{getattr(rank, name):.4g}") for rank in window.ranks] for name in _COLUMNS}
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


def _window_from(line: Mapping[str, Any]) -> PaceWindow | None:
    try:
        hosts = [str(host) for host, count in line["hosts"] for _ in range(count)]
        columns = [[_finite(value) for value in line[name]] for name in _COLUMNS]
        ranks = [RankPace(rank, *one) for rank, one in enumerate(zip(hosts, *columns, strict=True))]
        facts: dict[str, Any] = {name: int(line[name]) for name in ("attempt", "from_step", "to_step", "samples")}
        facts |= {name: _finite(line[name]) for name in ("begin_unix_s", "end_unix_s")}
        findings = tuple(_finding_from(finding) for finding in line["findings"])
        return PaceWindow(**facts, ranks=tuple(ranks), findings=findings)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _finding_from(value: Mapping[str, Any]) -> Finding:
    facts: dict[str, Any] = {name: str(value[name]) for name in ("kind", "sentence", "advice")}
    facts |= {name: _finite(value[name]) for name in ("factor", "lost_share")}
    return Finding(**facts, hosts=tuple(map(str, value["hosts"])), ranks=tuple(map(int, value["ranks"])))


def all_findings(windows: Sequence[PaceWindow]) -> list[tuple[PaceWindow, Finding]]:
    """Returns each finding once, with the window in which it was first made."""
    seen: dict[tuple[Any, ...], tuple[PaceWindow, Finding]] = {}
    for window in windows:
        for finding in window.findings:
            seen.setdefault((window.attempt, finding.kind, finding.ranks), (window, finding))
    return list(seen.values())
