"""A study as text for a terminal and as one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence

from slurm_train.formatting import byte_size, columns, duration, table
from slurm_train.tools.scaling.study import Measured, Study, verdict

_BAR = 40


def render_text(study: Study) -> str:
    """Returns the whole report."""
    parts = [_sizes("fixed local batch", study.local)]
    if len(study.whole) > 1:
        parts.append(_sizes("fixed global batch", study.whole))
    parts.append(_bars(study.local))
    if study.others:
        parts.append(_exchanges(study))
    parts.append("\n".join(f"- {sentence}" for sentence in verdict(study)))
    return "\n\n".join(parts)


def _sizes(title: str, points: Sequence[Measured]) -> str:
    base, unit = points[0], points[0].unit
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
    base = points[0]
    perfect = [one.size.ranks * base.per_s / base.size.ranks for one in points]
    lines = [f"throughput at a fixed local batch ('.' would be perfect scaling from {base.size.ranks} rank)"]
    for one, ideal in zip(points, perfect, strict=True):
        filled = round(_BAR * one.per_s / max(perfect[-1], one.per_s))
        bar = "#" * filled + "." * (round(_BAR * ideal / perfect[-1]) - filled)
        lines.append(f"  {one.size!s:<6} {bar} {one.per_s:,.0f} {one.unit}/s")
    return "\n".join(lines)


def _exchanges(study: Study) -> str:
    rows = [("exchange", "ranks", "step", "against plain", "sent per step", "bytes / bandwidth", "network")]
    for plain in study.local:
        same_size = [other for other in study.others if other.size == plain.size]
        for one in (plain, *same_size) if same_size else ():
            limit = "-" if study.model is None else duration(one.ring_bytes() / study.model.bytes_per_s)
            gain, sent = f"{one.per_s / plain.per_s:.2f}x", byte_size(one.sent_bytes)
            name, ranks = f"{one.size} {one.point.comm}", str(one.size.ranks)
            rows.append((name, ranks, duration(one.step_s), gain, sent, limit, duration(one.comm_s)))
    return columns(rows, right=True)


_PARTS = {
    "compute_s": ("computing", "#4878a8"),
    "data_s": ("waiting for data", "#6aa84f"),
    "uneven_s": ("waiting for slower ranks", "#e69f00"),
    "comm_s": ("exchange", "#cc5a4a"),
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; font-size: 13px; }
.row { display: grid; grid-template-columns: 9em 1fr 6em; gap: .6em; margin: .3em 0; font-size: 13px; }
.bar { display: flex; height: 1.4em; }
i { height: 1em; min-width: 0; } .key i { display: inline-block; width: 1em; margin: 0 .4em 0 1em; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre { background: #242424; }
}
"""


def render_page(study: Study, *, title: str) -> str:
    """Returns the HTML of the page: the sentences, what a step of each run is spent on, and the text."""
    sentences = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in verdict(study))
    keys = "".join(f'<i style="background:{colour}"></i>{name}' for name, colour in _PARTS.values())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{sentences}</ul>"
        f'<h2>What a step is spent on</h2><p class="key">{keys}</p>{_steps((*study.local, *study.others))}'
        f"<h2>Numbers</h2><pre>{html.escape(render_text(study))}</pre></body></html>\n"
    )


def _steps(runs: Sequence[Measured]) -> str:
    """A bar per run: the parts of a step, in time."""
    longest = max(sum(getattr(one, name) for name in _PARTS) for one in runs) or 1.0
    rows = []
    for one in runs:
        parts = "".join(
            f'<i style="width:{getattr(one, name) / longest:.2%};background:{colour}"></i>'
            for name, (_, colour) in _PARTS.items()
        )
        name = html.escape(f"{one.size} {one.point.comm}")
        rows.append(f'<div class="row">{name}<span class="bar">{parts}</span>{duration(one.step_s)}</div>')
    return "".join(rows)
