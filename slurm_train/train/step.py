"""One optimizer step: passes over micro-batches, one division, one update.

After the exchange one divisor turns the gradients into those of the mean over all items of all ranks and clips them,
and the update applies it, so they are touched once. Nothing waits for a GPU: its reduced values are copied during the
next step's work and read one step late, by every rank alike. A step that is not finite is never applied: on the CPU the
host sees it first, on a GPU the update itself is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from slurm_train.train.context import Rank
from slurm_train.train.optimizer import Update
from slurm_train.train.passes import COUNT, LOSS, NON_FINITE, STOP, HasTensors, Passes

_EPSILON = 1e-6
_NORM, _SKIPPED = 4, 5


class StepFacts(NamedTuple):
    """What this rank knows of a step when it starts it."""

    step: int
    """Number of the step, from 1."""
    samples: int
    """Global samples consumed, this step included."""
    lr: float
    loss_limit: float = float("inf")
    """A loss above it is a spike."""


class StepResult(NamedTuple):
    """What all ranks know of a step after its exchange."""

    facts: StepFacts
    stop: bool
    """Some rank was asked to stop."""
    num_items: int
    """Items (tokens, samples) over all ranks and micro-batches."""
    loss: float
    """Mean over those items."""
    num_non_finite: int
    """Micro-batches whose loss was not finite."""
    grad_norm: float
    """Norm of the gradient of the mean loss, before clipping."""
    applied: bool = True
    """Whether the update was made: it is not where a value is not finite."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        # A NaN fails every comparison, so this is false for it too.
        return self.grad_norm < float("inf") and abs(self.loss) < float("inf")

    @property
    def is_spike(self) -> bool:
        """Whether the loss is above its limit."""
        return self.loss > self.facts.loss_limit


class Stepper:
    """Takes optimizer steps; on a GPU it gives each step's result with the next call, or when drained.

    Args:
        rank: this rank.
        passes: forward and backward of a step's micro-batches.
        optimizer: what uses the gradients.
        before_update: on a GPU, called before the parameters change: a copy of them may be under way.
    """

    def __init__(
        self, rank: Rank, passes: Passes, optimizer: Optimizer, *, before_update: Callable[[], None] = lambda: None
    ) -> None:
        self.passes = passes
        self._optimizer, self._update = optimizer, Update(optimizer)
        self._before_update, self._device, self._on_gpu = before_update, rank.device, rank.device.type != "cpu"
        clip_norm = rank.config.optim.grad_clip_norm
        self._limit = float("inf") if clip_norm is None else clip_norm
        self._applies_spikes = rank.config.health.on_spike == "log"
        self._divisor = torch.ones(())
        # Values of the previous step on their way from a GPU to the host.
        self._pending: tuple[StepFacts, Tensor, torch.cuda.Event] | None = None

    def step(self, facts: StepFacts, batches: Iterator[HasTensors]) -> StepResult | None:
        """Takes one step; returns its result, or on a GPU the previous one's (None after the first). Collective.

        Args:
            facts: number, samples and learning rate of the step.
            batches: this rank's micro-batches; those of one accumulation are taken.
        """
        self.passes.run(batches)
        for group in self._optimizer.param_groups:
            group["lr"] = facts.lr
        gradients, numbers, norm = self.passes.reduce(self._update.parameters)
        result = (self._apply_masked if self._on_gpu else self._apply)(facts, gradients, numbers, norm)
        for parameter in self._update.parameters:
            parameter.grad = None
        self.passes.forget()
        return result

    def drain(self) -> StepResult | None:
        """Returns the result that is still on its way, if there is one; waits for the device."""
        if self._pending is None:
            return None
        facts, host, event = self._pending
        self._pending = None
        event.synchronize()
        return self._read(facts, host.tolist())

    def forget(self) -> None:
        """Drops the result that is still on its way: the run goes back to before it."""
        self._pending = None

    def _apply(self, facts: StepFacts, gradients: list[Tensor], numbers: Tensor, norm: Tensor) -> StepResult:
        values = numbers.tolist()
        result = self._read(facts, [*values, norm.item() / values[COUNT] if values[COUNT] else float("nan")])
        if result.applied:
            self._divisor.fill_(values[COUNT] * max(1.0, (result.grad_norm + _EPSILON) / self._limit))
            self._update.apply(gradients, self._divisor)
        return result

    def _apply_masked(
        self, facts: StepFacts, gradients: list[Tensor], numbers: Tensor, norm_of_sum: Tensor
    ) -> StepResult | None:
        norm = norm_of_sum / numbers[COUNT]
        divisor = numbers[COUNT] * ((norm + _EPSILON) / self._limit).clamp(min=1.0)
        self._before_update()
        values = torch.cat((numbers, norm.to(numbers.dtype).reshape(1)))
        # The host will know the values one step late, so the device decides for itself whether to apply them. All
        # ranks have the same reduced values and decide alike; the verdict travels with them and is not taken again.
        skip = values.isfinite().all().logical_not()
        if not self._applies_spikes and facts.loss_limit < float("inf"):
            skip = skip | (numbers[LOSS] > facts.loss_limit * numbers[COUNT])
        self._update.apply(gradients, divisor.float(), skip=skip.float())
        previous = self.drain()
        values = torch.cat((values, skip.to(values.dtype).reshape(1)))
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says no types here
        event.record(torch.cuda.current_stream(self._device))
        self._pending = (facts, host, event)
        return previous

    def _read(self, facts: StepFacts, values: list[float]) -> StepResult:
        """Turns the averaged numbers, the gradient's norm, and on a GPU its verdict, into the result of the step."""
        count = round(values[COUNT] * self.passes.num_averaged)
        result = StepResult(
            facts,
            stop=values[STOP] > 0,
            num_items=count,
            loss=values[LOSS] / values[COUNT] if count else float("nan"),
            num_non_finite=round(values[NON_FINITE] * self.passes.num_averaged),
            grad_norm=values[_NORM],
        )
        applied = result.is_finite and (self._applies_spikes or not result.is_spike)
        if len(values) > _SKIPPED:
            applied = not values[_SKIPPED]
        return result if applied else result._replace(applied=False)
