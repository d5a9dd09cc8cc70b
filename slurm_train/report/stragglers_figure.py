"""The section on stragglers as markup: findings with advice, a heat map of ranks against time, and a table of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from slurm_train.report.markup import Html, join, tag
from slurm_train.report.quantity import duration, moment, share
from slurm_train.report.scale import fit
from slurm_train.report.stragglers import (
    LEVELS,
    HeatMap,
    build_heat_map,
    findings_of,
    level_of,
    mapped_attempt,
    sums_of,
)
from slurm_train.report.table import Cell, table
from slurm_train.rundir.stragglers import PaceWindow

_MOST_RANKS = 128
_WHOLE = 10_000
NOTE = (
    "Colour: how much longer a rank's own part of a step (data, forward, backward, update) took than the middle rank's "
    "in the same seconds. Whoever is dark holds the others up; the pale ones wait for it."
)


def stragglers(windows: Sequence[PaceWindow]) -> Html:
    """Returns who held the others up, and the map; empty where nothing was measured."""
    attempt = mapped_attempt(windows)
    if attempt is None:
        return Html("")
    heat = build_heat_map(windows, attempt)
    return join(
        _findings(windows),
        tag("h3", "Ranks over time"),
        tag("p", f"Attempt {attempt}. ", NOTE, class_="note"),
        heat_map(heat),
        _ranks_table(windows, heat),
    )


def _findings(windows: Sequence[PaceWindow]) -> Html:
    found = findings_of(windows)
    if not found:
        return tag("p", f"No rank has held the others up for long, in {len(windows):,} windows.", class_="none")
    rows = [
        [
            Cell(str(first.attempt), first.attempt, "num"),
            Cell(moment(first.begin_unix_s), first.begin_unix_s, "time"),
            Cell(duration(last.end_unix_s - first.begin_unix_s), last.end_unix_s - first.begin_unix_s, "num"),
            Cell(share(finding.lost_share), finding.lost_share, "num"),
            Cell(join(tag("div", finding.sentence), tag("small", finding.advice)), finding.sentence, "words"),
        ]
        for first, last, finding in found
    ]
    return table(["attempt", "since", "for", "of each step lost", "what was found, and what helps"], rows)


def heat_map(heat: HeatMap) -> Html:
    """Returns the drawing with its labels beside it, and what the colours mean."""
    title = "Own part of a step, by rank"
    drawing = tag(
        "svg",
        [tag("path", tag("title", _meaning(level)), d=path, class_=f"heat h{level}") for level, path in _paths(heat)],
        tag("path", d=_node_lines(heat), class_="mark node"),
        viewBox=f"0 0 {_WHOLE} {_WHOLE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title} against time",
    )
    frame = tag(
        "div",
        tag("div", _rank_labels(heat), class_="ylabels"),
        tag("div", drawing, class_="area", style=f"height:{min(19.0, max(3.0, 1.3 * len(heat.hosts))):g}rem"),
        tag("div", _time_labels(heat), class_="xlabels"),
        class_="frame frame-0",
    )
    legend = [
        tag("span", tag("i", class_=f"key heat h{level}"), _meaning(level), class_="entry")
        for level in range(1, len(LEVELS) + 1)
    ]
    names = (tag("span", title, class_="title"), tag("span", "rank", class_="unit"))
    caption = tag("figcaption", *names, tag("span", legend, class_="legend"))
    return tag("div", tag("figure", caption, frame, class_="wide heatmap", id="plot-stragglers"), class_="plots")


def _meaning(level: int) -> str:
    return f"{share(LEVELS[level - 1])} longer" + (" or more" if level == len(LEVELS) else "")


def _paths(heat: HeatMap) -> list[tuple[int, str]]:
    """Returns the cells of each colour as one path; neighbours of one colour in a rank's row are one cell."""
    paths: dict[int, list[str]] = {}
    edges = [_across(heat, begin) for begin in heat.begins_unix_s] + [_WHOLE]
    num_ranks = len(heat.hosts)
    for rank in range(num_ranks):
        top, bottom = _WHOLE * rank // num_ranks, _WHOLE * (rank + 1) // num_ranks
        levels = [(level_of(column[rank]), place) for place, column in enumerate(heat.excess)]
        for level, same in groupby(levels, key=itemgetter(0)):
            places = [place for _, place in same]
            if level:
                left, right = edges[places[0]], edges[places[-1] + 1]
                paths.setdefault(level, []).append(f"M{left} {top}H{right}V{bottom}H{left}z")
    return [(level, "".join(paths[level])) for level in sorted(paths)]


def _across(heat: HeatMap, unix_s: float) -> int:
    first = heat.begins_unix_s[0]
    return round(_WHOLE * (unix_s - first) / heat.seconds)


def _node_lines(heat: HeatMap) -> str:
    starts = [rank for rank in range(1, len(heat.hosts)) if heat.hosts[rank] != heat.hosts[rank - 1]]
    return "".join(f"M0 {_WHOLE * rank // len(heat.hosts)}H{_WHOLE}" for rank in starts)


def _rank_labels(heat: HeatMap) -> list[Html]:
    num_ranks = len(heat.hosts)
    every = -(-num_ranks // 16)
    return [
        tag("span", str(rank), style=f"bottom:{100 * (1 - (rank + 0.5) / num_ranks):.2f}%", title=heat.hosts[rank])
        for rank in range(0, num_ranks, every)
    ]


def _time_labels(heat: HeatMap) -> list[Html]:
    size, unit = heat.unit
    scale = fit([0.0, heat.seconds / size], is_padded=False)
    labels = [tag("span", f"{tick:g}", style=f"left:{100 * scale.at(tick):.2f}%") for tick in scale.ticks()]
    return [*labels, tag("span", f"{unit} since {moment(heat.begins_unix_s[0])}", class_="xname")]


def _ranks_table(windows: Sequence[PaceWindow], heat: HeatMap) -> Html:
    rows = [
        [
            Cell(str(one.rank), one.rank, "num"),
            Cell(one.host, one.host),
            *(Cell(duration(value), value, "num") for value in (one.own_s, one.wait_s, one.data_s)),
            Cell(f"{100 * one.excess:+.0f} %", one.excess, "num"),
            Cell(str(one.named), one.named, "num"),
        ]
        for one in sums_of(windows, heat)[:_MOST_RANKS]
    ]
    header = ["rank", "node", "own part", "waits for others", "of own: data", "against the middle", "windows named"]
    cut = f", the slowest {_MOST_RANKS}" if len(heat.hosts) > _MOST_RANKS else ""
    summary = tag("summary", f"A step of each of {len(heat.hosts)} ranks{cut}")
    return tag("details", summary, table(header, rows, is_sortable=True))
