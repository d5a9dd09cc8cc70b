from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.data.even_cuts import cut_evenly, padded_costs


def best_cost(lengths: list[int], num_parts: int) -> int:
    """The smallest largest cost of any cut into so many parts, by trying all (dynamic programming)."""
    end = len(lengths)
    best = [[0.0] * (end + 1) for _ in range(num_parts + 1)]
    best[0] = [0.0] + [float("inf")] * end
    for parts in range(1, num_parts + 1):
        best[parts][0] = float("inf")
        for stop in range(1, end + 1):
            best[parts][stop] = min(
                max(best[parts - 1][start], (stop - start) * lengths[stop - 1]) for start in range(stop)
            )
    return int(best[num_parts][end])


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=24), num_parts=st.integers(1, 8))
@settings(deadline=None)
def test_the_costliest_part_costs_as_little_as_it_can(lengths: list[int], num_parts: int) -> None:
    num_parts = min(num_parts, len(lengths))
    ascending = np.sort(np.array(lengths, dtype=np.int64))
    borders = cut_evenly(ascending, num_parts)
    assert borders[0] == 0 and borders[-1] == len(lengths) and len(borders) == num_parts + 1
    assert (np.diff(borders) >= 1).all()
    best = best_cost(ascending.tolist(), num_parts)
    assert padded_costs(ascending, borders).max() <= best + max(1, 0.01 * best)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=64, max_size=256), num_parts=st.integers(1, 8), seed=st.integers(0)
)
@settings(deadline=None)
def test_every_part_gets_its_least_number_of_samples(lengths: list[int], num_parts: int, seed: int) -> None:
    ascending = np.sort(np.array(lengths, dtype=np.int64))
    least = len(lengths) // num_parts // 4
    borders = cut_evenly(ascending, num_parts, least=least)
    assert len(borders) == num_parts + 1 and borders[-1] == len(lengths)
    assert np.diff(borders).min() >= least


def test_equal_lengths_give_equal_parts() -> None:
    assert cut_evenly(np.full(12, 7, dtype=np.int64), 4).tolist() == [0, 3, 6, 9, 12]


def test_more_parts_than_samples_are_refused() -> None:
    with pytest.raises(AssertionError, match="2 samples for 3 parts"):
        cut_evenly(np.array([1, 2], dtype=np.int64), 3)
