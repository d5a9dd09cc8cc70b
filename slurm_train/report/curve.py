"""A curve of at most so many points; of many, each bucket keeps mean, smallest and largest, so no spike is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

MOST_POINTS = 600

Kind = Literal["line", "dots", "ranges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points that belong together; `low` and `high` are the band around them, empty where there is none."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    kind: Kind = "line"
    colour: str = "one"
    """Name of a colour of the page: one, two, three, four, quiet."""
    labels: Sequence[str] = ()
    """A text for each point, shown when it is pointed at."""
    is_dotted: bool = False
    """A line whose points are marked: they are few and far between."""
    key: str = ""
    """Joins it with other parts of the page that show the same, e.g. the number of a run."""

    @property
    def is_thinned(self) -> bool:
        """Whether a point stands for several values."""
        return bool(self.low) and self.kind == "line"


def skeleton(x: Sequence[float], y: Sequence[float], *, most: int) -> tuple[list[float], list[float]]:
    """Returns the smallest and the largest of equally many neighbours each: few points, and every spike among them."""
    if len(x) <= most:
        return list(x), list(y)
    edges = [round(2 * index * len(x) / most) for index in range(most // 2 + 1)]
    kept = {0, len(x) - 1}
    for start, end in pairwise(edges):
        span = range(start, end)
        kept |= {min(span, key=y.__getitem__), max(span, key=y.__getitem__)} if span else set()
    places = sorted(kept)
    return [x[place] for place in places], [y[place] for place in places]


def thinned(
    name: str, x: Sequence[float], y: Sequence[float], *, most: int = MOST_POINTS, colour: str = "one"
) -> Curve:
    """Returns a line through all points, or through the means of equally many of them where there are more.

    Args:
        name: what it is called.
        x: ascending.
        y: finite.
        most: points that may stay.
        colour: see `Curve`.
    """
    if len(x) <= most:
        return Curve(name=name, x=x, y=y, colour=colour)
    edges = [round(index * len(x) / most) for index in range(most + 1)]
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
