"""One optimizer step: forward and backward passes over micro-batches, one exchange, one division, one update.

Every step the ranks agree on a stop, on the number of items and on whether anything is not finite, and the log wants
the sum of the losses. Each rank back-propagates sums; what `reduce` gives is averaged over the ranks that have
different items, gradients and numbers alike, so one divisor makes gradients those of the mean over all items, and clips
them; the update applies it, so they are touched once.

`ReplicaPasses` is DDP over whole models, `ShardPasses` FSDP2, HSDP, tensor and context parallel, `PipelinePasses`
stages. Nothing waits for a GPU: its reduced values are copied during the next step's work and read one step late, by
every rank alike. A step that is not finite is never applied: on the CPU the host sees it first, on a GPU the update
itself is masked. Parameters that are offloaded to the host are updated as on the CPU.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_train.checkpoint.state import local_part
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import DdpSection
from slurm_train.data.batches import MicroBatch
from slurm_train.data.source import IGNORED, Batch, is_nested, map_tensors
from slurm_train.distributed.parallelize import own_positions, whole_parameters
from slurm_train.distributed.pipeline import Pipeline
from slurm_train.errors import ConfigError, DataError
from slurm_train.models.head import group_named
from slurm_train.session.signals import StopFlag
from slurm_train.train.buckets import BucketOrder
from slurm_train.train.buffers import SharedBuffers
from slurm_train.train.context import Rank, gather
from slurm_train.train.loss_scale import LossScale
from slurm_train.train.optimizer import LR_SCALE, Update
from slurm_train.train.preserve import preserved

STOP, COUNT, LOSS, NON_FINITE, SQUARES = range(5)
"""The agreed numbers: ranks asked to stop, items, sum of losses, micro-batches with a non-finite loss. With shards also
the sum of the squared gradients."""
_EPSILON = 1e-6
_NORM, _SKIPPED, _OVERFLOWED = 4, 5, 6
_NUM_NAMED = 5
# Of so many samples at least, more than this share may not be longer than the model's context.
_ENOUGH_SEEN, _MOST_CUT = 100, 0.5
_NUM_COMPARED = 2
"""Samples that a model's own loss is compared with before the first step."""


