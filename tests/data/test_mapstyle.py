from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from slurm_train.config.batch import BatchShare
from slurm_train.data.batches import BatchStream, GlobalBatches
from slurm_train.data.mapstyle import MapStyleSource, Padding, default_fingerprint, pad
from slurm_train.data.order import SampleOrder
from slurm_train.data.source import IGNORED, map_tensors
from slurm_train.errors import DataError
from slurm_train.models.batch_parts import has_lists
from slurm_train.rundir.events import is_same_data


class Noisy(Dataset[Any]):
    """A sample is its number and one draw of each random generator."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64), index


class KillsItsWorker(Noisy):
    """Sends its own process what Slurm sends to every process of a step."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            os.kill(os.getpid(), number)
        return torch.zeros(1), os.getpid()


def read(source: MapStyleSource, *, local: int = 4, rank: int = 0, ranks: int = 1, count: int = 10) -> list[Any]:
    batches = GlobalBatches(SampleOrder(len(source), seed=1), global_size=local * ranks)
    draws = batches.draws(BatchShare(rank=rank, accumulation=1, shares=(local,) * ranks), start_samples=0)
    return list(islice(BatchStream(source, draws), count))


def test_randomness_is_keyed_by_sample_and_epoch_not_by_workers_or_ranks() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    here = read(MapStyleSource(Noisy(), seed=9), count=16)
    there = read(MapStyleSource(Noisy(), seed=9, num_workers=2), count=16)
    shares = [read(MapStyleSource(Noisy(), seed=9), local=2, rank=rank, ranks=2, count=16) for rank in range(2)]
    assert torch.equal(torch.rand(3), expected), "the generators of this process are left alone"
    for one, other, first, second in zip(here, there, *shares, strict=True):
        assert np.array_equal(one.indices, other.indices)
        assert torch.equal(one.tensors[1], torch.from_numpy(one.indices))
        assert torch.equal(one.tensors[0], other.tensors[0])
        assert torch.equal(one.tensors[0], torch.cat([first.tensors[0], second.tensors[0]]))
    draws = torch.cat([batch.tensors[0] for batch in here])
    assert len(draws.unique(dim=0)) == 64


def drawing(items: list[Any]) -> tuple[torch.Tensor, ...]:
    return torch.rand(len(items)), torch.from_numpy(np.random.rand(len(items)))


def test_what_a_collate_function_draws_is_the_micro_batchs_whatever_the_workers() -> None:
    here, there = (read(MapStyleSource(Noisy(), seed=9, collate=drawing, num_workers=num)) for num in (0, 2))
    for one, other in zip(here, there, strict=True):
        assert all(map(torch.equal, one.tensors, other.tensors))
    assert len(torch.cat([batch.tensors[0] for batch in here]).unique()) == 40


