"""Streams that keep their own place: what a rank reads, and that it goes on with the very next sample."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from slurm_train.config.batch import BatchShare
from slurm_train.data.batches import BatchStream, GlobalBatches
from slurm_train.data.build import build_source, prefetch_depth
from slurm_train.data.mix import build as build_mix
from slurm_train.data.stream import StreamSource
from slurm_train.errors import ConfigError, DataError

# Of torchdata 0.11 under torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_data", sys.modules[__name__])


class Counting:
    """The numbers rank, rank + num_ranks, ... below `size`, with a number drawn at random, pass after pass."""

    def __init__(self, size: int = 10, rank: int = 0, num_ranks: int = 1) -> None:
        self.numbers, self.place = range(rank, size, num_ranks), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.place < len(self.numbers):
            self.place += 1
            yield torch.tensor(self.numbers[self.place - 1]), torch.tensor(random.random() + torch.rand(()).item())
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Unranked(Counting):
    def __init__(self) -> None:
        super().__init__()


class InArrays(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"place": np.array([self.place])}


class Once(Counting):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": index, "noise": torch.rand(())}


def from_torchdata(**words: Any) -> Any:
    """A loader of torchdata."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return loaders.StatefulDataLoader(Rows(), **words)


def started(stream: Any, *, samples: int = 0, state: dict[str, Any] | None = None, skip: int = 0) -> StreamSource:
    source = StreamSource(stream, seed=3)
    source.begin(samples=samples, state=state, num_skipped=skip)
    return source


def read(source: StreamSource, count: int, *, samples: int = 0, local: int = 4) -> list[Any]:
    draws = GlobalBatches(source.order, global_size=local).draws(
        BatchShare(rank=0, accumulation=1, shares=(local,)), start_samples=samples
    )
    return [batch.tensors for batch in islice(BatchStream(source, draws), count)]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    def parts(batch: Any) -> list[Tensor]:
        return list(batch.values() if isinstance(batch, dict) else batch)

    return [[part.tolist() for part in parts(one)] for one in ours] == [
        [part.tolist() for part in parts(one)] for one in theirs
    ]


