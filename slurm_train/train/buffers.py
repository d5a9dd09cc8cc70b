"""Keeps the buffers of a model the same on all ranks: each step begins with those of rank 0, as with DDP's defaults.

Training may read and change buffers that are saved: running statistics, a queue, a codebook. They are the same on all
ranks at the beginning of each step, and so in an evaluation and after a resume. Buffers that are not saved
(`persistent=False`) are taken for constants unless the first step changes them; `checkpoint.unsaved` finds those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.unsaved import buffer_places


class SharedBuffers:
    """The buffers that are the same on all ranks at the beginning of each step.

    Args:
        model: this rank's part of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = list(buffer_places(model, is_saved=True).values())
        self._unsaved = buffer_places(model, is_saved=False)

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

    def take_first_ranks(self) -> None:
        """Gives every rank the values of rank 0. Collective over all ranks; one exchange per device and number type."""
        if not self._places or dist.get_world_size() == 1:
            return
        buffers: list[Any] = [module._buffers[name] for module, name in self._places]
        kinds = dict.fromkeys((buffer.device, buffer.dtype) for buffer in buffers if buffer is not None)
        with torch.no_grad():
            for kind in kinds:
                members = [buffer for buffer in buffers if buffer is not None and (buffer.device, buffer.dtype) == kind]
                flat = torch.cat([buffer.reshape(-1) for buffer in members])
                dist.broadcast(flat, src=0)
                parts = torch.split(flat, [buffer.numel() for buffer in members])
                shaped = [part.view_as(buffer) for part, buffer in zip(parts, members, strict=True)]
                torch._foreach_copy_(members, shaped)