class Epochal(Dataset[Any]):
    """Draws other samples in each epoch, half of them at random; remembers the epochs that it was told."""

    def __init__(self) -> None:
        self.epoch, self.shift, self.told = -1, 0, list[int]()

    def __len__(self) -> int:
        return 30

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.shift = epoch, random.randrange(1000)
        self.told.append(epoch)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, self.epoch, self.shift


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: torch.utils.data.Subset(data, range(30))])
@pytest.mark.parametrize("seed", [9, None])
def test_a_data_set_is_told_the_epoch_of_each_sample(wrap: Any, seed: int | None) -> None:
    """A plain loop over the permutations of the epochs, in batches of 4, reads the same: 30 samples are no multiple."""
    order = SampleOrder(30, seed=1)
    expected = [(int(order.at(np.array([position]))[0]), position // 30) for position in range(80)]
    data = Epochal()
    here = read(MapStyleSource(wrap(data), seed=seed), count=20)
    pairs = [
        (index, epoch) for _, batch in here for index, epoch in zip(*(part.tolist() for part in batch[:2]), strict=True)
    ]
    assert pairs == expected and data.told == [0, 1, 2]
    there = read(MapStyleSource(wrap(Epochal()), seed=seed, num_workers=2), count=20)
    shares = [
        read(MapStyleSource(wrap(Epochal()), seed=seed), local=2, rank=rank, ranks=2, count=20) for rank in (0, 1)
    ]
    for number, (_, batch) in enumerate(here):
        split = [torch.cat(parts) for parts in zip(*(share[number][1] for share in shares), strict=True)]
        # What it draws at random without a key is its own business.
        for column in range(2 if seed is None else 3):
            assert torch.equal(batch[column], there[number][1][column]) and torch.equal(batch[column], split[column])


def test_held_out_samples_are_those_of_the_first_epoch_and_a_length_that_changes_is_refused() -> None:
    source = MapStyleSource(Epochal(), seed=9)
    assert [source.batch(np.array([number]))[1].tolist() for number in (3, 29)] == [[0], [0]]  # type: ignore[index]

    class Shrinking(Epochal):
        def __len__(self) -> int:
            return 30 - max(self.epoch, 0)

    with pytest.raises(DataError, match=r"set_epoch\(1\) of .*Shrinking has changed its length from 30 to 29 samples"):
        read(MapStyleSource(Shrinking(), seed=9), count=20)


def test_workers_outlive_the_signals_that_ask_a_job_to_stop() -> None:
    signal_before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        batches = read(MapStyleSource(KillsItsWorker(), num_workers=1), count=3)
    finally:
        signal.signal(signal.SIGUSR2, signal_before)
    assert not multiprocessing.active_children()
    workers = {worker for batch in batches for worker in batch.tensors[1].tolist()}
    assert len(workers) == 1 and os.getpid() not in workers


def test_process_that_ends_in_the_middle_of_reading_leaves_no_worker() -> None:
    found = subprocess.run([sys.executable, "-c", ENDS_WHILE_READING], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (3, "read\n", "")


ENDS_WHILE_READING = """
import sys, torch
from torch.utils.data import Dataset
from slurm_train.data.mapstyle import MapStyleSource

class Ones(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.ones(1)

from slurm_train.data.source import Draw
import numpy as np
next(MapStyleSource(Ones(), num_workers=2).stream(Draw(np.arange(4), np.arange(4)) for _ in range(20)))
print("read", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MapStyleSource(Noisy(), collate=dict), "or of lists of them, this one is a dict of"),
        (lambda: MapStyleSource(Named(text="hello")), "'text' of a sample cannot become a tensor: it is a str"),
        (lambda: MapStyleSource(iter([])), "list_iterator is not a map-style data set"),
    ],
)
def test_what_gives_no_tensors_by_number_is_refused(make: Callable[[], MapStyleSource], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make().batch(np.array([0]))


def test_tensors_are_gathered_and_the_fingerprint_tells_their_number() -> None:
    short, long = (TensorDataset(torch.arange(length), torch.arange(length) * 2) for length in (4, 5))
    assert [part.tolist() for part in MapStyleSource(short).batch(np.array([3, 1]))] == [[3, 1], [6, 2]]
    assert MapStyleSource(short).fingerprint() != MapStyleSource(long).fingerprint()


class Lines(Dataset[Any]):
    """The lines of a file, read when they are asked for; counts what was read."""

    def __init__(self, path: Path, *, has_clock: bool = False) -> None:
        self.path = path
        self.has_clock = has_clock
        self.num_read = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.num_read += 1
        line = self.path.read_text().splitlines()[number]
        time_ns = time.perf_counter_ns() if self.has_clock else 0
        return {"line": line, "length": len(line), "moved": torch.rand(2), "time_ns": time_ns}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(f"line {number}" for number in range(40)))
    return file


def test_a_fingerprint_tells_other_items_of_the_same_class_and_length(lines: Path) -> None:
    data = Lines(lines)
    first = MapStyleSource(data, seed=1).fingerprint()
    assert data.num_read == 0, "nothing is read in this process"
    assert MapStyleSource(Lines(lines), seed=2).fingerprint() == first
    assert is_same_data(default_fingerprint(data, 40), first), "as it was before items were part of it"
    text = lines.read_text()
    for old, new in (("line 0", "LINE 0"), ("line 39", "line 93")):
        lines.write_text(text.replace(old, new))
        assert not is_same_data(MapStyleSource(Lines(lines)).fingerprint(), first)


def test_last_digits_and_what_two_readings_give_differently_do_not_count(lines: Path) -> None:
    def of_reals(factor: float) -> str:
        columns = [torch.linspace(0.5, 7.7, 40).view(40, 1) * factor, torch.arange(40)]
        return MapStyleSource(TensorDataset(*columns)).fingerprint()

    assert of_reals(1.0) == of_reals(1.0000001) != of_reals(1.1)
    first, second = (MapStyleSource(Lines(lines, has_clock=True)).fingerprint() for _ in range(2))
    assert first == second


def test_items_that_cannot_be_read_aside_leave_class_and_length(tmp_path: Path) -> None:
    data = Lines(tmp_path / "absent.txt")
    assert MapStyleSource(data).fingerprint() == default_fingerprint(data, 40)


def test_inputs_are_padded_with_zeros_and_targets_with_what_does_not_count() -> None:
    inputs, targets = pad([(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])), (torch.tensor([5]), torch.tensor([6]))])
    assert inputs.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert targets.tolist() == [[2, 3, 4], [6, IGNORED, IGNORED]]


TOKEN = torch.ones(1, dtype=torch.int64)
OF_DEFAULT_LOSS = Padding(has_own_loss=False)


def test_float_targets_are_padded_with_what_the_loss_of_the_model_passes_over() -> None:
    samples = [(torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.int64)), (torch.ones(1),) * 2 + (TOKEN,)]
    assert [part[1, 1].item() for part in pad(samples)] == [0, -100, -100]
    assert [part[1, 1].item() for part in pad(samples, padding=OF_DEFAULT_LOSS)] == [0, float("-inf"), -100]
    named = [{"input_ids": row, "labels": label} for row, label, _ in samples]
    assert pad(named)["labels"].tolist() == [[1, 1], [1, -100]]
    with pytest.raises(DataError, match=r"labels are floats of unequal length, e\.g\. 2 and 1") as caught:
        pad(named, padding=OF_DEFAULT_LOSS)
    assert "training_loss" in caught.value.hint
    assert pad(named[:1] * 2, padding=OF_DEFAULT_LOSS)["labels"].tolist() == [[1, 1], [1, 1]]


def test_token_ids_get_a_mask_only_where_the_model_needs_it_and_something_was_padded() -> None:
    padding = Padding(tokens=1, adds_mask=True)
    rows = [{"input_ids": [5, 6, 7], "decoder_input_ids": [2], "labels": 0}, {"input_ids": [8], "labels": 1}]
    rows[1]["decoder_input_ids"] = [2, 3]
    batch = pad(rows, padding=padding)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 1, 1]],
        "decoder_input_ids": [[2, 1], [2, 3]],
        "labels": [0, 1],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert "attention_mask" not in pad(rows) and "attention_mask" not in pad(rows[:1] * 2, padding=padding)
    masked = [{**row, "attention_mask": [0] * len(row["input_ids"])} for row in rows]
    assert pad(masked, padding=padding)["attention_mask"].sum() == 0
    assert "attention_mask" not in pad([{"values": row["input_ids"]} for row in rows], padding=padding)


@pytest.mark.parametrize("collate", [None, pad])
def test_a_source_pads_with_what_suits_the_model(collate: Any) -> None:
    source = MapStyleSource(Named(), collate=collate)
    source.pad_with(Padding(tokens=9))
    (batch,) = read(source, count=1)
    assert sorted(batch.tensors["input_ids"].flatten().tolist())[-6:] == [9] * 6
    other = MapStyleSource(Named(), collate=lambda items: torch.tensor([len(items)]))
    other.pad_with(Padding(tokens=9))
    assert read(other, count=1)[0].tensors[0].tolist() == [4]


class Named(Dataset[Any]):
    """Rows as a tokenized data set of Hugging Face gives them: lists by name, of unequal length."""

    def __init__(self, **others: Any) -> None:
        self.others = others

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = list(range(1, index + 2))
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": tokens, "row": index, **self.others}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_mappings_become_padded_tensors_by_name(num_workers: int) -> None:
    (batch,) = read(MapStyleSource(Named(), num_workers=num_workers), count=1)
    order = np.argsort(batch.indices)
    assert {name: tensor[order].tolist() for name, tensor in batch.tensors.items()} == {
        "input_ids": [[1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]],
        "attention_mask": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        "labels": [[1, -100, -100, -100], [1, 2, -100, -100], [1, 2, 3, -100], [1, 2, 3, 4]],
        "row": [0, 1, 2, 3],
    }


class Boxes(Dataset[Any]):
    """Images of unequal sizes with any number of boxes, as detectors take them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 4 + index, 4), {"boxes": torch.zeros(index, 4), "image_id": index}


def columns(items: list[Any]) -> Any:
    return tuple(zip(*items, strict=True))


def test_lists_of_tensors_and_of_dicts_are_a_batch_that_goes_to_a_device_as_it_is() -> None:
    batch: Any = MapStyleSource(Boxes(), collate=columns).batch(np.array([0, 3]))
    assert [tuple(image.shape) for image in batch[0]] == [(3, 4, 4), (3, 7, 4)]
    assert [tuple(target["boxes"].shape) for target in batch[1]] == [(0, 4), (3, 4)]
    doubled: Any = map_tensors(lambda tensor: tensor + 2, batch)
    assert doubled[0][1].eq(2).all() and doubled[1][1]["boxes"].eq(2).all() and doubled[1][1]["image_id"] == 3
    assert has_lists(batch) and not has_lists((torch.zeros(1),))
