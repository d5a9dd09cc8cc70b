from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.data.order import DIGEST_MODULUS, KeyedPermutation, SampleOrder, samples_digest
from slurm_train.errors import DataError


@pytest.mark.parametrize("size", [1, 2, 3, 10, 4095, 4096, 4097, 4100, 10_000, 65_537, 300_001])
def test_every_sample_appears_exactly_once(size: int) -> None:
    samples = KeyedPermutation(size, seed=3, epoch=1)(np.arange(size, dtype=np.int64))
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(size))


@given(size=st.integers(1, 2**60), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6), data=st.data())
@settings(max_examples=200, deadline=None)
def test_samples_stay_inside_and_differ_at_any_size(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    samples = KeyedPermutation(size, seed=seed, epoch=epoch)(np.array(positions, dtype=np.int64))
    assert ((samples >= 0) & (samples < size)).all()
    assert len(set(samples.tolist())) == len(positions)


def test_value_does_not_depend_on_how_positions_are_grouped() -> None:
    permutation = KeyedPermutation(10**9, seed=0, epoch=0)
    positions = np.arange(50_000, dtype=np.int64)
    one_by_one = np.concatenate([permutation(positions[i : i + 1]) for i in range(0, 50_000, 1000)])
    assert np.array_equal(permutation(positions)[::1000], one_by_one)


# Written down once: a change of these values would give every resumed run another order.
def test_order_is_the_same_for_ever() -> None:
    positions = np.arange(5, dtype=np.int64)
    found = {size: KeyedPermutation(size, seed=7, epoch=2)(positions).tolist() for size in (5, 100_000, 10**13)}
    assert found == EXPECTED


@pytest.mark.parametrize("size", [4096, 5000, 100_003, 10**9, 10**12 + 7])
def test_values_at_fixed_positions_are_uniform_over_seeds(size: int) -> None:
    positions = np.array([0, 1, size // 2, size - 1], dtype=np.int64)
    drawn = np.stack([KeyedPermutation(size, seed=seed, epoch=0)(positions) for seed in range(1500)])
    for place in range(4):
        assert chi_square(drawn[:, place] * 16 // size, bins=16) < limit(16)


@pytest.mark.parametrize("size", [5000, 100_003, 10**9, 10**12 + 7])
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


EXPECTED = {
    5: [0, 2, 4, 1, 3],
    100000: [44832, 99575, 67876, 31974, 38423],
    10000000000000: [4037855468976, 316164433863, 8733576895979, 9185167301315, 6374188240201],
}


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), start=st.integers(0, 500), count=st.integers(0, 200))
def test_any_window_equals_the_same_part_of_the_whole(num_samples: int, start: int, count: int) -> None:
    whole = SampleOrder(num_samples, seed=4).indices(0, 700)
    assert np.array_equal(SampleOrder(num_samples, seed=4).indices(start, count), whole[start : start + count])


def test_each_epoch_holds_each_sample_once_in_its_own_order() -> None:
    epochs = SampleOrder(37, seed=0).indices(0, 37 * 4).reshape(4, 37)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(37), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_positions_with_gaps_over_several_epochs() -> None:
    order = SampleOrder(10, seed=1)
    positions = np.array([0, 9, 10, 31, 95], dtype=np.int64)
    assert order.at(positions).tolist() == [int(order.indices(p, 1)[0]) for p in positions.tolist()]


def test_no_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="no samples"):
        SampleOrder(0, seed=0)


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
