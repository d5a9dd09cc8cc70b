"""Gives DDP in a resumed run the buckets that it had before the interruption, from the first step on.

After its first backward pass DDP orders its buckets anew, by the order in which gradients became ready. Where three or
more ranks add, the rounding of a sum depends on the place of a value in its bucket. So a run records the order in its
first step and keeps it in its checkpoints; a resumed run shows it to DDP before its first step, by backward passes with
gradients of zero. The model is not called for that, so it cannot change. With a static graph DDP takes the order of its
second backward pass, so a run shows it once after its first step, and a resumed run twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class RecordedOrder:
    """The order of a run's first step as checkpoints have it, in every layout.

    Args:
        numbers: see there.
    """

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self.numbers = list(numbers)
        """See `BucketOrder.numbers`; empty before a step of DDP."""

    def state_dict(self) -> dict[str, list[int]]:
        """Returns {"values": numbers}."""
        return {"values": self.numbers}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Takes over what `state_dict` returned."""
        self.numbers = list(state["values"])


class BucketOrder:
    """The order in which the gradients of a wrapped module become ready.

    Args:
        ddp: around the module.
        recorded: of the run; gets the order of the first step.
    """

    def __init__(self, ddp: DistributedDataParallel, recorded: RecordedOrder) -> None:
        self.numbers: list[int] = []
        """Places of parameters among those that require a gradient; empty while it is not known."""
        self._ddp = ddp
        self._recorded = recorded
        self._parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        sparse = (part for part in ddp.module.modules() if getattr(part, "sparse", False) is True)
        self._sparse = {id(parameter) for part in sparse for parameter in part.parameters(recurse=False)}
        # Backward passes in the recorded order that DDP still needs.
        self._num_missing = 2 if ddp.static_graph else 1
        # Only these settings make DDP order its buckets anew.
        self._is_used = ddp.static_graph or not ddp.find_unused_parameters

    @property
    def is_missing(self) -> bool:
        """Whether the next backward pass is to be recorded."""
        return self._is_used and not self.numbers

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the order of a backward pass in this context."""
        ready: list[int] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_note, ready, number))
            for number, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._fits(ready):
            self.numbers = self._recorded.numbers = ready
            self._num_missing -= 1

    def repeat(self) -> bool:
        """Shows DDP the recorded order, before the first step of a resumed run. Collective.

        Returns:
            Whether the order fits this module's parameters; if not, nothing is done.
        """
        numbers = self._recorded.numbers
        if not self._is_used or not self._fits(numbers):
            return False
        self.numbers = list(numbers)
        self.complete()
        return True

    def complete(self) -> None:
        """Makes the backward passes that DDP still needs; between two steps. Collective."""
        while self.numbers and self._num_missing:
            self._num_missing -= 1
            self._show_zeros()

    def _show_zeros(self) -> None:
        module: Any = self._ddp.module
        in_order = [self._parameters[number] for number in self.numbers]
        # What is computed last is differentiated first.
        module.forward = lambda _: _touch_all(in_order[::-1], sparse=self._sparse)
        try:
            self._ddp(None).backward()
        finally:
            del module.forward
        for parameter in self._parameters:
            parameter.grad = None

    def _fits(self, numbers: Sequence[int]) -> bool:
        count = len(self._parameters)
        is_whole = len(numbers) == count or self._ddp.static_graph
        # A block that is recomputed in the backward pass may add to a gradient several times: no order is kept then.
        return bool(numbers) and is_whole and len(set(numbers)) == len(numbers) and max(numbers) < count


def _note(ready: list[int], number: int, _parameter: Tensor) -> None:
    ready.append(number)


class _Touch(torch.autograd.Function):
    """Returns the given number; its backward pass gives the parameter a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, parameter: Tensor, is_sparse: bool) -> Tensor:
        ctx.save_for_backward(parameter)
        ctx.is_sparse = is_sparse
        return carried.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (parameter,) = ctx.saved_tensors
        # DDP needs the layout that the model's gradients have; a sparse one gets a single row of zeros.
        zeros = torch.zeros_like(parameter[:1] if ctx.is_sparse else parameter)
        if ctx.is_sparse:
            zeros = torch.sparse_coo_tensor(
                torch.zeros(1, 1, dtype=torch.int64, device=zeros.device), zeros, parameter.shape
            )
        return gradients[0], zeros, None


def _touch_all(parameters: Sequence[nn.Parameter], *, sparse: Collection[int]) -> Tensor:
    """Returns a scalar that depends on all parameters; in the backward pass the last one gets its gradient first.

    Args:
        parameters: of the module.
        sparse: `id` of each parameter that gets a sparse gradient.
    """
    touch: Any = _Touch.apply
    carried = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        carried = touch(carried, parameter, id(parameter) in sparse)
    return carried
