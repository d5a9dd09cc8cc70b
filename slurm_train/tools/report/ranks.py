"""Ranks compared: percentiles of their step times, and stragglers, the ranks that the others wait for.

Ranks wait for each other in every step, so their step times are alike. A rank's own part of a step is its own; it is
compared with the middle rank in the same seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

from slurm_train.rundir.step_times import Histogram, PaceWindow, RankTimes, all_findings
from slurm_train.tools.report.curves import Curve, in_unit, plot
from slurm_train.tools.report.page import Block, duration, moment, share, table, text

_MOST_NODE_MARKS = 64
_MOST_ROWS = 128
_MOST_COLUMNS = 160


def by_rank(step_times: Mapping[int, Sequence[RankTimes]]) -> list[Block]:
    """Returns plots and a table of the attempt with the most steps, the newest of several."""
    counts = {attempt: max(times.step.num for times in of_ranks) for attempt, of_ranks in step_times.items()}
    attempt = max(counts, key=lambda one: (counts[one], one), default=None)
    if attempt is None:
        return []
    times = step_times[attempt]
    rows = [
        [
            one.rank,
            one.host,
            one.step.num,
            *(_seconds(one.step.quantile_s(part)) for part in (0.05, 0.5, 0.95, 0.99)),
            _seconds(one.step.longest_s),
            *(_seconds(one.data_wait.quantile_s(part)) for part in (0.5, 0.95)),
            _seconds(one.data_wait.longest_s),
        ]
        for one in times[:_MOST_ROWS]
    ]
    heads = ["5 %", "median", "95 %", "99 %", "longest", "data: median", "data: 95 %", "data: longest"]
    columns = ["rank|num", "node", "steps|num", *(f"{head}|num" for head in heads)]
    note = (
        f"Attempt {attempt}{', the longest of those on record' if len(step_times) > 1 else ''}. Ranks wait for each "
        "other in every step, so their step times are alike even where one of them slows the others down; the wait for "
        "data is each rank's own. An attempt's first step is not counted. Right to 2 %."
    )
    cut = f", the first {_MOST_ROWS}" if len(times) > _MOST_ROWS else ""
    return [
        text("By rank", "heading"),
        text(note, "note"),
        _plot("rank_step_time", "Step time by rank", times, [one.step for one in times]),
        _plot("rank_data_wait", "Wait for data by rank", times, [one.data_wait for one in times]),
        table("ranks", columns, rows, summary=f"Percentiles of {len(times)} ranks{cut}", sortable=True),
    ]


def _seconds(seconds: float) -> tuple[str, float]:
    return (duration(seconds), seconds)


def _plot(key: str, title: str, times: Sequence[RankTimes], histograms: Sequence[Histogram]) -> Block:
    unit, factor = in_unit([one.longest_s for one in histograms])
    ranks, labels = [float(one.rank) for one in times], [one.host for one in times]
    low, middle, high, late = (
        [factor * one.quantile_s(part) for one in histograms] for part in (0.05, 0.5, 0.95, 0.99)
    )
    longest = [factor * one.longest_s for one in histograms]
    curves = [
        Curve(name="longest", x=ranks, y=longest, kind="dots", colour="quiet"),
        Curve(name="99 %", x=ranks, y=late, kind="dots", colour="two"),
        Curve(name="median, 5 to 95 %", x=ranks, y=middle, low=low, high=high, kind="ranges", labels=labels),
    ]
    groups = [(host, next(same).rank) for host, same in groupby(times, key=lambda one: one.host)]
    marks = [(rank - 0.5, host, "node") for host, rank in groups] if 1 < len(groups) <= _MOST_NODE_MARKS else []
    return plot(key, title, curves, x_label="rank", unit=unit, marks=marks, from_zero=True)


def stragglers(windows: Sequence[PaceWindow]) -> list[Block]:
    """Returns who held the others up, and the map of the attempt with the longest record; empty without one."""
    seconds: dict[int, float] = {}
    for window in windows:
        if len(window.ranks) > 1:
            seconds[window.attempt] = seconds.get(window.attempt, 0.0) + window.end_unix_s - window.begin_unix_s
    attempt = max(seconds, key=lambda one: (seconds[one], one), default=None)
    if attempt is None:
        return []
    own = [window for window in windows if window.attempt == attempt and len(window.ranks) > 1]
    # Ranks do not change within an attempt; a line that says otherwise is damaged.
    own = [window for window in own if len(window.ranks) == len(own[0].ranks)]
    note = (
        f"Attempt {attempt}. Colour: how much longer a rank's own part of a step (data, forward, backward, update) "
        "took than the middle rank's in the same seconds. The others wait for the dark ranks."
    )
    heat = _heat_map(own)
    return [
        _findings(windows),
        text("Ranks over time", "heading"),
        text(note, "note"),
        heat,
        _ranks_table(own, heat["percent"]),
    ]


def _findings(windows: Sequence[PaceWindow]) -> Block:
    rows = []
    for first, finding in all_findings(windows):
        key = (first.attempt, finding.kind, finding.ranks)
        same = [one for one in windows for other in one.findings if (one.attempt, other.kind, other.ranks) == key]
        lasted_s = same[-1].end_unix_s - first.begin_unix_s
        what = f"{finding.sentence}. {finding.advice}"
        rows.append([first.attempt, moment(first.begin_unix_s), duration(lasted_s), share(finding.lost_share), what])
    if not rows:
        return text(f"No rank has held the others up for long, in {len(windows):,} windows.", "none")
    columns = ["attempt|num", "since|time", "for|num", "of each step lost|num", "what was found, and what helps|words"]
    return table("findings", columns, rows)


def _heat_map(windows: Sequence[PaceWindow]) -> Block:
    """Returns the map of one attempt; where windows are many, neighbours share a column."""
    each = -(-len(windows) // _MOST_COLUMNS)
    columns = [windows[first : first + each] for first in range(0, len(windows), each)]
    edges = [*(column[0].begin_unix_s for column in columns), windows[-1].end_unix_s]
    excess = [_excess_percent(column) for column in columns]
    return {
        "kind": "heatmap",
        "key": "stragglers",
        "title": "Own part of a step, by rank",
        "hosts": [rank.host for rank in windows[0].ranks],
        "edges_s": [round(edge - edges[0], 3) for edge in edges],
        "since": moment(edges[0]),
        "percent": [list(of_rank) for of_rank in zip(*excess, strict=True)],
    }


def _excess_percent(column: Sequence[PaceWindow]) -> list[int]:
    own_s = [fmean(one) for one in zip(*([rank.own_s for rank in window.ranks] for window in column), strict=True)]
    # Of an even number the lower of the two in the middle: of two ranks the quick one is what the other should be.
    middle = sorted(own_s)[(len(own_s) - 1) // 2]
    return [round(100 * (own / middle - 1)) if middle > 0 else 0 for own in own_s]


def _ranks_table(windows: Sequence[PaceWindow], percent: Sequence[Sequence[int]]) -> Block:
    rows: list[list[Any]] = []
    for rank, of_rank in enumerate(percent):
        paces = [window.ranks[rank] for window in windows]
        named = sum(rank in finding.ranks for window in windows for finding in window.findings)
        means = [fmean(values) for values in zip(*((one.own_s, one.wait_s, one.data_s) for one in paces), strict=True)]
        excess = median(of_rank)
        rows.append([rank, paces[0].host, *map(_seconds, means), (f"{excess:+.0f} %", excess), named])
    rows.sort(key=lambda row: (-row[-1], -row[-2][1], row[0]))
    heads = ["own part", "waits for others", "of own: data", "against the middle", "windows named"]
    cut = f", the slowest {_MOST_ROWS}" if len(rows) > _MOST_ROWS else ""
    return table(
        "stragglers",
        ["rank|num", "node", *(f"{head}|num" for head in heads)],
        rows[:_MOST_ROWS],
        summary=f"A step of each of {len(rows)} ranks{cut}",
        sortable=True,
    )
