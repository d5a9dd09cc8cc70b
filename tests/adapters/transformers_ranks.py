"""Trainings of `transformers.Trainer` on several ranks, whole and with stops; `main` runs all that are here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from slurm_train.adapters.transformers import SessionCallback
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag
from tests.support.joined_runs import joined_rank
from tests.support.stopped_ranks import leave_steps

NUM_SAMPLES = 40


class Numbers(Dataset[dict[str, Any]]):
    """Each sample is a number, and as long as its last digit."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._num_samples:
            raise IndexError
        return {"input_ids": [index] * (index % 10 + 1), "number": index}


class Stream(IterableDataset[dict[str, Any]]):
    """The same numbers, without saying how many there are."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"number": index} for index in range(NUM_SAMPLES))


class Counted(Stream):
    """A stream that says it."""

    def __len__(self) -> int:
        return NUM_SAMPLES


class ByEpoch(Sampler[int]):
    """An order of the program's own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(NUM_SAMPLES, generator=generator).tolist())


class OwnOrder(Trainer):  # type: ignore[misc]  # Any: of an extra
    def _get_train_sampler(self, *_: Any) -> Any:
        return ByEpoch()


class OwnGenerator(Trainer):  # type: ignore[misc]  # Any: of an extra
    def _get_train_sampler(self, *_: Any) -> Any:
        return RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(3))


class Network(torch.nn.Module):
    """Notes the samples and the loss of each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.dropout = torch.nn.Dropout(0.5)
        self.steps: list[Any] = []

    def forward(self, number: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        loss = self.layer(self.dropout(number) / NUM_SAMPLES).square().mean()
        if self.training:
            self.steps.append([number.flatten().int().tolist(), float(loss)])
        return {"loss": loss, "logits": number} if return_loss else {"logits": number}


class Stopping(TrainerCallback):  # type: ignore[misc]  # Any: of an extra
    """Asks this rank to stop in a step."""

    def __init__(self, stop: StopFlag, stop_at: int | None) -> None:
        self._stop = stop
        self._stop_at = stop_at

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step + 1 == self._stop_at:
            self._stop.request("TERM")


@dataclass(frozen=True)
class Scene:
    """A training of 23 steps.

    Args:
        stops: the steps at which it is stopped; ten are an epoch, if not said otherwise.
        settings: of the Trainer.
        data: what is trained on.
        kind: the Trainer.
        patience: of early stopping, 0 for none.
    """

    stops: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    data: Any = field(default_factory=Numbers)
    kind: Any = Trainer
    patience: int = 0


def by_accelerate(**settings: Any) -> dict[str, Any]:
    return {"accelerator_config": settings}


EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "eval_on_start": True,
    "metric_for_best_model": "loss",
    "learning_rate": 0.0,
}
SCENES = {
    "rebalanced": Scene([4, 16], {"train_sampling_strategy": "batch_rebalance"}),
    "in an order of its own": Scene([12], kind=OwnOrder),
    "by a generator of its own": Scene([4, 16], by_accelerate(use_seedable_sampler=False), kind=OwnGenerator),
    "read by rank 0": Scene([4, 10, 16], by_accelerate(dispatch_batches=True)),
    "split by rank 0": Scene([12], by_accelerate(dispatch_batches=True, split_batches=True)),
    # Nine batches are an epoch, in four steps.
    "accumulated": Scene([3, 6, 8], {"gradient_accumulation_steps": 3, "max_steps": 11}, data=Numbers(35)),
    "counted": Scene([4, 16], by_accelerate(dispatch_batches=False), data=Counted()),
    "evaluated at the start": Scene([3], EVALUATED, patience=2),
}


def attempt(name: str, run: RunDirectory, stop_at: int | None) -> tuple[int, list[Any]]:
    """See `stopped_ranks.Attempt`."""
    scene = SCENES[name]
    stop = StopFlag()
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    model = Network()
    set_seed(dist.get_rank())
    arguments: dict[str, Any] = {
        "max_steps": 23,
        "save_steps": 100,
        "logging_strategy": "no",
        "remove_unused_columns": False,
        "learning_rate": 0.1,
        "optim": "sgd",
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **scene.settings,
    }
    patience = [EarlyStoppingCallback(scene.patience)] if scene.patience else []
    with joined_rank(run, stop):
        callback = SessionCallback()
        trainer = scene.kind(
            model=model,
            args=TrainingArguments(str(run.path / "output"), **arguments),
            train_dataset=scene.data,
            eval_dataset=Numbers(8),
            data_collator=lambda some: {"number": torch.tensor([[float(sample["number"])] for sample in some])},
            callbacks=[Stopping(stop, stop_at), *patience, callback],
        )
        try:
            trainer.train(resume_from_checkpoint=callback.newest())
        except SystemExit as ended:
            return int(str(ended.code)), model.steps
    return 0, model.steps


def main() -> None:
    """Runs all scenes in the folder that the command line names, and leaves their steps in the file OUT."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo")
    leave_steps(Path(sys.argv[1]), {name: scene.stops for name, scene in SCENES.items()}, attempt)
