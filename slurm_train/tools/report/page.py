"""The page of a report: the facts as one JSON document, the script that draws them, and what both sorts of plots need.

Rows, labels, sentences and quantities as text are made by `page.js`, figures by `figures.js`. Plots are prepared here,
since `pictures` draws them, too. The page holds the document as data and inserts every string as text, so no string can
become markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from string import Template
from typing import Any, Literal, TypeAlias

from slurm_train.assets import read_asset

Block: TypeAlias = dict[str, Any]
Document: TypeAlias = dict[str, Any]

_FOLDER = "tools/report/page"
# Control characters but tab and line feed, lone surrogates, and marks that turn the writing direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# json.dumps gives ASCII only, so U+2028 and U+2029, line ends to JavaScript, are escaped already.
_NOT_IN_SCRIPTS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
# JavaScript's numbers are exact up to here.
_LARGEST_EXACT = 2**53
MOST_POINTS = 600
# A range of so many times is easier to read in powers of ten.
_LOG_ABOVE = 8.0


def render(document: Document) -> str:
    """Returns the HTML page of a document; it loads nothing.

    The content security policy allows this page's script by its hash and no other.
    """
    # The licence of uPlot asks for its text in every copy.
    names = ("uPlot.LICENSE.txt", "uPlot.iife.min.js", "figures.js", "page.js")
    licence, uplot, figures, page = (read_asset(_FOLDER, name) for name in names)
    script = f'\n/*! uPlot\n{licence}*/\n{uplot}\n(() => {{\n"use strict";\n{figures}\n{page}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(read_asset(_FOLDER, "page.html")).substitute(
        title=html.escape(_printable(str(document["title"]))),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'",
        style=read_asset(_FOLDER, "uPlot.min.css") + read_asset(_FOLDER, "page.css"),
        data=as_json(document),
        script=script,
    )


def read_colours() -> dict[str, str]:
    """Returns the colours of a light page by name, e.g. {"one": "#2563c9"}."""
    light, _, _ = read_asset(_FOLDER, "page.css").partition("}")
    return dict(re.findall(r"--(\w+): (#\w+);", light))


def as_json(value: Any) -> str:
    """Returns JSON that is safe inside a script element, whatever strings it holds.

    Control characters, lone surrogates and marks that turn the writing direction become question marks. Numbers that
    JavaScript cannot hold, and values that are no JSON, become texts.
    """
    return json.dumps(_printable(value), separators=(",", ":"), allow_nan=False).translate(_NOT_IN_SCRIPTS)


def _printable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_printable(str(key)): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    is_exact = isinstance(value, int) and abs(value) <= _LARGEST_EXACT
    if value is None or is_exact or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value))


# Curves and plots.


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
    """Name of a variable in page.css."""
    labels: Sequence[str] = ()
    """A text for each point, shown when it is pointed at."""
    run: int | None = None
    """Number of the run of a sweep that it belongs to."""


def line(
    name: str, x: Sequence[float], y: Sequence[float], *, most: int = MOST_POINTS, band: bool = True, **more: Any
) -> Curve:
    """Returns a line through all points; of many, through the means of neighbours, with a band from least to largest.

    Neighbours share a part of the x axis whose length is a power of two, so that curves of a sweep share their places.

    Args:
        name: of the curve.
        x: ascending.
        y: finite.
        most: points that it may have.
        band: with the band.
        more: see `Curve`.
    """
    if len(x) <= most:
        kind: Any = "dots" if len(x) == 1 else "line"
        return Curve(name=name, x=x, y=y, kind=kind, **more)
    width = 2 ** max(0, math.ceil(math.log2((x[-1] - x[0] + 1) / (most - 1))))
    groups: dict[float, list[float]] = {}
    for place, value in zip(x, y, strict=True):
        groups.setdefault(place // width * width, []).append(value)
    return Curve(
        name=name,
        x=list(groups),
        y=list(map(fmean, groups.values())),
        low=list(map(min, groups.values())) if band else (),
        high=list(map(max, groups.values())) if band else (),
        **more,
    )


def plot(key: str, title: str, curves: Sequence[Curve], *, unit: str = "", linear: bool = False, **more: Any) -> Block:
    """Returns a plot.

    Args:
        key: names the PNG file.
        title: of the plot.
        curves: those without points are left out; all share one ascending x, with None where they have no point.
        unit: of the y axis; short times in "s" are drawn in ms.
        linear: begins with a linear scale even if the values span a wide range.
        more: "x_label", what the x axis counts (steps); "marks": place on the x axis, text, and "attempt", "node",
            "event" (bad) or "calm"; "from_zero", whether the linear axis begins at 0; "is_wide".
    """
    shown = [curve for curve in curves if len(curve.x)]
    places: set[float] = set()
    values: list[float] = []
    for curve in shown:
        places.update(curve.x)
        values += curve.y
    x = sorted(places)
    factor = 1.0
    if unit == "s" and max(values, default=2.0) < 2:
        unit = "ms"
        factor = 1000.0
    block: Block = {
        "key": key,
        "title": title,
        "x_label": "step",
        "unit": unit,
        "scales": _scales(shown, values, linear=linear),
        "marks": [],
        "from_zero": False,
        "is_wide": False,
    }
    block |= more
    block["x"] = [_short(place) for place in x]
    block["curves"] = [_as_block(curve, x, factor) for curve in shown]
    return block


def _scales(curves: Sequence[Curve], values: Sequence[float], *, linear: bool) -> list[str]:
    """Returns the scales of the y axis that a plot can have, the one to begin with first."""
    least = min((value for curve in curves for value in (*curve.y, *curve.low)), default=0.0)
    if least <= 0 or max(values) == min(values):
        return ["linear"]
    if linear or max(values) <= _LOG_ABOVE * min(values):
        return ["linear", "log"]
    return ["log", "linear"]


def drawn(plots: Sequence[Block]) -> list[Block]:
    """Returns the plots that have something to show."""
    return [block for block in plots if block["curves"]]


def _as_block(curve: Curve, x: Sequence[float], factor: float) -> Block:
    block: Block = {"name": curve.name, "colour": curve.colour, "kind": curve.kind, "run": curve.run}
    columns: dict[str, Sequence[Any]] = {"labels": curve.labels}
    for name, values in (("y", curve.y), ("low", curve.low), ("high", curve.high)):
        columns[name] = [_short(factor * value) for value in values]
    for name, column in columns.items():
        if column:
            at = dict(zip(curve.x, column, strict=True))
            block[name] = [at.get(place) for place in x]
    return block


def _short(value: float) -> int | float:
    """Returns a value of six digits: enough for a picture, a third of the bytes."""
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")
