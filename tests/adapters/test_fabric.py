"""A loop with Lightning Fabric needs no callback: the session saves and resumes what `fabric.setup` returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from slurm_train.session.joined import JoinedSession
from tests.adapters.loops import losses, undisturbed_and_stopped
from tests.support.extras import NEEDS_LIGHTNING

pytestmark = [NEEDS_LIGHTNING, pytest.mark.filterwarnings("ignore"), pytest.mark.full]


def train(run: JoinedSession, at_step: Callable[[int], None]) -> None:
    from lightning.fabric import Fabric

    fabric: Any = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    loader = run.replay(fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True)))
    training = run.training(model, optimizer)
    step = training.resume()
    for _ in range(loader.epoch, 3):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            step += 1
            run.report(step, loss=loss.item(), max_steps=18)
            at_step(step)
            if run.should_stop():
                training.save(step)
                run.leave()
    training.save(step)


@pytest.mark.parametrize("stop_at", [4, 6])
def test_a_loop_goes_on_where_it_was_stopped(tmp_path: Path, stop_at: int) -> None:
    undisturbed, stopped = undisturbed_and_stopped(tmp_path, train, stop_at=stop_at)
    assert losses(stopped) == losses(undisturbed)
    assert len(losses(stopped)) == 18
