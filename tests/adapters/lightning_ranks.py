"""Trainings of Lightning on several ranks, each once as a whole and once with stops; `main` runs all that are here.

Each stop reaches one rank alone. A rank leaves as JSON, for each training, its steps of both; `test_lightning_ranks.py`
compares them.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from slurm_train.adapters.lightning import SessionCallback
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag
from tests.support.joined_runs import joined_rank
from tests.support.lightning_programs import Stopping
from tests.support.stopped_ranks import leave_steps

NUM_SAMPLES = 32
DATA = TensorDataset(torch.arange(float(NUM_SAMPLES)).unsqueeze(1))
UNEVEN = TensorDataset(torch.arange(29.0).unsqueeze(1))


class Stream(IterableDataset[torch.Tensor]):
    """Other samples on each rank, without a number of them."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(dist.get_rank(), NUM_SAMPLES, dist.get_world_size()):
            yield torch.tensor([float(index)])


class Training(pl.LightningModule):  # type: ignore[misc]  # Any: of an extra
    """Notes each batch; its rate falls on plateaus of the validation, which does not become better."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.steps: list[Any] = []
        """Epoch, samples, loss and learning rate."""

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        samples = batch[0] if isinstance(batch, list) else batch
        loss: torch.Tensor = self.layers(samples / NUM_SAMPLES).square().mean()
        rate = self.optimizers().param_groups[0]["lr"]
        self.steps.append([self.trainer.current_epoch, samples.flatten().int().tolist(), float(loss), rate])
        return loss

    def validation_step(self, *_: Any) -> None:
        self.log("val_loss", torch.tensor(1.0), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "strict": False}}


class InParts(Training):
    """Each rank has a part of each parameter, and saves it; a value is of a type that torch does not read by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"folder": Path("data")})

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.layers[0], self.layers):
            fully_shard(layer, mesh=mesh)


@dataclass(frozen=True)
class Scene:
    """A training.

    Args:
        make_loader: returns its loader.
        stops: the steps at which it is stopped, each in another attempt; four are an epoch, if not said otherwise.
        settings: of the Trainer.
        make_strategy: returns the strategy.
        kind: what is trained.
    """

    make_loader: Callable[[], Any]
    stops: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    make_strategy: Callable[[], Any] = lambda: "ddp"
    kind: type[Training] = Training


def distributed(data: Any, kind: Any = DataLoader, **settings: Any) -> Any:
    """Returns a loader with a sampler of the program's own."""
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank())
    return kind(data, batch_size=4, sampler=sampler, **settings)


def weighted() -> Any:
    sampler = WeightedRandomSampler([1.0 + index for index in range(NUM_SAMPLES)], NUM_SAMPLES)
    return DataLoader(DATA, batch_size=4, sampler=sampler)


def in_parts() -> Any:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


FOR_OTHER_RANKS = "for another number of ranks"
NO_VALIDATION = {"limit_val_batches": 0}
SCENES = {
    # Lightning puts a DistributedSampler into it.
    "shuffled": Scene(lambda: DataLoader(DATA, batch_size=4, shuffle=True), [2, 4, 11], {"val_check_interval": 0.5}),
    "shuffled by workers": Scene(lambda: DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1), [6]),
    # Lightning divides what their samplers draw.
    "shuffled, with a state": Scene(lambda: StatefulDataLoader(DATA, batch_size=4, shuffle=True), [5]),
    "by weights": Scene(weighted, [3, 5]),
    "uneven": Scene(
        lambda: distributed(UNEVEN), [1, 3], {"use_distributed_sampler": False, "accumulate_grad_batches": 3}
    ),
    "in parts": Scene(lambda: distributed(DATA), [3, 6], make_strategy=in_parts, kind=InParts),
    "a stream": Scene(lambda: DataLoader(Stream(), batch_size=4), [2, 7], NO_VALIDATION),
    FOR_OTHER_RANKS: Scene(lambda: distributed(DATA), [6]),
}


def train(
    joining: Any, loader: Any, *, stop_at: int | None = None, kind: type[Training] = Training, **settings: Any
) -> tuple[int, Training]:
    """Runs an attempt on the ranks that there are.

    Args:
        joining: a function that takes the flag of this rank and returns the context in which it is in the run.
        loader: of the training data.
        stop_at: the step in which this rank is asked to stop.
        kind: what is trained.
        **settings: of the Trainer.

    Returns:
        The exit code, and what was trained.
    """
    stop = StopFlag()
    module = kind()
    callbacks = [Stopping(stop, stop_at), pl.callbacks.EarlyStopping("val_loss", patience=5, strict=False)]
    facts: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 3,
        "num_sanity_val_steps": 0,
        **settings,
    }
    with joining(stop):
        callback = SessionCallback()
        trainer = pl.Trainer(callbacks=[*callbacks, callback], **facts)
        try:
            trainer.fit(module, loader, DataLoader(DATA, batch_size=16), ckpt_path=callback.newest())
        except SystemExit as ended:
            return int(str(ended.code)), module
    return 0, module


def main() -> None:
    """Runs all scenes in the folder that the command line names, and leaves their steps in the file OUT."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")

    def attempt(name: str, run: RunDirectory, stop_at: int | None) -> tuple[int, list[Any]]:
        scene = SCENES[name]
        settings = {"devices": dist.get_world_size(), "strategy": scene.make_strategy(), **scene.settings}
        loader = scene.make_loader()
        code, module = train(lambda stop: joined_rank(run, stop), loader, stop_at=stop_at, kind=scene.kind, **settings)
        return code, module.steps

    stops = {name: scene.stops for name, scene in SCENES.items()}
    leave_steps(Path(sys.argv[1]), stops, attempt, unfinished=FOR_OTHER_RANKS)
