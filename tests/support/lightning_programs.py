"""Modules, callbacks and data for trainings with Lightning, which takes seconds to import: import it in a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from slurm_train.session.signals import StopFlag

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Looking(lightning.LightningModule):  # type: ignore[misc]  # Any: of an extra
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        # Two loaders give a list of lists.
        parts = batch if isinstance(batch[0], list) else [batch]
        self.seen.append(torch.cat([part[0] for part in parts]).flatten().tolist())
        return self.layer(parts[0][0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stopping(lightning.Callback):  # type: ignore[misc]  # Any: of an extra
    """Asks the ranks to stop in a step."""

    def __init__(self, stop: StopFlag, stop_at: int | None) -> None:
        self._stop = stop
        self._stop_at = stop_at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step + 1 == self._stop_at:
            self._stop.request("TERM")


class Training(lightning.LightningModule):  # type: ignore[misc]  # Any: of an extra
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
        """Epoch, first sample, loss and learning rate; of a batch of a validation -1, loader, number, first sample."""

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        rate = self.optimizers().param_groups[0]["lr"]
        self.steps.append((self.trainer.current_epoch, float(batch[0][0]), float(loss), rate))
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int, dataloader_idx: int = 0) -> None:
        self.steps.append((-1.0, float(dataloader_idx), float(number), float(batch[0][0])))
        if dataloader_idx == 0:
            self.log("val_loss", torch.tensor(1.0), add_dataloader_idx=False)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
            scheduler: dict[str, Any] = {"scheduler": plateau, "monitor": "val_loss"}
        else:
            falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            scheduler = {"scheduler": falling, "interval": self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class WithSettings(Training):
    """Its checkpoints have a value of a type that torch does not read by itself."""

    def __init__(self) -> None:
        super().__init__("step")
        self.save_hyperparameters({"folder": Path("data")})

    def test_step(self, *_: Any) -> None: ...


class Averaging(Training):
    """Its rate falls where what is logged has not become much better; it also notes the means of each epoch.

    Args:
        monitor: what the rate looks at after each epoch.
    """

    def __init__(self, monitor: str) -> None:
        super().__init__("plateau")
        self._monitor = monitor
        self.mean = MeanMetric()
        # They share their states.
        self.hits = MetricCollection([BinaryAccuracy(), BinaryPrecision()])

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.mean(batch[0].mean())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.hits.update((loss > 1.0).reshape(1), (batch[0].mean() > 5.0).long().reshape(1))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_epoch_end(self) -> None:
        self.steps.append((self.trainer.current_epoch, *map(float, self.hits.compute().values())))
        self.hits.reset()

    def validation_step(self, batch: list[torch.Tensor], number: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.layers(batch[0]).square().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": self._monitor, "strict": False},
        }


class SeeingMeans(lightning.Callback):  # type: ignore[misc]  # Any: of an extra
    """Notes the means of each epoch in the steps of the module."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        means = [float(trainer.callback_metrics[name]) for name in ("loss_epoch", "mean", "largest")]
        module.steps.append(("means", trainer.current_epoch, *means))


class Unfreezing(Training):
    """Its first layer is trained from its second epoch on, and without dropout."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)
            self.layers[1].eval()


class ByEpoch(Training):
    """Sets at the start of an epoch what its steps and validations depend on; keeps a setting of a type of its own."""

    def __init__(self, schedule: str) -> None:
        super().__init__(schedule)
        self.factor = 0.0
        self.save_hyperparameters({"folder": Path("data"), "loss": torch.nn.MSELoss()})

    def on_train_epoch_start(self) -> None:
        self.factor = 1.0 / (1 + self.current_epoch)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return super().training_step(batch, number) * self.factor

    def validation_step(self, batch: list[torch.Tensor], number: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, number, dataloader_idx)
        self.log("val_factor", torch.tensor(self.factor))


class Noting(lightning.Callback):  # type: ignore[misc]  # Any: of an extra
    """A callback of the program's own, whose rate follows from the epoch."""

    def on_train_epoch_start(self, trainer: Any, _: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.1 * trainer.current_epoch


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


class Adversaries(Looking):
    """Two optimizers, the second one stepped twice per batch: three of Lightning's steps for each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], _: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        for optimizer in (first, second, second):
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).sum())
            optimizer.step()

    def validation_step(self, *_: Any) -> None:
        self.log("val_loss", torch.tensor(1.0))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.0) for _ in range(2)]


class OfItsEpoch(Looking):
    """Makes loaders with samples of the present epoch."""

    def train_dataloader(self) -> Any:
        return DataLoader(
            TensorDataset(torch.arange(8.0).unsqueeze(1) + 100 * self.trainer.current_epoch), batch_size=2
        )


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
