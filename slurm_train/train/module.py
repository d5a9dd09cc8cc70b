"""The module that DDP sees: the objective, and a rider whose gradient carries four numbers through the all-reduce.

Every step the ranks must agree on a stop, on the number of items and on whether anything went non-finite, and the log
wants the sum of the losses. A parameter of four zeros is a second root of the backward pass, with those four numbers as
its gradient; DDP reduces it with the last layer's gradients, in a bucket that is sent anyway. No collective and no
operation is added, and no rank can act on a value that another rank did not see.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.supervise.signals import StopFlag

STOP, COUNT, LOSS, NON_FINITE = range(4)
"""What the four numbers are: ranks asked to stop, items, sum of losses, micro-batches with a non-finite loss."""


class TrainingModule(nn.Module):
    """Calling it gives the summed loss of one micro-batch; `backward` then sends the rider along.

    The rider is no part of the model: the optimizer does not get it and checkpoints do not have it. It is registered
    last, which puts it into the first bucket that DDP sends.

    Args:
        objective: gives (sum of losses, number of items) of a batch; already compiled, if it is to be.
        stop: this rank's wish to stop.
        device: where the model is.
        autocast: lower precision of the forward pass, None for none.
    """

    def __init__(
        self, objective: nn.Module, *, stop: StopFlag, device: torch.device, autocast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.objective = objective
        self.stop = stop
        self.autocast = autocast
        self.rider = nn.Parameter(torch.zeros(4, dtype=rider_dtype(objective), device=device))
        self._values = torch.zeros_like(self.rider, requires_grad=False)
        self._one = torch.ones((), device=device)
        # Writing through numpy costs a tenth of a tensor operation; only the CPU has it.
        self._host_values: Any = self._values.numpy() if device.type == "cpu" else None

    def forward(self, *batch: Tensor) -> Tensor:
        """Returns the sum of the loss over this rank's micro-batch (a scalar)."""
        if self.autocast is None:
            loss, count = self.objective(*batch)
        else:
            with torch.autocast(self.rider.device.type, dtype=self.autocast):
                loss, count = self.objective(*batch)
        self._note(loss, count)
        total: Tensor = loss
        return total

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss that calling this module (through DDP) gave, and the rider's four numbers."""
        torch.autograd.backward((loss, self.rider), (self._one, self._values))

    def _note(self, loss: Tensor, count: Tensor) -> None:
        host = self._host_values
        if host is None:
            self._values = self._on_device(loss.detach(), count)
            return
        host[STOP] = self.stop.requested
        host[COUNT] = float(count)
        host[LOSS] = value = loss.item()
        host[NON_FINITE] = not math.isfinite(value)

    def _on_device(self, loss: Tensor, count: Tensor) -> Tensor:
        # No value comes to the host: that would wait for the device.
        values = torch.zeros_like(self.rider, requires_grad=False)
        if self.stop.requested:
            values[STOP] = 1.0
        values[COUNT] = count
        values[LOSS] = loss
        values[NON_FINITE] = loss.isfinite().logical_not()
        return values


def rider_dtype(module: nn.Module) -> torch.dtype:
    """Returns the type of the rider: the parameters' own, so that it shares their bucket, but never below float32.

    A bfloat16 number cannot count to 300; a model in bfloat16 pays for a small bucket of its own.
    """
    first = next((parameter for parameter in module.parameters() if parameter.requires_grad), None)
    return torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
