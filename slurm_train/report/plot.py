"""A plot as a value: curves, marks, axes. `figure` draws it into the page, `pictures` as PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurm_train.report.curve import Curve
from slurm_train.report.scale import Scale, fit, wants_log

_BELOW = 10.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a place of the x axis."""

    x: float
    text: str
    kind: str = "attempt"
    """attempt, node, event (bad) or calm (asked for)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One picture."""

    key: str
    """Names it in the page and as a file, e.g. "loss"."""
    title: str
    curves: Sequence[Curve]
    x_label: str = "step"
    y_label: str = ""
    """Unit."""
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    is_wide: bool = False
    prefers_log: bool | None = None
    """None: powers of ten where the values span a wide range."""
    note: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(len(curve.x) for curve in self.curves)

    def values(self) -> Iterator[float]:
        """Yields everything that has to fit between the ends of the y axis."""
        for curve in self.curves:
            yield from curve.y
            yield from curve.low
            yield from curve.high

    def x_scale(self) -> Scale:
        """Returns the x axis."""
        values = [x for curve in self.curves for x in curve.x]
        if self.x_label == "rank":
            return Scale(min(values) - 0.5, max(values) + 0.5)
        return fit(values, is_padded=any(curve.kind != "line" for curve in self.curves))

    def y_scales(self) -> list[Scale]:
        """Returns the y axes that make sense, the one to begin with first."""
        values = list(self.values())
        linear = fit(values, from_zero=self.from_zero)
        if not values or min(values) <= 0 or max(values) == min(values):
            return [linear]
        # Of a band, single values next to 0 would take most of the room; they stand at the edge.
        floor = min(y for curve in self.curves for y in curve.y) / _BELOW
        log = fit((max(value, floor) for value in values), is_log=True)
        is_log_first = (
            wants_log(max(value, floor) for value in values) if self.prefers_log is None else self.prefers_log
        )
        return [log, linear] if is_log_first else [linear, log]
