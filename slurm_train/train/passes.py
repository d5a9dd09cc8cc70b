"""Forward and backward passes over the micro-batches of a step, and the one exchange between the ranks.

In every step the ranks agree on a stop, on the number of items, on the sum of the losses and on whether a value is not
finite: the four agreed numbers, whose places are constants of `ddp`. Each rank back-propagates sums. What `reduce`
returns, gradients and numbers, is averaged over the ranks that have different items, so one divisor turns gradients
into those of the mean over all items, and clips them (see `step`).

`ReplicaPasses` is for DDP over whole models, `ShardPasses` for FSDP2, HSDP, tensor and context parallelism, and
`PipelinePasses` for the stages of a pipeline.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slurm_train.checkpoint.state import local_part
from slurm_train.config.parallel import ParallelLayout
from slurm_train.data.batches import MicroBatch
from slurm_train.data.source import Batch
from slurm_train.distributed.float8 import ScalesOfStep
from slurm_train.distributed.parallelize import own_positions, whole_parameters
from slurm_train.distributed.pipeline import Pipeline
from slurm_train.errors import ConfigError, DataError
from slurm_train.formatting import shorten
from slurm_train.models.batch_parts import has_lists, labels_in
from slurm_train.models.head import group_named
from slurm_train.models.loss import LOW_TOLERANCE, TOLERANCE
from slurm_train.models.objective import Objective
from slurm_train.models.scores import num_counted
from slurm_train.train.buckets import BucketOrder, RecordedOrder
from slurm_train.train.buffers import SharedBuffers
from slurm_train.train.context import Parts, Rank, gather
from slurm_train.train.convolutions import tune_convolutions
from slurm_train.train.ddp import COUNT, LOSS, NON_FINITE, SQUARES, STOP, TrainingModule, build_ddp, send_bfloat16
from slurm_train.train.device_copies import DeviceCopies
from slurm_train.train.held import HeldModel
from slurm_train.train.inputs import ModelInputs, require_cuttable
from slurm_train.train.preserve import preserved
from slurm_train.train.samples import note_of_batch_norms

# The training ends where more than this share of the samples is cut to the model's context, counted over this many at
# least.
_LEAST_SAMPLES = 100
_LARGEST_SHARE_CUT = 0.5


class Passes(HeldModel):
    """Forward and backward passes of a rank; base class of the three kinds.

    Args:
        rank: this rank.
        inputs: how batches get to its model.
        objective: the loss around it.
        num_averaged: number of ranks that have different items; reduced values are averaged over them.
        pipeline: this rank's stages; None where every rank computes all layers.
    """

    ddp: DistributedDataParallel | None = None
    """DDP's wrapper around the model; None without DDP."""

    def __init__(
        self,
        rank: Rank,
        *,
        inputs: ModelInputs,
        objective: Objective,
        num_averaged: int,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__(rank, inputs=inputs, objective=objective, pipeline=pipeline)
        self.num_averaged = num_averaged
        self.data_wait_s = 0.0
        """Seconds that steps have waited for data on this rank."""
        self.num_cut = 0
        """Samples of this rank that were longer than the model's table of positions."""
        self._num_seen = 0
        self._device = rank.device
        self._norm_type = _norm_type(objective.parameters())
        health = rank.config.health
        # A loss scale that is too large skips a step, too.
        may_skip = "skip" in (health.on_non_finite, health.on_spike) or rank.autocast is torch.float16
        self.buffers = SharedBuffers(objective, may_skip=may_skip)
        """Buffers of the model; all ranks have the same values when a step begins."""
        self._mark = rank.heartbeat.mark
        self._clock = rank.heartbeat.clock
        self._accumulation = rank.plan.accumulation
        self._copies = DeviceCopies(rank.device) if rank.device.type == "cuda" else None

    def check_first_batch(self, batch: Batch) -> str | None:
        """Prepares the first step; returns a note for the user, if there is one. Collective.

        Args:
            batch: a micro-batch on the CPU.

        Raises:
            ConfigError: the model cannot be trained with such batches, the layout cannot cut them, or the model itself
                computes another loss for them.
        """
        require_cuttable(batch, self._rank.layout)
        objective = self.objective
        self._inputs.keep_floats(objective.model, batch)
        loss = objective.choose(batch)
        loss.check_batch(batch)
        notes = [loss.other_loss(batch)]
        if not self.is_cut:
            samples = self.few_of(batch)
            tolerance = TOLERANCE if self._rank.autocast is None else LOW_TOLERANCE
            with preserved(objective.model), self._inputs.in_precision(), torch.no_grad():
                loss.check_documents(samples)
                notes.append(loss.check_scores(samples, labels_in(batch)))
                notes.append(loss.compare(samples, tolerance=tolerance))
            if not has_lists(batch):
                notes.append(tune_convolutions(self._rank, objective, samples, inputs=self._inputs))
        first: Any = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        global_size = self._rank.plan.global_size
        notes.append(note_of_batch_norms(objective.model, local_size=len(first), global_size=global_size))
        if isinstance(batch, dict):
            notes.append(objective.call.agree(gather(objective.call.repeats)))
        return "; ".join(filter(None, notes)) or None

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients of one step's micro-batches. Collective.

        Args:
            batches: gives this rank's micro-batches on the CPU.
            num_batches: global batches of the step.
        """
        raise NotImplementedError

    def reduce(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Exchanges what `run` has added up. Collective.

        Args:
            parameters: those of the optimizer, in its order.

        Returns:
            This rank's parts of the gradients, averaged over `num_averaged` ranks; parameters without one are left out.
            The agreed numbers (4,), averaged likewise. The norm of the whole gradient over all ranks, a scalar.
        """
        raise NotImplementedError

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns all parameters of this rank's part of the model."""
        named: list[tuple[str, nn.Parameter]] = list(self.objective.named_parameters())
        return named

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        """Returns the Euclidean norm of each gradient, float (n,) on their device; at least float32."""
        return torch.stack(torch._foreach_norm(gradients, 2, self._norm_type))

    def frozen_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of this rank's part that are not trained."""
        return [parameter for _, parameter in self.named_parameters() if not parameter.requires_grad]

    def forget(self) -> None:
        """Drops what the step has left, but for the gradients of the model."""

    def next_batch(self, batches: Iterator[MicroBatch]) -> Any:
        """Returns the next micro-batch on the device, and adds the time that the step has waited for it."""
        self._mark("data")
        start = self._clock()
        tensors: Any = next(batches).tensors
        self.data_wait_s += self._clock() - start
        self._mark("step")
        if self.objective.call.own_loss.context is not None:
            self._count_long(tensors)
        tensors = self._inputs.own_part(tensors)
        if self._copies is None:
            return tensors
        return self._copies.copy(tensors, image_format=self._inputs.image_format)

    def _count_long(self, batch: Batch) -> None:
        """Counts samples that the objective cuts, since the model has no positions for their last tokens.

        Raises:
            DataError: more than half of the samples are cut.
        """
        first_tensor = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        self._num_seen += len(first_tensor)
        num_long = self.objective.call.num_too_long(batch)
        context = self.objective.call.own_loss.context
        if num_long and not self.num_cut:
            self._rank.say(
                f"samples have more than the {context} tokens that the model has positions for: they are cut"
            )
        self.num_cut += num_long
        if self._num_seen >= _LEAST_SAMPLES and self.num_cut > _LARGEST_SHARE_CUT * self._num_seen:
            raise DataError(
                f"{self.num_cut} of {self._num_seen} samples have more than the {context} tokens that the model has "
                "positions for, and lose their ends",
                hint="cut the samples into pieces of that length, or take a model with more positions",
            )


class ReplicaPasses(Passes):
    """Every rank has the whole model: DDP averages gradients and agreed numbers in the backward pass.

    Args:
        rank: this rank.
        inputs: how batches get to its model.
        module: the module that DDP wraps.
        ddp: the wrapper; None for one rank, which exchanges nothing.
        order: that of DDP's buckets in the run's first step.
    """

    def __init__(
        self,
        rank: Rank,
        inputs: ModelInputs,
        module: TrainingModule,
        ddp: DistributedDataParallel | None,
        *,
        order: RecordedOrder,
    ) -> None:
        objective: Any = module.objective
        super().__init__(rank, inputs=inputs, objective=objective, num_averaged=rank.place.world_size)
        self.ddp = ddp
        self._compute: nn.Module = ddp or module
        # Looked up once: a module's attributes cost half a microsecond each time.
        self._module = module
        self._stats_param = module.stats_param
        self._order = None if ddp is None else BucketOrder(ddp, order)
        # DDP learns a static graph in the first backward pass, and torch (2.13) asserts that this pass exchanges. To
        # reduce after every micro-batch gives the same gradient, so the first step does that with a static graph.
        self._may_accumulate = ddp is None or not ddp.static_graph
        self._has_sparse = any(getattr(part, "sparse", False) is True for part in module.modules())
        settings = rank.config.ddp
        self._may_lack_gradients = settings.find_unused_parameters or settings.static_graph

    def check_first_batch(self, batch: Batch) -> str | None:
        """Checks the model with a micro-batch, and restores the order of DDP's buckets. Collective."""
        note = super().check_first_batch(batch)
        if self._order is not None and self._order.repeat():
            self._may_accumulate = True
        return note

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients; they are exchanged in the backward pass of the last micro-batch."""
        self.buffers.take_first_ranks()
        for _ in range(self._accumulation * num_batches - 1):
            with self._without_exchange():
                self._module.backward(self._compute(self.next_batch(batches)))
        with self._with_order_recorded():
            self._module.backward(self._compute(self.next_batch(batches)))
        self._may_accumulate = True

    def _without_exchange(self) -> contextlib.AbstractContextManager[Any]:
        if self.ddp is None or not self._may_accumulate:
            return contextlib.nullcontext()
        return self.ddp.no_sync()

    def _with_order_recorded(self) -> contextlib.AbstractContextManager[Any]:
        if self._order is None or not self._order.is_missing:
            return contextlib.nullcontext()
        return self._order.recorded()

    def reduce(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns gradients, numbers and norm; the backward pass has exchanged them.

        Raises:
            ConfigError: parameters are unused, and `ddp.find_unused_parameters` is not set; or parameters were frozen
                since the training began.
        """
        if self._has_sparse:
            # Norm, clipping and division need dense gradients.
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len(gradients) < len(parameters) and not self._may_lack_gradients:
            # DDP has not exchanged the buckets with these parameters; it would raise an error in the next step only.
            raise self._unused_error(parameters)
        numbers = self._stats_param.grad
        assert numbers is not None
        # What torch.nn.utils.get_total_norm computes for one device, without sorting the gradients by device and type
        # again at every step (30 us).
        return gradients, numbers, torch.linalg.vector_norm(self._norms(gradients))

    def _unused_error(self, parameters: Sequence[Tensor]) -> ConfigError:
        """Returns the error for trained parameters that got no gradient: frozen by the program meanwhile, or unused."""
        without_gradient = {
            name: parameter for name, parameter in self._module.named_parameters() if parameter.grad is None
        }
        unused = [name for name, parameter in without_gradient.items() if parameter.requires_grad]
        if not unused:
            trained = {id(parameter) for parameter in parameters}
            frozen = [name for name, parameter in without_gradient.items() if id(parameter) in trained]
            return changed_error(frozen, "is frozen")
        shown = shorten(name.removeprefix("objective.model.") for name in unused)
        return ConfigError(
            f"the loss does not depend on {len(unused)} parameters of the model: {shown}",
            hint="if they give scores of a second head, define training_loss(batch) on the model; if they are meant to "
            "be left out, set ddp.find_unused_parameters=true, or freeze what is never used: requires_grad_(False)",
        )

    def forget(self) -> None:
        """Drops the numbers, and completes the order of DDP's buckets after a first step. Collective."""
        self._stats_param.grad = None
        if self._order is not None:
            self._order.complete()


class ShardPasses(Passes):
    """Ranks hold parts of the model: FSDP reduces gradients, and five numbers have an exchange of their own.

    The fifth number is the sum of the squares of all gradients. Where several ranks hold the same items or the same
    part of a gradient, one of them adds to a number, or each a share, so nothing counts twice.

    Args:
        rank: this rank.
        inputs: how batches get to its model.
        model: its part of the model.
        objective: the loss around it.
        parameters: those of the optimizer, in its order.
        factor: factor of the losses that are back-propagated (`LossScale`), None for 1.
        pipeline: this rank's stages; None where every rank computes all layers.
    """

    def __init__(
        self,
        rank: Rank,
        inputs: ModelInputs,
        *,
        model: nn.Module,
        objective: Objective,
        parameters: Sequence[Tensor],
        factor: Tensor | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        layout = rank.layout
        super().__init__(rank, inputs=inputs, objective=objective, num_averaged=layout.reducing_size, pipeline=pipeline)
        self._sharded: Any = model if hasattr(model, "set_requires_all_reduce") else None
        self._scales = ScalesOfStep(model)
        self._factor = factor
        self._owns_items = layout.owns_items(rank.place.rank)
        self._shares = [_share_of_squares(parameter, layout) for parameter in parameters]
        # With sequence parallelism the gradient of these is a sum over this rank's own positions.
        of_own_positions, self._positions_group = own_positions(model)
        self._of_own_positions = {
            number for number, parameter in enumerate(parameters) if parameter in of_own_positions
        }
        whole, self._reducing_groups = whole_parameters(model)
        self._whole = [parameter for parameter in parameters if parameter in whole]
        # Numbers of the parameters that had a gradient in the step before, and the shares of their squares.
        self._with_gradient: list[int] = []
        self._shares_on_device = torch.zeros(0)
        self._values = self._no_values()

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients, one micro-batch after the other."""
        self.buffers.take_first_ranks()
        with self._scales.computed():
            self._run(batches, num_batches=num_batches)

    def _run(self, batches: Iterator[MicroBatch], *, num_batches: int) -> None:
        values = self._no_values()
        for number in range(self._accumulation * num_batches, 0, -1):
            tensors = self.next_batch(batches)
            # Shards are reduced in every backward pass, since a whole gradient would have to stay otherwise; copies of
            # shards (HSDP) are reduced once. Each pass is also completed: after one that is not, FSDP prefetches blocks
            # in the wrong order.
            if self._sharded is not None:
                self._sharded.set_requires_all_reduce(number == 1)
            with self._inputs.in_precision():
                loss, count = self.objective(tensors)
            loss.backward(self._factor)
            if self._owns_items:
                values[COUNT] += count
                values[LOSS] += loss.detach()
                values[NON_FINITE] += loss.detach().isfinite().logical_not()
        self._values = values

    def reduce(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns this rank's parts of the gradients, the numbers, and the norm of the whole gradient. Collective."""
        values = self._values
        if self._rank.stop.requested:
            values[STOP] = 1.0
        if self._whole:
            self._average_whole()
        with_gradient = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
        gradients = [local_part(_gradient_as_parameter(parameters[number])) for number in with_gradient]
        if self._of_own_positions:
            numbered = zip(with_gradient, gradients, strict=True)
            partial_sums = [gradient for number, gradient in numbered if number in self._of_own_positions]
            self._add_up(partial_sums, groups=[self._positions_group])
        if gradients:
            norms = self._norms(gradients).double()
            if with_gradient != self._with_gradient:
                # Kept between steps, since the host waits for the copy to a GPU.
                shares = [self._shares[number] for number in with_gradient]
                self._with_gradient = with_gradient
                # Offloaded gradients are on the host, and so are their norms.
                self._shares_on_device = torch.tensor(shares, dtype=norms.dtype, device=norms.device)
            values[SQUARES] = (norms.square() * self._shares_on_device).sum().to(values.device)
        dist.all_reduce(values)
        return gradients, values[:SQUARES] / self.num_averaged, values[SQUARES].sqrt()

    def _average_whole(self) -> None:
        """Averages the gradients of parameters that FSDP ignores, as FSDP averages those of shards. Collective."""
        gradients = []
        for parameter in self._whole:
            if parameter.grad is None:
                # Another rank may have a gradient, and all ranks have to join in the same exchange.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self._add_up(gradients, groups=self._reducing_groups)
        torch._foreach_div_(gradients, self.num_averaged)

    def _add_up(self, gradients: Sequence[Tensor], *, groups: Sequence[str]) -> None:
        """Adds up gradients over the ranks of each group, in place. Collective; one exchange for each group."""
        # Offloaded gradients are on the host.
        whole = torch.cat([gradient.flatten() for gradient in gradients]).to(self._device)
        for name in groups:
            dist.all_reduce(whole, group=group_named(name))
        parts = torch.split(whole, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _no_values(self) -> Tensor:
        return torch.zeros(5, dtype=torch.float64, device=self._device)


class PipelinePasses(ShardPasses):
    """Stages of a pipeline: torch's schedule runs the passes over all micro-batches; the last stage has the losses.

    Args:
        rank: this rank.
        inputs: how batches get to its model.
        pipeline: its stages.
        **keywords: those of `ShardPasses`.
    """

    def __init__(self, rank: Rank, inputs: ModelInputs, pipeline: Pipeline, **keywords: Any) -> None:
        super().__init__(rank, inputs, pipeline=pipeline, **keywords)
        name = rank.config.parallel.pipeline_schedule
        self._schedule = pipeline.build_schedule(name=name, num_batches=self._accumulation, loss=self._scaled_loss)
        self._stages = pipeline
        # Lets a schedule free scores before the step ends; older torch always keeps them.
        has_option = "return_outputs" in inspect.signature(self._schedule.step).parameters
        self._options: dict[str, Any] = {"return_outputs": False} if has_option else {}

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients; all micro-batches of the step are in the pipeline at once."""
        assert num_batches == 1, "the schedule has a fixed number of micro-batches"
        taken = [self.next_batch(batches) for _ in range(self._accumulation)]
        inputs, targets, *positions = (torch.cat(parts) for parts in zip(*taken, strict=True))
        losses: list[Tensor] = []
        arguments = [inputs] if self._stages.is_first else []
        keywords = dict(self._options)
        if positions:
            # Every stage has attention.
            keywords["position_ids"] = positions[0]
        if self._stages.is_last:
            keywords |= {"target": targets, "losses": losses}
            if self.objective.call.takes_targets:
                keywords["targets"] = targets
        with self._scales.computed(), self._inputs.in_precision():
            self._schedule.step(*arguments, **keywords)
        values = self._no_values()
        if self._owns_items:
            all_losses = torch.stack([loss.detach().double() for loss in losses])
            values[COUNT] = num_counted(targets)
            values[LOSS] = all_losses.sum() if self._factor is None else all_losses.sum() / self._factor
            values[NON_FINITE] = all_losses.isfinite().logical_not().sum()
        self._values = values

    def _scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.objective.scores.loss_of(outputs, targets)[0]
        # A schedule that cuts the backward pass in two detaches the loss in place, which a view does not allow.
        return loss.clone() if self._factor is None else loss * self._factor


def build_passes(parts: Parts, objective: Objective, *, factor: torch.Tensor | None, order: RecordedOrder) -> Passes:
    """Returns the passes for the run's layout. Collective.

    Args:
        parts: model, optimizer and data of this rank.
        objective: the loss around the model.
        factor: factor of the losses that are back-propagated; None for 1.
        order: that of DDP's buckets in the run's first step.
    """
    rank = parts.rank
    if rank.layout.is_replicated:
        module = TrainingModule(objective, stop=rank.stop, device=rank.device, autocast=rank.autocast, factor=factor)
        ddp = None
        # DDP copies gradients into its buckets and cuts compiled graphs, so a single rank does without.
        if rank.place.world_size > 1:
            ddp = build_ddp(module, ddp=rank.config.ddp, device=rank.device)
            if rank.config.ddp.comm == "bf16":
                send_bfloat16(ddp, module.stats_param)
        return ReplicaPasses(rank, parts.inputs, module, ddp, order=order)
    parameters = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
    keywords: dict[str, Any] = {
        "model": parts.model,
        "objective": objective,
        "parameters": parameters,
        "factor": factor,
    }
    if parts.pipeline is None:
        return ShardPasses(rank, parts.inputs, **keywords)
    return PipelinePasses(rank, parts.inputs, parts.pipeline, **keywords)


def changed_error(names: Sequence[str], change: str) -> ConfigError:
    """Returns the error for parameters that were frozen or unfrozen after the training began."""
    shown = shorten(name.removeprefix("objective.").removeprefix("model.") for name in names)
    return ConfigError(
        f"{shown} {change} since the training began: {len(names)} parameters, and the optimizer and the "
        "exchange between ranks have those that required a gradient at the start",
        hint="choose the trained parameters in the constructor of the model; for another choice later start a second "
        "run with train.init_from",
    )


def _norm_type(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """Returns the type in which the norms of gradients are computed, None for the gradients' own.

    It is at least float32, since norms decide about clipping, and at least that of each trained parameter.
    """
    types = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if types <= {torch.float32} or any(dtype.is_complex for dtype in types):
        return None
    return functools.reduce(torch.promote_types, types, torch.float32)


def _gradient_as_parameter(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter, laid out as the parameter is.

    The gradient of a bias after a sum over positions is a partial sum; FSDP adds those up itself, else it is done here.
    """
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    laid_out: Tensor = gradient
    return laid_out


def _share_of_squares(parameter: Tensor, layout: ParallelLayout) -> float:
    """Returns the share of its gradient's squares that a rank adds: 1 / (number of ranks with the same part of it)."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    placements = getattr(parameter, "placements", ())
    parts = math.prod(mesh.size(axis) for axis, place in enumerate(placements) if not place.is_replicate())
    share: float = parts * layout.pp / layout.world_size
    return share
