"""Which ranks delay the others: readings of heartbeats, cut into windows and judged. Pure; no clock, no files.

A rank is compared with the others by its own part of a step, not by its step time, which is the same for all ranks. The
median of the others is the expected time, and their median absolute deviation the random variation. Medians are used so
that one slow rank in the comparison does not hide another. Only what holds for several windows in a row is reported.
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
"""Number of windows that must agree: a pause of some seconds is not reported."""
_LEAST_SAMPLES = 8
_SCORE = 5.0
_TO_SIGMA = 1.4826
# Differences below this share of the median do not count. Few ranks are a small sample of the random variation.
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
        self._base_unix_s = 0.0
        self._newest_unix_s = 0.0

    def look(self, beats: Mapping[int, Beat], now_unix_s: float) -> PaceWindow | None:
        """Takes a reading; returns a window if the reading completes one, else None."""
        if len(beats) < self._world_size or any(beat.pace.samples == 0 for beat in beats.values()):
            return None
        self._newest = dict(beats)
        self._newest_unix_s = now_unix_s
        if not self._base:
            # The first steps, with compilation and warm-up, lie before it and are in no window.
            self._base = self._newest
            self._base_unix_s = now_unix_s
            return None
        if now_unix_s - self._base_unix_s < self._length_s or self._num_samples() < _LEAST_SAMPLES:
            return None
        self._length_s = min(1.25 * self._length_s, self._longest_s)
        return self._close()

    def last_window(self) -> PaceWindow | None:
        """Returns the window that was still open when the ranks ended, None where it has too few samples."""
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


class WindowJudge:
    """Finds in each window what has held for several windows in a row.

    Args:
        excess: how much longer than the others' own time makes a straggler, 0.1 for a tenth.
        alike: groups of ranks that have equal work; only ranks of one group are compared. None: all ranks have equal
            work. With groups, uneven batches are not searched for.
    """

    def __init__(self, *, excess: float, alike: Sequence[Sequence[int]] | None = None) -> None:
        self._excess = excess
        self._alike = alike
        self._slow_for: dict[int, int] = {}
        self._lasting_for: dict[str, int] = {}

    def judge(self, window: PaceWindow) -> PaceWindow:
        """Returns the window with its findings; to be called once per window, in order."""
        groups = self._groups(window.ranks)
        slow: list[int] = []
        for group in groups:
            slow += slow_ranks(group, excess=self._excess)
        slow.sort()
        self._slow_for = {rank: self._slow_for.get(rank, 0) + 1 for rank in slow}
        lasting = [rank for rank, count in self._slow_for.items() if count >= WINDOWS_IN_A_ROW]
        if lasting:
            self._lasting_for = {}
            compared: list[RankPace] = []
            for group in groups:
                if {rank.rank for rank in group}.intersection(lasting):
                    compared += group
            return replace(window, findings=(explain_stragglers(compared, lasting),))
        uneven = find_uneven(window.ranks) if self._alike is None else None
        candidates = () if slow else (uneven, find_data(window.ranks))
        findings = [finding for finding in candidates if finding is not None]
        self._lasting_for = {finding.kind: self._lasting_for.get(finding.kind, 0) + 1 for finding in findings}
        confirmed = (finding for finding in findings if self._lasting_for[finding.kind] >= WINDOWS_IN_A_ROW)
        return replace(window, findings=tuple(confirmed))

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
    """Returns the keys whose value lies far above the others, measured by their spread and by a share of their median.

    Args:
        values: seconds by key; from a single value nothing can be concluded.
        excess: the smallest share above the others' median that counts.
    """
    if len(values) < 2:
        return set()
    # Without any one value above the middle, the median of the others is the same: the middle moves down by half a
    # place. The list of deviations from that median then lacks only the deviation of the value itself.
    ordered = sorted(values.values())
    middle = median(ordered)
    usual = median(ordered[:-1])
    deviations = sorted(abs(value - usual) for value in ordered)
    floor = _FLOOR_OF_FEW if len(ordered) <= _FEW else _FLOOR
    outlying = set()
    for key, value in values.items():
        if value <= middle or value < (1 + excess) * usual:
            continue
        spread = _TO_SIGMA * _median_without(deviations, value - usual)
        if value - usual >= _SCORE * max(spread, floor * usual):
            outlying.add(key)
    return outlying


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of sorted values without one of them, which is in them."""
    position = bisect_left(ordered, value)
    num_others = len(ordered) - 1
    low_index = (num_others - 1) // 2
    high_index = num_others // 2
    low = ordered[low_index] if low_index < position else ordered[low_index + 1]
    high = ordered[high_index] if high_index < position else ordered[high_index + 1]
    return (low + high) / 2


def explain_stragglers(ranks: Sequence[RankPace], slow: Sequence[int]) -> Slowdown:
    """Returns the finding about ranks that delay the others."""
    named = set(slow)
    slow_paces = [rank for rank in ranks if rank.rank in named]
    other_paces = [rank for rank in ranks if rank.rank not in named]
    own_s = median([rank.own_s for rank in slow_paces])
    usual_s = median([rank.own_s for rank in other_paces])
    more_data_s = median([rank.data_s for rank in slow_paces]) - median([rank.data_s for rank in other_paces])
    is_data = more_data_s >= 0.5 * (own_s - usual_s)
    hosts = tuple(dict.fromkeys(rank.host for rank in slow_paces))
    names = ",".join(hosts)
    step_s = _step_s(ranks)
    lost_s = median([rank.wait_s for rank in other_paces]) - min(rank.wait_s for rank in slow_paces)
    share = min(max(lost_s / step_s, 0.0), 1.0) if step_s > 0 else 0.0
    factor = own_s / max(usual_s, 1e-6)
    if is_data:
        reason = f"data come late ({_ms(more_data_s)} of it)"
        advice = "read ahead with more workers: data.num_workers=N, or data.prefetch=N; if others read the same "
        advice += f"quickly, look at the file system of {names}"
    else:
        reason = "computing takes longer"
        advice = f"see what else runs on {names}, or whether it is throttled; "
        advice += f"on a cluster, cluster.exclude={names} keeps the run off it"
    return Slowdown(
        kind="straggler",
        ranks=tuple(rank.rank for rank in slow_paces),
        hosts=hosts,
        factor=round(factor, 3),
        lost_share=round(share, 3),
        sentence=f"{_names(slow_paces, ranks)}: {factor:.2f}x as slow as the others: {_ms(own_s)} of own time per step "
        f"instead of {_ms(usual_s)}, because {reason}; the others wait {share:.0%} of each step",
        advice=advice,
    )


def find_uneven(ranks: Sequence[RankPace]) -> Slowdown | None:
    """Returns the finding that each step waits for a different rank because batches differ; None if that is not so."""
    if len(ranks) < 2:
        return None
    # A rank is itself the slowest of n at times, so its waits show only the part (n - 1) / n of its variation.
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


def _names(slow_paces: Sequence[RankPace], ranks: Sequence[RankPace]) -> str:
    parts = []
    for host in dict.fromkeys(rank.host for rank in slow_paces):
        on_node = [rank.rank for rank in slow_paces if rank.host == host]
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
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.2f} s"
