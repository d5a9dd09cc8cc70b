"""States of a program's objects as nested dictionaries of tensors and plain values, and back.

A checkpoint has each tensor by its path in dictionaries, also one that is cut over the ranks, and reads nothing but
tensors and plain values. Objects of programs keep tensors in lists as well (averages of weights), and numbers of numpy
(replay buffers, the states of generators).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def encode(value: Any) -> Any:
    """Returns a state in which tensors are in dictionaries only, and arrays are tensors; the tensors are the live ones.

    What has neither is left as it is.
    """
    if isinstance(value, dict):
        keys = {_KEYS: list(value)} if _needs_name(value) else {}
        return {**{key: encode(item) for key, item in value.items()}, **keys}
    if type(value) in (list, tuple) and any(_needs_name(item) for item in value):
        items = {str(number): encode(item) for number, item in enumerate(value)}
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
