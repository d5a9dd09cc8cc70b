"""The simple model of a step: t(n) = compute + alpha log2(n) + 2 (n - 1) / n x bytes / bandwidth. Pure.

The last term is what a ring sends for n ranks, the one before it what each doubling of the ranks costs whatever the
bytes. What is fitted is the time that the exchange is waited for; what hides behind the backward pass is not seen, so
the bandwidth is an effective one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_train.scaling.measure import Measured


@dataclass(frozen=True, slots=True)
class Model:
    """What an exchange costs."""

    alpha_s: float
    """Seconds for each doubling of the ranks."""
    bytes_per_s: float
    """Effective bandwidth; infinity where bytes cost nothing."""

    def comm_s(self, ranks: int, sent_bytes: float) -> float:
        """Returns what an exchange among so many ranks takes."""
        return self.alpha_s * math.log2(max(ranks, 1)) + ring_bytes(ranks, sent_bytes) / self.bytes_per_s


def ring_bytes(ranks: int, sent_bytes: float) -> float:
    """Returns the bytes that each rank of a ring sends."""
    return 2.0 * (ranks - 1) / ranks * sent_bytes


def fit(points: Sequence[Measured]) -> Model | None:
    """Returns the model that fits best, of which no part is negative; None where nothing was exchanged.

    Runs over several nodes count; where there are none, those on one node.

    Args:
        points: runs that exchange in the same way.
    """
    known = [one for one in points if one.size.ranks > 1 and one.sent_bytes > 0]
    spanning = [one for one in known if one.size.nodes > 1] or known
    if not spanning:
        return None
    rows = [(math.log2(one.size.ranks), ring_bytes(one.size.ranks, one.sent_bytes), one.comm_s) for one in spanning]
    alpha, per_byte = _least_squares(rows)
    return Model(alpha, 1.0 / per_byte if per_byte > 0 else math.inf)


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns the two non-negative factors that miss the times least, relative to the times."""
    scaled = [(a / max(t, 1e-9), b / max(t, 1e-9)) for a, b, t in rows]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in _products(scaled))
    a1, b1 = sum(a for a, _ in scaled), sum(b for _, b in scaled)
    determinant = aa * bb - ab * ab
    # Of one size, or of sizes that are alike, the two cannot be told apart: then it is the bytes.
    if len(rows) > 1 and determinant > 1e-9 * aa * bb:
        alpha, per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha >= 0 and per_byte >= 0:
            return alpha, per_byte
    only_alpha, only_bytes = (a1 / aa if aa else 0.0, 0.0), (0.0, b1 / bb if bb else 0.0)
    return min((only_bytes, only_alpha), key=lambda factors: _missed(rows, factors))


def _products(scaled: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    first, second = [a for a, _ in scaled], [b for _, b in scaled]
    return [list(zip(x, y, strict=True)) for x, y in ((first, first), (first, second), (second, second))]


def _missed(rows: Sequence[tuple[float, float, float]], factors: tuple[float, float]) -> float:
    return sum(((a * factors[0] + b * factors[1]) / max(t, 1e-9) - 1.0) ** 2 for a, b, t in rows)
