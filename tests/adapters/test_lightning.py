"""The callback for Lightning: when it is called, what it makes of a validation, what a stop and a resume change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from slurm_train.errors import ConfigError
from slurm_train.rundir.events import read_saves
from slurm_train.session.signals import StopFlag
from tests.support.joined_runs import evaluated_steps, joined, new_run

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
    callback.session = SimpleNamespace(report=lambda step, **numbers: told.append((step, numbers)), mark=lambda _: None)
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
            if hasattr(trainer.train_dataloader, "state_dict"):
                torch.save(([trainer.train_dataloader.state_dict()], []), self.path.with_name("loaders_0.pt"))


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


def test_other_ranks_than_those_of_the_run_are_refused(tmp_path: Path) -> None:
    with joined(new_run(tmp_path)):
        callback = adapter.SessionCallback()
        trainer = SimpleNamespace(global_rank=0, world_size=4)
        with pytest.raises(ConfigError, match="calls this rank 0 of 4; it is 0 of 1 in the run"):
            callback.setup(trainer, None, "fit")


class Stopping(pl.Callback):  # type: ignore[misc]  # Any: of an extra
    """Asks the ranks to stop in a step."""

    def __init__(self, stop: StopFlag, stop_at: int | None) -> None:
        self._stop = stop
        self._stop_at = stop_at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step + 1 == self._stop_at:
            self._stop.request("TERM")


class Training(pl.LightningModule):  # type: ignore[misc]  # Any: of an extra
    """Notes each step; its validation is never better than the first.

    Args:
        schedule: how the learning rate falls: at each "step", each "epoch", or after an epoch on a "plateau".
    """

    def __init__(self, schedule: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.schedule = schedule
        self.steps: list[tuple[float, ...]] = []
        """Epoch, first sample, loss and learning rate."""

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        rate = self.optimizers().param_groups[0]["lr"]
        self.steps.append((self.trainer.current_epoch, float(batch[0][0]), float(loss), rate))
        return loss

    def validation_step(self, *_: Any) -> None:
        self.log("val_loss", torch.tensor(1.0))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
            scheduler: dict[str, Any] = {"scheduler": plateau, "monitor": "val_loss"}
        else:
            falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            scheduler = {"scheduler": falling, "interval": self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


EVERY_3: dict[str, Any] = {"val_check_interval": 3}
ACROSS_EPOCHS: dict[str, Any] = {"val_check_interval": 12, "check_val_every_n_epoch": None}
EVERY_2_EPOCHS: dict[str, Any] = {"check_val_every_n_epoch": 2}
NO_VALIDATION: dict[str, Any] = {"limit_val_batches": 0}
STREAM: dict[str, Any] = {"limit_val_batches": 1.0}


class Numbers(Iterator[tuple[torch.Tensor]]):
    """Knows where it is; a stream without that is run through again by its loader, which counts too far (torchdata)."""

    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> tuple[torch.Tensor]:
        if self.next == 16:
            raise StopIteration
        self.next += 1
        return (torch.tensor([float(self.next)]),)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """Samples without a number of them."""

    def __iter__(self) -> Numbers:
        return Numbers()


# Eight steps are an epoch.
@pytest.mark.parametrize(
    ("schedule", "settings", "stops"),
    [
        pytest.param("step", EVERY_3, [3], id="where a validation is due"),
        pytest.param("step", EVERY_3, [8], id="at the end of an epoch after its validations"),
        pytest.param("step", {}, [8], id="at the end of an epoch where a validation is due"),
        pytest.param("epoch", {}, [16], id="where a rate falls by the epoch"),
        pytest.param("plateau", {}, [10, 16], id="where a rate falls on a plateau"),
        pytest.param("step", ACROSS_EPOCHS, [8, 12], id="where validations do not follow epochs"),
        pytest.param("epoch", EVERY_2_EPOCHS, [8, 16], id="where every second epoch has a validation"),
        pytest.param("epoch", NO_VALIDATION, [16, 40], id="at the end of epochs without validation"),
        pytest.param("step", STREAM, [3, 10, 16], id="of a stream, from which a batch is taken ahead"),
    ],
)
def test_a_stop_changes_no_step_and_no_validation(
    schedule: str, settings: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    is_stream = settings is STREAM
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def train(run: Any, stop_at: int | None = None) -> tuple[int, list[tuple[float, ...]]]:
        stop = StopFlag()

        module = Training(schedule)
        callbacks: list[Any] = [Stopping(stop, stop_at)]
        if settings is not NO_VALIDATION:
            callbacks.append(pl.callbacks.EarlyStopping("val_loss", patience=4))
        with joined(run, stop):
            callback = adapter.SessionCallback()
            length = {"max_epochs": 5, "num_sanity_val_steps": 0}
            trainer = pl.Trainer(callbacks=[*callbacks, callback], **QUIET, **length, **settings)
            sampler = DistributedSampler(data, num_replicas=1, rank=0)
            samples = loader(Stream(), batch_size=2) if is_stream else loader(data, batch_size=2, sampler=sampler)
            try:
                trainer.fit(module, samples, DataLoader(data, batch_size=16), ckpt_path=callback.newest())
            except SystemExit as ended:
                return int(str(ended.code)), module.steps
        return 0, module.steps

    undisturbed = new_run(tmp_path / "undisturbed")
    _, expected = train(undisturbed)
    run = new_run(tmp_path / "stopped")
    steps = []
    for stop_at in stops:
        code, some = train(run, stop_at)
        # A stop in the very last step stops nothing.
        assert code == (75 if stop_at < len(expected) else 0)
        steps += some
    if len(steps) < len(expected):
        steps += train(run)[1]
    assert steps == expected
    assert evaluated_steps(run) == evaluated_steps(undisturbed)


class Adversaries(Looking):
    """Two optimizers, the second one stepped twice per batch: three of Lightning's steps for each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], _: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second, second):
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).sum())
            optimizer.step()

    def validation_step(self, *_: Any) -> None:
        self.log("val_loss", torch.tensor(1.0))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.0) for _ in range(2)]


