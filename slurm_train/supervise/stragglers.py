"""Who holds the others up: readings of the ranks' heartbeats, cut into windows and judged. Pure; no clock, no files.

A rank is compared with the others by its own part of a step, not by its step time, which is the same for all. The
median of the others is what it should be, their median absolute deviation what chance does, so that one bad rank in the
comparison does not hide another. Only what holds for several windows in a row is reported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, median
from typing import TypeVar

from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.timing import PaceWindow, RankPace, Slowdown

K = TypeVar("K", bound=Hashable)

WINDOWS_IN_A_ROW = 3
"""So many windows have to agree: a pause of seconds is not worth a message."""
_LEAST_SAMPLES = 8
_SCORE = 5.0
_TO_SIGMA = 1.4826
# Below this share of their median, the others do not differ in earnest. Few others show little of what chance does.
_FLOOR = 0.02
_FLOOR_OF_FEW = 0.05
_FEW = 4
_UNEVEN_SHARE = 0.1
_DATA_SHARE = 0.2
_SHOWN = 8


class WindowCutter:
    """Cuts readings of heartbeats into windows in which every rank was looked at often enough.

    Args:
        attempt: number of the attempt.
        world_size: ranks; before all have a heartbeat there is no window.
        first_s: length of the first window; later ones grow.
        longest_s: their longest.
    """

    def __init__(self, attempt: int, *, world_size: int, first_s: float = 3.0, longest_s: float = 60.0) -> None:
        self._attempt = attempt
        self._world_size = world_size
        self._length_s = first_s
        self._longest_s = longest_s
        self._base: Mapping[int, Beat] = {}
        self._newest: Mapping[int, Beat] = {}
        self._base_unix_s = self._newest_unix_s = 0.0

    def look(self, beats: Mapping[int, Beat], now_unix_s: float) -> PaceWindow | None:
        """Takes a reading; returns the window that it closes, if it closes one."""
        if len(beats) < self._world_size or any(beat.pace.samples == 0 for beat in beats.values()):
            return None
        self._newest, self._newest_unix_s = dict(beats), now_unix_s
        if not self._base:
            # What lies before it, the first steps with their compiling and warming up, is in no window.
            self._base = self._newest
            self._base_unix_s = now_unix_s
            return None
        if now_unix_s - self._base_unix_s < self._length_s or self._num_samples() < _LEAST_SAMPLES:
            return None
        self._length_s = min(1.25 * self._length_s, self._longest_s)
        return self._close()

    def rest(self) -> PaceWindow | None:
        """Returns the window that was still open when the ranks ended, None where it holds too little."""
        return self._close() if self._base and self._num_samples() >= 2 else None

    def _num_samples(self) -> int:
        return min(beat.pace.samples - self._base[rank].pace.samples for rank, beat in self._newest.items())

    def _close(self) -> PaceWindow:
        pairs = [(beat, self._base[rank]) for rank, beat in sorted(self._newest.items())]
        window = PaceWindow(
            attempt=self._attempt,
            begin_unix_s=self._base_unix_s,
            end_unix_s=self._newest_unix_s,
            from_step=min(early.step for _, early in pairs),
            to_step=min(late.step for late, _ in pairs),
            samples=self._num_samples(),
            ranks=tuple(_rank_pace(late, early) for late, early in pairs),
        )
        self._base = self._newest
        self._base_unix_s = self._newest_unix_s
        return window


def _rank_pace(late: Beat, early: Beat) -> RankPace:
    pace = late.pace.since(early.pace)
    number = max(pace.samples, 1)
    seconds = (pace.own_s / number, pace.wait_s / number, pace.data_s / number, pace.uneven_s)
    # Four digits: a line of the file has one of these for each rank.
    return RankPace(late.rank, late.host, *(float(f"{second:.4g}") for second in seconds))


class Judge:
    """Finds out of each window what has held for several of them.

    Args:
        excess: how much longer than the others' own time makes a straggler, 0.1 for a tenth.
        alike: groups of ranks that have equal work; only those of one group are compared. None: all have. Of a model
            that is cut, batches that differ are not looked for.
    """

    def __init__(self, *, excess: float, alike: Sequence[Sequence[int]] | None = None) -> None:
        self._excess = excess
        self._alike = alike
        self._slow_for: dict[int, int] = {}
        self._others_for: dict[str, int] = {}

    def take(self, window: PaceWindow) -> PaceWindow:
        """Returns the window with its findings; call it once for each, in order."""
        groups = self._groups(window.ranks)
        slow = sorted(rank for group in groups for rank in slow_ranks(group, excess=self._excess))
        self._slow_for = {rank: self._slow_for.get(rank, 0) + 1 for rank in slow}
        lasting = [rank for rank, count in self._slow_for.items() if count >= WINDOWS_IN_A_ROW]
        if lasting:
            self._others_for = {}
            compared = [rank for group in groups if {*lasting} & {rank.rank for rank in group} for rank in group]
            return replace(window, findings=(explain_stragglers(compared, lasting),))
        uneven = find_uneven(window.ranks) if self._alike is None else None
        found = [] if slow else [f for f in (uneven, find_data(window.ranks)) if f is not None]
        self._others_for = {finding.kind: self._others_for.get(finding.kind, 0) + 1 for finding in found}
        held = (finding for finding in found if self._others_for[finding.kind] >= WINDOWS_IN_A_ROW)
        return replace(window, findings=tuple(held))

    def _groups(self, ranks: Sequence[RankPace]) -> list[Sequence[RankPace]]:
        if self._alike is None:
            return [ranks]
        return [[rank for rank in ranks if rank.rank in group] for group in self._alike]


def slow_ranks(ranks: Sequence[RankPace], *, excess: float) -> list[int]:
    """Returns the ranks whose own time stands out in one window, alone or with all others of their node."""
    alone = outliers({rank.rank: rank.own_s for rank in ranks}, excess=excess)
    by_node: dict[str, list[float]] = {}
    for rank in ranks:
        by_node.setdefault(rank.host, []).append(rank.own_s)
    nodes = outliers({host: median(values) for host, values in by_node.items()}, excess=excess)
    usual_s = median([rank.own_s for rank in ranks if rank.host not in nodes] or [0.0])
    with_node = {rank.rank for rank in ranks if rank.host in nodes and rank.own_s > (1 + excess) * usual_s}
    return sorted(alone | with_node)


def outliers(values: Mapping[K, float], *, excess: float) -> set[K]:
    """Returns the keys whose value lies far above the others', by how much those differ and by a share of them.

    Args:
        values: seconds by whatever they belong to; of one alone nothing can be concluded.
        excess: the least share above the others' median.
    """
    if len(values) < 2:
        return set()
    # The others of one that is above the middle have the same median whichever of those it is: without it, the middle
    # moves down by half a place. Their deviations from it differ by its own alone.
    ordered = sorted(values.values())
    middle = median(ordered)
    usual = median(ordered[:-1])
    deviations = sorted(abs(value - usual) for value in ordered)
    floor = _FLOOR_OF_FEW if len(ordered) <= _FEW else _FLOOR
    found = set()
    for key, value in values.items():
        if value <= middle or value < (1 + excess) * usual:
            continue
        spread = _TO_SIGMA * _median_without(deviations, value - usual)
        if value - usual >= _SCORE * max(spread, floor * usual):
            found.add(key)
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of sorted values without one of them, which is in them."""
    at = bisect_left(ordered, value)
    rest = len(ordered) - 1
    low, high = ((ordered[n] if n < at else ordered[n + 1]) for n in ((rest - 1) // 2, rest // 2))
    return (low + high) / 2


def explain_stragglers(ranks: Sequence[RankPace], slow: Sequence[int]) -> Slowdown:
    """Returns the finding about ranks that hold the others up."""
    named = set(slow)
    theirs = [rank for rank in ranks if rank.rank in named]
    others = [rank for rank in ranks if rank.rank not in named]
    own_s = median([rank.own_s for rank in theirs])
    usual_s = median([rank.own_s for rank in others])
    more_data_s = median([rank.data_s for rank in theirs]) - median([rank.data_s for rank in others])
    is_data = more_data_s >= 0.5 * (own_s - usual_s)
    hosts = tuple(dict.fromkeys(rank.host for rank in theirs))
    names = ",".join(hosts)
    step_s = _step_s(ranks)
    lost_s = median([rank.wait_s for rank in others]) - min(rank.wait_s for rank in theirs)
    share = min(max(lost_s / step_s, 0.0), 1.0) if step_s > 0 else 0.0
    factor = own_s / max(usual_s, 1e-6)
    if is_data:
        why = f"data come late ({_ms(more_data_s)} of it)"
        advice = "read ahead with more workers: data.num_workers=N, or data.prefetch=N; if others read the same "
        advice += f"quickly, look at the file system of {names}"
    else:
        why = "computing takes longer"
        advice = f"see what else runs on {names}, or whether it is throttled; "
        advice += f"on a cluster, cluster.exclude={names} keeps the run off it"
    return Slowdown(
        kind="straggler",
        ranks=tuple(rank.rank for rank in theirs),
        hosts=hosts,
        factor=round(factor, 3),
        lost_share=round(share, 3),
        sentence=f"{_names(theirs, ranks)}: {factor:.2f}x as slow as the others: {_ms(own_s)} of own time per step "
        f"instead of {_ms(usual_s)}, because {why}; the others wait {share:.0%} of each step",
        advice=advice,
    )


def find_uneven(ranks: Sequence[RankPace]) -> Slowdown | None:
    """Returns the finding that each step waits for another rank, because their batches differ; None if it does not."""
    if len(ranks) < 2:
        return None
    # The waits of a rank among n follow only the part (n - 1) / n of what it is longer by: it is the slowest at times.
    uneven_s = fmean([rank.uneven_s for rank in ranks]) * (len(ranks) / (len(ranks) - 1)) ** 0.5
    # Expected maximum of so many normal values (Blom).
    slowest = NormalDist().inv_cdf((len(ranks) - 0.375) / (len(ranks) + 0.25))
    step_s = _step_s(ranks)
    lost_s = min(slowest * uneven_s, fmean([rank.wait_s for rank in ranks]))
    if step_s <= 0 or lost_s < _UNEVEN_SHARE * step_s:
        return None
    return Slowdown(
        kind="uneven",
        lost_share=round(lost_s / step_s, 3),
        sentence=f"each step waits about {lost_s / step_s:.0%} of its time for whichever rank has most to do in it, a "
        f"different one each time: a rank's own part differs by {_ms(uneven_s)} from step to step",
        advice="give the ranks equal work: batch.by_length=true where samples have lengths; larger local batches even "
        "out the rest",
    )


def find_data(ranks: Sequence[RankPace]) -> Slowdown | None:
    """Returns the finding that all ranks wait for data; None if they do not."""
    step_s = _step_s(ranks)
    data_s = median([rank.data_s for rank in ranks])
    if step_s <= 0 or data_s < _DATA_SHARE * step_s:
        return None
    return Slowdown(
        kind="data",
        lost_share=round(data_s / step_s, 3),
        sentence=f"all ranks wait for data {data_s / step_s:.0%} of each step ({_ms(data_s)})",
        advice="read ahead: data.num_workers=N for a data set of your own, data.prefetch=N for one that reads batches",
    )


def _step_s(ranks: Sequence[RankPace]) -> float:
    return fmean([rank.own_s + rank.wait_s for rank in ranks])


def _names(theirs: Sequence[RankPace], ranks: Sequence[RankPace]) -> str:
    parts = []
    for host in dict.fromkeys(rank.host for rank in theirs):
        on_node = [rank.rank for rank in theirs if rank.host == host]
        if len(on_node) > 1 and len(on_node) == sum(rank.host == host for rank in ranks):
            parts.append(f"all {len(on_node)} ranks on {host}")
            continue
        parts.append(f"{ranks_in_words(on_node)} on {host}")
    return " and ".join(parts)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Returns "rank 3", "ranks 3, 4", or the first eight of more."""
    names = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {names}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
