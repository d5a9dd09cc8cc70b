"""How many processes read ahead by default, and that they change nothing but the time."""

from __future__ import annotations

import os
import sqlite3
import time
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from slurm_train.config.batch import BatchShare
from slurm_train.data import workers
from slurm_train.data.batches import BatchStream, GlobalBatches
from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.data.order import SampleOrder
from slurm_train.data.workers import AutoWorkers, cpus_of_rank, most_workers

# torch warns of more workers than CPUs; the machine that tests may have fewer than the default is told.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Decoded(Dataset[Any]):
    """A sample takes time, has one draw of torch's generator and the number of the process that has read it."""

    def __init__(self, seconds: float = 5e-3, holds: Any = None) -> None:
        self.seconds = seconds
        self.holds = holds

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        time.sleep(self.seconds)
        return torch.rand(4), index, os.getpid()


class InMemory(Decoded):
    def __init__(self) -> None:
        super().__init__()
        self.values = np.arange(400 * 4, dtype=np.float32).reshape(400, 4)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return torch.from_numpy(self.values[index]), index, os.getpid()


class Fails(Decoded):
    """Cannot be read by another process than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        if os.getpid() != self.process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return super().__getitem__(index)


class Hangs(Fails):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        while os.getpid() != self.process:
            time.sleep(0.1)
        return super().__getitem__(index)


class Dies(Fails):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        if os.getpid() != self.process:
            os._exit(3)
        return super().__getitem__(index)


def read(dataset: Dataset[Any], num_workers: int | AutoWorkers, *, local: int = 8, count: int = 6) -> list[Any]:
    source = MapStyleSource(dataset, num_workers=num_workers, seed=5)
    batches = GlobalBatches(SampleOrder(len(source), seed=1), global_size=local)
    draws = batches.draws(BatchShare(rank=0, accumulation=1, shares=(local,)), start_samples=0)
    return list(islice(BatchStream(source, draws), count))


def num_readers(batches: list[Any]) -> int:
    """Returns how many worker processes have read, 0 for this process."""
    readers = set(torch.cat([batch.tensors[2] for batch in batches]).tolist())
    return 0 if readers == {os.getpid()} else len(readers)


def test_the_default_reads_the_same_samples_with_the_same_random_numbers_as_any_number_of_workers() -> None:
    notes: list[str] = []
    ways: list[int | AutoWorkers] = [0, 1, 3, AutoWorkers(cpus=4, note=notes.append)]
    read_by = [read(Decoded(), way) for way in ways]
    assert [num_readers(batches) for batches in read_by] == [0, 1, 3, 2]
    for batches in read_by[1:]:
        for batch, expected in zip(batches, read_by[0], strict=True):
            assert np.array_equal(batch.indices, expected.indices)
            assert torch.equal(batch.tensors[0], expected.tensors[0])
            assert torch.equal(batch.tensors[1], expected.tensors[1])
    assert len(notes) == 1
    assert notes[0].startswith("data.num_workers=auto: 2, since a micro-batch takes ")
    assert notes[0].endswith(" ms to read and this rank has 4 CPUs")


@pytest.mark.parametrize(
    ("dataset", "cpus", "note"),
    [
        (Decoded, 2, ""),
        (InMemory, 16, ""),
        (Fails, 4, "could not read: RuntimeError: Cannot re-initialize CUDA in forked subprocess"),
        (Hangs, 4, "did not read 17 samples within 0.5 s"),
        (Dies, 4, "ended without a word"),
    ],
)
def test_there_are_no_workers_where_they_would_cost_or_cannot_read(
    dataset: Callable[[], Decoded], cpus: int, note: str
) -> None:
    notes: list[str] = []
    # A loaded machine takes long to start what fails at once.
    limit_s = 0.5 if dataset is Hangs else 60.0
    auto = AutoWorkers(cpus=cpus, note=notes.append, trial_limit_s=limit_s)
    assert num_readers(read(dataset(), auto, local=2)) == 0
    assert notes == ([f"data.num_workers=auto: 0, since a trial process {note}"] if note else [])


@pytest.mark.parametrize("kind", ["file", "zip", "database"])
def test_a_data_set_with_an_open_file_is_read_by_one_process(tmp_path: Path, kind: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("sample", "1")
    opened: dict[str, Callable[[], Any]] = {
        "file": lambda: (tmp_path / "a.zip").open("rb"),
        "zip": lambda: zipfile.ZipFile(tmp_path / "a.zip"),
        "database": lambda: sqlite3.connect(tmp_path / "a.db"),
    }
    names = {"file": "_io.BufferedReader", "zip": "_io.BufferedReader", "database": "sqlite3.Connection"}
    handle = opened[kind]()
    notes: list[str] = []
    batches = read(Decoded(holds={"transforms": [lambda: handle]}), AutoWorkers(cpus=8, note=notes.append))
    handle.close()
    assert num_readers(batches) == 0
    expected = f"processes cannot share the open {names[kind]} of the data set"
    assert notes == [f"data.num_workers=auto: 0, since {expected}"]


def test_tensors_in_memory_start_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoWorkers, "choose", lambda *_, **__: pytest.fail("a trial was made"))
    numbers = torch.arange(400)
    batches = read(TensorDataset(numbers, numbers), AutoWorkers(cpus=16))
    assert torch.equal(batches[0].tensors[0], torch.from_numpy(batches[0].indices))


def test_shared_memory_limits_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_frsize = 1
        # Of a micro-batch: 8 samples of 4 float32, a number and a process; room for three workers of each of two ranks.
        f_bavail = 8 * (4 * 4 + 8 + 8) * 3 * 3 * 2 * 2

    monkeypatch.setattr(workers.os, "statvfs", lambda _path: Disk)
    notes: list[str] = []
    auto = AutoWorkers(cpus=16, ranks_on_node=2, note=notes.append)
    assert num_readers(read(Decoded(), auto)) == 3
    assert notes[0].endswith("this rank has 16 CPUs; /dev/shm has no room for more")


@pytest.mark.parametrize(
    ("env", "bound", "ranks", "cpus"),
    [
        ({}, 64, 8, 8),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_CPUS_PER_TASK": "8"}, 8, 8, 8),
        ({"SLURM_CPUS_ON_NODE": "16"}, 16, 4, 4),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_CPUS_PER_TASK": "1"}, 64, 8, 1),
        ({"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "32"}, 32, 4, 8),
        ({"SLURM_CPUS_ON_NODE": "128", "SLURM_CPUS_PER_TASK": "16"}, 64, 8, 8),
    ],
    ids=[
        "an unbound machine",
        "bound tasks",
        "tasks that share",
        "one CPU per task",
        "torchrun: one task per node",
        "unbound tasks of a node that Slurm takes for a larger one",
    ],
)
def test_a_rank_counts_no_cpus_of_its_neighbours(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], bound: int, ranks: int, cpus: int
) -> None:
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _process: set(range(bound)))
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 64)
    assert cpus_of_rank(env, ranks_on_node=ranks) == cpus


def test_most_workers_leave_cpus_to_the_training() -> None:
    assert [most_workers(cpus) for cpus in (1, 2, 3, 8, 64)] == [0, 0, 1, 6, 8]
