"""The passes of one optimizer step through a pipeline: the micro-batches of the accumulation are what flows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slurm_train.models.objective import IGNORED, default_loss
from slurm_train.train.layout_step import COUNT, LOSS, NON_FINITE, NUM_VALUES, STOP, Passes
from slurm_train.train.step import HasTensors


@dataclass(slots=True, kw_only=True)
class PipelinePasses(Passes):
    """As `Passes`, but forward and backward are torch's schedule; the losses are the last stage's."""

    schedule: Any
    """What `Pipeline.build_schedule` gave."""
    is_first: bool
    is_last: bool
    options: dict[str, bool] = field(default_factory=dict)
    """Further words for the schedule: `without_outputs`."""

    def run(self, batches: Iterator[HasTensors]) -> Tensor:
        """Adds up the gradients of one step; returns this rank's five numbers (float64, on its device)."""
        taken = [self.take(batches) for _ in range(self.accumulation)]
        inputs, targets = (torch.cat(parts) for parts in zip(*taken, strict=True))
        losses: list[Tensor] = []
        with self.in_precision():
            self.schedule.step(
                *((inputs,) if self.is_first else ()),
                target=targets if self.is_last else None,
                losses=losses if self.is_last else None,
                **self.options,
            )
        values = torch.zeros(NUM_VALUES, dtype=torch.float64, device=self.device)
        if self.counts:
            found = torch.stack([loss.detach().double() for loss in losses])
            values[COUNT] = num_items(targets)
            values[LOSS] = found.sum()
            values[NON_FINITE] = found.isfinite().logical_not().sum()
        if self.stop.requested:
            values[STOP] = 1.0
        return values


def without_outputs(schedule: Any) -> dict[str, bool]:
    """Returns what lets a schedule give up scores before the step ends; nothing where torch keeps them always."""
    return {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}


def summed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the loss over a micro-batch; what a schedule's last stage calls."""
    return default_loss(outputs, targets)[0]


def num_items(targets: Tensor) -> Tensor | int:
    """Returns how many items the loss of these targets is over."""
    return targets.numel() if targets.is_floating_point() else (targets != IGNORED).sum()