def test_steps_of_several_optimizers_pass_no_save_and_what_follows_is_no_hang(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    loader = DataLoader(TensorDataset(torch.arange(48.0).unsqueeze(1)), batch_size=2)
    with joined(run) as session:
        callback = adapter.SessionCallback(every_steps=10)
        trainer = pl.Trainer(max_epochs=1, callbacks=[callback], **QUIET)
        module = Adversaries()
        trainer.fit(module, loader)
        assert session._heartbeat.phase == "end"
        trainer.validate(module, loader, verbose=False)
        assert session._heartbeat.phase == "end"
    # 24 batches are 72 steps; each save is at the first step at or after a multiple of ten.
    assert [line["step"] for line in read_saves(run)] == [12, 21, 30, 42, 51, 60, 72]


class Estimating(Looking):
    """Asks how many steps there are, as a schedule does that ends with the training."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == 24
        return super().configure_optimizers()


class OfAnotherRank(Looking):
    """Is not where rank 0 is, whose loaders' states Lightning saves for all ranks."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        place = {"_num_yielded": 1, "_sampler_iter_yielded": 1, "_sampler_iter_state": {"samples_yielded": 2}}
        loops["combined_loader"] = [{**state, **place} for state in loops["combined_loader"]]


@pytest.mark.parametrize("stop_at", [3, 11])
@pytest.mark.parametrize("kind", [Estimating, OfAnotherRank])
def test_each_rank_continues_where_its_own_loaders_were(kind: type[Looking], stop_at: int, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))

    def seen(run: Any, stop_at: int = 0) -> list[list[float]]:
        stop = StopFlag()

        module = kind()
        with joined(run, stop):
            callback = adapter.SessionCallback()
            trainer = pl.Trainer(max_epochs=3, callbacks=[Stopping(stop, stop_at), callback], **QUIET)
            loader = stateful(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=1, rank=0))
            try:
                trainer.fit(module, loader, ckpt_path=callback.newest())
            except SystemExit as ended:
                assert ended.code == 75 and stop_at
        return module.seen

    expected = seen(new_run(tmp_path / "undisturbed"))
    run = new_run(tmp_path / "stopped")
    assert seen(run, stop_at) + seen(run) == expected
