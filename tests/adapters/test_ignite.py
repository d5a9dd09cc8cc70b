"""An ignite engine in a run goes on where it was stopped, bit for bit: within an epoch, at its end, after its last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.adapters.loops import losses, start, undisturbed_and_stopped
from tests.support.extras import NEEDS_IGNITE

pytestmark = [NEEDS_IGNITE, pytest.mark.filterwarnings("ignore"), pytest.mark.full]

EPOCHS = 3
PER_EPOCH = 6


class Training:
    """A program; it keeps at which steps it has evaluated."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []

    def __call__(self, _: Any, at_step: Callable[[int], None]) -> None:
        from ignite.engine import Engine, Events

        from slurm_train.adapters.ignite import attach

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))

        def step(_: Any, batch: Any) -> float:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss.item()

        trainer = Engine(step)

        @trainer.on(Events.ITERATION_STARTED)
        def count() -> None:
            at_step(trainer.state.iteration)

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate() -> None:
            self.evaluated.append(trainer.state.iteration)
            schedule.step()

        loader = attach(trainer, DataLoader(data, batch_size=4, shuffle=True), model, optimizer, schedule=schedule)
        trainer.run(loader, max_epochs=EPOCHS)


@pytest.mark.parametrize("stop_at", [4, 6, 7, 17])
def test_an_engine_goes_on_where_it_was_stopped(tmp_path: Path, stop_at: int) -> None:
    undisturbed, stopped = undisturbed_and_stopped(tmp_path, training := Training(), stop_at=stop_at)
    assert losses(stopped) == losses(undisturbed)
    assert len(losses(stopped)) == EPOCHS * PER_EPOCH
    assert training.evaluated == [6, 12, 18] * 2


def test_a_training_that_is_over_takes_no_step_again(tmp_path: Path) -> None:
    undisturbed, _ = undisturbed_and_stopped(tmp_path, training := Training(), stop_at=2)
    assert start(undisturbed, training) == 0
    assert training.evaluated == [6, 12, 18] * 2
