"""The first weights of a model, drawn or read by each rank for the part that it holds.

`build_without_memory` runs a constructor on parameters that have a shape and no memory, and records what would have
been done to them. Once the model is cut, `fill` gives each rank's part its numbers: it repeats the record for that
part, or reads the part from a file. Random numbers depend on the seed, the name of the parameter and the position in
it, so every layout begins with the same bits. They are drawn on the CPU, so every kind of GPU does, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from slurm_train.errors import ConfigError
from slurm_train.frozen_class import frozen

Index = tuple[slice, ...]
"""A part of a tensor: a slice with start and stop for each dimension."""
Read = Callable[[Index], Tensor]
"""Gives a part of a tensor's first values, on the host."""

_READ = "_read_first_values"
_INDEX_FILE, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# Values per seed: many enough to be drawn quickly, few against what a rank holds of a large matrix.
_BLOCK = 1 << 16
_ATEN = torch.ops.aten
_EMPTY = _ATEN.empty.memory_format
_FILLS = {_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.fill_.Scalar, _ATEN.zero_.default, nn.init.trunc_normal_}
_RANDOM = torch.Tag.nondeterministic_seeded
_RESIZES = {_ATEN.set_, _ATEN.resize_}


class NeedsMemoryError(Exception):
    """A constructor needs the values of its parameters, so the model has to be built in host memory."""


