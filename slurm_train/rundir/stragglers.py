"""stragglers.jsonl: what each rank spent its steps on, window by window, and who held the others up.

The supervisor appends a line per window, `status` and `report` read them. A window is some seconds long and some steps
of every rank. Nothing depends on a line, so none is made durable. Seconds are means per step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurm_train.rundir.files import append_line, read_lines
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.progress import last_lines

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
    ranks: tuple[int, ...]
    """Who it is; empty where it is everybody."""
    hosts: tuple[str, ...]
    factor: float
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
        columns = zip(hosts, *(map(_number, line[name]) for name in _COLUMNS), strict=True)
        ranks = tuple(
            RankPace(rank=rank, host=host, **dict(zip(_COLUMNS, values, strict=True)))
            for rank, (host, *values) in enumerate(columns)
        )
        findings = tuple(_finding_from(finding) for finding in line["findings"])
        return PaceWindow(
            **{name: int(line[name]) for name in ("attempt", "from_step", "to_step", "samples")},
            begin_unix_s=_number(line["begin_unix_s"]),
            end_unix_s=_number(line["end_unix_s"]),
            ranks=ranks,
            findings=findings,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _finding_from(value: Mapping[str, Any]) -> Finding:
    return Finding(
        kind=str(value["kind"]),
        ranks=tuple(map(int, value["ranks"])),
        hosts=tuple(map(str, value["hosts"])),
        factor=_number(value["factor"]),
        lost_share=_number(value["lost_share"]),
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
