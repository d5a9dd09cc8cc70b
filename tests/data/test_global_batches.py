"""Batches by length: the same for every split and every start, each sample once, equal in cost."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.data.global_batches import LengthBatches, Split
from slurm_train.data.order import SampleOrder
from slurm_train.data.source import Draw
from slurm_train.errors import DataError

GLOBAL_SIZE, POOL = 32, 8


def make_lengths(num_samples: int = 1000) -> np.ndarray:
    values = np.random.default_rng(3).lognormal(4.0, 0.8, num_samples)
    return np.clip(values, 4, 600).astype(np.int32)


LENGTHS = make_lengths()


def make(seed: int = 5, *, first: int = 0, pool: int = POOL, lengths: np.ndarray = LENGTHS) -> LengthBatches:
    order = SampleOrder(len(lengths), seed=seed)
    return LengthBatches(order, lengths, global_size=GLOBAL_SIZE, pool_batches=pool, first=first)


def steps_of(batches: LengthBatches, *, ranks: int, accumulation: int, steps: int, start: int = 0) -> list[list[Draw]]:
    """All micro-batches of each step, over all ranks."""
    found: list[list[Draw]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        split = Split(rank=rank, ranks=ranks, accumulation=accumulation)
        drawn = list(islice(batches.draws(split, start_samples=start), steps * accumulation))
        for step in range(steps):
            found[step] += drawn[step * accumulation : (step + 1) * accumulation]
    return found


def ids(draws: list[Draw]) -> list[int]:
    return sorted(int(sample) for draw in draws for sample in draw.indices)


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (4, 2), (8, 1), (3, 1)])
def test_any_split_reads_the_same_global_batches(ranks: int, accumulation: int) -> None:
    one = steps_of(make(), ranks=1, accumulation=1, steps=30)
    split = steps_of(make(), ranks=ranks, accumulation=accumulation, steps=30)
    assert [ids(step) for step in split] == [ids(step) for step in one]


@given(start_step=st.integers(0, 40), first=st.sampled_from([0, 96]))
@settings(deadline=None, max_examples=25)
def test_a_start_at_any_step_reads_what_follows(start_step: int, first: int) -> None:
    batches = make(first=first)
    samples = first
    for _ in range(start_step):
        samples += batches.size_at(samples)
    assert batches.align(samples) == samples
    whole = steps_of(make(first=first), ranks=2, accumulation=1, steps=start_step + 5, start=first)
    rest = steps_of(make(first=first), ranks=2, accumulation=1, steps=5, start=samples)
    assert [ids(step) for step in rest] == [ids(step) for step in whole[start_step:]]
    if start_step:
        assert batches.size_before(samples) == len(ids(whole[start_step - 1]))


def test_a_pool_holds_each_of_its_samples_once_and_as_many_batches_as_the_plain_order() -> None:
    drawn = steps_of(make(), ranks=2, accumulation=1, steps=2 * POOL)
    for pool in range(2):
        found = ids([draw for step in drawn[pool * POOL : (pool + 1) * POOL] for draw in step])
        plain = SampleOrder(len(LENGTHS), seed=5).indices(pool * POOL * GLOBAL_SIZE, POOL * GLOBAL_SIZE)
        assert found == sorted(plain.tolist())


def test_positions_are_those_of_the_plain_order() -> None:
    order = SampleOrder(len(LENGTHS), seed=5)
    for step in steps_of(make(), ranks=2, accumulation=2, steps=40):
        for draw in step:
            assert np.array_equal(order.at(np.sort(draw.positions)), draw.indices[np.argsort(draw.positions)])


def test_the_parts_of_a_step_cost_the_same_and_hold_neighbours_in_length() -> None:
    ratios, padded = [], 0
    for step in steps_of(make(pool=16), ranks=4, accumulation=1, steps=64):
        costs = [len(draw.indices) * int(LENGTHS[draw.indices].max()) for draw in step]
        ratios.append(max(costs) / np.mean(costs))
        padded += sum(costs)
    plain = SampleOrder(len(LENGTHS), seed=5).indices(0, 64 * GLOBAL_SIZE).reshape(64, 4, -1)
    plain_costs = LENGTHS[plain].max(axis=2) * plain.shape[2]
    assert np.mean(ratios) < 1.1 < np.mean(plain_costs.max(axis=1) / plain_costs.mean(axis=1))
    assert padded < 0.6 * plain_costs.sum(), "little is padding"


def test_the_batches_of_a_pool_cost_about_the_same() -> None:
    drawn = steps_of(make(pool=32), ranks=1, accumulation=1, steps=32)
    costs = [len(step[0].indices) * int(LENGTHS[step[0].indices].max()) for step in drawn]
    assert np.std(costs) < 0.2 * np.mean(costs)
    sizes = [len(step[0].indices) for step in drawn]
    assert min(sizes) >= GLOBAL_SIZE // 4 and max(sizes) > 2 * GLOBAL_SIZE, "short samples come in larger batches"


def test_batches_of_a_pool_are_shuffled_and_differ_by_seed_and_pool() -> None:
    def mean_lengths(seed: int, pool: int) -> list[int]:
        drawn = steps_of(make(seed), ranks=1, accumulation=1, steps=(pool + 1) * POOL)[pool * POOL :]
        return [int(LENGTHS[step[0].indices].mean()) for step in drawn]

    assert mean_lengths(5, 0) == mean_lengths(5, 0)
    assert mean_lengths(5, 0) != sorted(mean_lengths(5, 0))
    assert np.argsort(mean_lengths(5, 0)).tolist() != np.argsort(mean_lengths(5, 1)).tolist()
    assert np.argsort(mean_lengths(5, 0)).tolist() != np.argsort(mean_lengths(6, 0)).tolist()


def test_a_position_within_a_batch_moves_to_the_next_one() -> None:
    batches = make()
    end = batches.size_at(0)
    assert batches.align(1) == batches.align(end) == end
    assert batches.size_at(1) == end - 1
    assert make(first=50).align(7) == 50, "a position before the first pool"


def test_sample_ids_are_those_of_the_batches_in_order() -> None:
    batches = make()
    steps = steps_of(batches, ranks=1, accumulation=1, steps=12)
    flat = np.concatenate([step[0].indices for step in steps])
    assert np.array_equal(batches.sample_ids(0, len(flat)), flat)
    assert np.array_equal(batches.sample_ids(100, 200), flat[100:300])


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="1000 samples and lengths of shape"):
        LengthBatches(SampleOrder(1000, seed=0), LENGTHS[:-1], global_size=8, pool_batches=4)
    wrong = LENGTHS.copy()
    wrong[:] = 0
    with pytest.raises(DataError, match="has a length of 0"):
        make(lengths=wrong).size_at(0)
