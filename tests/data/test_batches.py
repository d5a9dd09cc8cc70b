"""Global batches, equal in number or in work: the same for every split and every start, each sample once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slurm_train.config.batch import cut_equally
from slurm_train.data.batches import (
    BatchStream,
    GlobalBatches,
    LengthBatches,
    Prefetch,
    RankBatches,
    Split,
    cut_evenly,
    evaluation_batches,
    evaluation_by_length,
    evaluation_indices,
)
from slurm_train.data.order import SampleOrder
from slurm_train.data.source import Draw
from slurm_train.errors import ConfigError, DataError
from tests.support.waiting import wait_for


class Numbers:
    """A source whose samples are their own numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        return (torch.from_numpy(indices.copy()),)

    def fingerprint(self) -> str:
        return f"numbers {self.length}"


def read_steps(num_samples: int, *, shares: tuple[int, ...], accumulation: int, start: int, steps: int) -> np.ndarray:
    """The global batches (steps, G) that ranks with these shares of them read together."""
    source, order = Numbers(num_samples), SampleOrder(num_samples, seed=5)
    batches = GlobalBatches(order, global_size=sum(shares))
    per_rank = []
    for rank in range(len(shares)):
        split = Split(rank=rank, accumulation=accumulation, shares=shares)
        stream = BatchStream(source, batches.draws(split, start_samples=start))
        own = list(islice(stream, steps * accumulation))
        assert all(np.array_equal(indices, tensors[0].numpy()) for indices, tensors in own)
        sizes = [len(indices) for indices, _ in own]
        assert sizes == [*split.micro_sizes] * steps and max(sizes) - min(sizes) <= 1
        per_rank.append(np.concatenate([batch.indices for batch in own]).reshape(steps, -1))
    return np.concatenate(per_rank, axis=1)


