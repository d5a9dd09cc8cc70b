"""One optimizer step: micro-batches, one all-reduce, one update.

Each rank back-propagates sums. After the reduce, one divisor turns the gradients into those of the mean over all items
of all ranks and clips them, and the update applies it, so they are touched once. Nothing waits for a GPU: its reduced
values are copied beside the next step's work and read one step late, by every rank alike. A step that is not finite is
never applied: on the CPU the host sees it first, on a GPU the update itself is masked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.train.module import COUNT, LOSS, NON_FINITE, STOP, TrainingModule
from slurm_train.train.traces import without_traces
from slurm_train.train.update import Update

_EPSILON = 1e-6
_NORM, _SKIPPED = 4, 5
_ORDER_COUNTS_ABOVE = 2
"""Ranks: the sum of two values is the same in either order, that of three is not."""


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
    """What all ranks know of a step after its all-reduce."""

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


class HasTensors(Protocol):
    """A micro-batch."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the objective takes, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step works with."""

    ddp: DistributedDataParallel
    module: TrainingModule
    optimizer: Optimizer
    clip_norm: float | None
    accumulation: int
    world_size: int
    device: torch.device
    before_update: Callable[[], None] | None = None
    """On a GPU, called before the parameters change: a copy of them may be under way."""
    applies_spikes: bool = True
    """Whether a step whose loss is above its limit is applied all the same."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    must_arrange: bool = False
    """What is kept about the buckets has to fit from the first step on."""


class Stepper:
    """Takes optimizer steps; on a GPU it gives each step's result with the next call, or when drained.

    Args:
        parts: what to work with.
    """

    def __init__(self, parts: StepParts) -> None:
        self.data_wait_s = 0.0
        self._parts = parts
        self._mark, self._clock = parts.heartbeat.mark, parts.heartbeat.clock
        self.ddp = self._ddp = parts.ddp
        self._module, self._optimizer = parts.module, parts.optimizer
        self._update = Update(parts.optimizer)
        self._parameters = self._update.parameters
        self._rider = parts.module.rider
        self._divisor = torch.ones(())
        # A static graph is learnt in the first backward pass, and torch asserts that it is a synchronised one (2.13).
        # Averages of averages add up to the same gradient, so the first step may send every micro-batch.
        self._may_accumulate = not parts.ddp.static_graph
        self._limit = float("inf") if parts.clip_norm is None else parts.clip_norm
        self._on_cpu = parts.device.type == "cpu"
        self._late = LateValues(parts.device) if not self._on_cpu else None

    def arrange(self, tensors: tuple[Tensor, ...]) -> None:
        """Lets DDP see one backward pass, whose gradients are dropped, before the first step. Collective.

        DDP orders its buckets anew after its first pass, and the order in which three or more ranks add depends on
        where in a bucket a value lies. Without this the first step after a start would round unlike the same step of
        a run that was not interrupted. Random streams and buffers are as before afterwards. One or two ranks are
        spared the pass, unless they accumulate over a static graph, whose first step sends what later ones add up.

        Args:
            tensors: a micro-batch of this rank.
        """
        parts = self._parts
        is_spared = parts.world_size <= _ORDER_COUNTS_ABOVE and (self._may_accumulate or parts.accumulation == 1)
        if is_spared and not parts.must_arrange:
            return
        with without_traces(self._module):
            self._module.backward(self._ddp(*(tensors if self._on_cpu else to_device(tensors, self._parts.device))))
        self._may_accumulate = True

    def step(self, facts: StepFacts, batches: Iterator[HasTensors]) -> StepResult | None:
        """Takes one step; returns its result, or on a GPU the previous one's (None after the first).

        Args:
            facts: number, samples and learning rate of the step.
            batches: this rank's micro-batches; `accumulation` of them are taken.
        """
        for _ in range(self._parts.accumulation - 1):
            with self._ddp.no_sync() if self._may_accumulate else contextlib.nullcontext():
                self._forward_backward(batches)
        self._forward_backward(batches)
        self._may_accumulate = True
        for group in self._optimizer.param_groups:
            group["lr"] = facts.lr
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        result = self._update_on_cpu(facts, gradients) if self._on_cpu else self._update_on_device(facts, gradients)
        self._drop_gradients()
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

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._rider.grad = None

    def _forward_backward(self, batches: Iterator[HasTensors]) -> None:
        self._mark("data")
        start = self._clock()
        tensors = next(batches).tensors
        self.data_wait_s += self._clock() - start
        self._mark("step")
        if not self._on_cpu:
            tensors = to_device(tensors, self._parts.device)
        self._module.backward(self._ddp(*tensors))

    def _update_on_cpu(self, facts: StepFacts, gradients: list[Tensor]) -> StepResult:
        assert self._rider.grad is not None
        values = self._rider.grad.tolist()
        norm_of_sum = global_norm(gradients).item()
        result = self._read(facts, [*values, norm_of_sum / values[COUNT] if values[COUNT] else float("nan")])
        if not result.applied:
            return result
        # DDP gives averages over ranks of sums over items; the rider's count is averaged alike.
        self._divisor.fill_(values[COUNT] * max(1.0, (result.grad_norm + _EPSILON) / self._limit))
        self._update.apply(gradients, self._divisor)
        return result

    def _update_on_device(self, facts: StepFacts, gradients: list[Tensor]) -> StepResult | None:
        assert self._rider.grad is not None and self._late is not None
        rider = self._rider.grad
        norm = global_norm(gradients) / rider[COUNT]
        divisor = rider[COUNT] * ((norm + _EPSILON) / self._limit).clamp(min=1.0)
        if self._parts.before_update is not None:
            self._parts.before_update()
        values = torch.cat((rider, norm.to(rider.dtype).reshape(1)))
        # The host will know the values one step late, so the device decides for itself whether to apply them. All
        # ranks have the same reduced values and decide alike; the verdict travels with them and is not taken again.
        skip = values.isfinite().all().logical_not()
        if not self._parts.applies_spikes and facts.loss_limit < float("inf"):
            skip = skip | (rider[LOSS] > facts.loss_limit * rider[COUNT])
        self._update.apply(gradients, divisor.float(), skip=skip.float())
        previous = self._late.take()
        self._late.put(facts, torch.cat((values, skip.to(rider.dtype).reshape(1))))
        return None if previous is None else self._read(*previous)

    def _read(self, facts: StepFacts, values: list[float]) -> StepResult:
        """Turns averages over ranks, the gradient's norm, and on a GPU its verdict, into the result of the step."""
        count = round(values[COUNT] * self._parts.world_size)
        result = StepResult(
            facts,
            stop=values[STOP] > 0,
            num_items=count,
            loss=values[LOSS] / values[COUNT] if count else float("nan"),
            num_non_finite=round(values[NON_FINITE] * self._parts.world_size),
            grad_norm=values[_NORM],
        )
        applied = result.is_finite and (self._parts.applies_spikes or not result.is_spike)
        if len(values) > _SKIPPED:
            applied = not values[_SKIPPED]
        return result if applied else result._replace(applied=False)


class LateValues:
    """A few numbers on their way from a GPU to the host.

    Args:
        device: where they come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: tuple[StepFacts, Tensor, torch.cuda.Event] | None = None

    def put(self, facts: StepFacts, values: Tensor) -> None:
        """Sends the values of a step off."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says no types here
        event.record(torch.cuda.current_stream(self._device))
        self._pending = (facts, host, event)

    def take(self) -> tuple[StepFacts, list[float]] | None:
        """Waits for the values that were sent last and returns them, None where there are none."""
        if self._pending is None:
            return None
        facts, host, event = self._pending
        self._pending = None
        event.synchronize()
        return facts, host.tolist()


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Returns the 2-norm of all gradients together (a scalar).

    What torch.nn.utils.get_total_norm computes for one device, without sorting the gradients by device and type
    again at every step (30 us).
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Returns copies on the device, made beside its running work."""
    return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that get gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
