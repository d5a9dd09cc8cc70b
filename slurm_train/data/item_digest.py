"""What tells the items of a person's own data set from those of another one: a digest of a few of them.

The class and the length of a data set stay the same when the file below it changes. So some items are read, the first
and the last and others at random places, with keyed randomness, in a process of its own: nothing that the data set
opens or counts stays in the training process. What two readings give differently is left out. Of real numbers a few of
each tensor count, rounded to two digits, since other CPUs may compute the last digits otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from slurm_train.data.order import mix64
from slurm_train.data.workers import in_trial_process

_NUM_ITEMS = 8
_NUM_REALS = 8
_LIMIT_S = 20.0
"""A data set that takes longer is known by its class and length alone."""


def digest_items(read: Callable[[int], Any], length: int, *, prepare: Callable[[], None]) -> str:
    """Returns a digest of some items as 32 hex digits, "" where a process of its own cannot read them.

    Args:
        read: gives an item by its number; its randomness is keyed by the number.
        length: of the data set.
        prepare: called first in the process that reads.
    """

    def read_twice() -> str:
        hasher = xxhash.xxh3_128()
        for number in _numbers(length):
            digest = _digest(read(number))
            if _digest(read(number)) == digest:
                hasher.update(f"{number} {digest}\n".encode())
        return hasher.hexdigest()

    outcome = in_trial_process(read_twice, prepare=prepare, limit_s=_LIMIT_S)
    return "" if outcome.value is None else outcome.value


def _numbers(length: int) -> list[int]:
    """Returns the numbers of the items that are read, ascending."""
    if length <= _NUM_ITEMS:
        return list(range(length))
    places = mix64(np.arange(_NUM_ITEMS - 2, dtype=np.uint64)) % np.uint64(length)
    return sorted({0, length - 1, *places.tolist()})


def _digest(item: Any) -> str:
    hasher = xxhash.xxh3_128()
    _add(hasher, item)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    """Adds a value with its kind and shape; of what is no data, its class alone."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if isinstance(value, (bool, int, float, complex, np.generic)):
        value = np.asarray(value)
    hasher.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuSU":
        hasher.update(f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        places = np.linspace(0, max(0, value.size - 1), _NUM_REALS).astype(int)
        numbers = value.reshape(-1)[places] if value.size else value
        hasher.update(f"{value.shape} {[f'{number:.1e}' for number in numbers.tolist()]}".encode())
    elif isinstance(value, str):
        hasher.update(value.encode(errors="surrogateescape"))
    elif isinstance(value, bytes):
        hasher.update(value)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _add(hasher, str(key))
            _add(hasher, part)
    elif isinstance(value, Sequence):
        for part in value:
            _add(hasher, part)