def build_without_memory(build: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Returns a model whose parameters that come from `torch.empty`, as those of torch's modules do, have no memory.

    All others, and buffers, have their values. `fill` does the rest.

    Args:
        build: makes the model; it is left in the middle if it cannot be recorded.
        seed: of the values that will be drawn.

    Raises:
        NeedsMemoryError: the constructor changes its parameters in a way that cannot be repeated.
    """
    recorder = _Recorder()
    draws_again: Any = nn.init
    # It looks at what it has drawn and draws some of it again (torch 2.13), so it is recorded as one operation.
    before, draws_again._no_grad_trunc_normal_ = draws_again._no_grad_trunc_normal_, recorder.truncate
    try:
        with recorder, _Disguise(recorder.knows):
            model = build()
    finally:
        draws_again._no_grad_trunc_normal_ = before
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    empty = {name: tensor for name, tensor in named if tensor.is_meta}
    views = {name: recorder.view(tensor) for name, tensor in empty.items()}
    recorder.require_same_constants()
    others = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    if any(one.is_meta for one in others):
        raise NeedsMemoryError("torch.empty makes a tensor that is neither a parameter nor a buffer")
    # Of tied parameters the first name counts.
    names = {view.storage: name for name, view in reversed(views.items())}
    for name, tensor in empty.items():
        if not hasattr(tensor, _READ):
            setattr(tensor, _READ, _Record(views[name], names=names, seed=seed))
    return model


def is_recording() -> bool:
    """Returns whether the constructor of a model is being recorded, so that its parameters have no memory."""
    return any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack())


def begin_with(parameter: Tensor, read: Read) -> None:
    """Gives a parameter other first values: at once, or if it has no memory yet when it is filled."""
    if parameter.is_meta or is_recording():
        setattr(parameter, _READ, read)
    else:
        with torch.no_grad():
            parameter.copy_(read(tuple(slice(0, size) for size in parameter.shape)))


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
    """Returns what gives the values of each parameter and buffer without memory, by name; for a model that is whole.

    Raises:
        ConfigError: the model's own code has put one on the meta device.
    """
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    found: dict[str, Read] = {}
    for name, tensor in named:
        if tensor.is_meta:
            if not hasattr(tensor, _READ):
                raise ConfigError(
                    f"{name} is on the meta device, and nothing is known of its values",
                    hint="build the model without a device; it gets memory when each rank knows which part it holds",
                )
            found[name] = getattr(tensor, _READ)
    return found


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
        NeedsMemoryError: what was recorded cannot be repeated, or memory cannot be given to the parameters as they are;
            the model is left in the middle.
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
        own: Tensor = filled.to_local() if is_cut else filled
        if own.numel():
            starts = _offsets(filled) if is_cut else [0] * own.dim()
            index = tuple(slice(start, start + size) for start, size in zip(starts, own.shape, strict=True))
            own.copy_(values[names[id(tensor)]](index))
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
    except ConfigError:
        raise
    except Exception as err:  # what is repeated may be any operation
        raise NeedsMemoryError(f"{type(err).__name__}: {err}") from err
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for tensor, own in attributes:
        own.pop(_READ, None)
        vars(tensor).update(own)


def _offsets(tensor: Any) -> Sequence[int]:
    """Returns where in the whole tensor a rank's part begins, per dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: Sequence[int] = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    return found


@frozen
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
            found: Tensor = handle.get_slice(self.name)[index] if index else handle.get_tensor(self.name)
        return found


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a safetensors file or of a directory in transformers' layout, by name.

    Raises:
        ConfigError: there is no such file.
    """
    from safetensors import SafetensorError, safe_open

    names = [_SINGLE_FILE]
    if (path / _INDEX_FILE).is_file():
        names = sorted(set(json.loads((path / _INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()))
    found: dict[str, Stored] = {}
    for file in [path / name for name in names] if path.is_dir() else [path]:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  # it is no mapping
                    shape = tuple(handle.get_slice(name).get_shape())
                    found[name] = Stored(file=file, name=name, shape=shape)
        except (OSError, SafetensorError) as err:
            raise ConfigError(
                f"cannot read weights from {file}: {err}", hint="name a safetensors file, or a directory that has one"
            ) from err
    return found


@frozen
class _Call:
    """An operation that makes a storage, or changes its values."""

    operator: Any
    arguments: tuple[Any, Any]
    """Positional and by name; a `_View` in place of each recorded tensor."""
    output: int = 0
    """Which of the results is the storage, where the operation makes it."""
    stride: tuple[int, ...] = ()
    """Of that result."""


@frozen
class _View:
    """A tensor without memory, as it was at one moment."""

    storage: int
    calls: tuple[_Call, ...]
    """The first one made the storage, the others changed it."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    """It has all values of the storage, in their order."""


@frozen
class _Storage:
    number: int
    handle: Any
    """Kept, so that no other gets its address."""
    dtype: torch.dtype
    num_values: int


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Makes tensors of `torch.empty` without memory, and records the operations on them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and torch would import dynamo to say so: a second for every start (torch 2.13).
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[_Call, ...]] = []
        self._storages: dict[int, _Storage] = {}
        self._constants: list[tuple[Tensor, int]] = []
        init: Any = nn.init
        self._truncate = init._no_grad_trunc_normal_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation; on shapes alone where there is nothing else."""
        kwargs = kwargs or {}
        is_empty = func is _EMPTY and torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if not is_empty and not any(map(self.knows, tree_leaves((args, kwargs)))):
            # The number in `weight[rows] = 0`.
            here = {"device": "cpu"} if func is _ATEN.scalar_tensor.default else {}
            outputs = func(*args, **{**kwargs, **here})
            if any(isinstance(one, Tensor) and one.is_meta for one in tree_leaves(outputs)):
                raise NeedsMemoryError(f"{func} makes a tensor on the meta device")
            return outputs
        if kwargs.get("generator") is not None:
            raise NeedsMemoryError(f"{func} draws from a generator of its own")
        arguments = tree_map_only(Tensor, self._encode, (args, kwargs))
        here = {"device": "meta"} if is_empty or kwargs.get("device") is not None else {}
        # There is nothing to fill, and torch would import dynamo for it.
        outputs = args[0] if func in _FILLS else func(*args, **{**kwargs, **here})
        if written := _written(func, args, kwargs):
            self._change(written, _Call(operator=func, arguments=arguments))
        for number, one in enumerate(outputs if isinstance(outputs, (tuple, list)) else [outputs]):
            if isinstance(one, Tensor) and not self.knows(one):
                self._add(one, _Call(operator=func, arguments=arguments, output=number, stride=one.stride()))
        return outputs

    def knows(self, value: Any) -> bool:
        """Returns whether a value is a recorded tensor."""
        return isinstance(value, Tensor) and _address(value) in self._storages

    def truncate(self, tensor: Tensor, *bounds: float, generator: torch.Generator | None = None) -> Tensor:
        """Records `nn.init.trunc_normal_`, or calls it for a tensor with memory or with a generator of its own."""
        if generator is not None or not self.knows(tensor):
            return self._truncate(tensor, *bounds, generator=generator)  # type: ignore[no-any-return]
        self._change([tensor], _Call(operator=nn.init.trunc_normal_, arguments=((self.view(tensor), *bounds), {})))
        return tensor

    def view(self, tensor: Tensor) -> _View:
        """Returns what is known of a tensor without memory.

        Raises:
            NeedsMemoryError: it is not one of those that were recorded, or its bytes are taken for another type.
        """
        storage = self._storages.get(_address(tensor))
        if storage is None or tensor.dtype != storage.dtype:
            raise NeedsMemoryError(f"a tensor of {tensor.dtype} without memory was made in another way")
        offset = int(tensor.storage_offset())
        return _View(
            storage=storage.number,
            calls=self._calls[storage.number],
            size=tuple(tensor.size()),
            stride=tensor.stride(),
            offset=offset,
            is_whole=tensor.is_contiguous() and offset == 0 and tensor.numel() == storage.num_values,
        )

    def require_same_constants(self) -> None:
        """Checks that tensors with memory that went into parameters still are what they were then.

        Raises:
            NeedsMemoryError: they are not.
        """
        if any(tensor._version != version for tensor, version in self._constants):
            raise NeedsMemoryError("a tensor was changed after it was copied into a parameter")

    def _add(self, tensor: Tensor, call: _Call) -> None:
        handle, size = tensor.untyped_storage(), tensor.dtype.itemsize
        self._storages[_address(tensor)] = _Storage(
            number=len(self._calls), handle=handle, dtype=tensor.dtype, num_values=handle.nbytes() // size
        )
        self._calls.append((call,))

    def _change(self, written: Sequence[Tensor], call: _Call) -> None:
        is_known = len(written) == 1 and self.knows(written[0])
        if not is_known or getattr(call.operator, "overloadpacket", None) in _RESIZES:
            raise NeedsMemoryError(f"{call.operator} changes parameters in a way that is not recorded")
        view = self.view(written[0])
        # What was drawn before is gone: torch's modules draw values, and most models draw others.
        calls = view.calls[:1] if call.operator in _FILLS and view.is_whole else view.calls
        self._calls[view.storage] = (*calls, call)

    def _encode(self, tensor: Tensor) -> Any:
        if self.knows(tensor):
            return self.view(tensor)
        self._constants.append((tensor, tensor._version))
        return tensor


class _Disguise(TorchFunctionMode):
    """Lets recorded tensors look like those of the CPU: code that sees the meta device initialises nothing.

    That is so for torch's `trunc_normal_` and `orthogonal_`, and for models of transformers.

    Args:
        knows: whether a tensor was recorded.
    """

    def __init__(self, knows: Callable[[Any], bool]) -> None:
        super().__init__()
        self._knows = knows
        getters: Any = Tensor
        self._answers = {getters.is_meta.__get__: False, getters.device.__get__: torch.device("cpu")}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers where a tensor is; all else goes on as it is."""
        if func in self._answers and self._knows(args[0]):
            return self._answers[func]
        return func(*args, **(kwargs or {}))


class _Record:
    """A `Read` that repeats what was recorded.

    Args:
        view: the tensor.
        names: of storages; one without a name is keyed by the order in which they were made.
        seed: of the run.
    """

    def __init__(self, view: _View, *, names: Mapping[int, str], seed: int) -> None:
        self._view, self._names, self._seed = view, names, seed
        self._steps = _pointwise_steps(view) if view.size else None

    def __call__(self, index: Index) -> Tensor:
        """Returns a part; the whole tensor is made for it only where its values depend on each other.

        Raises:
            ConfigError: nothing has given it values.
        """
        if [call.operator for call in self._view.calls] == [_EMPTY]:
            name = self._names[self._view.storage]
            raise ConfigError(
                f"{name} is made by torch.empty, and the model's constructor gives it no values",
                hint="initialise it, e.g. with torch.nn.init.zeros_, or start from weights: train.init_from",
            )
        if self._steps is None:
            return self._repeat(self._view)[index]
        num_rows, *others = self._view.size
        at_once = max(1, _BLOCK // max(1, torch.Size(others).numel()))
        start, stop = index[0].start, index[0].stop
        parts = []
        for block in range(start // at_once, -(-stop // at_once)):
            first, last = block * at_once, min((block + 1) * at_once, num_rows)
            values: Any = [last - first, *others]
            for storage, position, call in self._steps:
                (_, *rest), keywords = call.arguments
                self._set_seed(call, storage, position, block)
                values = call.operator(values, *rest, **keywords)
            own = (slice(max(start - first, 0), stop - first), *index[1:])
            parts.append(values[own])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _repeat(self, view: _View) -> Tensor:
        """Returns a whole tensor."""
        made: Tensor | None = None

        def decode(other: _View) -> Tensor:
            if made is None or other.storage != view.storage:
                return self._repeat(other)
            return made.as_strided(other.size, other.stride, other.offset)

        for position, call in enumerate(view.calls):
            args, kwargs = tree_map_only(_View, decode, call.arguments)
            self._set_seed(call, view.storage, position, 0)
            outputs = call.operator(*args, **kwargs)
            if made is None:
                made = outputs[call.output] if isinstance(outputs, (tuple, list)) else outputs
                made = torch.empty_strided(made.size(), call.stride, dtype=made.dtype).copy_(made)
        return decode(view)

    def _set_seed(self, call: _Call, storage: int, position: int, block: int) -> None:
        if _RANDOM in _tags(call.operator):
            # In JSON, so that no two lists give the same bytes.
            key = json.dumps([self._seed, self._names.get(storage, storage), position, block])
            torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(key.encode()))


def _pointwise_steps(view: _View) -> list[tuple[int, int, _Call]] | None:
    """Returns storage, position and call of the steps that made a tensor, if none of them looks at other values."""
    first, *others = view.calls
    if not view.is_whole or not all(map(_is_pointwise, others)):
        return None
    steps = [(view.storage, position, call) for position, call in enumerate(view.calls)]
    if first.operator is _EMPTY:
        return steps
    before = _pointwise_steps(first.arguments[0][0]) if _is_pointwise(first) else None
    return None if before is None else before + steps


def _is_pointwise(call: _Call) -> bool:
    """Returns whether an operation gives each value of a whole tensor without a look at the others."""
    (args, kwargs), tags = call.arguments, _tags(call.operator)
    is_known = torch.Tag.pointwise in tags and _RANDOM not in tags
    if not (is_known or call.operator in _FILLS or call.operator is _ATEN._to_copy.default):
        return False
    others = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, (_View, Tensor))]
    is_alone = all(isinstance(one, Tensor) and one.dim() == 0 for one in others)
    return is_alone and isinstance(args[0], _View) and args[0].is_whole


def _tags(operator: Any) -> Any:
    return getattr(operator, "tags", [_RANDOM])


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation changes."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[number] if number < len(args) else kwargs.get(argument.name))
    return [one for one in found if isinstance(one, Tensor)]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
