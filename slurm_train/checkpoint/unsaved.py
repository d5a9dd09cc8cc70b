"""What training changes of a model and no checkpoint has: it begins with its first value after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from torch import Tensor, nn

# Attributes of their modules are caches, not state.
_LIBRARIES = ("torch", "transformers", "slurm_train")
# Larger arrays are data, mapped from a file perhaps, and would be read at each save.
_LARGEST_ARRAY_BYTES = 1 << 26
Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers; not the tensor, which a model may replace."""


class UnsavedState:
    """State of a model that no checkpoint has: buffers that are not saved, and attributes.

    Attributes are numbers, tensors and arrays of numpy that a module of the user has from the start.

    Args:
        model: in the state with which later states are compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = _unsaved_buffers(model)
        self._attributes = _unsaved_attributes(model)

    def changed_buffers(self) -> list[str]:
        """Returns the full names of the buffers that have changed since."""
        now = _unsaved_buffers(self._model)
        return [name for name, before in self._buffers.items() if not _is_same(before, now.get(name))]

    def changed_attributes(self) -> list[str]:
        """Returns the full names of the attributes that have changed since."""
        now = _unsaved_attributes(self._model)
        return [name for name, before in self._attributes.items() if not _is_same(before, now.get(name))]


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, tuple):
        # Tensors are compared by identity: their values may be on a GPU.
        return isinstance(now, tuple) and before[0] is now[0] and before[1] == now[1]
    return bool(before == now) or (before != before and now != now)  # a number that is NaN


def _unsaved_buffers(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Returns each unsaved buffer by full name, with the number of changes in place that torch has counted."""
    buffers: dict[str, Any] = {
        name: module._buffers[buffer] for name, (module, buffer) in buffer_places(model, is_saved=False).items()
    }
    return {name: (tensor, tensor._version) for name, tensor in buffers.items()}


def _unsaved_attributes(model: nn.Module) -> dict[str, Any]:
    """Returns what `_is_same` compares of the attributes of the user's modules, by full name.

    There are none where some module saves extra state, which may have them.
    """
    modules = list(model.named_modules())
    if any(type(module).get_extra_state is not nn.Module.get_extra_state for _, module in modules):
        return {}
    attributes = {}
    for prefix, module in modules:
        if type(module).__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(module).items():
            content = None if name == "training" else _content_of(value)
            if content is not None:
                attributes[f"{prefix}.{name}".lstrip(".")] = content
    return attributes


def _content_of(value: Any) -> Any:
    """Returns what shows a change of a number, a tensor or an array; None of anything else."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Tensor):
        # What a forward pass leaves, e.g. attention to be looked at, is a result.
        return None if value.requires_grad else (value, value._version)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes <= _LARGEST_ARRAY_BYTES:
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return None


def buffer_places(model: nn.Module, *, is_saved: bool) -> dict[str, Place]:
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
