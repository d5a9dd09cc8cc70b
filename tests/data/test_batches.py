"""Global batches: the same for every split and every start, each sample once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slurm_train.config.batch import BatchShare, cut_equally
from slurm_train.data.batches import (
    BatchStream,
    GlobalBatches,
    Prefetch,
    RankBatches,
    evaluation_batches,
    evaluation_indices,
)
from slurm_train.data.length_batches import evaluation_by_length
from slurm_train.data.order import SampleOrder
from slurm_train.errors import ConfigError
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
        split = BatchShare(rank=rank, accumulation=accumulation, shares=shares)
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
    costs = np.random.default_rng(4).integers(1, 300, num_samples)
    divide = partial(evaluation_by_length, costs) if lengths else None
    seen = [
        number
        for rank in range(size)
        for _, (numbers,) in evaluation_batches(Numbers(num_samples), rank=rank, size=size, batch_size=4, divide=divide)
        for number in numbers.tolist()
    ]
    assert sorted(seen) == list(range(num_samples))


@pytest.mark.parametrize("by_length", [False, True])
def test_a_capped_evaluation_sees_the_same_samples_on_any_number_of_ranks(by_length: bool) -> None:
    divide = partial(evaluation_by_length, np.random.default_rng(4).integers(1, 300, 50)) if by_length else None
    for size in (1, 2, 3):
        shares = [
            [number for _, (numbers,) in batches for number in numbers.tolist()]
            for batches in (
                evaluation_batches(Numbers(50), rank=rank, size=size, batch_size=4, divide=divide, most=12)
                for rank in range(size)
            )
        ]
        assert sorted(number for share in shares for number in share) == [0, 4, 8, 12, 16, 20, 25, 29, 33, 37, 41, 45]
        assert by_length or max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sum(len(one.indices) for one in evaluation_batches(Numbers(5), rank=0, size=1, batch_size=4, most=12)) == 5


def test_a_batch_of_a_capped_evaluation_has_samples_of_about_one_length() -> None:
    divide = partial(evaluation_by_length, np.array([9, 1, 1, 1, 9, 1, 1, 1]))
    batches = evaluation_batches(Numbers(8), rank=0, size=1, batch_size=2, divide=divide, most=4)
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
