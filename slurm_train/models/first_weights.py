"""The first weights of a model, drawn or read by each rank for the part that it holds.

A class that defines `init_weights(name, part)` is built by `build_without_memory`: its parameters have a shape and no
memory. Once the model is cut, `fill` calls the method for the rows of each parameter that a rank holds, or reads them
from a file. The random generator is seeded by the run's seed, the name of the parameter and the number of the block of
rows, so every layout begins with the same bits; they are drawn on the CPU, so every kind of GPU does, too.

Any other model is built as it is written, whole, by every rank, in host memory (`build_in_host_memory`).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from slurm_train.errors import ConfigError
from slurm_train.formatting import byte_size
from slurm_train.models.host_memory import available_bytes

Index = tuple[slice, ...]
"""A part of a tensor: a slice with start and stop for each dimension."""
Read = Callable[[Index], Tensor]
"""Gives a part of a tensor's first values, on the host."""

B = TypeVar("B", bound=Callable[..., nn.Module])
_METHOD = "init_weights"
_marked = set[object]()
_METHOD_ARGUMENTS = ["self", "name", "part"]
_READ = "_read_first_values"
_REPLACEMENT = "_replacement_without_memory"
_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
# Values per seed: many enough to be drawn quickly, few against what a rank holds of a large matrix.
_BLOCK = 1 << 16
# Smaller parameters are not compared with the free memory.
_LARGE_BYTES = 1 << 20
_is_without_memory: ContextVar[bool] = ContextVar("is_without_memory", default=False)


class NeedsMemoryError(Exception):
    """Parameters get first values that no rank can make for its part alone, so each builds the whole model."""


def gives_init_weights(build: B) -> B:
    """Marks a function: what it returns is of a class with an `init_weights(self, name, part)` of its own."""
    _marked.add(build)
    return build


def defines_init_weights(target: object) -> bool:
    """Returns whether a class has an `init_weights(self, name, part)` of its own, or a function is marked so.

    An inherited one does not count: it knows nothing of the parameters that a derived class may add. Methods of the
    same name with other arguments, which many constructors call, are left alone.
    """
    if target in _marked:
        return True
    method = vars(target).get(_METHOD) if isinstance(target, type) else None
    return inspect.isfunction(method) and list(inspect.signature(method).parameters) == _METHOD_ARGUMENTS


def is_without_memory() -> bool:
    """Returns whether a model is being built whose parameters get no memory."""
    return _is_without_memory.get()


@contextmanager
def without_memory() -> Iterator[None]:
    """Takes the memory of each parameter as soon as a module registers it; buffers keep their values."""
    token = _is_without_memory.set(True)
    hook: Any = _take_memory
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        _is_without_memory.reset(token)


def _take_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Returns the parameter on the meta device; None leaves it as it is."""
    if parameter.is_meta or is_lazy(parameter):
        return None
    # What is registered in two places stays one parameter.
    if not hasattr(parameter, _REPLACEMENT):
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        vars(empty).update(vars(parameter))
        setattr(parameter, _REPLACEMENT, empty)
    replacement: nn.Parameter = getattr(parameter, _REPLACEMENT)
    return replacement


def build_without_memory(build: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Returns a model whose parameters have no memory; buffers have their values. `fill` does the rest.

    Args:
        build: makes a model that has `init_weights(name, part)`.
        seed: of the values that will be drawn.

    Raises:
        NeedsMemoryError: raised by `build`.
    """
    with without_memory():
        model = build()
    # Of tied parameters the first name counts.
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not hasattr(parameter, _READ):
            setattr(parameter, _READ, _Drawn(model, name, parameter, seed=seed))
    return model


