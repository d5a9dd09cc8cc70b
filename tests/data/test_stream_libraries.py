"""Streams of the libraries that people use: two passes and a half, stopped at random places in each of them."""

from __future__ import annotations

import io
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from slurm_train.config.batch import BatchShare
from slurm_train.data.batches import BatchStream, GlobalBatches
from slurm_train.data.source import Draw
from slurm_train.data.stream import StreamSource, is_stream
from slurm_train.errors import DataError

# Of torchdata 0.11 under torch 2.13.
pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
SIZE, LOCAL = 22, 4
NUM_BATCHES = 14
"""Two passes and a half."""


def hugging_face(*, buffer: int = 0, num_shards: int = 2) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_dict({"row": list(range(SIZE))})
    stream = rows.to_iterable_dataset(num_shards=num_shards).with_format("torch")
    return stream.shuffle(seed=0, buffer_size=buffer) if buffer else stream


def loader(source: Any, **words: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return loaders.StatefulDataLoader(source, batch_size=None, **words)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": index}


class Generated(IterableDataset[Any]):
    """Has no state; its order comes from the global generator of Python, and its numbers from torch's."""

    def __iter__(self) -> Iterator[Any]:
        rows = list(range(SIZE))
        random.shuffle(rows)
        for row in rows:
            yield {"row": row, "noise": torch.rand(())}


class Buffered(IterableDataset[Any]):
    """Has no state; adds noise before it shuffles in a buffer, by the number of the pass."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order, buffer = random.Random(self.epoch), []
        for row in range(SIZE):
            buffer.append({"row": row, "noise": torch.rand(())})
            if len(buffer) == 6:
                yield buffer.pop(order.randrange(6))
        yield from buffer


def web_dataset(folder: Path, shuffle: Callable[[Any], Any]) -> Any:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    path = folder / "rows.tar"
    if not path.exists():
        with tarfile.open(path, "w") as tar:
            for row in range(SIZE):
                data = str(row).encode()
                member = tarfile.TarInfo(f"{row:04d}.txt")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    stream = wds.WebDataset(str(path), shardshuffle=False, nodesplitter=None)
    return shuffle(stream).map(lambda sample: (torch.tensor(int(sample["txt"])),))


def draws(first: int, last: int) -> Iterator[Draw]:
    batches = GlobalBatches(StreamSource(iter(())).order, global_size=LOCAL)
    split = BatchShare(rank=0, accumulation=1, shares=(LOCAL,))
    return islice(batches.draws(split, start_samples=first), (last - first) // LOCAL)


def begun(make: Callable[[], Any], *, samples: int = 0, state: Any = None, seed: int | None = 3) -> StreamSource:
    stream = make()
    assert is_stream(stream)
    source = StreamSource(stream, seed=seed, rebuild=make)
    source.begin(samples=samples, state=state, num_skipped=0, draws=draws)
    return source


def read(source: StreamSource, first: int, last: int) -> list[Any]:
    stream = BatchStream(source, draws(LOCAL * first, LOCAL * last))
    batches = [batch.tensors if isinstance(batch.tensors, dict) else {"row": batch.tensors[0]} for batch in stream]
    return [{name: part.tolist() for name, part in batch.items()} for batch in batches]


def interrupted(make: Callable[[], Any], stops: list[int]) -> list[Any]:
    """Reads in several attempts; a state goes through a file."""
    batches: list[Any] = []
    state, first = None, 0
    for stop in [*stops, NUM_BATCHES]:
        torch.manual_seed(first)
        random.seed(first)
        source = begun(make, samples=LOCAL * first, state=state)
        batches += read(source, first, stop)
        file = io.BytesIO()
        torch.save(source.state(LOCAL * stop), file)
        file.seek(0)
        state, first = torch.load(file, weights_only=True), stop
    return batches


STREAMS: dict[str, Callable[[Path], Any]] = {
    "datasets": lambda _: hugging_face(),
    "datasets, shuffle buffer": lambda _: hugging_face(buffer=6),
    "datasets in a loader": lambda _: loader(hugging_face()),
    "datasets in a loader, shuffle buffer": lambda _: loader(hugging_face(buffer=6)),
    "datasets in a loader, persistent workers": lambda _: loader(
        hugging_face(), num_workers=1, persistent_workers=True
    ),
    "torchdata": lambda _: loader(Rows(), shuffle=True),
    "torchdata, without a state": lambda _: loader(Generated()),
    "no state": lambda _: Generated(),
    "no state, passes have numbers": lambda _: Buffered(),
    "webdataset": lambda folder: web_dataset(folder, lambda stream: stream),
    "webdataset, seeded shuffle": lambda folder: web_dataset(folder, lambda stream: stream.shuffle(8, seed=1)),
    "webdataset, shuffled by epoch": lambda folder: web_dataset(
        folder, lambda stream: stream.compose(__import__("webdataset").detshuffle(8))
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_samples_and_order_are_those_of_a_run_without_a_stop(name: str, tmp_path: Path) -> None:
    make = partial(STREAMS[name], tmp_path)
    # A loader draws a seed when it is made.
    torch.manual_seed(0)
    whole = read(begun(make), 0, NUM_BATCHES)
    rows = [row for batch in whole for row in batch["row"]]
    assert set(Counter(rows).values()) == {2, 3} and sorted(rows[:SIZE]) == list(range(SIZE))
    generator = random.Random(name)
    for _ in range(1 if "workers" in name else 3):
        # One in each pass, of 5.5 batches each.
        stops = [generator.randint(1, 5), generator.randint(6, 10), generator.randint(11, 13)]
        assert interrupted(make, stops) == whole, stops


@pytest.mark.parametrize("name", ["datasets, shuffle buffer", "webdataset, shuffled by epoch"])
def test_each_pass_has_an_order_of_its_own(name: str, tmp_path: Path) -> None:
    rows = [row for batch in read(begun(partial(STREAMS[name], tmp_path)), 0, 11) for row in batch["row"]]
    assert sorted(rows[:SIZE]) == sorted(rows[SIZE:]) and rows[:SIZE] != rows[SIZE:]


def test_a_shuffle_without_a_seed_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def make() -> Any:
        return web_dataset(tmp_path, lambda stream: stream.shuffle(SIZE))

    with pytest.raises(DataError, match="gives other samples each time it is made"):
        read(begun(make), 0, 1)


class Changing(Generated):
    """Another order in another process, which its beginning does not show."""

    salt = 0

    def __iter__(self) -> Iterator[Any]:
        yield from ({"row": row if row < LOCAL else row + Changing.salt} for row in range(SIZE))


def test_a_stream_that_gives_other_samples_when_it_is_read_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = begun(Changing)
    read(source, 0, 3)
    state = source.state(3 * LOCAL)
    begun(Changing, samples=3 * LOCAL, state=state)
    monkeypatch.setattr(Changing, "salt", 1)
    with pytest.raises(DataError, match="gives other samples than before the interruption"):
        begun(Changing, samples=3 * LOCAL, state=state)


class Rewinding:
    """Begins each pass where it was resumed."""

    def __init__(self) -> None:
        self.start = self.place = 0

    def __iter__(self) -> Iterator[Any]:
        self.place = self.start
        while self.place < SIZE:
            self.place += 1
            yield {"row": self.place - 1}

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["place"]


@pytest.mark.parametrize("stop", [1, 4])
def test_a_pass_that_begins_where_the_run_was_resumed_is_an_error(stop: int) -> None:
    source = begun(Rewinding)
    read(source, 0, stop)
    resumed = begun(Rewinding, samples=stop * LOCAL, state=source.state(stop * LOCAL))
    with pytest.raises(DataError, match="begins again where the run was resumed"):
        read(resumed, stop, NUM_BATCHES)


def test_a_state_of_an_older_version_is_taken() -> None:
    assert read(begun(Rewinding, samples=LOCAL, state={"place": LOCAL}), 1, 2) == [{"row": [4, 5, 6, 7]}]
