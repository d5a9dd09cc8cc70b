"""Ways to exchange less than whole gradients where the network is slow: torch's own hooks of DDP, made exact to resume.

Whatever is compressed, the four agreed numbers are not: they are taken out of their bucket and summed by themselves in
full precision, over all ranks and at every step. So a stop is still agreed upon, items are counted exactly, and a step
that is not finite is seen by all. Loaded only where `ddp.comm` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_train.config.schema import DdpSection, RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.seeds import mix
from slurm_train.errors import ConfigError, RunError
from slurm_train.train.context import gather
from slurm_train.train.step import Exchange

Bucket = Any
"""torch.distributed.GradBucket."""
Reduced = torch.futures.Future[Tensor]
_MIN_RATE = 2.0
# Keeps the orthogonalisation of vanishing gradients from dividing by zero.
_EPSILON = 1e-8


def build_exchange(config: RunConfig, *, place: RankPlace, device: torch.device) -> Exchange:
    """Returns the exchange that `ddp.comm` names. Collective over all ranks."""
    ddp = config.ddp
    if ddp.comm == "bf16":
        return HalfPrecision()
    if ddp.comm == "powersgd":
        return PowerSgd(start_step=ddp.comm_start_step, rank=ddp.powersgd_rank, seed=config.seed, device=device)
    # A group for each node's ranks.
    nodes = gather(place.node_rank)
    members = [[rank for rank, node in enumerate(nodes) if node == one] for one in sorted(set(nodes))]
    group, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]  # torch says no types here
    return LocalSteps(start_step=ddp.comm_start_step, every=ddp.average_every_steps, node_group=group)


class HalfPrecision(Exchange):
    """Reduces bucket after bucket in bfloat16, which halves the bytes; the base of the other ways.

    Args:
        start_step: steps up to this one exchange in full; 0 for ways that need no such beginning.
    """

    name = "bf16"
    is_active = True

    def __init__(self, *, start_step: int = 0) -> None:
        self._start_step = start_step
        # Before the first step begins, everything is exchanged in full.
        self._is_on = False
        self._stats_param: nn.Parameter | None = None
        self._optimizer: Optimizer | None = None
        self._before_change: Callable[[], None] = lambda: None

    def attach(
        self,
        ddp: DistributedDataParallel,
        stats_param: nn.Parameter,
        *,
        optimizer: Optimizer,
        before_change: Callable[[], None],
    ) -> None:
        """Becomes the hook of a wrapped module."""
        self._stats_param, self._optimizer, self._before_change = stats_param, optimizer, before_change
        ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def begin(self, step: int) -> None:
        """Says which step follows."""
        self._is_on = step > self._start_step

    def sent_bytes(self, parameters: Sequence[Tensor]) -> float:
        """Returns two bytes for each number."""
        return float(sum(parameter.numel() * min(parameter.element_size(), 2) for parameter in parameters))

    def _compress(self, bucket: Bucket) -> Reduced:
        return bf16_compress_hook(_world(), bucket)

    def _reduce(self, bucket: Bucket) -> Reduced:
        if not self._is_on:
            return allreduce_hook(_world(), bucket)
        parameters = bucket.parameters()
        place = next((number for number, one in enumerate(parameters) if one is self._stats_param), None)
        if place is None:
            return self._compress(bucket)
        buffer, numbers = bucket.buffer(), bucket.gradients()[place]
        begin = numbers.storage_offset() - buffer.storage_offset()
        # Sent first: whoever waits for the bucket finds the four numbers there already.
        exact = numbers.clone()
        sent = dist.all_reduce(exact, async_op=True)
        numbers.zero_()

        def put_back(future: Reduced) -> Tensor:
            reduced: Tensor = future.value()
            sent.wait()
            reduced[begin : begin + len(exact)] = exact.div_(dist.get_world_size())
            return reduced

        if len(parameters) > 1:
            return self._compress(bucket).then(put_back)
        done: Reduced = torch.futures.Future()
        done.set_result(buffer)
        return done.then(put_back)


class LocalSteps(HalfPrecision):
    """Post-local SGD: gradients are exchanged within each node only, parameters over all nodes every so many steps.

    Lin et al. 2018, arXiv 1808.07217. Between two averagings the nodes' parameters differ, so they are averaged, and
    the optimizer's moments with them, before they are evaluated or saved.

    Args:
        start_step: steps up to this one exchange in full.
        every: steps between averagings.
        node_group: the ranks of this node.
    """

    name = "post_local_sgd"

    def __init__(self, *, start_step: int, every: int, node_group: dist.ProcessGroup) -> None:
        super().__init__(start_step=start_step)
        self._every = every
        self._differ = False
        is_alone = node_group.size() == 1
        self._local = PostLocalSGDState(  # type: ignore[no-untyped-call]  # torch says no types here
            None, node_group, start_localSGD_iter=0, post_local_gradient_allreduce=not is_alone
        )

    def after_update(self, step: int) -> None:
        """Averages the parameters where it is time."""
        if self._is_on:
            self._differ = True
            if step % self._every == 0:
                self._average(self._parameters())

    def settle(self) -> None:
        """Averages parameters and moments, so that all ranks have the same."""
        if self._differ:
            assert self._optimizer is not None
            states = [self._optimizer.state[parameter] for parameter in self._parameters()]
            kept = (value for state in states for value in state.values())
            # Step counts are tensors, too, but without dimensions and the same everywhere.
            moments = [value for value in kept if isinstance(value, Tensor) and value.dim() > 0]
            self._average([*self._parameters(), *moments])
            self._differ = False

    def sent_bytes(self, parameters: Sequence[Tensor]) -> float:
        """Returns the bytes that leave a node, per step."""
        return super(HalfPrecision, self).sent_bytes(parameters) / self._every

    def _compress(self, bucket: Bucket) -> Reduced:
        return post_localSGD_hook(self._local, bucket)

    def _parameters(self) -> list[Tensor]:
        assert self._optimizer is not None
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _average(self, tensors: list[Tensor]) -> None:
        """Gives all ranks the means of their tensors, in place, one exchange for each type. Collective."""
        self._before_change()
        with torch.no_grad():
            for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
                members = [tensor for tensor in tensors if tensor.dtype == kind]
                flat = torch.cat([tensor.reshape(-1) for tensor in members])
                dist.all_reduce(flat.div_(dist.get_world_size()))
                parts = torch.split(flat, [tensor.numel() for tensor in members])
                shaped = [part.view_as(tensor) for part, tensor in zip(parts, members, strict=True)]
                torch._foreach_copy_(members, shaped)


class PowerSgd(HalfPrecision):
    """Sends matrices as products of two thin ones; the state travels with each rank's checkpoint.

    Vogels et al. 2019, arXiv 1905.13727. What the thin matrices leave out is added to the next step's gradient (error
    feedback). These leftovers differ from rank to rank, are as large as the gradients, and decide what follows, so they
    are saved and restored. On another number of ranks they cannot be; then they begin at zero, and the run says so.

    Args:
        start_step: steps up to this one exchange in full.
        rank: columns of the thin matrices.
        seed: of their first values.
        device: where the gradients are.
    """

    name = "powersgd"

    def __init__(self, *, start_step: int, rank: int, seed: int, device: torch.device) -> None:
        super().__init__(start_step=start_step)
        self._rank, self._device = rank, device
        # When to begin is decided here, by the run's step, so torch's own counting never matters.
        self._inner = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=_MIN_RATE,
            orthogonalization_epsilon=_EPSILON,
            compression_stats_logging_frequency=2**62,
        )
        self._inner.iter = 2
        self._seed, self._step = seed, 0
        self._inner.rng = self  # type: ignore[assignment]  # only randint is called

    def fit_buckets(self, ddp: DdpSection, parameters: Sequence[Tensor], *, device: torch.device) -> DdpSection:
        """Returns the settings with one bucket for all gradients of CPU ranks.

        Between them the hook's exchanges wait for each other on gloo's two threads: with one bucket there is always
        one free, and all ranks make them in the same order.

        Raises:
            ConfigError: the parameters are of several types.
        """
        if device.type != "cpu":
            return ddp
        kinds = sorted({str(parameter.dtype) for parameter in parameters})
        if len(kinds) > 1:
            raise ConfigError(
                f"ddp.comm=powersgd between CPU ranks needs parameters of one type, these are {' and '.join(kinds)}",
                hint="convert the model to one type, or choose another ddp.comm",
            )
        return replace(ddp, bucket_cap_mb=sum(parameter.nbytes for parameter in parameters) / 2**20 + 1.0)

    def begin(self, step: int) -> None:
        """Says which step follows."""
        super().begin(step)
        self._step = step

    def randint(self, below: int) -> int:
        """Returns the seed of first thin matrices, the same on every rank; keyed by the step: nothing to save."""
        return mix(self._seed, self._step, 0) % below

    def forget(self) -> None:
        """Drops the leftovers and the thin matrices: a NaN in them would come back at every step."""
        for kept in self._kept().values():
            kept.clear()

    def state(self) -> dict[str, Any]:
        """Returns copies of the leftovers and the thin matrices, by bucket."""
        return {
            name: {bucket: tensor.clone() for bucket, tensor in kept.items()} for name, kept in self._kept().items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
        self.forget()
        for name, kept in self._kept().items():
            kept.update({int(bucket): tensor.to(self._device) for bucket, tensor in state.get(name, {}).items()})

    def sent_bytes(self, parameters: Sequence[Tensor]) -> float:
        """Returns the bytes of the thin matrices, and of what is too small to be sent so."""
        return float(sum(self._sent_numbers(parameter) * parameter.element_size() for parameter in parameters))

    def _kept(self) -> dict[str, dict[int, Tensor]]:
        inner = self._inner
        return {"error": inner.error_dict, "p": inner.p_memory_dict, "q": inner.q_memory_dict}

    def _compress(self, bucket: Bucket) -> Reduced:
        leftovers = self._inner.error_dict.get(bucket.index())
        if leftovers is not None and leftovers.numel() != bucket.buffer().numel():
            raise RunError(
                f"bucket {bucket.index()} has {bucket.buffer().numel()} gradients, PowerSGD's state is of "
                f"{leftovers.numel()}",
                hint="ddp.bucket_cap_mb must stay what it was with ddp.comm=powersgd, or resume with another ddp.comm",
            )
        reduced: Reduced = powerSGD_hook(self._inner, bucket)
        return reduced

    def _sent_numbers(self, parameter: Tensor) -> int:
        rows = parameter.shape[0] if parameter.dim() else 1
        columns = parameter.numel() // max(rows, 1)
        thin = (rows + columns) * min(rows, columns, self._rank)
        return thin if thin * _MIN_RATE < parameter.numel() else parameter.numel()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