class TrainingModule(nn.Module):
    """The module that DDP sees: calling it gives the summed loss of one micro-batch, `backward` its gradients.

    A parameter of four zeros, `stats_param`, is a second root of the backward pass, with the four agreed numbers as its
    gradient; DDP reduces it with the last layer's gradients, in a bucket that is sent anyway. No collective and no
    operation is added, and no rank can act on a value that another rank did not see. It is no part of the model: the
    optimizer does not get it and checkpoints do not have it. It is registered last, which puts it into the first bucket
    that DDP sends.

    Args:
        objective: gives (sum of losses, number of items) of a batch; already compiled, if it is to be.
        stop: this rank's stop flag.
        device: where the model is.
        autocast: lower precision of the forward pass, None for none.
        factor: of the losses that are back-propagated (`LossScale`), None for 1.
    """

    def __init__(
        self,
        objective: nn.Module,
        *,
        stop: StopFlag,
        device: torch.device,
        autocast: torch.dtype | None,
        factor: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.objective = objective
        self.stop = stop
        self.autocast = autocast
        self.is_searched = False
        """DDP looks through the graph of the loss for the parameters that are used."""
        # The parameters' own type, so that it shares their bucket, but never below float32: a bfloat16 number cannot
        # count to 300. A model in bfloat16 pays for a small bucket of its own.
        first = next((parameter for parameter in objective.parameters() if parameter.requires_grad), None)
        dtype = torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
        self.stats_param = nn.Parameter(torch.zeros(4, dtype=dtype, device=device))
        self._values = torch.zeros_like(self.stats_param, requires_grad=False)
        self._factor = torch.ones((), device=device) if factor is None else factor
        # Writing through numpy costs a tenth of a tensor operation; only the CPU has it.
        self._host_values: Any = self._values.numpy() if device.type == "cpu" else None

    def forward(self, batch: Batch) -> Tensor:
        """Returns the sum of the loss over this rank's micro-batch (a scalar)."""
        if self.autocast is None:
            loss, count = self.objective(batch)
        else:
            with torch.autocast(self.stats_param.device.type, dtype=self.autocast):
                loss, count = self.objective(batch)
        self._note(loss, count)
        # DDP must find the numbers, too: adding nothing changes neither loss nor gradients.
        total: Tensor = loss + 0 * self.stats_param.sum() if self.is_searched else loss
        return total

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss that calling this module (through DDP) gave, and the four numbers."""
        torch.autograd.backward((loss, self.stats_param), (self._factor, self._values))

    def _note(self, loss: Tensor, count: Tensor) -> None:
        if (host := self._host_values) is not None:
            host[STOP] = self.stop.requested
            host[COUNT] = float(count)
            host[LOSS] = value = loss.item()
            host[NON_FINITE] = not math.isfinite(value)
            return
        # A new tensor each time: the one before may still be under way.
        self._values = torch.zeros_like(self.stats_param, requires_grad=False)
        if self.stop.requested:
            self._values[STOP] = 1.0
        self._values[COUNT] = count
        self._values[LOSS] = loss.detach()
        self._values[NON_FINITE] = loss.detach().isfinite().logical_not()


class Passes:
    """What all kinds of passes have in common.

    Args:
        rank: this rank.
        objective: the loss around its model.
        num_averaged: ranks that have different items, over which what is reduced is averaged.
    """

    ddp: DistributedDataParallel | None = None
    """What is wrapped around the model, if it is DDP."""

    def __init__(self, rank: Rank, *, objective: nn.Module, num_averaged: int) -> None:
        self.num_averaged = num_averaged
        self.data_wait_s = 0.0
        """Seconds that steps have waited for data on this rank."""
        self.num_cut = 0
        """Samples of this rank that were longer than the model's table of positions."""
        self._num_seen = 0
        self._say: Callable[[str], None] = partial(print, file=sys.stderr) if rank.place.is_first else lambda _: None
        self._rank, self._part, self._device = rank, rank.sequence_part, rank.device
        self._objective: Any = objective
        self.buffers = SharedBuffers(objective)
        """Those that all ranks have alike when a step begins."""
        self._mark, self._clock = rank.heartbeat.mark, rank.heartbeat.clock
        self._accumulation = rank.plan.accumulation
        self._copies = DeviceCopies(rank.device) if rank.device.type == "cuda" else None

    @property
    def bucket_order(self) -> list[int]:
        """The order of DDP's buckets, for checkpoints; empty where there is none."""
        return []

    def arrange(self, batch: Batch, *, bucket_order: Sequence[int] = ()) -> str | None:
        """Gets ready before the first step; returns a line to say. Collective.

        Args:
            batch: a micro-batch on the CPU.
            bucket_order: what a checkpoint has kept; empty at the beginning of a run.

        Raises:
            ConfigError: the model cannot be trained with it, its layout cannot cut it, or the model computes another
                loss of it.
        """
        del bucket_order
        layout = self._rank.layout
        if isinstance(batch, dict) and layout.pp * layout.cp > 1:
            raise ConfigError(
                f"batches are dicts ({', '.join(batch)}), which a layout of {layout} cannot cut",
                hint="let the data set give tuples (inputs, targets), or leave parallel.pp and parallel.cp at 1",
            )
        if is_nested(batch):
            self._require_lists_fit()
        objective = self._objective
        objective.look_at(batch)
        if layout.pp * layout.cp == 1 and not is_nested(batch):
            some = to_device(map_tensors(lambda tensor: tensor[:_NUM_COMPARED], batch), self._device)
            with preserved(objective.model), in_precision(self._device, self._rank.forward_autocast):
                objective.compare(some, is_precise=self._rank.autocast is None)
        note: str | None = objective.agree(gather(objective.repeats)) if isinstance(batch, dict) else None
        return note

    def _require_lists_fit(self) -> None:
        """Checks that the layout leaves lists of tensors as they are.

        Raises:
            ConfigError: it would cut them, or round coordinates of boxes to bfloat16.
        """
        layout = self._rank.layout
        if layout.pp * layout.cp > 1:
            raise ConfigError(
                f"a batch has lists of tensors, which a layout of {layout} cannot cut",
                hint="leave parallel.pp and parallel.cp at 1",
            )
        if self._rank.casts_shards:
            raise ConfigError(
                "a batch has lists of tensors, and shards that are gathered in bfloat16 round all inputs, targets too",
                hint="set parallel.gather_dtype=float32, or define training_loss(batch) on the model",
            )

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients of one step's micro-batches, those of so many global batches. Collective."""
        raise NotImplementedError

    def reduce(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns this rank's parts of the gradients, the four agreed numbers, and the norm of all gradients.

        Collective.
        """
        raise NotImplementedError

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns all parameters of this rank's part of the model."""
        named: list[tuple[str, nn.Parameter]] = list(self._objective.named_parameters())
        return named

    def frozen_parameters(self) -> list[nn.Parameter]:
        """Returns those that are not trained."""
        return [parameter for _, parameter in self.named_parameters() if not parameter.requires_grad]

    def forget(self) -> None:
        """Drops what the step left apart from the gradients of the model."""

    def take(self, batches: Iterator[MicroBatch]) -> Any:
        """Returns the next micro-batch on the device, and counts the time that it took to come."""
        self._mark("data")
        start = self._clock()
        tensors: Any = next(batches).tensors
        self.data_wait_s += self._clock() - start
        self._mark("step")
        if self._objective.own.context is not None:
            self._count_long(tensors)
        if self._part is not None:
            tensors = self._part.cut(tensors)
        return tensors if self._copies is None else self._copies(tensors)

    def _count_long(self, batch: Batch) -> None:
        """Counts samples that the objective cuts, since the model has no position for their last tokens.

        Raises:
            DataError: it is most of them.
        """
        self._num_seen += len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
        num_long = self._objective.num_too_long(batch)
        context = self._objective.own.context
        if num_long and not self.num_cut:
            self._say(f"samples have more than the {context} tokens that the model has positions for: they are cut")
        self.num_cut += num_long
        if self._num_seen >= _ENOUGH_SEEN and self.num_cut > _MOST_CUT * self._num_seen:
            raise DataError(
                f"{self.num_cut} of {self._num_seen} samples have more than the {context} tokens that the model has "
                "positions for, and lose their ends",
                hint="cut the samples into pieces of that length, or take a model with more positions",
            )


class ReplicaPasses(Passes):
    """Every rank has the whole model: DDP adds up gradients and the four numbers as they come.

    Args:
        rank: this rank.
        module: what is wrapped.
        ddp: the wrapper; None for one rank, which exchanges nothing.
    """

    def __init__(self, rank: Rank, module: TrainingModule, ddp: DistributedDataParallel | None) -> None:
        super().__init__(rank, objective=module.objective, num_averaged=rank.place.world_size)
        self.ddp = ddp
        self._compute: nn.Module = ddp or module
        # Looked up once: a module's attributes cost half a microsecond each time.
        self._module, self._stats_param = module, module.stats_param
        self._order = None if ddp is None else BucketOrder(ddp)
        # A static graph is learnt in the first backward pass, and torch asserts that it is a synchronised one (2.13).
        # Reducing after every micro-batch gives the same gradient, so the first step does that with a static graph.
        self._may_accumulate = ddp is None or not ddp.static_graph
        self._has_sparse = any(getattr(part, "sparse", False) is True for part in module.modules())
        settings = rank.config.ddp
        self._may_lack = settings.find_unused_parameters or settings.static_graph

    @property
    def bucket_order(self) -> list[int]:
        """The order of DDP's buckets, for checkpoints; empty where there is none."""
        return [] if self._order is None else self._order.numbers

    def arrange(self, batch: Batch, *, bucket_order: Sequence[int] = ()) -> str | None:
        """Checks the model with a micro-batch, and orders DDP's buckets as before an interruption. Collective."""
        note = super().arrange(batch, bucket_order=bucket_order)
        if self._order is not None and self._order.repeat(bucket_order):
            self._may_accumulate = True
        return note

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients; those of all micro-batches are sent with the last one."""
        self.buffers.take_first_ranks()
        for _ in range(self._accumulation * num_batches - 1):
            with self.ddp.no_sync() if self.ddp and self._may_accumulate else contextlib.nullcontext():
                self._module.backward(self._compute(self.take(batches)))
        with self._order.recorded() if self._order and self._order.is_missing else contextlib.nullcontext():
            self._module.backward(self._compute(self.take(batches)))
        self._may_accumulate = True

    def reduce(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns gradients, numbers and norm; they have been exchanged already.

        Raises:
            ConfigError: parameters are unused, and `ddp.find_unused_parameters` is not set.
        """
        if self._has_sparse:
            # Norm, clipping and division are over all numbers of a gradient.
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        if len(gradients) < len(parameters) and not self._may_lack:
            # DDP has not exchanged the buckets that they are in; by itself it raises in the next step.
            named = [(name, parameter) for name, parameter in self._module.named_parameters() if parameter.grad is None]
            names = [name for name, parameter in named if parameter.requires_grad]
            if not names:
                chosen = {id(parameter) for parameter in parameters}
                raise _changed_error([name for name, parameter in named if id(parameter) in chosen], "is frozen")
            raise ConfigError(
                f"the loss does not depend on {len(names)} parameters of the model, among them "
                + ", ".join(name.removeprefix("objective.model.") for name in names[:_NUM_NAMED]),
                hint="if that is meant, set ddp.find_unused_parameters=true, or freeze what is never used: "
                "requires_grad_(False)",
            )
        numbers = self._stats_param.grad
        assert numbers is not None
        # What torch.nn.utils.get_total_norm computes for one device, without sorting the gradients by device and type
        # again at every step (30 us).
        return gradients, numbers, torch.linalg.vector_norm(_norms(gradients))

    def forget(self) -> None:
        """Drops the numbers."""
        self._stats_param.grad = None


class ShardPasses(Passes):
    """Ranks hold parts of the model; five numbers travel in one exchange of their own after the backward pass.

    A rank adds to a number only where it is the one that counts for it, so nothing that several ranks hold alike counts
    twice.

    Args:
        rank: this rank.
        model: its part of the model.
        objective: the loss around it.
        parameters: what the optimizer has, in its order.
        factor: of the losses that are back-propagated (`LossScale`), None for 1.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        model: nn.Module,
        objective: nn.Module,
        parameters: Sequence[Tensor],
        factor: Tensor | None = None,
    ) -> None:
        layout = rank.layout
        super().__init__(rank, objective=objective, num_averaged=layout.reducing_size)
        self._sharded: Any = model if hasattr(model, "set_requires_all_reduce") else None
        self._autocast, self._factor = rank.forward_autocast, factor
        self._counts = layout.owns_items(rank.place.rank)
        self._shares = [_weight(parameter, layout) for parameter in parameters]
        of_positions, self._positions_group = own_positions(model)
        self._of_positions = {number for number, parameter in enumerate(parameters) if parameter in of_positions}
        whole, self._reducing_groups = whole_parameters(model)
        self._whole = [parameter for parameter in parameters if parameter in whole]
        self._found: list[int] = []
        self._values = self._no_values()

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients, one micro-batch after the other."""
        self.buffers.take_first_ranks()
        values = self._no_values()
        for number in range(self._accumulation * num_batches, 0, -1):
            tensors = self.take(batches)
            # Shards are reduced in every backward pass, or a whole gradient would have to stay; copies of shards once.
            # Each pass is closed, too: of one that is not, FSDP prefetches blocks in the next pass that come later.
            if self._sharded is not None:
                self._sharded.set_requires_all_reduce(number == 1)
            with in_precision(self._device, self._autocast):
                loss, count = self._objective(tensors)
            loss.backward(self._factor)
            if self._counts:
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
        found = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
        gradients = [local_part(_settled(parameters[number])) for number in found]
        if self._of_positions:
            of_positions = [
                gradient for number, gradient in zip(found, gradients, strict=True) if number in self._of_positions
            ]
            self._add_up(of_positions, groups=[self._positions_group])
        if gradients:
            norms = _norms(gradients).double()
            if found != self._found:
                # Kept, since a copy to a GPU is waited for. Gradients that are offloaded are on the host.
                shares = [self._shares[number] for number in found]
                self._found, self._weights = found, torch.tensor(shares, dtype=norms.dtype, device=norms.device)
            values[SQUARES] = (norms.square() * self._weights).sum().to(values.device)
        dist.all_reduce(values)
        return gradients, values[:SQUARES] / self.num_averaged, values[SQUARES].sqrt()

    def _average_whole(self) -> None:
        """Averages the gradients of parameters that FSDP passes over, as it does those of shards. Collective."""
        gradients = []
        for parameter in self._whole:
            if parameter.grad is None:
                # Another rank may have one, and all have to make the same exchange.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self._add_up(gradients, groups=self._reducing_groups)
        torch._foreach_div_(gradients, self.num_averaged)

    def _add_up(self, gradients: Sequence[Tensor], *, groups: Sequence[str]) -> None:
        """Adds up, in place and in one exchange with each group, gradients of which each rank has a part."""
        # Those that are offloaded are on the host.
        whole = torch.cat([gradient.flatten() for gradient in gradients]).to(self._device)
        for name in groups:
            dist.all_reduce(whole, group=group_named(name))
        parts = torch.split(whole, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _no_values(self) -> Tensor:
        return torch.zeros(5, dtype=torch.float64, device=self._device)


class PipelinePasses(ShardPasses):
    """Forward and backward are torch's schedule over the micro-batches of the accumulation; the last stage has losses.

    Args:
        rank: this rank.
        pipeline: its stages.
        **how: as for `ShardPasses`.
    """

    def __init__(self, rank: Rank, pipeline: Pipeline, **how: Any) -> None:
        super().__init__(rank, **how)
        name = rank.config.parallel.pipeline_schedule
        self._schedule = pipeline.build_schedule(name=name, num_batches=self._accumulation, loss=self._scaled_loss)
        self._pipeline = pipeline
        # Lets a schedule give up scores before the step ends; older torch keeps them always.
        has_option = "return_outputs" in inspect.signature(self._schedule.step).parameters
        self._options = {"return_outputs": False} if has_option else {}

    def run(self, batches: Iterator[MicroBatch], *, num_batches: int = 1) -> None:
        """Adds up the gradients; all micro-batches of the step are under way at once."""
        assert num_batches == 1, "the schedule has a fixed number of micro-batches"
        taken = [self.take(batches) for _ in range(self._accumulation)]
        inputs, targets = (torch.cat(parts) for parts in zip(*taken, strict=True))
        is_last = self._pipeline.is_last
        losses: list[Tensor] = []
        with in_precision(self._device, self._autocast):
            self._schedule.step(
                *((inputs,) if self._pipeline.is_first else ()),
                target=targets if is_last else None,
                losses=losses if is_last else None,
                **({"targets": targets} if is_last and self._objective.takes_targets else {}),
                **self._options,
            )
        self._values = values = self._no_values()
        if self._counts:
            found = torch.stack([loss.detach().double() for loss in losses])
            values[COUNT] = targets.numel() if targets.is_floating_point() else (targets != IGNORED).sum()
            values[LOSS] = found.sum() if self._factor is None else found.sum() / self._factor
            values[NON_FINITE] = found.isfinite().logical_not().sum()

    def _scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._objective.loss_of(outputs, targets)[0]
        # A schedule that cuts the backward pass in two detaches the loss in place, which a view does not allow.
        return loss.clone() if self._factor is None else loss * self._factor


def build_ddp(module: TrainingModule, *, ddp: DdpSection, device: torch.device) -> DistributedDataParallel:
    """Returns the module wrapped for data parallelism. Collective over all ranks.

    It does not broadcast buffers: `SharedBuffers` does, in all layouts, and leaves out what is not saved.
    """
    module.is_searched = ddp.find_unused_parameters
    # torch 2.13 renamed the option, and the old name warns.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    no_broadcast: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        **no_broadcast,
        bucket_cap_mb=ddp.bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=ddp.static_graph,
        find_unused_parameters=ddp.find_unused_parameters,
    )


def send_bfloat16(ddp: DistributedDataParallel, stats_param: nn.Parameter) -> None:
    """Has DDP round gradients to bfloat16 before it adds them up, which halves the bytes, by torch's own hook.

    The agreed numbers are sent in full beside their bucket: bfloat16 could not hold a count of items.

    Args:
        ddp: the wrapped module; it can have one hook.
        stats_param: the parameter whose gradient is the agreed numbers.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    world: Any = dist.group.WORLD

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        numbers = _gradient_in(bucket, stats_param)
        if numbers is None:
            return bf16_compress_hook(world, bucket)
        exact = numbers.clone()
        sent = dist.all_reduce(exact, async_op=True)
        numbers.zero_()
        begin = numbers.storage_offset() - bucket.buffer().storage_offset()

        def put_back(future: torch.futures.Future[Tensor]) -> Tensor:
            reduced = future.value()
            sent.wait()
            reduced[begin : begin + len(exact)] = exact.div_(world.size())
            return reduced

        return bf16_compress_hook(world, bucket).then(put_back)

    # torch looks at the hook's annotations and takes none that are text.
    ddp.register_comm_hook(None, lambda _, bucket: reduce(bucket))


def _gradient_in(bucket: Any, parameter: nn.Parameter) -> Tensor | None:
    """Returns a parameter's gradient as a view into a bucket of DDP, None if the bucket does not have it."""
    for member, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if member is parameter:
            view: Tensor = gradient
            return view
    return None


def sent_bytes(parameters: Sequence[Tensor], *, comm: str) -> float:
    """Returns the bytes of gradients that a replica passes to all-reduce per step.

    Args:
        parameters: those that are trained.
        comm: value of `ddp.comm`.
    """
    most = 2 if comm == "bf16" else 8
    return float(sum(parameter.numel() * min(parameter.element_size(), most) for parameter in parameters))


class PinnedBatches:
    """An iterator over micro-batches that puts their tensors into pinned memory, from which a GPU copies by itself.

    For the thread that reads ahead: pinning copies on the host, and would take its time from the thread that trains.

    Args:
        batches: micro-batches in host memory; only one thread touches them.
        device: the GPU that they will be copied to.
    """

    def __init__(self, batches: Iterator[MicroBatch], *, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._has_entered = False

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        batch = next(self._batches)
        if not self._has_entered:
            # A thread begins on GPU 0, and whatever touches CUDA there takes half a GB of it.
            torch.cuda.set_device(self._device)
            self._has_entered = True
        return batch._replace(tensors=map_tensors(_pinned, batch.tensors))


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()


class DeviceCopies:
    """Copies micro-batches to a GPU on a stream of their own, beside what it computes.

    On the stream of the computation a copy would begin when all that was launched before it is done.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    def __call__(self, batch: Batch) -> Batch:
        """Returns copies; what is launched from now on waits for them, and the host does not."""
        with torch.cuda.stream(self._stream):
            copies = to_device(batch, self._device)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)

        def keep(tensor: Tensor) -> Tensor:
            # Their memory belongs to the other stream, which may not give it away while it is computed with.
            tensor.record_stream(computing)
            return tensor

        return map_tensors(keep, copies)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns copies on a GPU, made while it works; on the CPU the tensors themselves."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: _pinned(tensor).to(device, non_blocking=True), batch)


def in_precision(device: torch.device, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of a forward pass's precision."""
    return torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)


def _changed_error(names: Sequence[str], change: str) -> ConfigError:
    """Returns the error for parameters that are to be trained, or not, since a later moment than the start."""
    shown = [name.removeprefix("objective.").removeprefix("model.") for name in names[:_NUM_NAMED]]
    return ConfigError(
        f"{', '.join(shown)} {change} since the training began: {len(names)} parameters, and the optimizer and the "
        "exchange between ranks have those that required a gradient at the start",
        hint="choose the trained parameters in the constructor of the model; for another choice later start a second "
        "run with train.init_from",
    )


def _norms(gradients: list[Tensor]) -> Tensor:
    """Returns the norm of each gradient; of those in bfloat16 in float32, since they decide about clipping."""
    lowered = gradients[0].dtype == torch.bfloat16
    return torch.stack(torch._foreach_norm(gradients, 2, torch.float32 if lowered else None))


def _settled(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter, laid out as the parameter is.

    That of a bias behind a sum by positions is a part of a sum; FSDP adds such up itself, else it is done here.
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


class StepFacts(NamedTuple):
    """What this rank knows of a step when it starts it."""

    step: int
    """Number of the step, from 1."""
    samples: int
    """Global samples consumed, this step included."""
    lr: float
    loss_limit: float = float("inf")
    """A loss above it is a spike."""
    size: int = 0
    """Samples of this step."""
    num_batches: int = 1
    """Global batches that they are, each of one accumulation."""


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
    """Takes optimizer steps; on a GPU it gives each step's result with the next call, or when drained.

    Args:
        rank: this rank.
        passes: forward and backward of a step's micro-batches.
        optimizer: what uses the gradients.
        before_update: on a GPU, called before the parameters change: a copy of them may be under way.
        scale: what the losses are multiplied by, with float16.
    """

    def __init__(
        self,
        rank: Rank,
        passes: Passes,
        optimizer: Optimizer,
        *,
        before_update: Callable[[], None] = lambda: None,
        scale: LossScale | None = None,
    ) -> None:
        self.passes, self.scale = passes, scale
        self.optimizer, self._update = optimizer, Update(optimizer)
        self._frozen = passes.frozen_parameters()
        # The learning rates that were set at the step before, by group.
        self._lrs: list[float] = []
        self._before_update, self._device = before_update, rank.device
        # Offloaded parameters are updated by the host, which has to wait for their gradients in any case.
        self._is_masked = local_part(self._update.parameters[0]).device.type != "cpu"
        clip_norm = rank.config.optim.grad_clip_norm
        self._limit = float("inf") if clip_norm is None else clip_norm
        self._applies_spikes = rank.config.health.on_spike == "log"
        self._divisor = torch.ones(())
        # Values of the previous step on their way from a GPU to the host.
        self._pending: tuple[StepFacts, Tensor, torch.cuda.Event] | None = None

    def step(self, facts: StepFacts, batches: Iterator[MicroBatch]) -> StepResult | None:
        """Takes one step; returns its result, or on a GPU the previous one's (None after the first). Collective.

        Args:
            facts: number, samples and learning rate of the step.
            batches: this rank's micro-batches; those of one accumulation are taken.
        """
        self.passes.run(batches, num_batches=facts.num_batches)
        self._require_unchanged()
        self._lrs = [facts.lr * group.get(LR_SCALE, 1.0) for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        gradients, numbers, norm = self.passes.reduce(self._update.parameters)
        result = (self._apply_masked if self._is_masked else self._apply)(facts, gradients, numbers, norm)
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
        """Drops the result that is still on its way: the run goes back to before it, with other learning rates."""
        self._pending = None
        self._lrs = []

    def _require_unchanged(self) -> None:
        """Checks what a callback or the model could have changed since the last step, and would have no effect.

        Raises:
            ConfigError: parameters are trained that were frozen, or the optimizer has other groups or learning rates.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            names = {id(parameter): name for name, parameter in self.passes.named_parameters()}
            raise _changed_error(
                [names[id(parameter)] for parameter in self._frozen if parameter.requires_grad], "requires a gradient"
            )
        groups = self.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self._update.parameters):
            raise ConfigError(
                f"the optimizer has {sum(len(group['params']) for group in groups)} parameters, and "
                f"{len(self._update.parameters)} when the training began",
                hint="give all parameters to the optimizer from the start; `optim.groups` gives some another rate",
            )
        for number, (group, lr) in enumerate(zip(groups, self._lrs, strict=False)):
            if group["lr"] != lr:
                raise ConfigError(
                    f"the learning rate of group {number} was set to {group['lr']} between two steps; the schedule had "
                    f"set {lr}, and sets it at each step",
                    hint="give the rate as optim.schedule (also a function of your own), or lr_scale in optim.groups",
                )

    def _apply(self, facts: StepFacts, gradients: list[Tensor], numbers: Tensor, norm: Tensor) -> StepResult:
        values = numbers.tolist()
        items = values[COUNT] if self.scale is None else values[COUNT] * self.scale.factor.item()
        result = self._read(facts, [*values, norm.item() / items if items else float("nan")])
        if result.applied:
            self._divisor.fill_(items * max(1.0, (result.grad_norm + _EPSILON) / self._limit))
            self._update.apply(gradients, self._divisor)
        if self.scale is not None and self.scale.update(numbers[LOSS], norm):
            result = result._replace(overflowed=True)
        return result

    def _apply_masked(
        self, facts: StepFacts, gradients: list[Tensor], numbers: Tensor, norm_of_sum: Tensor
    ) -> StepResult | None:
        items = numbers[COUNT] if self.scale is None else numbers[COUNT] * self.scale.factor
        norm = norm_of_sum / items
        divisor = items * ((norm + _EPSILON) / self._limit).clamp(min=1.0)
        self._before_update()
        values = torch.cat((numbers, norm.to(numbers.dtype).reshape(1)))
        # The host will know the values one step late, so the device decides for itself whether to apply them. All
        # ranks have the same reduced values and decide alike; the verdict travels with them and is not taken again.
        skip = values.isfinite().all().logical_not()
        if not self._applies_spikes and facts.loss_limit < float("inf"):
            skip = skip | (numbers[LOSS] > facts.loss_limit * numbers[COUNT])
        self._update.apply(gradients, divisor.float(), skip=skip.float())
        previous = self.drain()
        flags = [skip] if self.scale is None else [skip, self.scale.update(numbers[LOSS], norm_of_sum)]
        values = torch.cat((values, torch.stack(flags).to(values.dtype)))
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
        if len(values) > _OVERFLOWED and values[_OVERFLOWED]:
            result = result._replace(overflowed=True)
        return result if applied else result._replace(applied=False)
