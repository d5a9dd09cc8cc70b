"""A program with a loader that has no state goes on in the middle of an epoch, bit for bit, and nothing is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from slurm_train.metrics import read_metrics
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag
from tests.support.joined_runs import joined, new_run

EPOCHS = 3


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    give = _BaseDataLoaderIter.__next__
    yield
    _BaseDataLoaderIter.__next__ = give  # type: ignore[method-assign]


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> Any:
        return torch.full((4,), number / 24) + torch.randn(4), torch.tensor([number / 24])


def train(run: RunDirectory, *, stop_at: int | None = None) -> None:
    """Trains with dropout, and stops after a step where asked."""
    stop = StopFlag()
    with joined(run, stop) as session:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = session.replay(DataLoader(Noisy(), batch_size=4, shuffle=True))
        training = session.training(model, optimizer)
        step = training.resume()
        for epoch in range(loader.epoch, EPOCHS):
            loader.set_epoch(epoch)
            for inputs, targets in loader:
                loss = mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                session.report(step, loss=loss.item(), max_steps=EPOCHS * len(loader))
                if step == stop_at:
                    stop.request("TERM")
                if session.should_stop():
                    training.save(step)
                    return
        training.save(step)


def losses(run: RunDirectory) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(run.metrics)}


@pytest.mark.parametrize("stop_at", [4, 6, 7])
def test_losses_are_those_of_an_undisturbed_training(
    tmp_path: Path, stop_at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = new_run(tmp_path / "undisturbed")
    train(undisturbed)
    stopped = new_run(tmp_path / "stopped")
    train(stopped, stop_at=stop_at)
    train(stopped)
    assert losses(stopped) == losses(undisturbed)
    assert len(losses(stopped)) == EPOCHS * 6
    notes = [line for line in "".join(capfd.readouterr()).splitlines() if "samples" in line]
    assert notes == []
