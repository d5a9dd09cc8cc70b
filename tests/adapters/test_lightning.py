"""The callback for Lightning: when it is called, what it makes of a validation, the order of data after a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pl: Any = pytest.importorskip("lightning.pytorch")
adapter: Any = pytest.importorskip("slurm_train.adapters.lightning")
# What Lightning itself warns of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_it_comes_after_what_changes_a_step_and_is_the_only_one_that_saves() -> None:
    callback = adapter.SessionCallback()
    # Stands for one that averages weights after each step.
    averaging = pl.Callback()
    trainer = pl.Trainer(callbacks=[callback, averaging], **QUIET)
    assert trainer.callbacks[-1] is callback and averaging in trainer.callbacks
    assert [found for found in trainer.callbacks if isinstance(found, pl.callbacks.Checkpoint)] == [callback]


def test_the_measures_of_a_validation_are_told_by_one_name() -> None:
    told: list[tuple[int, dict[str, Any]]] = []
    callback = adapter.SessionCallback()
    callback.session = SimpleNamespace(report=lambda step, **numbers: told.append((step, numbers)))
    logged = {"val_loss": 1, "valid_accuracy": 2, "validation/f1": 3, "value": 4, "train_loss": 5}
    callback.on_validation_end(SimpleNamespace(callback_metrics=logged, sanity_checking=False, global_step=7))
    callback.on_validation_end(SimpleNamespace(callback_metrics={"value": 4}, sanity_checking=False, global_step=8))
    assert told == [(7, {"eval_loss": 1, "eval_accuracy": 2, "eval_f1": 3})]


class Looking(pl.LightningModule):  # type: ignore[misc]  # Any: of an extra
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.seen.append(batch[0].flatten().tolist())
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Saving(pl.Callback):  # type: ignore[misc]  # Any: of an extra
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 11:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("is_stateful", [True, False], ids=["goes on where it was", "begins the epoch anew"])
def test_a_resumed_epoch_has_its_own_order(is_stateful: bool, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def seen(resumed_from: Path | None) -> list[list[float]]:
        module = Looking()
        callback = adapter.SessionCallback()
        if resumed_from is not None:
            callback._checkpoint = SimpleNamespace(path=tmp_path)
        trainer = pl.Trainer(max_epochs=3, callbacks=[Saving(tmp_path / "saved.ckpt"), callback], **QUIET)
        loader = stateful if is_stateful else DataLoader
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        trainer.fit(module, loader(data, batch_size=2, sampler=sampler), ckpt_path=resumed_from)
        return module.seen

    whole = seen(None)
    resumed = seen(tmp_path / "saved.ckpt")
    # Eight steps are an epoch; a plain loader takes as many as are left of it.
    assert resumed[:5] == (whole[11:16] if is_stateful else whole[8:13])
    assert resumed[5:] == whole[16:]
