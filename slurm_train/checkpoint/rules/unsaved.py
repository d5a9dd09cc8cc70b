"""What training changes and no checkpoint has: it begins with its first value after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from torch import Tensor, nn

from slurm_train.checkpoint.replicas import digest
from slurm_train.checkpoint.tree import encode
from slurm_train.formatting import shorten

# Attributes of their modules are caches, not state.
_LIBRARIES = ("torch", "transformers", "slurm_train")
# Larger arrays are data, mapped from a file perhaps, and would be read at each save.
_LARGEST_ARRAY_BYTES = 1 << 26
# Larger tensors of an object are compared by identity, and not read at each save.
_LARGEST_TENSOR_BYTES = 1 << 20
Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers; not the tensor, which a model may replace."""


class UnsavedState:
    """State of a model that no checkpoint has: buffers that are not saved, and attributes; and that of other objects.

    Attributes are numbers, tensors and arrays of numpy that a module of the user has from the start.

    Args:
        model: in the state with which later states are compared.
        others: objects that are saved by their `state_dict`, by name.
    """

    def __init__(self, model: nn.Module, others: Mapping[str, Any] | None = None) -> None:
        self._others = {name: _UnsavedValues(other) for name, other in (others or {}).items()}
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

    def notes_on_others(self) -> list[str]:
        """Returns notes for the user on what has changed since and the states of the other objects lack; each once."""
        return [note for name, values in self._others.items() for note in values.notes(name)]


class _UnsavedValues:
    """Values of a handed-over object that training changes and its `state_dict` lacks.

    Values are numbers, tensors, arrays, and lists and dictionaries of them. A module has to save each one, except
    private ones, which are caches. Those of another object count where its state is empty: whether a longer state is
    complete is known to its author alone.

    Args:
        other: as it is before the first step.
    """

    def __init__(self, other: Any) -> None:
        self._other = other
        self._is_module = isinstance(other, nn.Module)
        self._parts = self._parts_now()
        self._first = self._values()
        self._named: set[str] = set()
        # Not asked here: a loader that is asked for its state begins to read.
        self._has_state = False

    def notes(self, name: str) -> list[str]:
        """Returns notes for the user on what has changed.

        Args:
            name: under which the object was handed over.
        """
        changed = [value for value in self._changed() if value not in self._named]
        self._named |= set(changed)
        switched = [value for value in changed if self._has_switch(value)]
        other = [value for value in changed if value not in switched]
        notes = []
        if switched:
            is_metric = hasattr(self._other, "_defaults")
            metrics = {f"{name}.{value}".rpartition(".")[0] if is_metric else name for value in switched}
            calls = " and ".join(f"{metric}.persistent(True)" for metric in sorted(metrics))
            notes.append(_lost(name, switched) + f"; torchmetrics saves them after {calls}, called before `resume`")
        if other:
            notes.append(_lost(name, other) + "; add them to it, or hand over an object of yours that saves them")
        added = sorted(self._parts_now().keys() - self._parts.keys() - self._named)
        self._named |= set(added)
        if added:
            notes.append(
                f"training adds {shorten(added)} to {name}: a resume begins without them and cannot load them; hand "
                "over an object of yours that saves what they hold"
            )
        return notes

    def _changed(self) -> list[str]:
        """Returns the names of the values that have changed and are not saved, e.g. "_base_metric.weight"."""
        if self._has_state:
            return []
        state = self._other.state_dict()
        self._has_state = not self._is_module and bool(state)
        if self._has_state:
            return []
        saved = state if self._is_module else ()
        names = []
        for name, value in self._values().items():
            # A module may keep a result under a new name.
            before = self._first.get(name, value if self._is_module else None)
            if name not in saved and value != before:
                names.append(name)
        return names

    def _has_switch(self, name: str) -> bool:
        """Returns whether a value is a state of a metric of torchmetrics, which saves it where it is told to."""
        part, _, value = name.rpartition(".")
        return value in getattr(self._parts.get(part), "_defaults", ())

    def _parts_now(self) -> dict[str, Any]:
        """Returns a module's parts by name, itself with an empty one; another object alone."""
        return dict(self._other.named_modules()) if self._is_module else {"": self._other}

    def _values(self) -> dict[str, Any]:
        """Returns what shows a change of each value, by name."""
        shown: dict[str, Any] = {}
        if self._is_module:
            for name, (tensor, version) in _unsaved_buffers(self._other).items():
                shown[name] = _digest_of(tensor) or (id(tensor), version)
        for prefix, part in self._parts_now().items():
            if type(part).__module__.partition(".")[0] in _LIBRARIES and self._is_module:
                continue
            for name, value in getattr(part, "__dict__", {}).items():
                is_passed_over = self._is_module and (name == "training" or name.startswith("_"))
                content = None if is_passed_over else _digest_of(value)
                if content is not None:
                    shown[f"{prefix}.{name}".lstrip(".")] = content
        return shown


def _lost(name: str, values: list[str]) -> str:
    return (
        f"training changes {shorten(values)} of {name}, which its state_dict lacks: a resume begins with the first "
        "values"
    )


def _digest_of(value: Any) -> Any:
    """Returns what differs where a number, tensor or array does, or a list or dictionary of them; None of all else."""
    if isinstance(value, (bool, int, float)):
        return value if value == value else "nan"
    if isinstance(value, (Tensor, np.ndarray)):
        if getattr(value, "requires_grad", False):
            return None  # a result, or a parameter of something else
        if value.nbytes > _LARGEST_TENSOR_BYTES or getattr(value, "is_meta", False):
            return id(value), getattr(value, "_version", 0)
        return digest({"": encode(value)})
    if isinstance(value, (list, tuple)):
        return tuple(_digest_of(item) for item in value)
    if isinstance(value, dict):
        return tuple((str(key), _digest_of(item)) for key, item in value.items())
    return None


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
