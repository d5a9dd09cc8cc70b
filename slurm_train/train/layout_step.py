"""One optimizer step where ranks hold parts of the model: FSDP2, HSDP, tensor parallel.

As with DDP each rank back-propagates sums, and one divisor makes them the gradients of the mean over all items. What
the ranks must agree on - a stop, the items, the sum of losses, what is not finite - and the square of the gradient's
norm travel together in one exchange of five numbers over all ranks after the backward pass. A rank adds to a number
only where it is the one that counts for it, so nothing that several ranks hold alike counts twice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from slurm_train.config.layout import ParallelLayout
from slurm_train.distributed.context import SequencePart
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.supervise.signals import StopFlag
from slurm_train.train.step import HasTensors, LateValues, StepFacts, StepResult, to_device
from slurm_train.train.update import Update, local_part

STOP, COUNT, LOSS, NON_FINITE, SQUARES, SKIPPED = range(6)
"""What the numbers are: ranks asked to stop, items, sum of losses, micro-batches with a non-finite loss, sum of the
squared gradients; from a GPU also its verdict."""
NUM_VALUES = 5
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStepParts:
    """What such a step works with."""

    passes: Passes
    """Forward and backward of one step's micro-batches."""
    optimizer: Optimizer
    clip_norm: float | None
    layout: ParallelLayout
    device: torch.device
    before_update: Callable[[], None] | None = None
    """On a GPU, called before the parameters change: a copy of them may be under way."""
    applies_spikes: bool = True
    """Whether a step whose loss is above its limit is applied all the same."""


class LayoutStepper:
    """Takes optimizer steps; on a GPU it gives each step's result with the next call, or when drained.

    Args:
        parts: what to work with.
    """

    def __init__(self, parts: LayoutStepParts) -> None:
        self._parts = parts
        self._optimizer = parts.optimizer
        self._update = Update(parts.optimizer)
        weights = [_weight(parameter, parts.layout) for parameter in self._update.parameters]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=parts.device)
        self._limit = float("inf") if parts.clip_norm is None else parts.clip_norm
        self._on_cpu = parts.device.type == "cpu"
        self._late = None if self._on_cpu else LateValues(parts.device)

    @property
    def data_wait_s(self) -> float:
        """Seconds that steps have waited for data on this rank."""
        return self._parts.passes.data_wait_s

    def arrange(self, tensors: tuple[Tensor, ...]) -> None:
        """Does nothing: here every pass adds up in the same order."""

    def step(self, facts: StepFacts, batches: Iterator[HasTensors]) -> StepResult | None:
        """Takes one step; returns its result, or on a GPU the previous one's (None after the first). Collective.

        Args:
            facts: number, samples and learning rate of the step.
            batches: this rank's micro-batches.
        """
        values = self._parts.passes.run(batches)
        for group in self._optimizer.param_groups:
            group["lr"] = facts.lr
        gradients = self._gradients(values)
        dist.all_reduce(values)
        result = (self._apply if self._on_cpu else self._apply_late)(facts, gradients, values)
        for parameter in self._update.parameters:
            parameter.grad = None
        return result

    def drain(self) -> StepResult | None:
        """Returns the result that is still on its way, if there is one; waits for the device."""
        if self._late is None or (pending := self._late.take()) is None:
            return None
        return self._read(*pending)

    def forget(self) -> None:
        """Drops the result that is still on its way: the run goes back to before it."""
        if self._late is not None:
            self._late.take()

    def _gradients(self, values: Tensor) -> list[Tensor]:
        """Returns this rank's parts of the gradients, and adds their squares to the values."""
        found = [number for number, parameter in enumerate(self._update.parameters) if parameter.grad is not None]
        gradients = [
            local_part(_settled(parameter)) for parameter in self._update.parameters if parameter.grad is not None
        ]
        if gradients:
            weights = self._weights if len(found) == len(self._weights) else self._weights[found]
            norms = torch.stack(torch._foreach_norm(gradients)).double()
            values[SQUARES] = (norms.square() * weights).sum()
        return gradients

    def _apply(self, facts: StepFacts, gradients: list[Tensor], values: Tensor) -> StepResult:
        result = self._read(facts, values.tolist())
        if result.applied:
            clipping = max(1.0, (result.grad_norm + _EPSILON) / self._limit)
            average = result.num_items / self._parts.layout.reducing_size
            self._update.apply(gradients, torch.tensor(average * clipping))
        return result

    def _apply_late(self, facts: StepFacts, gradients: list[Tensor], values: Tensor) -> StepResult | None:
        assert self._late is not None
        size = self._parts.layout.reducing_size
        norm = values[SQUARES].sqrt() * size / values[COUNT]
        divisor = values[COUNT] / size * ((norm + _EPSILON) / self._limit).clamp(min=1.0)
        if self._parts.before_update is not None:
            self._parts.before_update()
        # The device decides by the reduced values, which all ranks have alike; the host reads them one step late.
        skip = torch.stack((values, norm.expand_as(values))).isfinite().all().logical_not()
        if not self._parts.applies_spikes and facts.loss_limit < float("inf"):
            skip = skip | (values[LOSS] > facts.loss_limit * values[COUNT])
        self._update.apply(gradients, divisor.float(), skip=skip.float())
        previous = self._late.take()
        self._late.put(facts, torch.cat((values, skip.to(values.dtype).reshape(1))))
        return None if previous is None else self._read(*previous)

    def _read(self, facts: StepFacts, values: list[float]) -> StepResult:
        """Turns sums over the ranks, and from a GPU its verdict, into the result of the step."""
        count = round(values[COUNT])
        # FSDP gives averages over the ranks that have different items.
        norm_of_sum = math.sqrt(values[SQUARES]) * self._parts.layout.reducing_size
        result = StepResult(
            facts,
            stop=values[STOP] > 0,
            num_items=count,
            loss=values[LOSS] / count if count else float("nan"),
            num_non_finite=round(values[NON_FINITE]),
            grad_norm=norm_of_sum / count if count else float("nan"),
        )
        applied = result.is_finite and (self._parts.applies_spikes or not result.is_spike)
        if len(values) > SKIPPED:
            applied = not values[SKIPPED]
        return result if applied else result._replace(applied=False)


