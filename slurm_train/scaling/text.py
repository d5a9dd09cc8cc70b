"""A study in text, for a terminal: a table, a bar per size, the ways of exchanging, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_train.scaling.measure import Measured
from slurm_train.scaling.model import Model
from slurm_train.scaling.verdict import Study, efficiency, in_bytes, in_time, limit_s, verdict

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
