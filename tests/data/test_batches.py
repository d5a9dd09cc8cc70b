"""Global batches, equal in number or in work: the same for every split and every start, each sample once."""

from __future__ import annotations

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

from slurm_train.data.batches import (
    BatchStream,
    GlobalBatches,
    LengthBatches,
    Prefetch,
    Split,
    cut_evenly,
    evaluation_batches,
)
from slurm_train.data.order import SampleOrder
from slurm_train.data.source import Draw
from slurm_train.errors import DataError
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


def read_steps(num_samples: int, *, sizes: tuple[int, ...], accumulation: int, start: int, steps: int) -> np.ndarray:
    """The global batches (steps, G) that ranks with micro-batches of these sizes read together."""
    source, order = Numbers(num_samples), SampleOrder(num_samples, seed=5)
    batches = GlobalBatches(order, global_size=sum(sizes) * accumulation)
    per_rank = []
    for rank, size in enumerate(sizes):
        # Equal sizes need not be named.
        named = sizes if len(set(sizes)) > 1 else None
        split = Split(rank=rank, ranks=len(sizes), accumulation=accumulation, sizes=named)
        stream = BatchStream(source, batches.draws(split, start_samples=start))
        own = list(islice(stream, steps * accumulation))
        assert all(np.array_equal(indices, tensors[0].numpy()) and len(indices) == size for indices, tensors in own)
        per_rank.append(np.stack([batch.indices for batch in own]).reshape(steps, -1))
    return np.concatenate(per_rank, axis=1)


equal_sizes = st.tuples(st.integers(1, 24), st.integers(1, 8)).map(lambda pair: (pair[0],) * pair[1])
unequal_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@given(
    sizes=equal_sizes | unequal_sizes,
    accumulation=st.integers(1, 3),
    num_samples=st.integers(1, 300),
    start_step=st.integers(0, 50),
)
@settings(deadline=None)
def test_any_split_reads_the_same_global_batches(
    sizes: tuple[int, ...], accumulation: int, num_samples: int, start_step: int
) -> None:
    global_size = sum(sizes) * accumulation
    found = read_steps(num_samples, sizes=sizes, accumulation=accumulation, start=start_step * global_size, steps=4)
    whole = SampleOrder(num_samples, seed=5).indices(0, (start_step + 4) * global_size)
    assert np.array_equal(found.reshape(-1), whole[start_step * global_size :])


def test_resume_at_any_step_continues_the_stream_beyond_its_lookahead() -> None:
    whole = read_steps(1000, sizes=(512, 512), accumulation=2, start=0, steps=9)
    for step in range(9):
        resumed = read_steps(1000, sizes=(512, 512), accumulation=2, start=step * 2048, steps=9 - step)
        assert np.array_equal(resumed, whole[step:])


@pytest.mark.parametrize(
    ("by_length", "num_samples", "size"), [(False, 50, 9), (False, 0, 2), (True, 1, 3), (True, 64, 4)]
)
def test_evaluation_sees_each_sample_once_over_all_ranks(by_length: bool, num_samples: int, size: int) -> None:
    lengths = np.random.default_rng(4).integers(1, 300, num_samples) if by_length else None
    seen = [
        number
        for rank in range(size)
        for (numbers,) in evaluation_batches(Numbers(num_samples), rank=rank, size=size, batch_size=4, lengths=lengths)
        for number in numbers.tolist()
    ]
    assert sorted(seen) == list(range(num_samples))


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_a_capped_evaluation_sees_the_same_samples_on_any_number_of_ranks(by_length: bool, size: int) -> None:
    lengths = np.random.default_rng(4).integers(1, 300, 50) if by_length else None
    facts: dict[str, Any] = {"size": size, "batch_size": 4, "lengths": lengths, "most": 12}
    shares = [
        [number for (numbers,) in evaluation_batches(Numbers(50), rank=rank, **facts) for number in numbers.tolist()]
        for rank in range(size)
    ]
    assert sorted(number for share in shares for number in share) == [0, 4, 8, 12, 16, 20, 25, 29, 33, 37, 41, 45]
    assert by_length or max(map(len, shares)) - min(map(len, shares)) <= 1


GLOBAL_SIZE, POOL = 32, 8


LENGTHS = np.clip(np.random.default_rng(3).lognormal(4.0, 0.8, 1000), 4, 600).astype(np.int32)


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


@pytest.mark.parametrize(("ranks", "accumulation"), [(4, 2), (3, 1)])
def test_any_split_by_length_reads_the_same_global_batches(ranks: int, accumulation: int) -> None:
    one = steps_of(make(), ranks=1, accumulation=1, steps=30)
    plain = SampleOrder(len(LENGTHS), seed=5).indices(0, POOL * GLOBAL_SIZE)
    assert ids([draw for step in one[:POOL] for draw in step]) == sorted(plain.tolist()), "a pool has its samples once"
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
    assert np.mean(ratios) < 1.1
    assert padded < 0.6 * (LENGTHS[plain].max(axis=2) * plain.shape[2]).sum(), "little is padding"


def test_sample_ids_are_those_of_the_batches_in_order() -> None:
    batches = make()
    assert batches.align(1) == batches.align(batches.size_at(0)) == batches.size_at(0), "a position within a batch"
    steps = steps_of(batches, ranks=1, accumulation=1, steps=12)
    flat = np.concatenate([step[0].indices for step in steps])
    assert np.array_equal(batches.sample_ids(0, len(flat)), flat)
    assert np.array_equal(batches.sample_ids(100, 200), flat[100:300])


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="1000 samples and lengths of shape"):
        LengthBatches(SampleOrder(1000, seed=0), LENGTHS[:-1], global_size=8, pool_batches=4)
    with pytest.raises(DataError, match="has a length of 0"):
        make(lengths=0 * LENGTHS).size_at(0)


@given(lengths=st.lists(st.integers(1, 500), min_size=64, max_size=256), num_parts=st.integers(1, 8))
@settings(deadline=None)
def test_every_part_gets_its_least_number_of_samples(lengths: list[int], num_parts: int) -> None:
    ascending = np.sort(np.array(lengths, dtype=np.int64))
    least = len(lengths) // num_parts // 4
    borders = cut_evenly(ascending, num_parts, least=least)
    assert (len(borders), borders[0], borders[-1]) == (num_parts + 1, 0, len(lengths))
    assert np.diff(borders).min() >= least


def test_items_come_in_order_and_so_many_are_read_ahead() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    ahead = Prefetch(items(), depth=3)
    # Three wait in the queue and one for a place in it.
    wait_for(lambda: len(read) == 4, within_s=5, what="reading ahead", poll_s=0.01)
    assert [next(ahead) for _ in range(10)] == list(range(10))
    wait_for(lambda: len(read) == 14, within_s=5, what="reading ahead", poll_s=0.01)
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


def test_closing_ends_a_thread_that_waits_for_a_place() -> None:
    assert list(Prefetch(iter([1, 2, 3]), depth=2)) == [1, 2, 3]
    before = threading.active_count()
    ahead = Prefetch(iter(range(100)), depth=1)
    next(ahead)
    ahead.close()
    assert threading.active_count() == before