class _Drawn:
    """A `Read` that calls the model's `init_weights` for the rows that are asked for.

    Args:
        model: has the method.
        name: of the parameter.
        parameter: without memory.
        seed: of the run.
    """

    def __init__(self, model: nn.Module, name: str, parameter: Tensor, *, seed: int) -> None:
        self._model = model
        self._name = name
        self._shape = tuple(parameter.shape)
        # `lower_parameters` changes the parameter's type later; values are drawn in the first one and rounded.
        self._dtype = parameter.dtype
        self._seed = seed

    def __call__(self, index: Index) -> Tensor:
        """Returns a part.

        Raises:
            ConfigError: the method has left values out.
        """
        if not self._shape:
            return self._draw(0, ())
        num_rows, *sizes = self._shape
        rows_per_block = max(1, _BLOCK // max(1, math.prod(sizes)))
        start = index[0].start
        stop = index[0].stop
        parts = []
        for block in range(start // rows_per_block, math.ceil(stop / rows_per_block)):
            first = block * rows_per_block
            last = min(first + rows_per_block, num_rows)
            values = self._draw(block, (last - first, *sizes))
            rows = slice(max(start - first, 0), stop - first)
            place = (rows, *index[1:])
            parts.append(values[place])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _draw(self, block: int, shape: tuple[int, ...]) -> Tensor:
        can_be_nan = self._dtype.is_floating_point or self._dtype.is_complex
        values = torch.full(shape, math.nan if can_be_nan else 0, dtype=self._dtype)
        # In JSON, so that no two lists give the same bytes. The constant tells this use of the seed from others.
        key = json.dumps([self._seed, self._name, 1, block])
        torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(key.encode()))
        init_weights: Any = getattr(self._model, _METHOD)
        init_weights(self._name, values)
        if can_be_nan and values.isnan().any():
            raise ConfigError(
                f"{type(self._model).__name__}.{_METHOD}(name, part) gives no values to {self._name}",
                hint="fill `part` in place for every name, e.g. with torch.nn.init.zeros_(part); or leave the method "
                "out, and each rank builds the model as its constructor is written",
            )
        return values


def build_in_host_memory(build: Callable[[], nn.Module], *, name: str, ranks_on_node: int) -> nn.Module:
    """Returns a model as its constructor makes it, if it fits.

    Args:
        build: makes the model.
        name: of what is built, for errors.
        ranks_on_node: how many ranks of this node build it at the same time.

    Raises:
        ConfigError: the next parameter does not fit into what is left of the memory of the node or of the job.
    """

    def require_room(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        if is_lazy(parameter) or parameter.is_meta or parameter.nbytes < _LARGE_BYTES:
            return
        # torch.empty has reserved it, and nothing has been written: the kernel would end the process when it is.
        free_bytes = available_bytes()
        if free_bytes is not None and ranks_on_node * parameter.nbytes > free_bytes:
            raise _too_large(
                name,
                f"a parameter of {byte_size(parameter.nbytes)} for each of {ranks_on_node} ranks does not fit into the "
                f"{byte_size(free_bytes)} that are left on this node",
            )

    handle = register_module_parameter_registration_hook(require_room)
    try:
        return build()
    except MemoryError as err:
        raise _too_large(name, "the allocation failed") from err
    except RuntimeError as err:
        if "can't allocate memory" not in str(err):
            raise
        raise _too_large(name, str(err)) from err
    finally:
        handle.remove()


def _too_large(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"each rank builds all of {name} in host memory, and there is not enough: {reason}",
        hint="define init_weights(self, name, part) on its class, then each rank makes only what it holds "
        "(docs/own-model.md#first-weights); or ask for more memory with cluster.memory_gb_per_node",
    )


def begin_with(parameter: Tensor, read: Read) -> None:
    """Gives a parameter other first values: at once, or if it has no memory yet when it is filled."""
    if parameter.is_meta:
        setattr(parameter, _READ, read)
        return
    with torch.no_grad():
        parameter.copy_(read(tuple(slice(0, size) for size in parameter.shape)))


def has_first_values(parameter: Tensor) -> bool:
    """Returns whether a parameter has values, or is read when it is filled."""
    return not parameter.is_meta or hasattr(parameter, _READ)


def lower_parameters(model: nn.Module) -> None:
    """Makes float32 parameters bfloat16, in place, with memory or without; buffers stay as they are.

    Raises:
        ConfigError: the model has running statistics, which would be of another type than the parameters beside them.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ConfigError(
                f"train.param_dtype=bfloat16 was asked, but {name} of {type(model).__name__} keeps running statistics, "
                "which have to be precise",
                hint="leave train.param_dtype=float32; train.precision=bfloat16 computes in bfloat16 all the same",
            )
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.bfloat16()


def first_values(model: nn.Module) -> dict[str, Read]:
    """Returns what gives the values of each parameter without memory, by name; for a model that is whole.

    Raises:
        ConfigError: the model's own code has put a parameter or a buffer on the meta device.
    """
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    reads: dict[str, Read] = {}
    for name, tensor in named:
        if has_first_values(tensor):
            if tensor.is_meta:
                reads[name] = getattr(tensor, _READ)
            continue
        raise ConfigError(
            f"{name} is on the meta device, and nothing is known of its values",
            hint="build the model without a device; with init_weights(self, name, part) on its class each rank gives "
            "memory to the part that it holds",
        )
    return reads


def fill(
    roots: Sequence[nn.Module],
    values: Mapping[str, Read],
    *,
    device: torch.device,
    shards_device: torch.device | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Gives what this rank holds of a model memory and values, one parameter after the other; the rest is moved.

    Parameters stay the same objects, so tied ones stay tied.

    Args:
        roots: what is called: the model itself, or its stages; whole or cut.
        values: what `first_values` gave.
        device: this rank's.
        shards_device: where shards are kept, if elsewhere.
        progress: called after each parameter.

    Raises:
        ConfigError: the model's `init_weights` has left a parameter out.
    """
    named = [pair for root in roots for pair in (*root.named_parameters(), *root.named_buffers())]
    names = {id(tensor): name for name, tensor in named}

    def give(tensor: Tensor) -> Tensor:
        is_cut = hasattr(tensor, "placements")
        if not tensor.is_meta:
            return tensor if is_cut else tensor.to(device)
        if is_cut:
            filled: Any = torch.empty_like(tensor, device=shards_device or device)
        else:
            # `empty_like` of a tensor without memory would import sympy.
            filled = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        part: Tensor = filled.to_local() if is_cut else filled
        if part.numel():
            starts = _offsets(filled) if is_cut else [0] * part.dim()
            index = tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))
            part.copy_(values[names[id(tensor)]](index))
        progress()
        return filled  # type: ignore[no-any-return]

    if not any(tensor.is_meta or hasattr(tensor, "placements") for _, tensor in named):
        # Built in host memory. What other code holds on to (old weight_norm, a scripted module) can only be moved.
        for root in roots:
            root.to(device)
        return
    attributes = [(tensor, {**vars(tensor)}) for _, tensor in named if tensor.is_meta]
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for root in roots:
                # FSDP takes note of its new shards here, which nothing public asks of it alone.
                root._apply(give)  # type: ignore[no-untyped-call]  # torch has no types here
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for tensor, kept in attributes:
        kept.pop(_READ, None)
        vars(tensor).update(kept)


def _offsets(tensor: Any) -> Sequence[int]:
    """Returns where in the whole tensor a rank's part begins, per dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    offsets: Sequence[int]
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a safetensors file; a `Read` that takes from the file what is asked of it."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def __call__(self, index: Index) -> Tensor:
        """Returns a part."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as handle:
            # What has no dimension has no slices.
            part: Tensor = handle.get_slice(self.name)[index] if index else handle.get_tensor(self.name)
        return part


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a safetensors file or of a directory in transformers' layout, by name.

    Raises:
        ConfigError: there is no such file.
    """
    from safetensors import SafetensorError, safe_open

    names = [_SINGLE_FILE]
    if (path / _INDEX_FILE).is_file():
        names = sorted(set(json.loads((path / _INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, Stored] = {}
    for file in [path / name for name in names] if path.is_dir() else [path]:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  # it is no mapping
                    shape = tuple(handle.get_slice(name).get_shape())
                    tensors[name] = Stored(file=file, name=name, shape=shape)
        except (OSError, SafetensorError) as err:
            raise ConfigError(
                f"cannot read weights from {file}: {err}", hint="name a safetensors file, or a directory that has one"
            ) from err
    return tensors
