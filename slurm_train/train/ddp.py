"""torch's DistributedDataParallel as the trainer uses it: what it wraps, how it is made, how gradients are sent."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slurm_train.config.schema import DdpSection
from slurm_train.data.source import Batch
from slurm_train.session.signals import StopFlag

# Places of the agreed numbers: each rank gives its own, and they are summed over micro-batches and averaged over ranks.
STOP = 0
"""1 on a rank that was asked to stop: its request travels with the gradients (`train.stops`)."""
COUNT = 1
"""Items."""
LOSS = 2
"""Sum of the losses."""
NON_FINITE = 3
"""Micro-batches whose loss is not finite."""
SQUARES = 4
"""With shards only: the sum of the squares of all gradients."""


class TrainingModule(nn.Module):
    """The module that DDP sees: calling it gives the summed loss of one micro-batch, `backward` its gradients.

    A parameter of four zeros, `stats_param`, is a second root of the backward pass, with the four agreed numbers as its
    gradient; DDP reduces it with the last layer's gradients, in a bucket that is sent in any case. No collective and no
    operation is added, and no rank can act on a value that another rank did not see. It is no part of the model: the
    optimizer does not get it and checkpoints do not have it. It is registered last, which puts it into the first bucket
    that DDP sends.

    Args:
        objective: gives (sum of losses, number of items) of a batch; already compiled, if it is to be.
        stop: this rank's stop flag.
        device: where the model is.
        autocast: lower precision of the forward pass, None for none.
        factor: factor of the losses that are back-propagated (`LossScale`), None for 1.
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
        """Whether DDP searches the graph of the loss for the parameters that are used (find_unused_parameters)."""
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
        # DDP must find `stats_param` in the graph as well: adding zero changes neither loss nor gradients.
        total: Tensor = loss + 0 * self.stats_param.sum() if self.is_searched else loss
        return total

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss that calling this module (through DDP) gave, and the four numbers."""
        torch.autograd.backward((loss, self.stats_param), (self._factor, self._values))

    def _note(self, loss: Tensor, count: Tensor) -> None:
        host = self._host_values
        if host is not None:
            value = loss.item()
            host[STOP] = self.stop.requested
            host[COUNT] = float(count)
            host[LOSS] = value
            host[NON_FINITE] = not math.isfinite(value)
            return
        # A new tensor each time: the previous one may still be in use.
        self._values = torch.zeros_like(self.stats_param, requires_grad=False)
        if self.stop.requested:
            self._values[STOP] = 1.0
        self._values[COUNT] = count
        self._values[LOSS] = loss.detach()
        self._values[NON_FINITE] = loss.detach().isfinite().logical_not()


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
            if exact.is_cuda:
                # A future runs this on a stream of its own, and its record of what is in use has `reduced` alone: the
                # backward pass could get this memory again before it was read here.
                exact.record_stream(torch.cuda.current_stream(exact.device))
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
