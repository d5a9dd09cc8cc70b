"""A Runner of mmengine in a run goes on where it was stopped, bit for bit, and evaluates as often as undisturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from slurm_train.errors import ConfigError
from tests.adapters.loops import losses, start, undisturbed_and_stopped
from tests.support.extras import NEEDS_MMENGINE
from tests.support.joined_runs import new_run

pytestmark = [NEEDS_MMENGINE, pytest.mark.filterwarnings("ignore"), pytest.mark.full]


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> Any:
        return torch.full((4,), number / 24) + torch.randn(4), torch.tensor([number / 24])


class Training:
    """A program; it counts its evaluations.

    Args:
        folder: of mmengine's files.
        by_epoch: whether its loop goes by epochs.
    """

    def __init__(self, folder: Path, *, by_epoch: bool = True) -> None:
        self._folder = folder
        self._loop = {"by_epoch": True, "max_epochs": 3} if by_epoch else {"by_epoch": False, "max_iters": 18}
        self.num_evaluated = 0

    def __call__(self, _: Any, at_step: Callable[[int], None]) -> None:
        from mmengine.evaluator import BaseMetric, Evaluator
        from mmengine.hooks import Hook
        from mmengine.logging import MMLogger
        from mmengine.model import BaseModel
        from mmengine.runner import Runner

        from slurm_train.adapters.mmengine import SessionHook

        class Model(BaseModel):  # type: ignore[misc]  # Any: not installed everywhere
            def __init__(self) -> None:
                super().__init__()
                self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

            def forward(self, inputs: Any, targets: Any, mode: str) -> Any:
                loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
                return {"loss": loss} if mode == "loss" else (loss,)

        class Counted(BaseMetric):  # type: ignore[misc]  # as above
            def process(self, _: Any, samples: Any) -> None:
                self.results += [float(sample) for sample in samples]

            def compute_metrics(metric, results: Any) -> dict[str, float]:  # the test's self is used
                self.num_evaluated += 1
                return {"error": sum(results) / len(results)}

        class Count(Hook):  # type: ignore[misc]  # as above
            def before_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
                at_step(runner.iter + 1)

        torch.manual_seed(0)
        loader = {"batch_size": 4, "num_workers": 0, "dataset": Noisy(), "collate_fn": {"type": "default_collate"}}
        runner = Runner(
            model=Model(),
            work_dir=str(self._folder),
            train_dataloader={**loader, "sampler": {"type": "DefaultSampler", "shuffle": True}},
            val_dataloader={**loader, "sampler": {"type": "DefaultSampler", "shuffle": False}},
            val_evaluator=Evaluator(Counted()),
            val_cfg={},
            train_cfg={**self._loop, "val_interval": 1 if self._loop["by_epoch"] else 6},
            optim_wrapper={"optimizer": {"type": "Adam", "lr": 0.01}},
            param_scheduler={"type": "ExponentialLR", "gamma": 0.5, "by_epoch": True},
            default_hooks={"checkpoint": None},
            custom_hooks=[Count(), SessionHook()],
            randomness={"seed": 0},
            log_level="ERROR",
            experiment_name=f"run_{id(self)}_{len(MMLogger._instance_dict)}",
        )
        runner.train()


@pytest.mark.parametrize("stop_at", [4, 6, 7])
def test_a_runner_goes_on_where_it_was_stopped(tmp_path: Path, stop_at: int) -> None:
    training = Training(tmp_path / "work")
    undisturbed, stopped = undisturbed_and_stopped(tmp_path, training, stop_at=stop_at)
    assert losses(stopped) == losses(undisturbed)
    assert len(losses(stopped)) == 18
    assert training.num_evaluated == 6


def test_a_loop_by_iterations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="IterBasedTrainLoop"):
        start(new_run(tmp_path), Training(tmp_path / "work", by_epoch=False))
