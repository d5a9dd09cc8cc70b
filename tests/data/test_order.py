from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.data.order import DIGEST_MODULUS, KeyedPermutation, SampleOrder, samples_digest
from slurm_train.errors import DataError


@pytest.mark.parametrize("size", [1, 2, 10, 4095, 4096, 4097, 65_537])
def test_every_sample_appears_exactly_once(size: int) -> None:
    samples = KeyedPermutation(size, seed=3, epoch=1)(np.arange(size, dtype=np.int64))
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(size))


@given(size=st.integers(5000, 2**60), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_samples_stay_inside_and_differ_at_any_size(size: int, seed: int, epoch: int) -> None:
    samples = KeyedPermutation(size, seed=seed, epoch=epoch)(np.arange(size - 50, size, dtype=np.int64))
    assert samples.min() >= 0 and samples.max() < size and len(np.unique(samples)) == 50


# Written down once: a change of these values would give every resumed run another order.
def test_order_is_the_same_for_ever() -> None:
    positions = np.arange(5, dtype=np.int64)
    found = {size: KeyedPermutation(size, seed=7, epoch=2)(positions).tolist() for size in (5, 100_000, 10**13)}
    assert found == {
        5: [0, 2, 4, 1, 3],
        100_000: [44832, 99575, 67876, 31974, 38423],
        10**13: [4037855468976, 316164433863, 8733576895979, 9185167301315, 6374188240201],
    }


@pytest.mark.parametrize("size", [100_003, 10**12 + 7])
def test_neighbours_are_independent(size: int) -> None:
    samples = KeyedPermutation(size, seed=1, epoch=0)(np.arange(min(size, 100_000), dtype=np.int64))
    coarse = samples * 16 // size
    assert chi_square(coarse[:-1] * 16 + coarse[1:], bins=256) < limit(256)
    fine = samples % 16
    assert chi_square(fine[:-1] * 16 + fine[1:], bins=256) < limit(256)


def test_chi_square_notices_a_bad_shuffle() -> None:
    weak = (np.arange(100_000) * 7919) % 100_003
    coarse = weak * 16 // 100_003
    assert chi_square(coarse[:-1] * 16 + coarse[1:], bins=256) > limit(256)


def chi_square(values: np.ndarray, *, bins: int) -> float:
    counts = np.bincount(values, minlength=bins)
    expected = len(values) / bins
    return float(((counts - expected) ** 2).sum() / expected)


def limit(bins: int) -> float:
    """About five standard deviations above the mean of chi-square with bins - 1 degrees of freedom."""
    return bins - 1 + 5 * math.sqrt(2 * bins)


def test_positions_with_gaps_over_several_epochs() -> None:
    with pytest.raises(DataError, match="no samples"):
        SampleOrder(0, seed=1)
    order = SampleOrder(10, seed=1)
    assert len({tuple(order.indices(10 * epoch, 10)) for epoch in range(4)}) == 4, "each epoch has its own order"
    positions = np.array([0, 9, 10, 31, 95], dtype=np.int64)
    assert order.at(positions).tolist() == [int(order.indices(p, 1)[0]) for p in positions.tolist()]


@settings(deadline=None)
@given(indices=st.lists(st.integers(0, 2**40), max_size=40), cut=st.integers(0, 40), seed=st.randoms())
def test_digest_ignores_order_and_adds_up_over_parts(indices: list[int], cut: int, seed: object) -> None:
    values = np.array(indices, dtype=np.int64)
    parts = samples_digest(values[:cut]) + samples_digest(values[cut:])
    assert samples_digest(values[::-1]) == samples_digest(values) == parts % DIGEST_MODULUS


def test_digest_tells_a_repeated_or_swapped_sample() -> None:
    right = np.arange(100, dtype=np.int64)
    wrong = right.copy()
    wrong[3] = 4
    assert samples_digest(right) != samples_digest(wrong)
    assert samples_digest(np.array([0, 3])) != samples_digest(np.array([1, 2]))
