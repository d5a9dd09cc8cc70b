"""A loader that begins its pass again after a resume is named; one that goes on behind what was used is not."""

from __future__ import annotations

import itertools
import json
import mmap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from slurm_train.metrics import read_metrics
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.joined import JoinedSession
from slurm_train.session.loader_workers import note_draws
from tests.support.sessions import join_alone

_hearts: list[Heartbeat] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    give = _BaseDataLoaderIter.__next__
    yield
    _BaseDataLoaderIter.__next__ = give  # type: ignore[method-assign]
    while _hearts:
        _hearts.pop().stop()


class Place:
    """Says how many steps are done, as engines do; the loader does not follow it."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Behind(Sampler[int]):
    """Begins behind the samples that were used."""

    used = 0

    def __iter__(self) -> Iterator[int]:
        return iter([*range(self.used, 16), *range(self.used)])

    def __len__(self) -> int:
        return 16


class Stream(IterableDataset[torch.Tensor]):
    """Begins behind the samples that were used, and has a length."""

    used = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(16.0).roll(-self.used))

    def __len__(self) -> int:
        return 16


class Flipped(Dataset[torch.Tensor]):
    """Samples that are flipped at random, and read behind a sampler that skips."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(float(number)) * (1 if torch.rand(()) < 0.5 else -1)

    def __len__(self) -> int:
        return 16


def loader_of(order: str, done: int) -> DataLoader[torch.Tensor]:
    """Returns a loader of eight batches that is in its place after so many steps, or begins a new pass."""
    Behind.used = Stream.used = 2 * done
    samples: Any = torch.arange(16.0)
    if order == "stream":
        return DataLoader(Stream(), batch_size=2)
    if "flips" in order:
        num_workers = int(order[-1])
        generator = torch.Generator() if order.startswith("exact") else None
        # In a rank each forked process begins so.
        return DataLoader(
            Flipped(),
            batch_size=2,
            sampler=Behind(),
            generator=generator,
            num_workers=num_workers,
            worker_init_fn=lambda _: note_draws(),
        )
    if order == "sampler":
        return DataLoader(samples, batch_size=2, sampler=Behind())
    seed = done if order == "new" else 1
    return DataLoader(samples, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))


def train(run: RunDirectory, *, last: int, skips: bool = False, files: bool = False, order: str = "same") -> None:
    """Trains up to a step, in epochs of eight batches, and saves there."""
    _hearts.append(Heartbeat())
    session: JoinedSession = join_alone(run, heartbeat=_hearts[-1])
    model = torch.nn.Linear(1, 1)
    place = Place()
    training = None if files else session.training(model, torch.optim.SGD(model.parameters()), place=place)
    if training is None:
        newest = session.newest()
        done = 0 if newest is None else newest.step
    else:
        done = training.resume()
    step = done
    loader = [torch.ones(2)] * 8 if order == "own" else loader_of(order, done)
    while step < last:
        for batch in itertools.islice(loader, done % 8 if skips and step == done else 0, None):
            model(batch[:, None]).sum().backward()
            step += 1
            place.step = step
            session.report(step, loss=1.0)
            if step == last:
                break
    # The loop and its iterator are gone by now.
    if training is not None:
        training.save(step)
    else:
        with session.save(step) as folder:
            (folder / "step").write_text(str(step))
    session.close()


@pytest.mark.parametrize("files", [False, True])
def test_a_first_epoch_that_begins_again_is_named(
    files: bool, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run, last=3, files=files)
    train(run, last=6, files=files)
    said = capsys.readouterr().err
    assert (
        said.count("a loader gave batch 1 of the epoch again, of which 3 batches were used when step 3 was saved") == 1
    )


def test_what_skips_the_used_batches_or_begins_the_next_epoch_is_not_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run, last=3)
    train(run, last=8, skips=True)
    train(run, last=10)
    assert "batch 1 of the epoch again" not in capsys.readouterr().err


@pytest.mark.parametrize(("order", "is_named"), [("new", True), ("sampler", False), ("stream", False)])
def test_a_pass_in_another_order_is_named_where_samplers_of_torch_give_it(
    order: str, is_named: bool, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run, last=3, order=order)
    train(run, last=6, order=order)
    said = capsys.readouterr().err
    assert ("another batch 1 than in the epoch of which 3 of 8 batches were used" in said) is is_named


@pytest.mark.parametrize(
    ("order", "is_named"), [("flips0", True), ("exact flips0", False), ("flips2", True), ("sampler", False)]
)
def test_augmentation_behind_a_sampler_that_skips_is_named(
    order: str, is_named: bool, run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_train.session.loader_workers._has_drawn", mmap.mmap(-1, 1))
    train(run, last=3, order=order)
    train(run, last=6, order=order)
    said = capsys.readouterr().err
    assert ("draw other random numbers than in the epoch of which 3 batches were used" in said) is is_named


def test_samples_that_nothing_compares_are_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    train(run, last=3, order="own")
    train(run, last=6, order="own")
    words = "reads its samples by its own code and the state of place: nothing compares them"
    assert capsys.readouterr().err.count(words) == 1


class Slow(Dataset[torch.Tensor]):
    """Takes a while for a sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.tensor(float(index))

    def __len__(self) -> int:
        return 8


def test_waits_for_batches_are_told_by_step_and_those_of_another_thread_are_not(run: RunDirectory) -> None:
    _hearts.append(Heartbeat())
    session = join_alone(run, heartbeat=_hearts[-1])
    session.report(1)
    for step, _ in enumerate(DataLoader(Slow(), batch_size=2), start=2):
        session.report(step, loss=1.0)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(list, DataLoader(Slow())).result()
    session.report(6, loss=1.0)
    session.close()
    lines = {line["step"]: line for line in read_metrics(run.metrics)}
    waits = [lines[step]["data_time_s"] for step in range(2, 7)]
    # Two samples each; a step takes longer than its wait.
    assert all(0.04 <= lines[step]["data_time_s"] <= lines[step]["step_time_s"] for step in (2, 3, 4, 5))
    assert lines[6]["data_time_s"] < 0.16 and lines[6]["step_time_s"] >= 0.16
    assert json.loads(run.account(0).read_text())["data_wait_s"] == pytest.approx(sum(waits))
