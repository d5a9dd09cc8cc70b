"""Keeps the buffers of a model the same on all ranks: each step begins with those of rank 0, as with DDP's defaults.

Training may read and change buffers that are saved: running statistics, a queue, a codebook. They are the same on all
ranks at the beginning of each step, and so in an evaluation and after a resume. Buffers that are not saved
(`persistent=False`) are taken for constants unless the first step changes them; `UnsavedState` finds those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Number attributes of their modules are caches, not state.
_LIBRARIES = ("torch", "transformers", "slurm_train")
Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers; not the tensor, which a model may replace."""


class SharedBuffers:
    """The buffers that are the same on all ranks at the beginning of each step.

    Args:
        model: this rank's part of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = list(_places(model, is_saved=True).values())
        self._unsaved = _places(model, is_saved=False)

    def add(self, names: Iterable[str]) -> None:
        """Adds buffers that are not saved although training changes them, by their full names."""
        for name in sorted(set(names)):
            if name in self._unsaved:
                self._places.append(self._unsaved.pop(name))

    def add_new(self, model: nn.Module) -> None:
        """Adds the saved buffers that the first step has made."""
        present = {(id(module), name) for module, name in self._places}
        for module, name in _places(model, is_saved=True).values():
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


class UnsavedState:
    """State of a model that no checkpoint has: buffers that are not saved, and attributes that are numbers.

    Args:
        model: in the state with which later states are compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = _unsaved_buffers(model)
        self._numbers = _unsaved_numbers(model)

    def changed_buffers(self) -> list[str]:
        """Returns the full names of the buffers that have changed since."""
        now = _unsaved_buffers(self._model)
        changed = []
        for name, (tensor, version) in self._buffers.items():
            present_tensor, present_version = now.get(name, (None, 0))
            if present_tensor is not tensor or present_version != version:
                changed.append(name)
        return changed

    def changed_numbers(self) -> list[str]:
        """Returns the full names of the numbers that have changed since."""
        now = _unsaved_numbers(self._model)
        return [name for name, number in self._numbers.items() if now.get(name) != number]


def _unsaved_buffers(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Returns each unsaved buffer by full name, with the number of changes in place that torch has counted."""
    buffers: dict[str, Any] = {
        name: module._buffers[buffer] for name, (module, buffer) in _places(model, is_saved=False).items()
    }
    return {name: (tensor, tensor._version) for name, tensor in buffers.items()}


def _unsaved_numbers(model: nn.Module) -> dict[str, Any]:
    """Returns the number attributes of the user's modules by full name; none where some module saves extra state."""
    modules = list(model.named_modules())
    if any(type(module).get_extra_state is not nn.Module.get_extra_state for _, module in modules):
        return {}
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in modules
        if type(module).__module__.partition(".")[0] not in _LIBRARIES
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float)) and name != "training"
    }


def _places(model: nn.Module, *, is_saved: bool) -> dict[str, Place]:
    """Returns the places of buffers by full name; a shared buffer once, DTensors not at all."""
    places: dict[str, Place] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            is_whole = isinstance(buffer, Tensor) and not hasattr(buffer, "placements")
            if is_whole and id(buffer) not in seen and (name not in module._non_persistent_buffers_set) == is_saved:
                seen.add(id(buffer))
                places[f"{prefix}.{name}".lstrip(".")] = (module, name)
    return places
