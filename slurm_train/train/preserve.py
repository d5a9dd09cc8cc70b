"""Leaves a model as it was, bit for bit, after code that only looks at it, such as an evaluation.

What is put back is all that can be reached from the model: parameters (frozen ones too) and buffers, the mode of each
module, attributes of modules (numbers, lists, dicts, arrays, tensors, objects of the user's classes), and the random
generators of this process. State that lies elsewhere, in a global variable for instance, is not seen.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slurm_train.checkpoint.state import local_part, sharded_modules
from slurm_train.distributed.seeds import rng_state, set_rng_state

# What torch keeps of every module: hooks, and flags of its own. The rest of a module's attributes is the user's.
_OF_TORCH = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}
# Objects of these packages are functions, or hold threads, files or devices: not the state of a model.
_FOREIGN = {
    *("torch", "builtins", "functools"),
    *("threading", "queue", "multiprocessing", "concurrent", "asyncio"),
    *("logging", "io", "_io", "socket"),
}
# Longer containers are put back, but what their items hold is not looked at: a vocabulary, a list of files.
_MOST_ITEMS = 10_000


@contextmanager
def preserved(module: nn.Module) -> Iterator[list[Any]]:
    """Puts the module and this process's random generators back when the context ends; drops no gradient.

    Costs a copy of all parameters and buffers: on their device where it has room, else in host memory. The context
    gives the random generators that the module owns; they are put back, too.
    """
    generators = rng_state()
    snapshot = _Snapshot(module)
    try:
        yield snapshot.generators
    finally:
        # What FSDP2 has gathered may be of other values, and it puts its own parameters into the modules.
        for part in sharded_modules(module):
            part.reshard()
        snapshot.restore()
        set_rng_state(generators)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Puts the mode of each module back; one that is held in evaluation mode stays in it."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class _Snapshot:
    """The state of everything that can be reached from a module.

    Each object is recorded once and put back in place, so objects that share something still share it afterwards.

    Args:
        module: where to begin.
    """

    def __init__(self, module: nn.Module) -> None:
        self._seen: dict[int, Any] = {}
        """Keeps what was seen alive, so that no id is used again."""
        self.generators: list[Any] = []
        """The random generators among them."""
        self._restorers: list[Callable[[], None]] = []
        self._on_device = _has_room(module)
        waiting: list[Any] = [module]
        while waiting:
            value = waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._record(value)
            waiting.extend(_referred_to_by(value))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for restore in self._restorers:
            restore()

    def _record(self, value: Any) -> None:
        """Records how one object is put back; what it refers to is recorded apart."""
        restorer = self._restorer_of(value)
        if restorer is not None:
            self._restorers.append(restorer)

    def _restorer_of(self, value: Any) -> Callable[[], None] | None:
        """Returns what puts an object back as it is now; None where there is nothing to put back."""
        if isinstance(value, Tensor):
            return self._restorer_of_tensor(value)
        if isinstance(value, np.ndarray):
            # Nothing can write into one that is read-only, e.g. a mapped file.
            return partial(np.copyto, value, value.copy()) if value.flags.writeable else None
        if _is_generator(value):
            self.generators.append(value)
            return _restorer_of_generator(value)
        if isinstance(value, dict):
            return partial(_refill, value, dict(value))
        if isinstance(value, (list, deque, bytearray, set)):
            return partial(_refill, value, value.copy())
        if isinstance(value, tuple):
            # It cannot change; its items can.
            return None
        attributes = _attributes_of(value)
        return partial(_put_back, value, attributes) if attributes else None

    def _restorer_of_tensor(self, tensor: Tensor) -> Callable[[], None]:
        # An alias of the memory: `parameter.data = other` gives a parameter another one.
        memory = local_part(tensor).detach()
        written = _without_repeats(memory)
        content = written.clone() if self._on_device else written.to("cpu", copy=True)

        def restore() -> None:
            written.copy_(content)
            if isinstance(tensor, nn.Parameter) and local_part(tensor).data_ptr() != memory.data_ptr():
                local_part(tensor).data = memory

        return restore


def _referred_to_by(value: Any) -> list[Any]:
    """Returns the objects that one refers to and that may have state of their own."""
    if isinstance(value, (Tensor, np.ndarray, set)) or _is_generator(value):
        return []
    if isinstance(value, dict):
        return _items(list(value.values()))
    if isinstance(value, (list, deque, bytearray, tuple)):
        return _items(list(value))
    return list(_attributes_of(value).values())


def _restorer_of_generator(generator: Any) -> Callable[[], None]:
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes to put back: a module's, and those of an object of a user's class."""
    if isinstance(value, nn.Module):
        return {name: item for name, item in vars(value).items() if name not in _OF_TORCH}
    if isinstance(value, (type, types.ModuleType)) or type(value).__module__.partition(".")[0] in _FOREIGN:
        return {}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _put_back(value: Any, attributes: dict[str, Any]) -> None:
    present = vars(value)
    is_module = isinstance(value, nn.Module)
    for name in list(present):
        is_of_torch = is_module and name in _OF_TORCH
        if name not in attributes and not is_of_torch:
            del present[name]
    present.update(attributes)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def _items(items: list[Any]) -> list[Any]:
    return items if len(items) <= _MOST_ITEMS else []


def _without_repeats(memory: Tensor) -> Tensor:
    """Returns a view with each number once: torch does not write into a tensor that `expand` has made."""
    if memory.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(memory.shape, memory.stride(), strict=True)):
            if size > 1 and stride == 0:
                memory = memory.narrow(dim, 0, 1)
    return memory


def _is_generator(value: Any) -> bool:
    return isinstance(value, (np.random.Generator, np.random.RandomState, torch.Generator, random.Random))


def _has_room(module: nn.Module) -> bool:
    """Returns whether a copy of all tensors fits beside them, and as much again for what is done meanwhile."""
    tensors = {id(tensor): local_part(tensor) for tensor in (*module.parameters(), *module.buffers())}
    on_gpu = [tensor for tensor in tensors.values() if tensor.is_cuda]
    if not on_gpu:
        return True
    device = on_gpu[0].device
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused > 2 * sum(tensor.nbytes for tensor in on_gpu)
