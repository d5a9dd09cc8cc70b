"""Global batches of about equal work: the same for every split and every start, each sample once."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.batch import BatchShare, cut_equally
from slurm_train.data.length_batches import LengthBatches, cut_evenly, evaluation_by_length
from slurm_train.data.order import SampleOrder
from slurm_train.data.source import Draw
from slurm_train.errors import DataError


def test_evaluation_by_length_gives_all_ranks_as_much_to_do() -> None:
    lengths = np.random.default_rng(4).integers(1, 300, 1000)
    per_rank = [list(evaluation_by_length(lengths, None, rank=rank, size=3, batch_size=8)) for rank in range(3)]
    work = [sum(len(batch) * lengths[batch].max() for batch in batches) for batches in per_rank]
    assert max(work) < 1.1 * min(work)


GLOBAL_SIZE, POOL = 32, 8


LENGTHS = np.clip(np.random.default_rng(3).lognormal(4.0, 0.8, 1000), 4, 600).astype(np.int32)


def make(seed: int = 5, *, first: int = 0, pool: int = POOL, lengths: np.ndarray = LENGTHS) -> LengthBatches:
    order = SampleOrder(len(lengths), seed=seed)
    return LengthBatches(order, lengths, global_size=GLOBAL_SIZE, pool_batches=pool, first=first)


def steps_of(batches: LengthBatches, *, ranks: int, accumulation: int, steps: int, start: int = 0) -> list[list[Draw]]:
    """All micro-batches of each step, over all ranks."""
    found: list[list[Draw]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        split = BatchShare(rank=rank, accumulation=accumulation, shares=cut_equally(GLOBAL_SIZE, ranks))
        drawn = list(islice(batches.draws(split, start_samples=start), steps * accumulation))
        for step in range(steps):
            found[step] += drawn[step * accumulation : (step + 1) * accumulation]
    return found


def ids(draws: list[Draw]) -> list[int]:
    return sorted(int(sample) for draw in draws for sample in draw.indices)


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (4, 2), (8, 1), (3, 1)])
def test_any_split_by_length_reads_the_same_global_batches(ranks: int, accumulation: int) -> None:
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


def test_a_pool_holds_each_of_its_samples_once_and_as_many_batches_as_the_plain_order() -> None:
    drawn = steps_of(make(), ranks=2, accumulation=1, steps=2 * POOL)
    for pool in range(2):
        found = ids([draw for step in drawn[pool * POOL : (pool + 1) * POOL] for draw in step])
        plain = SampleOrder(len(LENGTHS), seed=5).indices(pool * POOL * GLOBAL_SIZE, POOL * GLOBAL_SIZE)
        assert found == sorted(plain.tolist())


def test_batches_by_length_are_the_same_for_ever() -> None:
    """A run that goes on with a later version has the rest of its samples."""
    lengths = 1 + np.arange(20) * 37 % 61
    batches = LengthBatches(SampleOrder(20, seed=7), lengths, global_size=4, pool_batches=4)
    # Two pools of 16; their batches have 4, 7, 3 and 2, then 6, 4, 3 and 3 samples.
    first = [4, 9, 14, 19, 0, 5, 10, 2, 7, 12, 17, 1, 6, 3, 13, 18]
    second = [0, 10, 15, 2, 7, 4, 14, 19, 1, 11, 8, 13, 18, 11, 16, 3]
    assert batches.sample_ids(0, 32).tolist() == first + second
    assert [batches.size_at(begin) for begin in (0, 4, 11, 14, 16, 22, 26, 29)] == [4, 7, 3, 2, 6, 4, 3, 3]


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
    costs = np.diff(borders) * ascending[borders[1:] - 1]
    assert costs.max() <= best + max(1, 0.01 * best)


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
