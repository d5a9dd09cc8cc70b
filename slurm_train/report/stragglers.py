"""Who holds the others up: what was found, and how much longer each rank's own part of a step was over time.

A rank's step time says nothing of this, since all wait for the slowest; its own part is compared with the middle of
all ranks in the same window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from slurm_train.rundir.stragglers import Finding, PaceWindow, all_findings

MOST_COLUMNS = 160
LEVELS = (0.05, 0.1, 0.25, 0.5, 1.0)
"""Shares above the middle from which a cell gets another colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Ranks against time, of one attempt."""

    attempt: int
    hosts: tuple[str, ...]
    """By rank."""
    begins_unix_s: tuple[float, ...]
    """Of the columns."""
    end_unix_s: float
    excess: tuple[tuple[float, ...], ...]
    """Column after column, by rank: own part of a step over the middle of all ranks, less one."""

    @property
    def seconds(self) -> float:
        """Length of the time axis."""
        return max(self.end_unix_s - self.begins_unix_s[0], 1e-9)

    @property
    def unit(self) -> tuple[float, str]:
        """Seconds of the unit that the time axis is written in, and its name."""
        units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
        return next((unit for unit in units if self.seconds >= 2 * unit[0]), units[-1])


def mapped_attempt(windows: Sequence[PaceWindow]) -> int | None:
    """Returns the attempt with the longest record, the newest of several; None where there is none of two ranks."""
    seconds: dict[int, float] = {}
    for window in windows:
        if len(window.ranks) > 1:
            seconds[window.attempt] = seconds.get(window.attempt, 0.0) + window.end_unix_s - window.begin_unix_s
    return max(seconds, key=lambda attempt: (seconds[attempt], attempt), default=None)


def build_heat_map(windows: Sequence[PaceWindow], attempt: int) -> HeatMap:
    """Returns the map of an attempt that has windows; where they are many, neighbours share a column."""
    own = [window for window in windows if window.attempt == attempt and len(window.ranks) > 1]
    # Ranks do not change within an attempt; a line that says otherwise is damaged.
    own = [window for window in own if len(window.ranks) == len(own[0].ranks)]
    each = -(-len(own) // MOST_COLUMNS)
    columns = [own[first : first + each] for first in range(0, len(own), each)]
    return HeatMap(
        attempt=attempt,
        hosts=tuple(rank.host for rank in own[0].ranks),
        begins_unix_s=tuple(column[0].begin_unix_s for column in columns),
        end_unix_s=own[-1].end_unix_s,
        excess=tuple(_excess(column) for column in columns),
    )


def _excess(column: Sequence[PaceWindow]) -> tuple[float, ...]:
    own_s = [fmean(one) for one in zip(*([rank.own_s for rank in window.ranks] for window in column), strict=True)]
    # Of an even number the lower of the two in the middle: of two ranks the quick one is what the other should be.
    middle = sorted(own_s)[(len(own_s) - 1) // 2]
    return tuple(own / middle - 1 if middle > 0 else 0.0 for own in own_s)


def level_of(excess: float) -> int:
    """Returns the colour of a cell: 0 for none, up to the number of `LEVELS`."""
    return sum(excess >= level for level in LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSum:
    """One rank over all windows of an attempt; seconds are means per step."""

    rank: int
    host: str
    own_s: float
    wait_s: float
    data_s: float
    excess: float
    """The middle of the columns."""
    named: int
    """Windows in which it was called a straggler."""


def sums_of(windows: Sequence[PaceWindow], heat: HeatMap) -> list[RankSum]:
    """Returns a line per rank, those that held the others up most first."""
    own = [one for one in windows if one.attempt == heat.attempt and len(one.ranks) == len(heat.hosts)]
    found = []
    for rank, host in enumerate(heat.hosts):
        paces = [window.ranks[rank] for window in own]
        found.append(
            RankSum(
                rank=rank,
                host=host,
                own_s=fmean(pace.own_s for pace in paces),
                wait_s=fmean(pace.wait_s for pace in paces),
                data_s=fmean(pace.data_s for pace in paces),
                excess=median(column[rank] for column in heat.excess),
                named=sum(rank in finding.ranks for window in own for finding in window.findings),
            )
        )
    return sorted(found, key=lambda one: (-one.named, -one.excess, one.rank))


def findings_of(windows: Sequence[PaceWindow]) -> list[tuple[PaceWindow, PaceWindow, Finding]]:
    """Returns each finding with the windows in which it was made first and last, oldest first."""
    found = []
    for first, finding in all_findings(windows):
        key = (first.attempt, finding.kind, finding.ranks)
        last = [one for one in windows for other in one.findings if (one.attempt, other.kind, other.ranks) == key]
        found.append((first, last[-1], finding))
    return found