@dataclass(slots=True, kw_only=True)
class Passes:
    """Forward and backward passes over the micro-batches of a step, one after the other."""

    model: nn.Module
    objective: nn.Module
    accumulation: int
    device: torch.device
    autocast: torch.dtype | None
    stop: StopFlag
    counts: bool
    """Whether this rank counts for its items; others that compute the same do not."""
    part: SequencePart | None = None
    """This rank's positions of each sequence; None for all."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    data_wait_s: float = 0.0

    def run(self, batches: Iterator[HasTensors]) -> Tensor:
        """Adds up the gradients of one step; returns this rank's five numbers (float64, on its device)."""
        values = torch.zeros(NUM_VALUES, dtype=torch.float64, device=self.device)
        for number in range(1, self.accumulation + 1):
            tensors = self.take(batches)
            self._arrange_exchange(is_last=number == self.accumulation)
            with self.in_precision():
                loss, count = self.objective(*tensors)
            loss.backward()
            if self.counts:
                add_outcome(values, loss.detach(), count)
        if self.stop.requested:
            values[STOP] = 1.0
        return values

    def take(self, batches: Iterator[HasTensors]) -> tuple[Tensor, ...]:
        """Returns the next micro-batch on the device, and counts the time that it took to come."""
        self.heartbeat.mark("data")
        start = self.heartbeat.clock()
        tensors = next(batches).tensors
        self.data_wait_s += self.heartbeat.clock() - start
        self.heartbeat.mark("step")
        if self.part is not None:
            tensors = self.part.cut(tensors)
        return tensors if self.device.type == "cpu" else to_device(tensors, self.device)

    def in_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of the forward pass's precision."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _arrange_exchange(self, *, is_last: bool) -> None:
        # Shards are reduced in every backward pass, or a whole gradient would have to stay; copies of shards once.
        sharded: Any = self.model
        if hasattr(sharded, "set_requires_all_reduce"):
            sharded.set_is_last_backward(is_last)
            sharded.set_requires_all_reduce(is_last)


def add_outcome(values: Tensor, loss: Tensor, count: Tensor) -> None:
    """Adds a micro-batch's sum of losses and number of items; no value comes to the host."""
    values[COUNT] += count
    values[LOSS] += loss
    values[NON_FINITE] += loss.isfinite().logical_not()


def _settled(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter, laid out as the parameter is.

    That of a norm which saw a part of the positions is a part of a sum; FSDP adds such up itself, else it is done here.
    """
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    settled: Tensor = gradient
    return settled


def _weight(parameter: Tensor, layout: ParallelLayout) -> float:
    """Returns what part of a gradient's squares this rank adds, where several ranks hold the same part of it."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    placements = getattr(parameter, "placements", ())
    parts = math.prod(mesh.size(axis) for axis, place in enumerate(placements) if not place.is_replicate())
    share: float = parts * layout.pp / layout.world_size
    return share
