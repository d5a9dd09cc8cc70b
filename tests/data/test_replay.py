"""A replayed loader gives the batches that an undisturbed one gives, from any place on, with their random numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from slurm_train.data.replay import ReplayedLoader
from slurm_train.errors import ConfigError

PASSES = 3


class Augmented(Dataset[Any]):
    """Each sample draws from all streams, and from a generator that the data set owns."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        drawn = (random.random(), np.random.random(), torch.rand(()).item(), self.generator.random())
        return torch.tensor([float(number), *drawn], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(10):
            yield torch.tensor([number, random.random()], dtype=torch.float64)


class Lines:
    """A loader of a program's own, without torch's."""

    def __iter__(self) -> Iterator[Any]:
        lines = list(range(5))
        random.shuffle(lines)
        for line in lines:
            yield torch.tensor([line, np.random.random()])


def distributed() -> Iterable[Any]:
    data = Augmented()
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=1))


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True),
    "workers": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, generator=torch.Generator()),
    "distributed": distributed,
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "plain": Lines,
}


def replay(loader: Iterable[Any], place: dict[str, Any] | None = None, **other: Any) -> ReplayedLoader:
    said: list[str] = other.setdefault("said", [])
    done = json.loads(json.dumps(place or {}))
    return ReplayedLoader(
        loader,
        seed=other.get("seed", 1),
        rank=1,
        num_ranks=other.get("num_ranks", 2),
        done=lambda: done,
        on_begin=lambda _: None,
        on_skip=lambda: None,
        say=said.append,
    )


def train(loader: ReplayedLoader, *, stop_at: int = 1000) -> tuple[list[Any], dict[str, Any]]:
    """Returns what a training has seen, batches and dropout, up to a batch, and where it is then."""
    seen = []
    for epoch in range(loader.epoch, PASSES):
        for batch in loader:
            seen.append((epoch, batch.tolist(), torch.rand(()).item(), random.random()))
            if len(seen) == stop_at:
                return seen, loader.place.to_json()
    return seen, loader.place.to_json()


@pytest.mark.parametrize("name", LOADERS)
def test_what_follows_a_stop_is_what_would_have_followed(name: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    whole, end = train(replay(LOADERS[name]()))
    assert end["epoch"] == PASSES
    num_batches = len(whole)
    # In a pass, at its last batch, and at the first of the next one.
    per_pass = num_batches // PASSES
    for stop_at in (2, per_pass, per_pass + 1) if name != "workers" else (per_pass + 2,):
        torch.manual_seed(0)
        random.seed(0)
        before, place = train(replay(LOADERS[name]()), stop_at=stop_at)
        streams = torch.get_rng_state(), random.getstate()
        loader = replay(LOADERS[name](), place)
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        np.random.seed(None)
        after, _ = train(loader)
        assert before + after == whole, stop_at


def test_passes_differ_from_each_other_and_by_the_seed() -> None:
    seen, _ = train(replay(LOADERS["shuffled"]()))
    other, _ = train(replay(LOADERS["shuffled"](), seed=2))
    batches = [batch for _, batch, *_ in seen]
    assert batches[:5] != batches[5:10]
    assert batches[:5] != [batch for _, batch, *_ in other][:5]


def test_other_batches_are_refused_and_other_workers_named() -> None:
    _, place = train(replay(LOADERS["shuffled"]()), stop_at=2)
    for loader in (
        replay(LOADERS["shuffled"](), place, num_ranks=3),
        replay(DataLoader(Augmented(), batch_size=5), place),
    ):
        with pytest.raises(ConfigError, match="other batches"):
            next(iter(loader))
    said: list[str] = []
    next(iter(replay(LOADERS["workers"](), place, said=said)))
    assert any("2 workers" in note for note in said)
    persistent = DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
    next(iter(replay(persistent, {**place, "epoch": 1, "num_workers": 1}, said=said)))
    assert any("persistent" in note for note in said)


def test_an_epoch_that_is_over_is_refused_and_one_that_is_set_counts() -> None:
    loader = replay(LOADERS["shuffled"](), {"epoch": 2, "batches": 1, "length": 5, "num_ranks": 2})
    assert (loader.epoch, loader.start, len(loader)) == (2, 1, 5)
    assert len(loader.dataset) == 10  # what the loader itself has
    with pytest.raises(ConfigError, match="over"):
        loader.set_epoch(1)
    assert len(list(loader)) == 4
    loader.set_epoch(4)
    assert (loader.place.epoch, loader.place.batches, loader.start) == (4, 0, 0)
