"""Curves of few points, and plots of them as blocks: one ascending x for all curves of a plot, None where one has none.

Of many points each stands for its neighbours: `thinned` keeps mean, smallest and largest, so no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

from slurm_train.tools.report.page import Block

MOST_POINTS = 600
# A range of so many times is easier to read in powers of ten.
_LOG_ABOVE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points that belong together; `low` and `high` are the band around them, empty where there is none."""

    name: str
    x: Sequence[float]
    """Ascending; of equal ones the last is drawn."""
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    kind: Literal["line", "steps", "dots", "ranges"] = "line"
    colour: str = "one"
    """A name in `page.COLOURS`."""
    labels: Sequence[str] = ()
    """A text for each point, shown when it is pointed at."""
    run: int | None = None
    """Number of the run of a sweep that it belongs to."""


def thinned(name: str, x: Sequence[float], y: Sequence[float], *, colour: str = "one") -> Curve:
    """Returns a line through all points, or through the means of equally many of them where they are many.

    Args:
        name: of the curve.
        x: ascending.
        y: finite.
        colour: see `Curve`.
    """
    if len(x) <= MOST_POINTS:
        return Curve(name=name, x=x, y=y, colour=colour)
    edges = [round(index * len(x) / MOST_POINTS) for index in range(MOST_POINTS + 1)]
    spans = [slice(start, end) for start, end in pairwise(edges)]
    return Curve(
        name=name,
        # The last value stands at its own place, so that a curve ends where the run ended.
        x=[x[span][len(x[span]) // 2] for span in spans[:-1]] + [x[-1]],
        y=[sum(y[span]) / len(y[span]) for span in spans],
        low=[min(y[span]) for span in spans],
        high=[max(y[span]) for span in spans],
        colour=colour,
    )


def skeleton(x: Sequence[float], y: Sequence[float], *, most: int) -> tuple[list[float], list[float]]:
    """Returns the smallest and the largest of neighbours: about `most` points, and every spike among them.

    The points of many lie on multiples of a power of two, so that curves of a sweep share their places.
    """
    if len(x) <= most:
        return list(x), list(y)
    width = 2.0 ** max(1, math.ceil(math.log2(2 * max(x[-1], 1.0) / most)))
    xs, ys = [], []
    for bucket, found in groupby(range(len(x)), key=lambda place: x[place] // width):
        places = list(found)
        ends = sorted({min(places, key=y.__getitem__), max(places, key=y.__getitem__)})
        xs += [width * bucket, width * (bucket + 0.5)][: len(ends)]
        ys += [y[place] for place in ends]
    return xs, ys


def plot(
    key: str,
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str = "step",
    unit: str = "",
    marks: Sequence[tuple[float, str, str]] = (),
    from_zero: bool = False,
    is_wide: bool = False,
    prefers_linear: bool = False,
    note: str = "",
) -> Block:
    """Returns a plot; one without points shows its note instead.

    Args:
        key: names the PNG file.
        title: of the plot.
        curves: those without points are left out.
        x_label: what the x axis counts.
        unit: of the y axis.
        marks: place on the x axis, text, and "attempt", "node", "event" (bad) or "calm".
        from_zero: the linear axis begins at 0.
        is_wide: takes the whole width.
        prefers_linear: even if the values span a wide range.
        note: below the plot.
    """
    shown = [curve for curve in curves if len(curve.x)]
    x = sorted({value for curve in shown for value in curve.x})
    values = [value for curve in shown for column in (curve.y, curve.low, curve.high) for value in column]
    return {
        "kind": "plot",
        "key": key,
        "title": title,
        "x_label": x_label,
        "unit": unit,
        "x": list(map(_short, x)),
        "curves": [_as_block(curve, x) for curve in shown],
        "marks": list(marks),
        "scales": _scales(values, middle=[value for curve in shown for value in curve.y], linear=prefers_linear),
        "from_zero": from_zero,
        "is_wide": is_wide,
        "note": note or ("" if shown else "nothing was recorded"),
    }


def is_empty(block: Block) -> bool:
    """Returns whether a plot has no points."""
    return not block["curves"]


def in_unit(seconds: Sequence[float]) -> tuple[str, float]:
    """Returns the unit for so many seconds and what to multiply them with: ("s", 1.0) or ("ms", 1000.0)."""
    return ("s", 1.0) if max(seconds, default=0.0) >= 2 else ("ms", 1000.0)


def _as_block(curve: Curve, x: Sequence[float]) -> Block:
    def aligned(values: Sequence[Any]) -> list[Any]:
        return list(map(dict(zip(curve.x, values, strict=True)).get, x))

    found: Block = {"name": curve.name, "colour": curve.colour, "kind": curve.kind, "run": curve.run}
    columns = {"y": curve.y, "low": curve.low, "high": curve.high}
    found |= {name: aligned(list(map(_short, column))) for name, column in columns.items() if len(column)}
    return found | ({"labels": aligned(curve.labels)} if curve.labels else {})


def _scales(values: Sequence[float], *, middle: Sequence[float], linear: bool) -> list[str]:
    """Returns the scales that make sense, the one to begin with first."""
    if not values or min(values) <= 0 or max(values) == min(values):
        return ["linear"]
    # A single low value of a band does not decide.
    is_wide_range = max(values) > _LOG_ABOVE * max(min(values), min(middle) / 10)
    return ["log", "linear"] if is_wide_range and not linear else ["linear", "log"]


def _short(value: float) -> int | float:
    """Returns a value of six digits: enough for a picture, a third of the bytes."""
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")
