"""The document of a report: the blocks that it consists of, quantities as text, and the HTML page around it.

A document is JSON: title, head, tiles, and sections of blocks. A block is a dictionary with a "kind"; `page.js` draws
each kind. The page holds the document as data and inserts every string as text, so no string can become markup.
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
from datetime import datetime
from itertools import groupby, pairwise
from string import Template
from typing import Any, Literal, TypeAlias

from slurm_train.assets import read_asset
from slurm_train.formatting import duration, number

Block: TypeAlias = dict[str, Any]
Document: TypeAlias = dict[str, Any]
Cell: TypeAlias = tuple[str, float | None]
"""A text of a table, and the value to sort by."""

_FOLDER = "tools/report/page"
# Control characters but tab and line feed, lone surrogates, and marks that turn the writing direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# json.dumps gives ASCII only, so U+2028 and U+2029, line ends to JavaScript, are escaped already.
_NOT_IN_SCRIPTS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
_MOODS = {
    "finished": "good",
    **dict.fromkeys(("running", "queued", "requeued", "finishing"), "busy"),
    **dict.fromkeys(("not started", "stopped", "completed"), "calm"),
}
MOST_POINTS = 600
# A range of so many times is easier to read in powers of ten.
_LOG_ABOVE = 8.0


def render(document: Document) -> str:
    """Returns the HTML page of a document; it loads nothing.

    The content security policy allows this page's script by its hash and no other.
    """
    # The licence of uPlot asks for its text in every copy.
    licence, uplot, own = (read_asset(_FOLDER, name) for name in ("uPlot.LICENSE.txt", "uPlot.iife.min.js", "page.js"))
    script = f"\n/*! uPlot\n{licence}*/\n{uplot}\n{own}"
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

    Control characters, lone surrogates and marks that turn the writing direction become question marks.
    """
    return json.dumps(_printable(value), separators=(",", ":"), allow_nan=False).translate(_NOT_IN_SCRIPTS)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {_printable(str(key)): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, (list, tuple)) else value


# Blocks.


def section(key: str, title: str, *blocks: Block) -> dict[str, Any]:
    """Returns a section of a document; one without blocks is not shown."""
    return {"key": key, "title": title, "blocks": blocks}


def text(sentence: str, css: str = "") -> Block:
    """Returns a paragraph; css is "note" (small), "none" (nothing to show) or "heading"."""
    return {"kind": "text", "text": sentence, "css": css}


def folded(summary: str, lines: Sequence[str], *, is_diff: bool = False) -> Block:
    """Returns a long text that opens behind its summary."""
    return {"kind": "folded", "summary": summary, "text": "\n".join(lines), "is_diff": is_diff}


def table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, summary: str = "", **more: Any) -> Block:
    """Returns a table.

    Args:
        name: what it holds, e.g. "attempts".
        columns: "heading" or "heading|style"; styles: num, time, words, chip, code, cause.
        rows: a cell is a text or number, or a pair of the text and the value to sort by.
        summary: shown in place of the folded table; empty: not folded.
        more: "sortable"; "runs", the number of the sweep's run of each row; "marked", numbers of rows.
    """
    heads = [dict(zip(("name", "css"), column.rsplit("|", 1), strict=False)) for column in columns]
    cells = [[cell if isinstance(cell, tuple) else _cell(cell) for cell in row] for row in rows]
    return {"kind": "table", "name": name, "columns": heads, "rows": cells, "summary": summary, **more}


def _cell(value: Any) -> Any:
    figure = as_float(value)
    if figure is not None:
        return (number(figure, digits=5), figure)
    return "" if value is None else setting(value)


def chip(state: str) -> tuple[str, str]:
    """Returns a state and how its colour is chosen, e.g. ("timed out", "bad"); an unknown state is bad."""
    name = state.replace("_", " ")
    return name, _MOODS.get(name, "bad")


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


def thinned(name: str, x: Sequence[float], y: Sequence[float], *, colour: str = "one") -> Curve:
    """Returns a line through all points; of many, through the means of neighbours, with a band from least to largest.

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
        # The last value is at its own place, so that a curve ends where the run ended.
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
    note: str = "",
    linear: bool = False,
    **more: Any,
) -> Block:
    """Returns a plot; one without points shows its note instead.

    Args:
        key: names the PNG file.
        title: of the plot.
        curves: those without points are left out; all share one ascending x, with None where they have no point.
        x_label: what the x axis counts.
        note: below the plot.
        linear: begins with a linear scale even if the values span a wide range.
        more: "unit" of the y axis; "marks": place on the x axis, text, and "attempt", "node", "event" (bad) or "calm";
            "from_zero", whether the linear axis begins at 0; "is_wide".
    """
    shown = [curve for curve in curves if len(curve.x)]
    x = sorted({value for curve in shown for value in curve.x})
    middle = [value for curve in shown for value in curve.y]
    ends = [*middle, *(value for curve in shown for value in (*curve.low, *curve.high))]
    scales = ["linear"]
    if ends and min(ends) > 0 and max(ends) > min(ends):
        # A single low value of a band does not decide.
        is_wide_range = max(ends) > _LOG_ABOVE * max(min(ends), min(middle) / 10)
        scales = ["log", "linear"] if is_wide_range and not linear else ["linear", "log"]
    found: Block = {"kind": "plot", "key": key, "title": title, "x_label": x_label, "scales": scales}
    found |= {"unit": "", "marks": [], "from_zero": False, "is_wide": False, **more}
    found |= {"x": list(map(_short, x)), "curves": [_as_block(curve, x) for curve in shown]}
    return found | {"note": note or ("" if shown else "nothing was recorded")}


def _as_block(curve: Curve, x: Sequence[float]) -> Block:
    found: Block = {"name": curve.name, "colour": curve.colour, "kind": curve.kind, "run": curve.run}
    numbers = {"y": curve.y, "low": curve.low, "high": curve.high}
    columns: dict[str, Sequence[Any]] = {name: list(map(_short, values)) for name, values in numbers.items()}
    for name, values in (columns | {"labels": curve.labels}).items():
        if values:
            found[name] = list(map(dict(zip(curve.x, values, strict=True)).get, x))
    return found


def _short(value: float) -> int | float:
    """Returns a value of six digits: enough for a picture, a third of the bytes."""
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")


def in_unit(seconds: Sequence[float]) -> tuple[str, float]:
    """Returns the unit for so many seconds and what to multiply them with: ("s", 1.0) or ("ms", 1000.0)."""
    return ("s", 1.0) if max(seconds, default=0.0) >= 2 else ("ms", 1000.0)


# Quantities as text.


def moment(unix_s: float | None) -> str:
    """Returns a moment in the time of this machine, e.g. "2026-11-21 13:41:07 +0100"; "-" for none."""
    try:
        return "-" if unix_s is None else datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (ValueError, OverflowError, OSError):
        return "-"


def duration_cell(seconds: float | None) -> Cell:
    """Returns a duration for a table."""
    return duration(seconds), seconds


def moment_cell(entry: Mapping[str, Any]) -> Cell:
    """Returns the moment of a record for a table."""
    unix_s = as_float(entry.get("time_unix_s"))
    return moment(unix_s), unix_s


def setting(value: Any) -> str:
    """Returns the value of a setting as it is typed: null, true, text, list."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(setting, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_float(value: Any) -> float | None:
    """Returns a finite number as float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
