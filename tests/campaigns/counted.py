"""A model with dropout, a data set with random augmentation, a callback whose state the ranks do not share, and a count
of the samples that each step consumed.

A run names them by `_target_` (`counted.Net`, `counted.Samples`, `counted.Unshared`). Each sample carries its number as
its first feature. Importing this module makes every optimizer step append the numbers that it was really given, as
they come out of the batch's tensor, to `consumed/attempt_<k>_rank_<r>.jsonl` in the run directory: counted where the
step has been taken, not where data is read ahead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.train.callbacks import Callback
from slurm_train.train.step import StepFacts, Stepper

FEATURES = 8
# The first layer's weights are large enough to be shared out among the ranks that save them.
HIDDEN = 64


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random points with a rule, moved at random whenever they are read.

    Args:
        size: how many; an odd number is split evenly by nothing.
        split: "train" or "heldout".
    """

    def __init__(self, *, size: int, split: str = "train") -> None:
        generator = torch.Generator().manual_seed(3 if split == "train" else 4)
        self.inputs = torch.randn(size, FEATURES, generator=generator)
        self.targets = (self.inputs.sum(dim=1) > 0).long() + (self.inputs[:, 0] > 1).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        moved = self.inputs[index] + 0.1 * torch.randn(FEATURES)
        return torch.cat((torch.tensor([float(index)]), moved)), self.targets[index]


class Net(nn.Module):
    """A small classifier that passes over the sample's number.

    Args:
        step_s: seconds that each forward pass takes at least.
    """

    def __init__(self, *, step_s: float = 0.0) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Dropout(0.2), nn.Linear(HIDDEN, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.step_s)
        scores: Tensor = self.layers(inputs[:, 1:])
        return scores


class Unshared(Callback):
    """Counts the steps in tensors that other ranks do not have: one of rank 0, and one of each rank."""

    def attach(self, parts: Any) -> None:
        self.rank = parts.rank.place.rank
        names = ["first", f"of_rank_{self.rank}"] if self.rank == 0 else [f"of_rank_{self.rank}"]
        self.counts = {name: torch.zeros(300 + self.rank) for name in names}

    def on_start(self, trainer: Any) -> None:
        for name, count in self.counts.items():
            assert count.eq(trainer.position.step).all(), f"{name} is {count[0]} at step {trainer.position.step}"

    def on_step_end(self, trainer: Any) -> None:
        for count in self.counts.values():
            count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts} | ({"steps": int(self.counts["first"][0])} if self.rank == 0 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(count.eq(state["steps"]).all() for count in self.counts.values())


def count_steps() -> None:
    """Makes every later optimizer step of this process leave the samples that it consumed."""
    take_step = Stepper.step

    def step(self: Stepper, facts: StepFacts, batches: Any) -> Any:
        taken: list[int] = []
        result = take_step(self, facts, _noting(batches, taken))
        _leave(facts.step, taken)
        return result

    Stepper.step = step  # type: ignore[method-assign]


def _noting(batches: Iterator[Any], taken: list[int]) -> Iterator[Any]:
    for batch in batches:
        taken.extend(int(number) for number in batch.tensors[0][:, 0].tolist())
        yield batch


def _leave(step: int, samples: list[int]) -> None:
    # The worker's command line ends with the run directory.
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    path = Path(sys.argv[-1], "consumed", f"attempt_{os.environ['SLURM_TRAIN_ATTEMPT']}_rank_{rank}.jsonl")
    path.parent.mkdir(exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps({"step": step, "samples": samples}) + "\n").encode())


if not getattr(Stepper.step, "__qualname__", "").startswith("count_steps"):
    count_steps()
