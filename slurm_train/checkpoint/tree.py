"""Nested states: their leaves by full names, tensors apart from plain values, and objects as both of these.

A checkpoint has each tensor by its path in dictionaries, also one that is cut over the ranks, and reads nothing but
tensors and plain values. Objects of programs keep tensors in lists as well (averages of weights), and numbers of numpy
(replay buffers, the states of generators).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KIND = "__slurm_train_kind__"
"""Key of a dictionary that replaces something else; its value says what."""
_ARRAY = "array"
_NUMBER = "number"
_VALUE = "value"
_KEYS = "__slurm_train_keys__"
"""Key of the keys of a dictionary that has tensors, in their order: a checkpoint has tensors by names, in any order."""


def leaves_of(state: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields what is no dictionary in a nested one, with its path."""
    for key, value in state.items():
        path = (*prefix, str(key))
        if isinstance(value, dict):
            yield from leaves_of(value, path)
        else:
            yield path, value


def full_name(path: Sequence[object]) -> str:
    """Returns the full name of a leaf, as torch writes it."""
    return ".".join(map(str, path))


def filtered(state: dict[str, Any], is_kept: Callable[[str], bool], prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a nested dictionary with some of its leaves, which are asked for by their full names."""
    part: dict[str, Any] = {}
    for key, value in state.items():
        path = (*prefix, str(key))
        if isinstance(value, dict):
            part[key] = filtered(value, is_kept, path)
        elif is_kept(full_name(path)):
            part[key] = value
    return part


def put(state: dict[str, Any], path: Sequence[Any], value: Any) -> None:
    """Puts a value at a path in nested dictionaries, which are made."""
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors of a nested dictionary, and a copy of everything else; `merge_state` puts them together."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            inner, values[key] = split_state(value)
            tensors |= {key: inner} if inner else {}
        elif isinstance(value, Tensor):
            tensors[key] = value
        else:
            values[key] = copy.deepcopy(value)
    return tensors, values


def merge_state(values: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dictionary that was split."""
    merged = dict(values)
    # Numbers are keys, too, and a checkpoint has the tensors' keys as text.
    keys = {str(key): key for key in values}
    for text, value in tensors.items():
        key = keys.get(str(text), text)
        # Rank 0's values lack a dictionary that has tensors of another rank only.
        merged[key] = merge_state(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def on_host(value: Any) -> Any:
    """Returns a copy of a nested state, in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    return copy.deepcopy(value)


def encode(value: Any, *, keeps_order: bool = True) -> Any:
    """Returns a state in which tensors are in dictionaries only, and arrays are tensors; the tensors are the live ones.

    What has neither is left as it is.

    Args:
        value: the state.
        keeps_order: dictionaries of tensors keep the order of their keys, also where all of these are texts; earlier
            versions read that of a program's objects only.
    """
    if isinstance(value, dict):
        has_keys = _needs_name(value) and (keeps_order or any(type(key) is not str for key in value))
        keys = {_KEYS: list(value)} if has_keys else {}
        return {**{key: encode(item, keeps_order=keeps_order) for key, item in value.items()}, **keys}
    if type(value) in (list, tuple) and any(_needs_name(item) for item in value):
        items = {str(number): encode(item, keeps_order=keeps_order) for number, item in enumerate(value)}
        return {_KIND: type(value).__name__, **items}
    if isinstance(value, (np.ndarray, np.generic)):
        tensor = _tensor_of(value)
        if tensor is not None:
            return {_KIND: _ARRAY if isinstance(value, np.ndarray) else _NUMBER, _VALUE: tensor}
    return value


def decode(value: Any) -> Any:
    """Returns a state as it was before `encode`; arrays have memory of their own."""
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind == _ARRAY:
        return value[_VALUE].cpu().numpy().copy()
    if kind == _NUMBER:
        return value[_VALUE].cpu().numpy()[()]
    decoded = {key: decode(item) for key, item in value.items() if key not in (_KIND, _KEYS)}
    if kind is None and _KEYS in value:
        by_name = {str(key): item for key, item in decoded.items()}
        return {key: by_name[str(key)] for key in value[_KEYS] if str(key) in by_name}
    if kind is None:
        return decoded
    items = [decoded[key] for key in sorted(decoded, key=int)]
    return tuple(items) if kind == tuple.__name__ else items


def plain_number(value: Any) -> Any:
    """Returns a number of numpy as Python's with the same bits, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _needs_name(value: Any) -> bool:
    """Returns whether there is a tensor or an array in a value."""
    return isinstance(value, (Tensor, np.ndarray, np.generic)) or any(_needs_name(item) for item in _items(value))


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value


def _tensor_of(value: np.ndarray[Any, Any] | np.generic) -> Tensor | None:
    """Returns the same numbers as a tensor, None where torch has no such type (texts, objects, other byte orders)."""
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError):
        return None
