"""Who is not like the others: pure comparisons of one value per node."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Odd(Generic[Value]):
    """Nodes that have another value than most."""

    usual: Value
    nodes: Mapping[str, Value]
    """The odd ones."""
    is_clear: bool
    """Whether the usual value has more nodes than all others together; of two nodes nobody knows which is right."""


def odd_ones(values: Mapping[str, Value]) -> Odd[Value] | None:
    """Returns who differs from most, None where all agree; where two values are as frequent, the first node is right.

    Args:
        values: node -> value, in rank order; nodes that do not say are left out by the caller.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    # Counter keeps the order of first sight, so of equals the first node's wins.
    usual, number = counts.most_common(1)[0]
    odd = {node: value for node, value in values.items() if value != usual}
    return Odd(usual, odd, is_clear=number > len(odd))


def median_of_others(values: Mapping[str, float], node: str) -> float | None:
    """Returns the median over all nodes but one, None where it is alone."""
    others = [value for name, value in values.items() if name != node]
    return statistics.median(others) if others else None


def common_end(pairs: Sequence[tuple[str, str]], *, num_nodes: int) -> str:
    """Returns the one node that all pairs have in common and that has several partners, "" where there is none.

    Of two nodes nobody can say which one is to blame.

    Args:
        pairs: nodes between which something does not get through, in either order.
        num_nodes: of the job.
    """
    partners: dict[str, set[str]] = {}
    for one, other in pairs:
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    common = [node for node, others in partners.items() if len(others) > 1 and all(node in pair for pair in pairs)]
    return common[0] if len(common) == 1 and num_nodes > 2 else ""


def listed(names: list[str], *, most: int = 6) -> str:
    """Returns names in one line, cut after a few."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def as_ranges(numbers: list[int]) -> str:
    """Returns numbers as people write them: [0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
