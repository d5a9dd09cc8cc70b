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
from datetime import datetime
from string import Template
from typing import Any, TypeAlias

from slurm_train.assets import read_asset

Block: TypeAlias = dict[str, Any]
Document: TypeAlias = dict[str, Any]

_FOLDER = "tools/report/page"
# Control characters but tab and line feed, lone surrogates, and marks that turn the writing direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# json.dumps gives ASCII only, so U+2028 and U+2029, line ends to JavaScript, are escaped already.
_NOT_IN_SCRIPTS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}

GOOD, BAD, BUSY, CALM = "good", "bad", "busy", "calm"
_MOODS = {
    **dict.fromkeys(("finished",), GOOD),
    **dict.fromkeys(("running", "queued", "requeued", "finishing"), BUSY),
    **dict.fromkeys(("not started", "stopped", "completed"), CALM),
}

COLOURS = {
    "one": ("#2563c9", "#6ea8fe"),
    "two": ("#d4500c", "#ff9a5c"),
    "three": ("#7a4fc0", "#bf9cf5"),
    "four": ("#0a7d6c", "#45c9b1"),
    "quiet": ("#9aa1a9", "#79828c"),
    "failed": ("#c3202b", "#ff7a80"),
    # Runs of a sweep, from the best tenth to the worst.
    "q0": ("#08519c", "#7db7ff"),
    "q1": ("#3f8fc9", "#4f8fd6"),
    "q2": ("#8db9d8", "#3c6798"),
    "q3": ("#b9bfc6", "#48525e"),
    "q4": ("#d5d8dc", "#373e47"),
    # What time is spent on.
    "queue_s": ("#d3d7db", "#3a4149"),
    "start_s": ("#8a94a6", "#6f7a8c"),
    "rendezvous_s": ("#6f7fc4", "#7787d3"),
    "load_s": ("#9b86cf", "#937cc9"),
    "compile_s": ("#b79ddb", "#a78bd0"),
    "productive_s": ("#23946a", "#2fb583"),
    "lost_work_s": ("#cf3f3f", "#e05c5c"),
    "data_wait_s": ("#e8912d", "#e09a45"),
    "evaluate_s": ("#5aa9d6", "#4f9fcd"),
    "checkpoint_stall_s": ("#c05a9c", "#c569a6"),
    "suspended_s": ("#c9bfa9", "#6f664f"),
    "end_s": ("#6b7280", "#59616c"),
    "unknown_s": ("#e7e1d2", "#4a4538"),
}
"""Names of colours in documents: on a light and on a dark page. PNG files use the light ones."""


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
        style=_colours() + read_asset(_FOLDER, "uPlot.min.css") + read_asset(_FOLDER, "page.css"),
        data=as_json(document),
        script=script,
    )


def as_json(value: Any) -> str:
    """Returns JSON that can stand inside a script element, whatever strings it holds.

    Control characters, lone surrogates and marks that turn the writing direction become question marks.
    """
    text = json.dumps(_printable(value), separators=(",", ":"), allow_nan=False)
    return text.translate(_NOT_IN_SCRIPTS)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {_printable(str(key)): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, (list, tuple)) else value


def _colours() -> str:
    light, dark = ("".join(f"--{name}:{shades[place]};" for name, shades in COLOURS.items()) for place in (0, 1))
    return f":root{{{light}}}\n:root[data-theme=dark]{{{dark}}}\n"


def section(key: str, title: str, *blocks: Block | None) -> dict[str, Any]:
    """Returns a section of a document; one without blocks is not shown."""
    return {"key": key, "title": title, "blocks": [block for block in blocks if block is not None]}


def text(sentence: str, css: str = "") -> Block:
    """Returns a paragraph; css is "note" (small), "none" (nothing to show) or "heading"."""
    return {"kind": "text", "text": sentence, "css": css}


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


def folded(summary: str, content: str, *, is_diff: bool = False) -> Block:
    """Returns a long text that opens behind its summary."""
    return {"kind": "folded", "summary": summary, "text": content, "is_diff": is_diff}


def chip(state: str) -> list[str]:
    """Returns a state and how its colour is chosen, e.g. ["timed out", "bad"]; an unknown state is bad."""
    name = state.replace("_", " ")
    return [name, _MOODS.get(name, BAD)]


def number(value: float | None, *, digits: int = 4) -> str:
    """Returns a value in so many digits: "2.386", "12,345", "3e-05"; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1e15:
        return f"{value:.{digits}g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """Returns "2 d 3 h", "1 h 24 min", "3 min 12 s", "12.3 s", "85 ms" or "12 us"; "-" for none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        size, unit = next((one for one in ((1.0, "s"), (1e-3, "ms")) if abs(seconds) >= one[0]), (1e-6, "us"))
        return f"{seconds / size:.3g} {unit}" if seconds else "0 s"
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, unit, part_size, part = next(one for one in units if whole >= one[0])
    rest = whole % size // part_size
    return f"{whole // size:,} {unit}" + (f" {rest} {part}" if rest else "")


def hours(seconds: float) -> str:
    """Returns what devices were held for: "1,234 h" however many days it is; less than an hour as a duration."""
    whole = seconds / 3600
    return duration(seconds) if whole < 1 else f"{number(round(whole) if whole >= 1000 else whole)} h"


def byte_size(num: float) -> str:
    """Returns "1.55 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num < 1024:
            break
        num, unit = num / 1024, "PiB"
    return f"{num:.0f} B" if unit == "B" else f"{num:.3g} {unit}"


def share(part: float) -> str:
    """Returns "94 %", "0.3 %"."""
    percent = 100 * part
    if 0 < percent < 0.05:
        return "< 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def moment(unix_s: float | None) -> str:
    """Returns a moment in the time of this machine, e.g. "2026-11-21 13:41:07 +0100"; "-" for none."""
    try:
        return "-" if unix_s is None else datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (ValueError, OverflowError, OSError):
        return "-"


def setting(value: Any) -> str:
    """Returns the value of a setting as it is typed: null, true, text, list."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(setting, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_float(value: Any) -> float | None:
    """Returns a finite number as float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
