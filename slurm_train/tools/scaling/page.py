"""A study as text for a terminal and as one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from slurm_train.formatting import byte_size, columns, duration, table
from slurm_train.tools.scaling.study import Measured, Study, verdict

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
            duration(one.step_s),
            f"{one.per_s:,.0f}",
            f"{one.per_s / base.per_s:.2f}x",
            f"{one.efficiency(base):.0%}",
            *(f"{seconds / max(one.step_s, 1e-12):.0%}" for seconds in (one.comm_s, one.uneven_s, one.data_s)),
        )
        for one in points
    ]
    return table(head, rows, right=True)


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
    rows = [("exchange", "ranks", "step", "against plain", "sent per step", "bytes / bandwidth", "network")]
    for plain in study.local:
        same_size = [other for other in study.others if other.size == plain.size]
        for one in (plain, *same_size) if same_size else ():
            limit = "-" if study.model is None else duration(one.ring_bytes() / study.model.bytes_per_s)
            gain, sent = f"{one.per_s / plain.per_s:.2f}x", byte_size(one.sent_bytes)
            name, ranks = f"{one.size} {one.point.comm}", str(one.size.ranks)
            rows.append((name, ranks, duration(one.step_s), gain, sent, limit, duration(one.comm_s)))
    return columns(rows, right=True)


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 320, 70, 40
_ROW = 26
_PARTS = {
    "compute_s": ("computing", "#4878a8"),
    "data_s": ("waiting for data", "#6aa84f"),
    "uneven_s": ("waiting for slower ranks", "#e69f00"),
    "comm_s": ("exchange", "#cc5a4a"),
}
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
    ideal = base.per_s / base.size.ranks
    curves = [
        ("perfect scaling", [(one.size.ranks, ideal * one.size.ranks) for one in study.local], "#999"),
        ("fixed local batch", [(one.size.ranks, one.per_s) for one in study.local], "#4878a8"),
    ]
    if len(study.whole) > 1:
        curves.append(("fixed global batch", [(one.size.ranks, one.per_s) for one in study.whole], "#cc5a4a"))
    rates = [rate for _, points, _ in curves for _, rate in points]
    across = _scale(base.size.ranks, last.size.ranks, _LEFT, _WIDTH - 20)
    up = _scale(min(rates) / 1.2, max(rates) * 1.2, _HEIGHT - _BOTTOM, 15)
    parts = [_text(_WIDTH / 2, _HEIGHT - 2, f"nodes x ranks; {last.unit} per second", "middle")]
    for number, (_, points, colour) in enumerate(curves):
        places = [(across(ranks), up(rate)) for ranks, rate in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = "" if number else ' stroke-dasharray="5 4"'
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places if number]
    for one in study.local:
        parts.append(_text(across(one.size.ranks), _HEIGHT - 18, str(one.size), "middle"))
        parts.append(_text(_LEFT - 8, up(one.per_s) + 4, f"{one.per_s:,.0f}", "end"))
    return _svg(parts, _HEIGHT, legend={name: colour for name, _, colour in curves})


def _steps(study: Study) -> str:
    """A bar per run: the parts of a step, in time."""
    runs = (*study.local, *study.others)
    longest = max(sum(getattr(one, name) for name in _PARTS) for one in runs) or 1.0
    parts = []
    for number, one in enumerate(runs):
        x, y = 150.0, 30.0 + number * _ROW
        parts.append(_text(142, y + 13, f"{one.size} {one.point.comm}", "end"))
        for name, (_, colour) in _PARTS.items():
            width = (_WIDTH - 170) * getattr(one, name) / longest
            parts.append(_rectangle(x, y, width, _ROW - 8, colour))
            x += width
    return _svg(parts, 40 + len(runs) * _ROW, legend=dict(_PARTS.values()))


def _svg(parts: list[str], height: int, *, legend: Mapping[str, str]) -> str:
    for number, (name, colour) in enumerate(legend.items()):
        x = _LEFT + 10 + number * 150.0
        parts += [_rectangle(x, 5, 10, 10, colour), _text(x + 15, 14, name, "start")]
    return f'<svg viewBox="0 0 {_WIDTH + 60} {height}" width="100%" role="img">{"".join(parts)}</svg>'


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _scale(first: float, last: float, begin: float, end: float) -> Callable[[float], float]:
    """Returns what places a value on a logarithmic axis."""
    span = math.log(last / first) if last > first else 1.0
    return lambda value: begin + (end - begin) * math.log(value / first) / span
