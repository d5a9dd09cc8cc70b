from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_train.data.order import DIGEST_MODULUS, SampleOrder, samples_digest
from slurm_train.errors import DataError


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