@st.composite
def equal_shares(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Also of global batches that are no multiple of ranks or micro-batches."""
    global_size = draw(st.integers(1, 96))
    ranks = draw(st.integers(1, min(global_size, 9)))
    return cut_equally(global_size, ranks), draw(st.integers(1, global_size // ranks))


@st.composite
def unequal_shares(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    accumulation = draw(st.integers(1, 3))
    return tuple(draw(st.lists(st.integers(accumulation, 21), min_size=1, max_size=4))), accumulation


@given(split=equal_shares() | unequal_shares(), num_samples=st.integers(1, 300), start_step=st.integers(0, 50))
@settings(deadline=None)
def test_any_split_reads_the_same_global_batches(
    split: tuple[tuple[int, ...], int], num_samples: int, start_step: int
) -> None:
    shares, accumulation = split
    global_size = sum(shares)
    found = read_steps(num_samples, shares=shares, accumulation=accumulation, start=start_step * global_size, steps=4)
    whole = SampleOrder(num_samples, seed=5).indices(0, (start_step + 4) * global_size)
    assert np.array_equal(found.reshape(-1), whole[start_step * global_size :])


def test_resume_at_any_step_continues_the_stream_beyond_its_lookahead() -> None:
    whole = read_steps(1000, shares=(1024, 1024), accumulation=2, start=0, steps=9)
    for step in range(9):
        resumed = read_steps(1000, shares=(1024, 1024), accumulation=2, start=step * 2048, steps=9 - step)
        assert np.array_equal(resumed, whole[step:])


def batches_of_ranks(ranks: int, *, done: int = 0, steps: int = 10, accumulation: int = 1) -> list[list[list[int]]]:
    """Returns the batches of each rank, of steps of 12 samples of 50."""
    order = SampleOrder(50, seed=3)
    of_ranks = (
        RankBatches(
            order, global_size=12, rank=rank, num_ranks=ranks, accumulation=accumulation, steps=steps, done=done
        )
        for rank in range(ranks)
    )
    batches = [list(of_rank) for of_rank in of_ranks]
    assert all(len(of_rank) == (steps - done) * accumulation for of_rank in batches)
    return batches


def samples_of_steps(of_ranks: list[list[list[int]]], *, accumulation: int = 1) -> list[list[int]]:
    """Returns the samples of each step over all ranks, in their order."""
    num_steps = len(of_ranks[0]) // accumulation
    return [
        [
            number
            for batches in of_ranks
            for batch in batches[step * accumulation : (step + 1) * accumulation]
            for number in batch
        ]
        for step in range(num_steps)
    ]


def test_a_step_counts_as_given_with_its_last_micro_batch() -> None:
    batches = RankBatches(SampleOrder(50, seed=3), global_size=12, rank=0, num_ranks=2, accumulation=3, steps=4, done=1)
    assert [batches.steps_given for _ in batches] == [1, 1, 2, 2, 2, 3, 3, 3, 4]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 3), (3, 2), (5, 2), (12, 1)])
def test_steps_have_the_same_samples_on_any_number_of_ranks_and_after_any_step(ranks: int, accumulation: int) -> None:
    whole = samples_of_steps(batches_of_ranks(1))
    assert samples_of_steps(batches_of_ranks(ranks, accumulation=accumulation), accumulation=accumulation) == whole
    for done in range(11):
        resumed = batches_of_ranks(ranks, done=done, accumulation=accumulation)
        assert samples_of_steps(resumed, accumulation=accumulation) == whole[done:]
    # Each epoch has every sample once, though it ends within a step.
    used = [number for step in whole for number in step]
    for epoch in range(2):
        assert sorted(used[epoch * 50 : (epoch + 1) * 50]) == list(range(50))


@pytest.mark.full
def test_batches_of_a_rank_are_not_divided_once_more() -> None:
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    batches = RankBatches(SampleOrder(50, seed=3), global_size=12, rank=0, num_ranks=2, accumulation=1, steps=6, done=0)
    loader = torch.utils.data.DataLoader(range(50), batch_sampler=batches)
    for even_batches in (True, False):
        with pytest.raises(ConfigError, match="divided among the ranks once more"):
            prepare(loader, num_processes=2, process_index=0, even_batches=even_batches)


@pytest.mark.parametrize(("ranks", "accumulation"), [(13, 1), (4, 4), (1, 0)])
def test_a_batch_without_a_sample_is_refused(ranks: int, accumulation: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        batches_of_ranks(ranks, accumulation=accumulation)


def test_a_loader_of_torch_takes_the_batches_whatever_its_workers_read_ahead() -> None:
    batches = RankBatches(SampleOrder(50, seed=3), global_size=12, rank=1, num_ranks=2, accumulation=2, steps=6, done=2)
    expected = batches_of_ranks(2, done=2, steps=6, accumulation=2)[1]
    for num_workers in (0, 2):
        loader = torch.utils.data.DataLoader(range(50), batch_sampler=batches, num_workers=num_workers)
        assert len(loader) == 8
        assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loop_over_epochs_goes_on_after_any_step_in_the_same_order(accumulation: int, num_workers: int) -> None:
    whole = batches_of_ranks(2, steps=10, accumulation=accumulation)[1]

    def train(done: int) -> list[tuple[int, int, list[int]]]:
        batches = RankBatches(
            SampleOrder(50, seed=3),
            global_size=12,
            rank=1,
            num_ranks=2,
            accumulation=accumulation,
            steps=10,
            done=done,
            steps_per_epoch=4,
        )
        loader = torch.utils.data.DataLoader(range(50), batch_sampler=batches, num_workers=num_workers)
        seen = []
        for epoch in range(batches.epoch, 3):
            batches.set_epoch(epoch)
            # The last epoch is shorter. What a resumed one has done counts, for schedules by `i / len(loader)`.
            assert len(loader) == (4 if epoch < 2 else 2) * accumulation
            for i, batch in enumerate(loader, start=batches.start):
                seen.append((epoch, i, batch.tolist()))
        return seen

    places = [(epoch, i) for epoch, steps in ((0, 4), (1, 4), (2, 2)) for i in range(steps * accumulation)]
    expected = [(*place, batch) for place, batch in zip(places, whole, strict=True)]
    for done in range(11) if num_workers == 0 else (0, 3, 4):
        assert train(done) == expected[done * accumulation :]


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from every generator that an augmentation may use."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(())), float(self.own.random())]
        return torch.tensor([number, *drawn], dtype=torch.float64)


def noisy_rows(*, ranks: int = 1, done: int = 0, num_workers: int = 0) -> list[list[float]]:
    """Returns the samples of steps 1 to 10 as all ranks read them, in the order of their places."""
    of_ranks = []
    for rank in range(ranks):
        batches = RankBatches(
            SampleOrder(50, seed=3), global_size=12, rank=rank, num_ranks=ranks, accumulation=1, steps=10, done=done
        )
        loader = torch.utils.data.DataLoader(
            batches.keyed(Noisy()), batch_sampler=batches, num_workers=num_workers, generator=torch.Generator()
        )
        of_ranks.append([batch.tolist() for batch in loader])
    return [row for step in zip(*of_ranks, strict=True) for rows in step for row in rows]


def test_augmentations_follow_from_the_place_of_a_sample_alone() -> None:
    state = torch.get_rng_state()
    whole = noisy_rows()
    assert torch.equal(torch.get_rng_state(), state), "those of the training are left alone"
    assert len({tuple(row[1:]) for row in whole}) == 120, "each epoch has its own"
    torch.rand(1)
    assert noisy_rows(ranks=2, num_workers=2) == whole
    assert noisy_rows(ranks=3, done=4) == whole[4 * 12 :]
    torch.set_rng_state(state)


def test_a_sample_without_its_place_is_refused() -> None:
    batches = RankBatches(SampleOrder(50, seed=3), global_size=12, rank=0, num_ranks=1, accumulation=1, steps=6, done=0)
    with pytest.raises(ConfigError, match="sample 7 was asked for by its number alone"):
        batches.keyed(Noisy())[7]


def test_an_epoch_that_would_be_read_again_is_refused() -> None:
    batches = RankBatches(
        SampleOrder(50, seed=3),
        global_size=10,
        rank=0,
        num_ranks=1,
        accumulation=1,
        steps=20,
        done=6,
        steps_per_epoch=5,
    )
    with pytest.raises(ConfigError, match="epoch 0 was set, and 1 epochs are done at step 6"):
        batches.set_epoch(0)
    # A look at the first batch reads no epoch.
    next(iter(batches))
    assert (batches.epoch, batches.start, len(list(batches))) == (1, 1, 4)
    with pytest.raises(ConfigError, match="epoch 1 was read to its end, and is read again"):
        list(batches)
    batches.set_epoch(2)
    assert (batches.start, len(list(batches))) == (0, 5)
    plain = RankBatches(SampleOrder(50, seed=3), global_size=10, rank=0, num_ranks=1, accumulation=1, steps=20, done=6)
    assert list(plain) == list(plain) and plain.start == 6
    with pytest.raises(ConfigError, match="one pass over these batches is the whole training"):
        plain.set_epoch(1)
    with pytest.raises(ConfigError, match="an epoch without a step"):
        RankBatches(
            SampleOrder(5, seed=3),
            global_size=10,
            rank=0,
            num_ranks=1,
            accumulation=1,
            steps=20,
            done=0,
            steps_per_epoch=5 // 10,
        )


@pytest.mark.parametrize(
    ("lengths", "num_samples", "size"), [(None, 50, 9), (None, 0, 2), (None, 7, 1), (1, 1, 3), (7, 7, 2), (64, 64, 4)]
)
def test_evaluation_sees_each_sample_once_over_all_ranks(lengths: Any, num_samples: int, size: int) -> None:
    lengths = lengths and np.random.default_rng(4).integers(1, 300, num_samples)
    seen = [
        number
        for rank in range(size)
        for _, (numbers,) in evaluation_batches(
            Numbers(num_samples), rank=rank, size=size, batch_size=4, lengths=lengths
        )
        for number in numbers.tolist()
    ]
    assert sorted(seen) == list(range(num_samples))


@pytest.mark.parametrize("by_length", [False, True])
def test_a_capped_evaluation_sees_the_same_samples_on_any_number_of_ranks(by_length: bool) -> None:
    lengths = np.random.default_rng(4).integers(1, 300, 50) if by_length else None
    for size in (1, 2, 3):
        shares = [
            [number for _, (numbers,) in batches for number in numbers.tolist()]
            for batches in (
                evaluation_batches(Numbers(50), rank=rank, size=size, batch_size=4, lengths=lengths, most=12)
                for rank in range(size)
            )
        ]
        assert sorted(number for share in shares for number in share) == [0, 4, 8, 12, 16, 20, 25, 29, 33, 37, 41, 45]
        assert by_length or max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sum(len(one.indices) for one in evaluation_batches(Numbers(5), rank=0, size=1, batch_size=4, most=12)) == 5


def test_a_batch_of_a_capped_evaluation_has_samples_of_about_one_length() -> None:
    lengths = np.array([9, 1, 1, 1, 9, 1, 1, 1])
    batches = evaluation_batches(Numbers(8), rank=0, size=1, batch_size=2, lengths=lengths, most=4)
    assert [numbers.tolist() for _, (numbers,) in batches] == [[2, 6], [0, 4]]


def test_shares_differ_by_at_most_one_and_none_is_padded() -> None:
    shares = [[batch.tolist() for batch in evaluation_indices(7, rank=rank, size=3, batch_size=2)] for rank in range(3)]
    assert shares == [[[0, 1]], [[2, 3]], [[4, 5], [6]]]


def test_blocks_are_the_same_on_any_number_of_ranks() -> None:
    for size in (1, 2, 3, 5):
        shares = [
            list(evaluation_indices(14, rank=rank, size=size, batch_size=4, in_blocks=True)) for rank in range(size)
        ]
        assert [block.tolist() for share in shares for block in share] == [
            [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]
        ]  # fmt: skip


def test_evaluation_by_length_gives_all_ranks_as_much_to_do() -> None:
    lengths = np.random.default_rng(4).integers(1, 300, 1000)
    per_rank = [list(evaluation_by_length(lengths, rank=rank, size=3, batch_size=8)) for rank in range(3)]
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
        split = Split(rank=rank, accumulation=accumulation, shares=cut_equally(GLOBAL_SIZE, ranks))
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


def test_items_come_in_order_and_so_many_are_read_ahead() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    ahead = Prefetch(items(), depth=3)
    # Three wait in the queue and one for a place in it.
    wait_for(lambda: len(read) == 4, within_s=60, what="reading ahead", poll_s=0.01)
    assert [next(ahead) for _ in range(10)] == list(range(10))
    wait_for(lambda: len(read) == 14, within_s=60, what="reading ahead", poll_s=0.01)
    ahead.close()


def test_an_error_of_reading_comes_where_its_item_would_have_been() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    ahead = Prefetch(items(), depth=4)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)


def test_the_end_of_the_items_is_the_end() -> None:
    assert list(Prefetch(iter([1, 2, 3]), depth=2)) == [1, 2, 3]


def test_closing_ends_a_thread_that_waits_for_a_place() -> None:
    before = threading.active_count()
    ahead = Prefetch(iter(range(100)), depth=1)
    next(ahead)
    ahead.close()
    assert threading.active_count() == before
