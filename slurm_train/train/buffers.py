"""Keeps the buffers of a model the same on all ranks: each step begins with those of rank 0, as with DDP's defaults.

Training may read and change buffers that are saved: running statistics, a queue, a codebook. They are the same on all
ranks at the beginning of each step, and so in an evaluation and after a resume. Buffers that are not saved
(`persistent=False`) are taken for constants unless the first step changes them; `checkpoint.rules.unsaved` finds those.

A step that is not applied leaves no trace in them: a NaN would stay in a running statistic for good, and with several
ranks it would depend on the rank whose sample it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_train.checkpoint.rules.unsaved import Place, buffer_places


class SharedBuffers:
    """The buffers that are the same on all ranks at the beginning of each step.

    Args:
        model: this rank's part of the model.
        may_skip: whether steps may turn out not to be applied; `put_back` then gives the buffers of before them.
    """

    def __init__(self, model: nn.Module, *, may_skip: bool = False) -> None:
        self._places = list(buffer_places(model, is_saved=True).values())
        self._unsaved = buffer_places(model, is_saved=False)
        self._may_skip = may_skip
        # Of each device and number type: the places, their tensors' shapes, and all values in one tensor.
        self._before: list[tuple[list[Place], list[torch.Size], Tensor]] = []

    def add(self, names: Iterable[str]) -> None:
        """Adds buffers that are not saved although training changes them, by their full names."""
        for name in sorted(set(names)):
            if name in self._unsaved:
                self._places.append(self._unsaved.pop(name))

    def add_new(self, model: nn.Module) -> None:
        """Adds the saved buffers that the first step has made."""
        present = {(id(module), name) for module, name in self._places}
        for module, name in buffer_places(model, is_saved=True).values():
            if (id(module), name) not in present:
                self._places.append((module, name))

    @torch.no_grad()
    def take_first_ranks(self) -> None:
        """Gives every rank the values of rank 0. Collective over all ranks; one exchange per device and number type."""
        self._before = []
        is_alone = dist.get_world_size() == 1
        if is_alone and not self._may_skip:
            return
        kinds = defaultdict[tuple[torch.device, torch.dtype], list[Place]](list)
        for place in self._places:
            buffer = _at(place)
            if buffer is not None:
                kinds[buffer.device, buffer.dtype].append(place)
        for places in kinds.values():
            buffers = [_at(place) for place in places]
            values = torch.cat([buffer.reshape(-1) for buffer in buffers])
            if not is_alone:
                dist.broadcast(values, src=0)
                _fill(buffers, values)
            if self._may_skip:
                self._before.append((places, [buffer.shape for buffer in buffers], values))

    @torch.no_grad()
    def put_back(self, skip: Tensor | None = None) -> None:
        """Gives the buffers the values that they had when the step began.

        Args:
            skip: a scalar on the device; they are put back where it is true, and nothing waits for it. None: put back.
        """
        for places, shapes, values in self._before:
            buffers = [_at(place) for place in places]
            if [None if buffer is None else buffer.shape for buffer in buffers] != shapes:
                # A queue that has grown, for instance: it is another tensor, which has no value to choose element-wise.
                if skip is None or bool(skip):
                    parts = torch.split(values, [shape.numel() for shape in shapes])
                    for (module, name), part, shape in zip(places, parts, shapes, strict=True):
                        module._buffers[name] = part.view(shape).clone()
                continue
            if skip is not None:
                present = torch.cat([buffer.reshape(-1) for buffer in buffers])
                values = torch.where(skip.to(present.device), values, present)
            _fill(buffers, values)
        self._before = []


def _at(place: Place) -> Any:
    module, name = place
    return module._buffers[name]


def _fill(buffers: list[Any], values: Tensor) -> None:
    """Copies values into buffers, one after the other; a kernel or two for all of them."""
    parts = torch.split(values, [buffer.numel() for buffer in buffers])
    torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
