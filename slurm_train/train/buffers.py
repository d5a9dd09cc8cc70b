"""The buffers of a model between ranks: all begin a step with those of the first rank, as with DDP's defaults.

Buffers that are saved may be read and changed by training: running statistics, a queue, a codebook. They are the same
on all ranks at the beginning of each step, and so in an evaluation and after a resume. Buffers that are not saved
(`persistent=False`) are taken for constants until the first step has changed them; `UnsavedState` finds those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# What these modules count is a cache.
_LIBRARIES = ("torch", "transformers", "slurm_train")
Place = tuple[nn.Module, str]
"""A module, and the name of one of its buffers: a model may put another tensor there."""


class SharedBuffers:
    """The buffers that ranks have alike at the beginning of each step.

    Args:
        model: all that this rank has.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = list(_places(model, is_saved=True).values())
        self._unsaved = _places(model, is_saved=False)

    def add(self, names: Iterable[str]) -> None:
        """Adds buffers that are not saved and that training changes all the same, by their full names."""
        self._places += [self._unsaved.pop(name) for name in sorted(set(names)) if name in self._unsaved]

    def add_new(self, model: nn.Module) -> None:
        """Adds the buffers that the first step has made and that are saved."""
        known = {(id(module), name) for module, name in self._places}
        for module, name in _places(model, is_saved=True).values():
            if (id(module), name) not in known:
                self._places.append((module, name))

    def take_first_ranks(self) -> None:
        """Gives every rank rank 0's. Collective over all ranks; one exchange for each type of numbers."""
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
    """What a model keeps and no checkpoint has: buffers that are not saved, and numbers that are attributes.

    Args:
        model: as it is now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = _unsaved_buffers(model)
        self._numbers = _unsaved_numbers(model)

    def changed_buffers(self) -> list[str]:
        """Returns the full names of the buffers that have changed since."""
        now = _unsaved_buffers(self._model)
        return [name for name, (tensor, version) in self._buffers.items() if _is_other(now.get(name), tensor, version)]

    def changed_numbers(self) -> list[str]:
        """Returns the full names of the numbers that have changed since."""
        now = _unsaved_numbers(self._model)
        return [name for name, number in self._numbers.items() if now.get(name) != number]


def _is_other(now: tuple[Tensor, int] | None, tensor: Tensor, version: int) -> bool:
    return now is None or now[0] is not tensor or now[1] != version


def _unsaved_buffers(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    buffers: dict[str, Any] = {
        name: module._buffers[buffer] for name, (module, buffer) in _places(model, is_saved=False).items()
    }
    return {name: (tensor, tensor._version) for name, tensor in buffers.items()}


def _unsaved_numbers(model: nn.Module) -> dict[str, Any]:
    """Returns numbers of the user's modules by full name; none where a module saves a state of its own."""
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
    """Returns where buffers are, by full name; one that several modules share once, and no part of a whole."""
    places: dict[str, Place] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            is_whole = isinstance(buffer, Tensor) and not hasattr(buffer, "placements")
            if is_whole and id(buffer) not in seen and (name not in module._non_persistent_buffers_set) == is_saved:
                seen.add(id(buffer))
                places[f"{prefix}.{name}".lstrip(".")] = (module, name)
    return places
