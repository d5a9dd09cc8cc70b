"""Finds what a data set owns besides its samples: random generators, and open files.

The search follows attributes of the data set, of its transforms, and of the objects that these hold.

numpy's `Generator` and `RandomState`, Python's `random.Random` and torch's `Generator` are found behind attributes, in
lists and dicts, in closures and partial functions. albumentations, for instance, draws from generators of its own,
which no seed of the global ones reaches.
"""

from __future__ import annotations

import functools
import io
import pickle
import random
import socket
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# Processes that share such a handle move each other's position in the file, or the library forbids sharing.
_HANDLES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper, socket.socket)
_PACKAGES_OF_HANDLES = {"h5py", "lmdb", "sqlite3", "netCDF4", "tables", "rasterio", "decord", "av"}
# What these packages hold is data, or a cache of it.
_LEFT_OUT = {"pyarrow", "pandas", "threading", "multiprocessing", "logging", "io", "_io", "builtins"}
# Longer containers hold samples, not transforms.
_MOST_ITEMS = 1000
_DEPTH = 8
_STRIDE = 0x9E3779B97F4A7C15


class OwnedGenerators:
    """The generators behind an object.

    Args:
        owner: the data set.
    """

    def __init__(self, owner: Any) -> None:
        self._getters = [get for get, value in _held_by(owner) if isinstance(value, _KINDS)]

    def __len__(self) -> int:
        return len(self._getters)

    def seed(self, key: int) -> None:
        """Seeds each of them with a number of its own; one that several attributes name has the same each time."""
        seed_each([get() for get in self._getters], key)

    def positions(self) -> bytes:
        """Returns what `positions_of` does."""
        return positions_of([get() for get in self._getters])


def seed_each(generators: Sequence[Any], key: int) -> None:
    """Seeds random generators with a number of its own each."""
    for number, generator in enumerate(generators):
        _seed(generator, (key + number * _STRIDE) % 2**63)


def positions_of(generators: Sequence[Any]) -> bytes:
    """Returns where random generators are; the same bytes as long as nothing is drawn from any of them."""
    return pickle.dumps([_state_of(generator) for generator in generators])


def open_handle(owner: Any) -> str | None:
    """Returns the type of something behind an object that forked processes cannot share, None if nothing is found.

    It is an open file, a zip or tar file, a socket, or what HDF5, LMDB, SQLite and the like open.
    """
    for _, value in _held_by(owner):
        kind = type(value)
        if isinstance(value, _HANDLES) or kind.__module__.partition(".")[0] in _PACKAGES_OF_HANDLES:
            return f"{kind.__module__}.{kind.__qualname__}"
    return None


def _held_by(owner: Any) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Yields how to get each object behind another one, and the object.

    A random generator comes once for each of its holders, everything else once.
    """
    seen: dict[int, Any] = {id(owner): owner}
    level = [owner]
    for _ in range(_DEPTH):
        following: list[Any] = []
        for holder in level:
            for get in _getters_of(holder):
                value = get()
                if isinstance(value, _KINDS):
                    yield get, value
                elif id(value) not in seen:
                    yield get, value
                    seen[id(value)] = value
                    following.append(value)
        level = following


def _seed(generator: Any, key: int) -> None:
    if isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(key).state
    elif isinstance(generator, np.random.RandomState):
        try:
            generator.seed(key % 2**32)
        except TypeError:
            # It draws from another bit generator than MT19937, which takes a state alone.
            bit_generator: Any = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])
            generator.set_state(bit_generator(key).state)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(key)
    elif isinstance(generator, random.Random):
        generator.seed(key)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.get_state()
    # Two tensors of the same values are pickled to different bytes.
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


def _getters_of(holder: Any) -> Iterator[Callable[[], Any]]:
    """Yields how to get what an object holds: a transform may replace its generator by another one."""
    if isinstance(holder, dict):
        names: list[Any] = list(holder) if len(holder) <= _MOST_ITEMS else []
        yield from (functools.partial(holder.get, name) for name in names)
    elif isinstance(holder, (list, tuple)):
        items: list[Any] = list(holder) if len(holder) <= _MOST_ITEMS else []
        yield from (functools.partial(_itself, item) for item in items)
    elif isinstance(holder, functools.partial):
        yield from (functools.partial(_itself, item) for item in (holder.func, holder.args, holder.keywords))
    elif isinstance(holder, types.MethodType):
        yield functools.partial(_itself, holder.__self__)
    elif isinstance(holder, types.FunctionType):
        yield from (functools.partial(_content_of, cell) for cell in holder.__closure__ or ())
    elif not isinstance(holder, (type, types.ModuleType, torch.Tensor)):
        package = type(holder).__module__.partition(".")[0]
        names = list(vars(holder)) if package not in _LEFT_OUT and hasattr(holder, "__dict__") else []
        yield from (functools.partial(getattr, holder, name, None) for name in names)


def _itself(value: Any) -> Any:
    return value


def _content_of(cell: types.CellType) -> Any:
    """Returns what a variable of a closure holds, None where nothing was assigned to it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
