"""One optimizer step: passes over micro-batches, one exchange, one division, one update.

The division turns gradients into those of the mean over all items, and clips them. It is a part of the update, so
gradients are read and written once. Nothing waits for a GPU: its reduced values are copied to the host during the next
step, and read one step late on every rank. A step that is not finite is never applied: on the CPU the host checks it
first, on a GPU the update itself is masked. Buffers that the forward pass has changed are then put back likewise.
Parameters that are offloaded to the host are updated as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from slurm_train.checkpoint.state import local_part
from slurm_train.data.batches import MicroBatch
from slurm_train.errors import ConfigError
from slurm_train.models.objective import Objective
from slurm_train.train.buckets import RecordedOrder
from slurm_train.train.context import Parts, Rank
from slurm_train.train.ddp import COUNT, LOSS, NON_FINITE, STOP
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.optimizer import LR_SCALE, Update
from slurm_train.train.passes import Passes, build_passes, changed_error

_EPSILON = 1e-6
# Places of further values behind the four agreed numbers (`ddp`).
_NORM = 4
_SKIPPED = 5
_OVERFLOWED = 6


class StepFacts(NamedTuple):
    """What is known of a step before it is taken, the same on every rank."""

    step: int
    """Number of the step, from 1."""
    samples: int
    """Global samples consumed, this step included."""
    lr: float
    loss_limit: float = float("inf")
    """A loss above it is a spike."""
    size: int = 0
    """Global samples of this step."""
    num_batches: int = 1
    """Global batches of this step; each is `accumulation` micro-batches on every rank."""


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
    """Whether the parameters were updated; not where a value is not finite, or where a spike is skipped."""
    overflowed: bool = False
    """The loss scale was too large for the range of float16; the next step has a smaller one."""

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
    """Takes optimizer steps. On a GPU the result of a step comes with the next call of `step`, or from `drain`.

    Args:
        rank: this rank.
        passes: forward and backward passes over a step's micro-batches.
        optimizer: updates the parameters.
        hold_changes: makes later work of a GPU wait until a save has copied the parameters.
        scale: the loss scale of float16; None for other types.
    """

    def __init__(
        self,
        rank: Rank,
        passes: Passes,
        optimizer: Optimizer,
        *,
        hold_changes: Callable[[], None] = lambda: None,
        scale: LossScale | None = None,
    ) -> None:
        self.passes = passes
        self.scale = scale
        self.optimizer = optimizer
        self._update = Update(optimizer)
        self._frozen = passes.frozen_parameters()
        # The learning rates that were set at the step before, by group.
        self._lrs: list[float] = []
        self._hold_changes = hold_changes
        self._device = rank.device
        # Offloaded parameters are updated by the host, which has to wait for their gradients in any case.
        self._is_masked = local_part(self._update.parameters[0]).device.type != "cpu"
        clip_norm = rank.config.optim.grad_clip_norm
        self._limit = float("inf") if clip_norm is None else clip_norm
        self._applies_spikes = rank.config.health.on_spike == "log"
        self._divisor = torch.ones(())
        # Values of the previous step on their way from a GPU to the host.
        self._pending: tuple[StepFacts, Tensor, torch.cuda.Event] | None = None

    def step(self, facts: StepFacts, batches: Iterator[MicroBatch]) -> StepResult | None:
        """Takes one step; returns its result, on a GPU that of the step before (None after the first). Collective.

        Args:
            facts: number, samples and learning rate of the step.
            batches: this rank's micro-batches; `accumulation` x `facts.num_batches` of them are taken.

        Raises:
            ConfigError: see `_require_unchanged` and `Passes.reduce`.
        """
        self.passes.run(batches, num_batches=facts.num_batches)
        self._require_unchanged()
        self._lrs = [facts.lr * group.get(LR_SCALE, 1.0) for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        gradients, numbers, norm = self.passes.reduce(self._update.parameters)
        if self._is_masked:
            result = self._apply_masked(facts, gradients, numbers, norm)
        else:
            result = self._apply(facts, gradients, numbers, norm)
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
        """Drops the result that is still on its way, and the learning rates: the run goes back to an earlier step."""
        self._pending = None
        self._lrs = []

    def _require_unchanged(self) -> None:
        """Checks that neither a callback nor the model has made changes since the last step that would have no effect.

        Raises:
            ConfigError: a frozen parameter requires a gradient now, or the optimizer has other parameters or learning
                rates.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            name_of = {id(parameter): name for name, parameter in self.passes.named_parameters()}
            unfrozen = [name_of[id(parameter)] for parameter in self._frozen if parameter.requires_grad]
            raise changed_error(unfrozen, "requires a gradient")
        groups = self.optimizer.param_groups
        num_parameters = sum(len(group["params"]) for group in groups)
        if num_parameters != len(self._update.parameters):
            raise ConfigError(
                f"the optimizer has {num_parameters} parameters, and {len(self._update.parameters)} when the training "
                "began",
                hint="give all parameters to the optimizer from the start; `optim.groups` gives some another rate",
            )
        for number, (group, lr) in enumerate(zip(groups, self._lrs, strict=False)):
            if group["lr"] != lr:
                raise ConfigError(
                    f"the learning rate of group {number} was set to {group['lr']} between two steps; the schedule had "
                    f"set {lr}, and sets it at each step",
                    hint="give the rate as optim.schedule (also a function of your own), or lr_scale in optim.groups",
                )

    def _apply(self, facts: StepFacts, gradients: list[Tensor], numbers: Tensor, norm_of_sum: Tensor) -> StepResult:
        """Updates parameters on the host, unless the step is bad; returns the result of this step."""
        values = numbers.tolist()
        # The gradients are sums over this many items, times the loss scale.
        items = values[COUNT]
        if self.scale is not None:
            items *= self.scale.factor.item()
        norm = norm_of_sum.item() / items if items else float("nan")
        result = self._read(facts, [*values, norm])
        if result.applied:
            self._divisor.fill_(items * max(1.0, (norm + _EPSILON) / self._limit))
            self._update.apply(gradients, self._divisor)
        else:
            self.passes.buffers.put_back()
        if self.scale is not None and self.scale.update(numbers[LOSS], norm_of_sum):
            result = result._replace(overflowed=True)
        return result

    def _apply_masked(
        self, facts: StepFacts, gradients: list[Tensor], numbers: Tensor, norm_of_sum: Tensor
    ) -> StepResult | None:
        """Updates parameters on a GPU, masked where the step is bad; returns the result of the step before."""
        items = numbers[COUNT] if self.scale is None else numbers[COUNT] * self.scale.factor
        norm = norm_of_sum / items
        divisor = items * ((norm + _EPSILON) / self._limit).clamp(min=1.0)
        self._hold_changes()
        values = torch.cat((numbers, norm.to(numbers.dtype).reshape(1)))
        # The host reads the values one step late, so the device decides whether to apply the update. All ranks have the
        # same reduced values and decide alike. The decision is copied with the values; the host does not decide again.
        skip = values.isfinite().all().logical_not()
        if not self._applies_spikes and facts.loss_limit < float("inf"):
            skip = skip | (numbers[LOSS] > facts.loss_limit * numbers[COUNT])
        self._update.apply(gradients, divisor.float(), skip=skip.float())
        self.passes.buffers.put_back(skip)
        previous = self.drain()
        flags = [skip] if self.scale is None else [skip, self.scale.update(numbers[LOSS], norm_of_sum)]
        values = torch.cat((values, torch.stack(flags).to(values.dtype)))
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        # While it waits, the host's core is free for NCCL and the loader; by default it would spin.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch says no types here
        event.record(torch.cuda.current_stream(self._device))
        self._pending = (facts, host, event)
        return previous

    def _read(self, facts: StepFacts, values: list[float]) -> StepResult:
        """Returns the result of a step.

        Args:
            facts: of the step.
            values: the four agreed numbers, averaged over ranks; the norm; on a GPU 1 where the update was skipped, and
                with a loss scale 1 where it overflowed.
        """
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
        if len(values) > _OVERFLOWED and values[_OVERFLOWED]:
            result = result._replace(overflowed=True)
        return result if applied else result._replace(applied=False)


def build_stepper(
    parts: Parts,
    objective: Objective,
    *,
    hold_changes: Callable[[], None],
    scale: LossScale | None,
    order: RecordedOrder,
) -> Stepper:
    """Returns the stepper for this run's layout. Collective: DDP compares the ranks' parameters.

    Args:
        parts: model, optimizer and data of this rank.
        objective: the loss around the model.
        hold_changes: makes later work of a GPU wait until a save has copied the parameters.
        scale: of the losses; None without float16.
        order: that of DDP's buckets in the run's first step.
    """
    passes = build_passes(parts, objective, factor=None if scale is None else scale.factor, order=order)
    return Stepper(parts.rank, passes, parts.optimizer, hold_changes=hold_changes, scale=scale)
