"""Cutting samples that are sorted by length into parts of about equal cost; what a part costs is its padded size.

Padded to its longest sample, a part costs (samples) x (longest). Parts of neighbours in length need little padding, and
parts of equal cost take equally long. Only numpy.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np

from slurm_train.data.permutation import Int64Array

# The cost that all parts stay below is searched for to this share; nobody notices less.
_PRECISION = 0.005


def cut_evenly(lengths: Int64Array, num_parts: int, *, least: int = 1) -> Int64Array:
    """Returns the borders of consecutive parts whose largest padded cost is as small as it can be (to half a percent).

    Args:
        lengths: int64 (n,), ascending, each at least 1.
        num_parts: how many; there is a sample for each, or twice `least`.
        least: samples that every part gets, even where it becomes too costly by them.

    Returns:
        int64 (num_parts + 1,): part p holds [borders[p], borders[p + 1]).
    """
    enough = num_parts if least == 1 else 2 * least * num_parts
    assert len(lengths) >= enough > 0, f"{len(lengths)} samples for {num_parts} parts of {least}"
    longest = lengths.tolist()
    low = max(int(lengths.sum()) // num_parts, 1)
    high = low
    while (borders := _fill(longest, high, num_parts, least)) is None:
        low, high = high, 2 * high
    while high - low > max(1.0, _PRECISION * high):
        middle = (low + high) // 2
        tried = _fill(longest, middle, num_parts, least)
        if tried is None:
            low = middle
        else:
            high, borders = middle, tried
    return np.array(_split_until(borders, longest, num_parts, least), dtype=np.int64)


def padded_costs(lengths: Int64Array, borders: Int64Array) -> Int64Array:
    """Returns what each part costs when padded to its longest sample, int64 (parts,)."""
    costs: Int64Array = np.diff(borders) * lengths[borders[1:] - 1]
    return costs


def _fill(lengths: list[int], limit: int, num_parts: int, least: int) -> list[int] | None:
    """Returns borders of at most so many parts, each below the limit or of the least size; None if they do not do.

    Filled from the longest sample down: the first of a part says at once how many fit into it.
    """
    borders = [len(lengths)]
    while borders[-1] > 0:
        if len(borders) > num_parts:
            return None
        end = borders[-1]
        borders.append(max(end - max(limit // lengths[end - 1], least), 0))
    if len(borders) > 2 and borders[-2] < least:
        # The shortest are left over; the part before gives them some of its own.
        borders[-2] = least
        if borders[-3] - least < least:
            return None
    return borders[::-1]


def _split_until(borders: list[int], lengths: list[int], num_parts: int, least: int) -> list[int]:
    """Halves the costliest parts until there are enough of them."""
    while len(borders) <= num_parts:
        parts = [
            ((stop - start) * lengths[stop - 1], -start, start, stop)
            for start, stop in itertools.pairwise(borders)
            if stop - start >= 2 * least
        ]
        _, _, start, stop = max(parts)
        bisect.insort(borders, (start + stop) // 2)
    return borders
