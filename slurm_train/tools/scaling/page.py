"""A study as text for a terminal and as one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

from slurm_train.tools.scaling.study import Measured, Model, Study, efficiency, in_bytes, in_time, limit_s, verdict

_BAR = 40


def render_text(study: Study) -> str:
    """Returns the whole report."""
    parts = [_sizes("fixed local batch", study.local, study.local[0])]
    if len(study.whole) > 1:
        parts.append(_sizes("fixed global batch", study.whole, study.whole[0]))
    parts.append(_bars(study.local))
    if study.others:
        parts.append(_ways(study))
    parts.append("\n".join(f"- {sentence}" for sentence in verdict(study)))
    return "\n\n".join(parts)


def _sizes(title: str, points: Sequence[Measured], base: Measured) -> str:
    unit = points[0].unit
    head = (title, "ranks", "samples/step", "step", f"{unit}/s", "speed-up", "efficiency", "network", "uneven", "data")
    rows = [
        (
            str(one.size),
            str(one.size.ranks),
            str(one.point.global_size),
            in_time(one.step_s),
            f"{one.per_s:,.0f}",
            f"{one.per_s / base.per_s:.2f}x",
            f"{efficiency(one, base):.0%}",
            *(f"{seconds / max(one.step_s, 1e-12):.0%}" for seconds in (one.comm_s, one.uneven_s, one.data_s)),
        )
        for one in points
    ]
    return aligned([head, *rows])


def _bars(points: Sequence[Measured]) -> str:
    """A bar per size: what there is of what perfect scaling would give."""
    base, most = points[0], points[-1].size.ranks * points[0].per_s / points[0].size.ranks
    lines = [f"throughput at a fixed local batch ('.' would be perfect scaling from {base.size.ranks} rank)"]
    for one in points:
        perfect = one.size.ranks * base.per_s / base.size.ranks
        filled = round(_BAR * one.per_s / max(most, one.per_s))
        dots = max(round(_BAR * perfect / most) - filled, 0)
        lines.append(f"  {one.size!s:<6} {'#' * filled}{'.' * dots} {one.per_s:,.0f} {one.unit}/s")
    return "\n".join(lines)


def _ways(study: Study) -> str:
    head = ("exchange", "ranks", "step", "against plain", "sent per step", "bytes / bandwidth", "network")
    rows = []
    for plain in study.local:
        same_size = [other for other in study.others if other.size == plain.size]
        if same_size:
            rows += [_way(one, plain, study.model) for one in (plain, *same_size)]
    return aligned([head, *rows])


def _way(one: Measured, plain: Measured, model: Model | None) -> tuple[str, ...]:
    return (
        f"{one.size} {one.point.comm}",
        str(one.size.ranks),
        in_time(one.step_s),
        f"{one.per_s / plain.per_s:.2f}x",
        in_bytes(one.sent_bytes),
        "-" if model is None else in_time(limit_s(one, model)),
        in_time(one.comm_s),
    )


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Returns rows as columns, the first to the left, the others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = (
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    )
    return "\n".join(line.rstrip() for line in lines)


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 320, 70, 40
_PARTS = (
    ("compute_s", "computing", "#4878a8"),
    ("data_s", "waiting for data", "#6aa84f"),
    ("uneven_s", "waiting for slower ranks", "#e69f00"),
    ("comm_s", "exchange", "#cc5a4a"),
)
_Scale = Callable[[float], float]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; font-size: 13px; }
svg text { font: 12px system-ui, sans-serif; fill: #444; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre { background: #242424; } svg text { fill: #bbb; }
}
"""


def render_page(study: Study, *, title: str) -> str:
    """Returns the HTML of the page."""
    sentences = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in verdict(study))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{sentences}</ul>"
        f"<h2>Throughput</h2>{_throughput(study)}<h2>What a step is spent on</h2>{_steps(study)}"
        f"<h2>Numbers</h2><pre>{html.escape(render_text(study))}</pre></body></html>\n"
    )


def _throughput(study: Study) -> str:
    """Throughput over ranks, both axes logarithmic: perfect scaling is a straight line."""
    base, last = study.local[0], study.largest
    most = max(last.size.ranks / base.size.ranks * base.per_s, *(one.per_s for one in (*study.local, *study.whole)))
    least = min(one.per_s for one in (*study.local, *study.whole))
    across = _scale(base.size.ranks, last.size.ranks, _LEFT, _WIDTH - 20)
    up = _scale(least / 1.2, most * 1.2, _HEIGHT - _BOTTOM, 15)
    perfect = [(one.size.ranks, one.size.ranks / base.size.ranks * base.per_s) for one in study.local]
    curves = [("perfect scaling", perfect, "#999", "5 4"), ("fixed local batch", _curve(study.local), "#4878a8", "")]
    if len(study.whole) > 1:
        curves.append(("fixed global batch", _curve(study.whole), "#cc5a4a", ""))
    drawn = "".join(_polyline(points, across, up, colour, dash) for _, points, colour, dash in curves)
    ticks = "".join(
        f'<text x="{across(one.size.ranks):.0f}" y="{_HEIGHT - 18}" text-anchor="middle">{one.size}</text>'
        f'<text x="{_LEFT - 8}" y="{up(one.per_s) + 4:.0f}" text-anchor="end">{one.per_s:,.0f}</text>'
        for one in study.local
    )
    legend = _legend([(name, colour) for name, _, colour, _ in curves])
    axis = f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 2}" text-anchor="middle">nodes x ranks; {last.unit} per second</text>'
    return _svg(drawn + ticks + legend + axis, _HEIGHT)


def _curve(points: Sequence[Measured]) -> list[tuple[int, float]]:
    return [(one.size.ranks, one.per_s) for one in points]


def _polyline(points: Sequence[tuple[int, float]], across: _Scale, up: _Scale, colour: str, dash: str) -> str:
    places = [(across(ranks), up(value)) for ranks, value in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "" if dash else "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>{dots}'


def _steps(study: Study) -> str:
    """A bar per run: the parts of a step, in time."""
    runs = (*study.local, *study.others)
    longest = max(sum(getattr(one, name) for name, _, _ in _PARTS) for one in runs) or 1.0
    rows, height = [], 26
    for number, one in enumerate(runs):
        x, y = 150.0, 30 + number * height
        rows.append(f'<text x="142" y="{y + 13}" text-anchor="end">{one.size} {html.escape(one.point.comm)}</text>')
        for name, _, colour in _PARTS:
            width = (_WIDTH - 170) * getattr(one, name) / longest
            rows.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height - 8}" fill="{colour}"/>')
            x += width
    legend = _legend([(name, colour) for _, name, colour in _PARTS])
    return _svg("".join(rows) + legend, 40 + len(runs) * height)


def _legend(names: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<rect x="{_LEFT + 10 + number * 150}" y="5" width="10" height="10" fill="{colour}"/>'
        f'<text x="{_LEFT + 25 + number * 150}" y="14">{name}</text>'
        for number, (name, colour) in enumerate(names)
    )


def _svg(content: str, height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH + 60} {height}" width="100%" role="img">{content}</svg>'


def _scale(first: float, last: float, begin: float, end: float) -> _Scale:
    """Returns what places a value on a logarithmic axis."""
    span = math.log(last / first) if last > first else 1.0
    return lambda value: begin + (end - begin) * math.log(value / first) / span
