"""Shapes of curves as the path of an SVG element, in whole numbers on a square of 10,000, which the page stretches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slurm_train.report.curve import Curve
from slurm_train.report.scale import Scale

SIDE = 10_000

Point = tuple[int, int]


def line(points: Iterable[Point]) -> str:
    """Returns a path from point to point; every number but the first two is a difference, which is short."""
    parts: list[str] = []
    last_x = last_y = 0
    for x, y in points:
        parts.append(f"M{x} {y}" if not parts else f"l{x - last_x} {y - last_y}")
        last_x, last_y = x, y
    return "".join(parts) + ("h0" if len(parts) == 1 else "")


def dots(points: Iterable[Point]) -> str:
    """Returns a path of lines without length: with round ends and a wide stroke they are dots."""
    return "".join(f"M{x} {y}h0" for x, y in points)


def ranges(lows: Iterable[Point], highs: Iterable[Point]) -> str:
    """Returns a path of upright lines."""
    return "".join(f"M{x} {low}V{high}" for (x, low), (_, high) in zip(lows, highs, strict=True))


def band(lows: Sequence[Point], highs: Sequence[Point]) -> str:
    """Returns a closed path around everything between two lines."""
    return line([*highs, *reversed(lows)]) + "z"


def places(curve: Curve, values: Sequence[float], x: Scale, y: Scale) -> list[Point]:
    """Returns where values of a curve stand; the y axis of the square points down."""
    return list(_places(curve.x, values, x, y))


def _places(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> Iterator[Point]:
    for one, other in zip(xs, ys, strict=True):
        yield round(SIDE * x.at(one)), round(SIDE * (1 - y.at(other)))