STREAMS: dict[str, Any] = {
    "samples": Counting,
    "torchdata, samples": lambda: from_torchdata(batch_size=None),
    "torchdata, shuffled batches": lambda: from_torchdata(batch_size=4, shuffle=True, drop_last=True),
    "torchdata, shuffled by workers": lambda: from_torchdata(batch_size=4, shuffle=True, drop_last=True, num_workers=2),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("done", [0, 1, 2, 3, 5])
def test_a_stream_goes_on_with_the_very_next_sample(name: str, done: int) -> None:
    # A loader may draw a seed when it is made; a resumed run has none of it but what the state says.
    streams = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        streams.append(STREAMS[name]())
    whole, before = read(started(streams[0]), 7), started(streams[1])
    found = read(before, done)
    after = started(streams[2], samples=4 * done, state=before.state(4 * done))
    assert same([*found, *read(after, 7 - done, samples=4 * done)], whole)


def test_a_micro_batch_that_was_read_and_not_consumed_is_read_again() -> None:
    source = started(Counting(), samples=8, state={"place": 3})
    read(source, 1, samples=8)
    assert source.state(8)["stream"] == {"place": 3} and source.state(12)["stream"] == {"place": 7}


class Boxes(IterableDataset[Any]):
    """Images with a varying number of boxes, as a detector takes them, and no state."""

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for number in range(100):
            yield torch.full((3,), float(number)), {"boxes": torch.full((number % 3, 4), float(number)), "name": "x"}


def in_lists(items: list[Any]) -> tuple[list[Any], ...]:
    return tuple(map(list, zip(*items, strict=True)))


def test_a_stream_of_lists_of_tensors_is_read_again() -> None:
    def begun(*, samples: int, state: dict[str, Any] | None) -> StreamSource:
        source = StreamSource(Boxes(), collate=in_lists, seed=1, rebuild=Boxes)
        split = BatchShare(rank=0, accumulation=1, shares=(4,))
        batches = GlobalBatches(source.order, global_size=4)
        source.begin(
            samples=samples,
            state=state,
            num_skipped=0,
            draws=lambda first, last: islice(batches.draws(split, start_samples=first), (last - first) // 4),
        )
        return source

    before = begun(samples=0, state=None)
    read(before, 2)
    after = begun(samples=8, state=before.state(8))
    (images, boxes), *_ = read(after, 1, samples=8)
    assert [image[0].item() for image in images] == [8, 9, 10, 11]
    assert [len(target["boxes"]) for target in boxes] == [2, 0, 1, 2]


def test_samples_of_a_rollback_are_passed_over() -> None:
    numbers = [batch[0].tolist() for batch in read(started(Counting(), state={"place": 1}, skip=4), 1)]
    assert numbers == [[5, 6, 7, 8]]


def test_each_rank_gets_its_own_part_and_its_generators_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    found = []
    for rank in range(2):
        source = build_source({"_target_": "my_data.Counting", "size": 8}, split="train", seed=3, part=(rank, 2))
        assert isinstance(source, StreamSource)
        source.begin(samples=0, state=None, num_skipped=0)
        found.append(read(source, 1, local=2)[0][0].tolist())
    assert found == [[0, 2], [1, 3]] and torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("config", "part", "message"),
    [
        ({"_target_": "my_data.Unranked"}, (0, 2), "the stream Unranked does not know its rank: all 2 data-parallel r"),
        ({"_target_": "my_data.Counting"}, None, "Counting is a stream, and held-out samples and parts of a mix are a"),
        ({"_target_": "my_data.Counting", "num_workers": 2}, (0, 1), "data.num_workers=2 was asked of the stream Coun"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(config: dict[str, Any], part: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        build_source(config, split="train", seed=0, part=part)
    assert caught.value.message.startswith(message) and caught.value.hint


def test_a_stream_is_no_part_of_a_mix_and_not_read_by_number_or_ahead() -> None:
    source = StreamSource(Counting())
    with pytest.raises(DataError, match="Counting is a stream"):
        build_mix(sources={"a": {"_target_": "my_data.Counting"}}, seed=0)
    with pytest.raises(DataError, match="sample 3 of a Counting was asked for by number"):
        source.batch(np.array([3]))
    with pytest.raises(ConfigError, match=r"data\.prefetch would read a stream ahead"):
        prefetch_depth({"prefetch": 2}, source)


def test_messages_of_streams_that_give_something_else() -> None:
    with pytest.raises(DataError, match="a Once gives no sample"):
        read(started(Once()), 1)
    with pytest.raises(DataError, match="the state of a InArrays cannot be in a checkpoint: Weights only load failed"):
        started(InArrays())
    with pytest.raises(DataError, match=r"the stream gave a batch of 4 samples, and a micro-batch is 5\nhint: make th"):
        read(started(from_torchdata(batch_size=4)), 3, local=5)


def test_the_last_batch_of_a_pass_may_be_short_and_is_counted() -> None:
    source = started(from_torchdata(batch_size=4))
    batches = read(source, 6)
    assert [len(batch["row"]) for batch in batches] == [4, 4, 3, 4, 4, 3]
    assert [int(number) for batch in batches for number in batch["row"]] == [*range(11), *range(11)]
    assert source.num_short == 2


def test_a_stream_of_whole_batches_is_refused_where_micro_batches_have_other_sizes() -> None:
    class Batches:
        batch_size = 4

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    source = StreamSource(Batches(), seed=3)
    source.require_batches_of((4, 4))
    with pytest.raises(DataError, match="batches of 4 samples, and a micro-batch of this rank is 3 or 4"):
        source.require_batches_of((3, 4))
