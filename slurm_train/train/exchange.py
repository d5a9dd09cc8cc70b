"""How gradients are exchanged where the network is slow: torch's own ways to send less, as hooks of DDP.

Whatever is compressed, the rider's four numbers are not: they are taken out of their bucket and summed by themselves in
full precision, over all ranks and at every step. So a stop is still agreed upon, items are counted exactly, and a step
that is not finite is seen by all. Without compression there is no hook at all and DDP is as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

Bucket = Any
"""torch.distributed.GradBucket."""
Reduced = torch.futures.Future[Tensor]


class Exchange:
    """Reduces bucket after bucket; this one in bfloat16, which halves the bytes.

    Args:
        start_step: steps up to this one exchange in full; set to 0 by ways that need no such beginning.
    """

    name = "bf16"

    def __init__(self, *, start_step: int = 0) -> None:
        self._start_step = start_step
        self._is_on = False
        self._rider: nn.Parameter | None = None

    def attach(self, ddp: DistributedDataParallel, rider: nn.Parameter) -> None:
        """Becomes the hook of a wrapped module.

        Args:
            ddp: the module; it can have one hook.
            rider: the parameter whose gradient is exchanged in full.
        """
        self._rider = rider
        ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def begin(self, step: int) -> None:
        """Says which step follows; before the first is said, everything is exchanged in full."""
        self._is_on = step > self._start_step

    def watch(self, optimizer: torch.optim.Optimizer, *, hold_changes: Callable[[], None]) -> None:
        """Takes over an optimizer's parameters and moments, where the way changes them itself."""

    def after_update(self, step: int) -> None:
        """Does what is to be done when the optimizer has used the gradients. Collective."""

    def settle(self) -> None:
        """Makes the ranks alike where they are to be evaluated or saved. Collective."""

    def forget(self) -> None:
        """Drops what was kept of earlier gradients: a step was not finite."""

    def state(self) -> dict[str, Any]:
        """Returns a copy of what this rank has to find again to go on with the same bits."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""

    def sent_bytes(self, parameters: Iterable[Tensor]) -> float:
        """Returns the bytes of gradients and parameters that a rank gives into exchanges per step, on average."""
        return sum(parameter.numel() * min(parameter.element_size(), 2) for parameter in parameters)

    def _compress(self, bucket: Bucket) -> Reduced:
        return bf16_compress_hook(_world(), bucket)

    def _reduce(self, bucket: Bucket) -> Reduced:
        if not self._is_on:
            return allreduce_hook(_world(), bucket)
        place = self._find_rider(bucket)
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

        only_rider = len(bucket.parameters()) == 1
        return (done(buffer) if only_rider else self._compress(bucket)).then(put_back)

    def _find_rider(self, bucket: Bucket) -> int | None:
        return next((n for n, parameter in enumerate(bucket.parameters()) if parameter is self._rider), None)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def done(value: Tensor) -> Reduced:
    """Returns a future that holds its value already."""
    future: Reduced = torch.futures.Future()
    future.set_result(value)
    return future


def average(tensors: list[Tensor]) -> None:
    """Gives all ranks the means of their tensors, in place, one exchange for each type. Collective."""
    world_size = dist.get_world_size()
    with torch.no_grad():
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = [tensor for tensor in tensors if tensor.dtype == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
            dist.all_reduce(flat.div_(world_size))
            parts = torch.split(flat, [tensor.numel() for tensor in members])
            torch._foreach_copy_(members, [part.view_as(tensor) for part, tensor in zip(parts, members, strict=True)])


class LocalSteps(Exchange):
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
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

        self._every = every
        self._differ = False
        self._hold_changes: Callable[[], None] = lambda: None
        self._optimizer: torch.optim.Optimizer | None = None
        is_alone = node_group.size() == 1
        self._local = PostLocalSGDState(  # type: ignore[no-untyped-call]  # torch says no types here
            None, node_group, start_localSGD_iter=0, post_local_gradient_allreduce=not is_alone
        )

    def watch(self, optimizer: torch.optim.Optimizer, *, hold_changes: Callable[[], None]) -> None:
        """Takes over an optimizer's parameters and moments.

        Args:
            optimizer: whose they are.
            hold_changes: makes their next change wait for a copy that is under way.
        """
        self._optimizer, self._hold_changes = optimizer, hold_changes

    def after_update(self, step: int) -> None:
        """Averages the parameters where it is time."""
        if self._is_on:
            self._differ = True
            if step % self._every == 0:
                self._average(self._parameters())

    def settle(self) -> None:
        """Averages parameters and moments, so that all ranks have the same."""
        if self._differ:
            self._average([*self._parameters(), *self._moments()])
            self._differ = False

    def sent_bytes(self, parameters: Iterable[Tensor]) -> float:
        """Returns the bytes that leave a node, per step."""
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / self._every

    def _compress(self, bucket: Bucket) -> Reduced:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook

        return post_localSGD_hook(self._local, bucket)

    def _average(self, tensors: list[Tensor]) -> None:
        self._hold_changes()
        average(tensors)

    def _parameters(self) -> list[Tensor]:
        assert self._optimizer is not None
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _moments(self) -> list[Tensor]:
        assert self._optimizer is not None
        states = [self._optimizer.state[parameter] for parameter in self._parameters()]
        found = (value for state in states for value in state.values())
        # Step counts are tensors, too, but without dimensions and the same everywhere.
        return [value for value in found if isinstance(value, Tensor) and value.dim() > 0]
