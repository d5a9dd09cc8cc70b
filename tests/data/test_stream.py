from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slurm_train.data.global_batches import Split
from slurm_train.data.order import SampleOrder
from slurm_train.data.stream import BatchSlice, BatchStream, EvenBatches, MicroBatch, draws, evaluation_batches


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


def read_steps(num_samples: int, *, local: int, accumulation: int, ranks: int, start: int, steps: int) -> np.ndarray:
    """The global batches (steps, G) that all ranks together read."""
    source, order = Numbers(num_samples), SampleOrder(num_samples, seed=5)
    per_rank = []
    for rank in range(ranks):
        part = BatchSlice(local * accumulation * ranks, local, accumulation, rank)
        stream = BatchStream(source, draws(order, slice=part, start_samples=start))
        batches = list(islice(stream, steps * accumulation))
        assert all(np.array_equal(batch.indices, batch.tensors[0].numpy()) for batch in batches)
        per_rank.append(np.stack([batch.indices for batch in batches]).reshape(steps, -1))
    return np.concatenate(per_rank, axis=1)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int]:
    global_size = draw(st.sampled_from([1, 6, 12, 24, 96]))
    divisors = [d for d in range(1, global_size + 1) if global_size % d == 0]
    ranks = draw(st.sampled_from(divisors))
    local = draw(st.sampled_from([d for d in divisors if (global_size // ranks) % d == 0]))
    return local, global_size // ranks // local, ranks


@given(split=splits(), num_samples=st.integers(1, 300), start_step=st.integers(0, 50))
@settings(deadline=None)
def test_any_split_reads_the_same_global_batches(
    split: tuple[int, int, int], num_samples: int, start_step: int
) -> None:
    local, accumulation, ranks = split
    global_size = local * accumulation * ranks
    found = read_steps(
        num_samples, local=local, accumulation=accumulation, ranks=ranks, start=start_step * global_size, steps=4
    )
    whole = SampleOrder(num_samples, seed=5).indices(0, (start_step + 4) * global_size)
    assert np.array_equal(found.reshape(-1), whole[start_step * global_size :])


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), accumulation=st.integers(1, 3), step=st.integers(0, 9)
)
@settings(deadline=None)
def test_unequal_shares_read_the_same_global_batches(sizes: list[int], accumulation: int, step: int) -> None:
    global_size, order = sum(sizes) * accumulation, SampleOrder(50, seed=5)
    batches = EvenBatches(order, global_size=global_size)
    found = []
    for rank, size in enumerate(sizes):
        split = Split(rank=rank, ranks=len(sizes), accumulation=accumulation, sizes=tuple(sizes))
        own = list(islice(batches.draws(split, start_samples=step * global_size), 3 * accumulation))
        assert {len(draw.indices) for draw in own} == {size}
        found.append(np.stack([draw.indices for draw in own]).reshape(3, -1))
    whole = np.concatenate(found, axis=1).reshape(-1)
    assert np.array_equal(whole, order.indices(step * global_size, 3 * global_size))


def test_resume_at_any_step_continues_the_stream_beyond_its_lookahead() -> None:
    whole = read_steps(1000, local=512, accumulation=2, ranks=2, start=0, steps=9)
    for step in range(9):
        resumed = read_steps(1000, local=512, accumulation=2, ranks=2, start=step * 2048, steps=9 - step)
        assert np.array_equal(resumed, whole[step:])


def test_resume_with_another_world_size_continues_the_stream() -> None:
    before = read_steps(500, local=4, accumulation=1, ranks=6, start=0, steps=5)
    after = read_steps(500, local=3, accumulation=8, ranks=1, start=5 * 24, steps=20)
    both = np.concatenate([before, after]).reshape(-1)
    assert np.array_equal(np.sort(both[:500]), np.arange(500))
    assert np.array_equal(both, SampleOrder(500, seed=5).indices(0, 25 * 24))


def test_micro_batch_unpacks_into_indices_and_tensors() -> None:
    stream = BatchStream(Numbers(8), draws(SampleOrder(8, seed=0), slice=BatchSlice(4, 4, 1, 0), start_samples=0))
    batch = next(iter(stream))
    assert isinstance(batch, MicroBatch)
    indices, (numbers,) = batch
    assert indices.tolist() == numbers.tolist()


@given(num_samples=st.integers(0, 50), size=st.integers(1, 9), batch_size=st.integers(1, 8))
def test_evaluation_sees_each_sample_once_over_all_ranks(num_samples: int, size: int, batch_size: int) -> None:
    seen = [
        number
        for rank in range(size)
        for (numbers,) in evaluation_batches(Numbers(num_samples), rank=rank, size=size, batch_size=batch_size)
        for number in numbers.tolist()
    ]
    assert seen == list(range(num_samples))
