"""Model and optimizer as one nested dictionary, keyed by full parameter names, and the memory it is copied into.

Names, not positions: the dictionary of a DDP-wrapped or compiled model equals that of the bare one, and the optimizer's
state can be loaded at another world size or mesh.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slurm_train.checkpoint.tree import plain_number
from slurm_train.errors import CheckpointError

_EXTRA_STATE = "_extra_state"
_FSDP = "torch.distributed.fsdp"
_TRAVELS_OTHERWISE = "fsdp_pre_all_gather"
"""What a tensor defines that FSDP gathers in another form."""


Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
"""The optimizer of a model, or those of its parts."""


def training_state(
    model: nn.Module, optimizers: Optimizers, *, makes_state: bool = True, structure: Structure | None = None
) -> dict[str, Any]:
    """Gives the state to save, or to be filled by load_tensors; its tensors are the live ones, not copies.

    Training stands still meanwhile, and torch's own function is slow: it looks each name up, module by module. It is
    called only where a state is to be made.

    Args:
        model: this rank's.
        optimizers: of its parameters.
        makes_state: an optimizer that has not stepped yet gets its state made (zero gradients, zero learning rate), so
            that there is something to fill; it must have no gradients at that moment. Collective for sharded models.
        structure: what `structure_of` gives of the model at this moment, if it is known.
    """
    structure = structure or structure_of(model)
    weights = _model_state(model, structure)
    if makes_state and not all(optimizer.state for optimizer in listed(optimizers)):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizers)}
    states: dict[str, Any] = {}
    groups = []
    for optimizer in listed(optimizers):
        kept, settings_of_groups = _state_of(optimizer)
        all_names = _names_of_groups(structure, optimizer)
        for group, settings, names in zip(optimizer.param_groups, settings_of_groups, all_names, strict=True):
            # Programs take learning rates out of arrays, and checkpoints have plain numbers.
            plain = {key: plain_number(value) for key, value in settings.items() if key != "params"}
            groups.append({**plain, "params": names})
            for parameter, name in zip(group["params"], names, strict=True):
                if parameter in kept:
                    states[name] = kept[parameter]
    return {"model": weights, "optimizer": {"state": states, "param_groups": groups}}


def _state_of(optimizer: Optimizer) -> tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]:
    """Returns what an optimizer saves of each parameter, and the settings of its groups."""
    if _gives_what_it_keeps(optimizer):
        # Without numbering all parameters.
        return optimizer.state, optimizer.param_groups
    given = optimizer.state_dict()
    parameter_of: dict[Any, Tensor] = {}
    for group, numbered in zip(optimizer.param_groups, given["param_groups"], strict=True):
        parameter_of |= dict(zip(numbered["params"], group["params"], strict=True))
    return {parameter_of[number]: kept for number, kept in given["state"].items()}, given["param_groups"]


def _gives_what_it_keeps(optimizer: Optimizer) -> bool:
    """Returns whether its `state_dict` gives its state and the settings of its groups as they are, and nothing else."""
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    return type(optimizer).state_dict is Optimizer.state_dict and not any(hooks)


def restore_training_state(model: nn.Module, optimizers: Optimizers, state: dict[str, Any]) -> None:
    """Puts a filled state back; hyperparameters of the parameter groups (learning rate, betas) come back too."""
    restore_model_state(model, state["model"])
    states = state["optimizer"]["state"]
    groups = iter(state["optimizer"]["param_groups"])
    for optimizer in listed(optimizers):
        group_names = names_of_groups(model, optimizer)
        # An optimizer may keep something of some of its parameters only.
        kept = {name: states[name] for names in group_names for name in names if name in states}
        # It takes any numbering of its parameters, in the order of its groups: also their names.
        own_groups = [{**next(groups), "params": names} for names in group_names]
        optimizer.load_state_dict({"state": kept, "param_groups": own_groups})
        for group, names in zip(optimizer.param_groups, group_names, strict=True):
            for parameter, name in zip(group["params"], names, strict=True):
                if parameter in optimizer.state:
                    _keep_types(optimizer.state[parameter], kept.get(name, {}))


def listed(optimizers: Optimizers) -> Sequence[Optimizer]:
    """Returns the optimizers, also where there is one."""
    return [optimizers] if isinstance(optimizers, Optimizer) else optimizers


def _keep_types(loaded: Any, saved: Any) -> None:
    """Puts tensors of another number type back as they were saved.

    torch converts what it loads to the type of the parameter, e.g. moments in float32 of a parameter in bfloat16.

    Args:
        loaded: what an optimizer keeps of a parameter, nested.
        saved: the same as in the checkpoint.
    """
    for key in saved if isinstance(saved, dict) else range(len(saved)):
        value = saved[key]
        if isinstance(value, (dict, list)):
            _keep_types(loaded[key], value)
        elif isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value


def model_state(model: nn.Module) -> dict[str, Any]:
    """Returns the live tensors of parameters and of buffers that are saved, and extra states, by their full names.

    A model whose `state_dict` leaves some out, renames or converts them is saved by the names and values of its own:
    what is written has to give every parameter back.
    """
    return _model_state(model, structure_of(model))


def _model_state(model: nn.Module, structure: Structure) -> dict[str, Any]:
    if structure.is_plain:
        # Training stands still meanwhile.
        return {name: _with_plain_part(tensor.detach()) for name, tensor in structure.saved.items()}
    plain = structure.plain
    given = _state_of_own_tensors(model)
    state = _own_tensors(model) if given is None else given
    named = {plain(name): _with_plain_part(_detached(value)) for name, value in state.items()}
    return {**named, **extra_states(model)} if given is None else named


class Structure(NamedTuple):
    """What a model is made of at this moment, by full names."""

    plain: Callable[[str], str]
    """Leaves out of a name what belongs to a wrapper."""
    modules: Mapping[str, nn.Module]
    """Without wrappers."""
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    """Those that are saved."""
    is_plain: bool
    """Whether torch's `state_dict` gives tensors by their names and as they are, and nothing else."""
    saved: Mapping[str, Tensor]
    """What it gives then, in its order; else nothing."""
    found: object
    """Another object for each structure that was found out: the same one as long as nothing has changed."""

    @property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the buffers that are saved."""
        return {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}


def structure_of(model: nn.Module) -> Structure:
    """Returns what a model is made of.

    To find it out takes milliseconds, several times for each save, and a GPU may be idle meanwhile. So the names are
    kept, until a module, a parameter or a buffer is replaced, added or gone.
    """
    objects = _objects_of(model)
    kept = _kept_names.get(model)
    if kept is not None and kept.are_of(objects):
        return kept.structure(objects)
    structure = _find_structure(model)
    _kept_names[model] = _KeptNames(structure, objects)
    return structure


def _find_structure(model: nn.Module) -> Structure:
    plain = plain_names(model)
    is_plain = all(map(_is_saved_as_is, model.modules()))
    return Structure(
        plain=plain,
        # What is within a wrapper comes after it.
        modules={plain(f"{prefix}.").removesuffix("."): module for prefix, module in model.named_modules()},
        parameters={plain(name): parameter for name, parameter in model.named_parameters()},
        buffers={plain(name): buffer for name, buffer in saved_buffers(model).items()},
        is_plain=is_plain,
        saved={plain(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()} if is_plain else {},
        found=object(),
    )


class _KeptNames:
    """The names of a structure, and at which place of `_objects_of` each object is; it keeps no object alive.

    Args:
        structure: of a model.
        objects: what `_objects_of` gives of it.
    """

    def __init__(self, structure: Structure, objects: Sequence[Any]) -> None:
        self._ids = list(map(id, objects))
        # An id is an object's as long as that lives. Names depend on the class of a module, of a tensor on its place
        # alone; and torch refuses to exchange a tensor with a weak reference, as sharding does.
        self._refs = [weakref.ref(value) for value in objects if isinstance(value, nn.Module)]
        self._names = [value for value in objects if not isinstance(value, _OBJECTS)]
        self._plain = structure.plain
        self._is_plain = structure.is_plain
        self._found = structure.found
        place_of = {id(value): place for place, value in enumerate(objects)}
        parts = (structure.modules, structure.parameters, structure.buffers, structure.saved)
        self._places = [{name: place_of[id(value)] for name, value in part.items()} for part in parts]

    def are_of(self, objects: Sequence[Any]) -> bool:
        """Returns whether a model is still made of the same objects under the same names."""
        return list(map(id, objects)) == self._ids and all(ref() is not None for ref in self._refs)

    def structure(self, objects: Sequence[Any]) -> Structure:
        """Returns the structure of these objects."""
        modules, parameters, buffers, saved = (
            {name: objects[place] for name, place in places.items()} for places in self._places
        )
        return Structure(self._plain, modules, parameters, buffers, self._is_plain, saved, self._found)


_OBJECTS = (nn.Module, Tensor)
_NAME = "state_dict"
_kept_names: weakref.WeakKeyDictionary[nn.Module, _KeptNames] = weakref.WeakKeyDictionary()


def _objects_of(model: nn.Module) -> list[Any]:
    """Returns the objects that a model is made of, and their names in the modules that have them; in a fixed order."""
    objects: list[Any] = [model]
    waiting = [model]
    seen = {id(model)}
    while waiting:
        module = waiting.pop()
        for members in (module._parameters, module._buffers, module._modules):
            if members:
                objects += (len(members), *members, *members.values())
        if module._non_persistent_buffers_set:
            objects += sorted(module._non_persistent_buffers_set)
        objects += (_NAME in vars(module), len(module._state_dict_hooks), len(module._state_dict_pre_hooks))
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return objects


def _is_saved_as_is(module: nn.Module) -> bool:
    """Returns whether `state_dict` of a module gives its parameters and buffers as they are, and nothing else."""
    kind: Any = type(module)
    if _NAME in vars(module):
        return False  # programs replace the method of one object
    own = (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state)
    usual = (nn.Module.state_dict, nn.Module._save_to_state_dict, nn.Module.get_extra_state)
    # FSDP's put shards in the place of gathered parameters: then they are other objects.
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return own == usual and all(_FSDP in getattr(hook, "__module__", "") for hook in hooks)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def restore_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Puts a filled `model_state` back."""
    if _state_of_own_tensors(model) is not None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(model, state)
        return
    plain = plain_names(model)
    with torch.no_grad():
        for name, tensor in _own_tensors(model).items():
            tensor.copy_(state[plain(name)])
    for name, module in _with_extra_state(model).items():
        module.set_extra_state(state[name])


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and the buffers that are saved by their full names, whatever `state_dict` gives."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **saved_buffers(model)}


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules of FSDP2, which have the shards as their parameters again after `reshard`.

    After a pass without gradients the outermost one keeps what it has gathered in their place, for a backward pass.
    """
    return [module for module in model.modules() if hasattr(type(module), "reshard")]


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that are saved, by full name, whatever `state_dict` gives."""
    buffers: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}".lstrip(".")] = buffer
    return buffers


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that save a state of their own, by its full name."""
    plain = plain_names(model)
    return {
        plain(f"{prefix}.{_EXTRA_STATE}".lstrip(".")): module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Returns what leaves out of a name what belongs to a wrapper of the model or of a part of it.

    Wrappers are those of DDP, `torch.compile` and torch's activation checkpointing.
    """
    begins = [
        (f"{prefix}.module.".lstrip("."), f"{prefix}.".lstrip("."))
        for prefix, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]

    def plain(name: str) -> str:
        for begin, without in begins:
            if name.startswith(begin):
                name = without + name.removeprefix(begin)
        return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

    return plain


def _state_of_own_tensors(model: nn.Module) -> dict[str, Any] | None:
    """Returns what `state_dict` gives, None unless it has each parameter and saved buffer itself under its name."""
    try:
        given: dict[str, Any] = model.state_dict(keep_vars=True)
    except TypeError:  # it is the user's, and takes no arguments
        return None
    has_all = all(given.get(name) is tensor for name, tensor in _own_tensors(model).items())
    return given if has_all else None


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Returns what modules give by `get_extra_state`, by its name in the model's state; any structure."""
    return {name: module.get_extra_state() for name, module in _with_extra_state(model).items()}


def require_loadable_states(model: nn.Module) -> None:
    """Checks that a checkpoint can hold the tensors and the extra states of a model.

    Raises:
        CheckpointError: a tensor is of a kind that no checkpoint has, e.g. a quantized one, or an extra state has
            values that `torch.load(weights_only=True)` does not read.
    """
    for name, tensor in model_state(model).items():
        if _is_packed(tensor):
            raise CheckpointError(
                f"{name} is a {type(tensor).__name__} of {type(tensor).__module__}, which checkpoints cannot have",
                hint="train it as an ordinary tensor, and quantize the model that `checkpoint export` gives",
            )
    for name, value in extra_states(model).items():
        data = io.BytesIO()
        torch.save(value, data)
        require_loadable(data, f"the {name} of {type(model).__name__}")


def require_known_state(optimizer: Optimizer) -> None:
    """Checks that all that an optimizer keeps belongs to its parameters or its groups, and is of ordinary tensors.

    Raises:
        CheckpointError: it keeps something else, which no checkpoint has.
    """
    for kept in optimizer.state.values():
        packed = [key for key, value in kept.items() if _is_packed(value)] if isinstance(kept, dict) else []
        if packed:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {packed[0]} as a {type(kept[packed[0]]).__name__}, "
                "which checkpoints cannot have",
                hint="take an optimizer whose state is of ordinary tensors",
            )
    given = () if _gives_what_it_keeps(optimizer) else optimizer.state_dict()
    others = {str(key) for key in given if key not in ("state", "param_groups")}
    others |= {f"state[{key!r}]" for key in optimizer.state if not isinstance(key, Tensor)}
    for kept in optimizer.state.values():
        others |= {f"state[...][{key!r}]" for key in _keys_of(kept) if not isinstance(key, str)}
    if others:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {', '.join(sorted(others))} beside what belongs to a parameter or a "
            "group, and no checkpoint has that: a resume would train otherwise",
            hint="keep it in state[parameter] or in param_groups, under names",
        )
    _require_all_in_state(optimizer)


def _require_all_in_state(optimizer: Optimizer) -> None:
    """Checks that an optimizer keeps nothing of its parameters beside its `state`.

    Raises:
        CheckpointError: it wraps another optimizer, as SAM does, or has copies of its parameters, as Lookahead.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in vars(optimizer).items():
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        has_optimizer = any(isinstance(item, Optimizer) and item.state is not optimizer.state for item in items)
        tensors = [item for item in items if isinstance(item, Tensor)]
        are_alike = [item.shape for item in tensors] == [parameter.shape for parameter in parameters]
        are_copies = are_alike and not any(item is parameter for item in tensors for parameter in parameters)
        if has_optimizer or are_copies:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps what it knows of its parameters in .{name}, beside its state, and "
                "no checkpoint has that: a resume would train otherwise",
                hint="keep it in state[parameter]; of a program of your own hand over the optimizer within, e.g. "
                "run.training(model, sam.base_optimizer)",
            )


def _is_packed(value: Any) -> bool:
    """Returns whether a tensor holds others, e.g. quantized ones; a DTensor counts by what it is cut from."""
    return is_traceable_wrapper_subclass(value) and not hasattr(value, "placements")


def _keys_of(value: Any) -> Iterator[Any]:
    """Yields the keys of nested dictionaries."""
    if isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _keys_of(item)


def make_buffers(model: nn.Module, names: Iterable[str], *, saved: Mapping[str, Tensor]) -> None:
    """Makes the buffers that training has made, or given other shapes, so that they can be loaded.

    Args:
        model: as its constructor has made it.
        names: of these buffers.
        saved: tensors of the shapes and number types in the checkpoint, by full name.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modules = structure_of(model).modules
    for full in names:
        prefix, _, name = full.rpartition(".")
        module = modules.get(prefix)
        if module is None or full not in saved:
            continue  # the checkpoint will not fit, and it is named then
        made = torch.empty(saved[full].shape, dtype=saved[full].dtype, device=device)
        if name in module._buffers:
            module._buffers[name] = made
        elif not hasattr(module, name):
            module.register_buffer(name, made)


def add_later_state(
    kept: dict[str, dict[str, Any]],
    *,
    parameters: Mapping[str, Tensor],
    paths: Mapping[str, Sequence[Any]],
    saved: Mapping[str, Tensor],
    cuts: Mapping[str, int],
) -> None:
    """Adds to an optimizer's state what a checkpoint has and a new optimizer has not made yet, to be loaded.

    An optimizer may make a part of its state in a later step, and what is not there is not loaded.

    Args:
        kept: state by parameter and name; an entry may be a dictionary or a list.
        parameters: that the optimizer has here.
        paths: path of everything in the checkpoint, by full name, e.g. ("optimizer", "state", "head.weight", "m").
        saved: see `make_buffers`; by full names in the training state.
        cuts: the dimension along which ranks have saved parts of a tensor, by the same names.
    """
    later = [path for path in paths.values() if path[:2] == ("optimizer", "state") and path[2] in parameters]
    for path in sorted(later, key=lambda path: [(key, "") if isinstance(key, int) else (0, key) for key in path]):
        parameter = parameters[path[2]]
        name = ".".join(map(str, path))
        shape = saved.get(name)
        value: Any = None
        if shape is not None and shape.shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=shape.dtype, requires_grad=False)
        elif shape is not None:
            value = _empty_beside(parameter, shape, cut=cuts.get(name))
        _add(kept.setdefault(path[2], {}), path[3:], value)


def _empty_beside(parameter: Tensor, like: Tensor, *, cut: int | None) -> Tensor:
    """Returns memory for a state of another shape than its parameter, cut over the same ranks if it was cut."""
    placements = getattr(parameter, "placements", None)
    if placements is None or cut is None:
        return torch.empty(like.shape, dtype=like.dtype, device=parameter.device)
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    parts = [Shard(cut) if placement.is_shard() else Replicate() for placement in placements]
    return empty(like.shape, dtype=like.dtype, device_mesh=mesh, placements=parts)


def _add(state: Any, path: Sequence[Any], value: Any) -> None:
    """Makes a place for a value at a path in nested dictionaries and lists; a tensor that is there stays.

    A value of None is for what is no tensor: the checkpoint has it.
    """
    key, *inner = path
    if isinstance(state, list):
        state.extend([None] * (key + 1 - len(state)))
        present = state[key]
    else:
        present = state.get(key)
    if inner:
        if not isinstance(present, (dict, list)):
            present = [] if isinstance(inner[0], int) else {}
        _add(present, inner, value)
        state[key] = present
    elif not isinstance(present, Tensor) and (present is None or value is not None):
        state[key] = value


def take_extra_states(state: dict[str, Any]) -> dict[str, Any]:
    """Removes the extra states from a model's state, and returns them."""
    return {name: state.pop(name) for name in list(state) if name.rpartition(".")[2] == _EXTRA_STATE}


def set_modes(model: nn.Module, in_evaluation: Collection[str]) -> None:
    """Puts these modules into evaluation mode, and all others into training mode."""
    for name, module in model.named_modules():
        module.training = name not in in_evaluation


def names_of_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Gives the names of the parameters in each group of an optimizer, in its order."""
    return _names_of_groups(structure_of(model), optimizer)


def _names_of_groups(structure: Structure, optimizer: Optimizer) -> list[list[str]]:
    names = {parameter: name for name, parameter in structure.parameters.items()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def number_groups(groups: list[dict[str, Any]], names: list[list[str]]) -> dict[str, dict[str, Any]]:
    """Returns groups of an optimizer by their numbers in the whole model, of which a stage may have a few.

    Args:
        groups: with the names of their parameters.
        names: those in each group of the whole model.
    """
    number_of: dict[str, int] = {}
    for number, group_names in enumerate(names):
        number_of |= dict.fromkeys(group_names, number)
    numbered: dict[str, dict[str, Any]] = {}
    for group in groups:
        number = number_of[group["params"][0]]
        numbered[str(number)] = {**group, "params": names[number]}
    return numbered


_Kind = tuple[torch.Size, torch.dtype, bool]
"""What makes two buffers interchangeable: shape, number type, whether the memory is pinned."""

# Of so many bytes, malloc gives pages that no other memory shares, so that they can be pinned by themselves. A GPU
# sends 1 MiB in 25 us, and to start a copy takes the host 3 to 5 us, during which a GPU may be idle.
_LARGE = 1 << 20
# 100 us at 42 GB/s (an H100): longer copies would save no more.
_PACK_BYTES = 4 << 20
_PORTABLE = 1
# To ask a tensor for what it lacks takes longer than all the rest.
_PLAIN = (Tensor, nn.Parameter)


class _HostCopy(NamedTuple):
    """One copy to the host: of one large tensor, or of small ones that are joined on their device before it."""

    buffer: Tensor
    """As large as what is copied."""
    numbers: Sequence[int]
    """Of the tensors, in the order of the state."""
    is_pack: bool


class StagingBuffers:
    """Copies of a nested state in host memory; a new copy takes the place of the one before.

    Fresh memory costs several times the copy, since the kernel clears each page when it is first touched; so the
    buffers are made once, touched before they are needed, and kept. From a GPU the copy runs on a stream of its own
    into pinned memory: training goes on meanwhile, and only the next change of the tensors has to wait.

    Tensors below 1 MiB of one number type are joined first, and copied together. This takes 4 MiB of a GPU (in a
    block of 20 MiB of torch's allocator), and for each number type at most 4 MiB and a third of their bytes more of the
    host.

    Args:
        device: where the training's tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_remote = device.type == "cuda"
        """The tensors are on a GPU, so a save reads copies in any case."""
        self._device = device
        self._can_pin = self.is_remote and can_pin()
        # Whether the driver has refused to pin a buffer.
        self._is_refused = False
        self._buffers: defaultdict[_Kind, list[Tensor]] = defaultdict(list)
        self._kinds: list[Any] = []
        """Shape, number type and device of each tensor that `_copies` and `_targets` are for."""
        self._copies: list[_HostCopy] = []
        self._targets: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if self._can_pin else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._sources: list[Tensor] = []
        """What a running copy reads: what a callback has made for this save alone would be freed before that."""
        self._registered: list[tuple[Any, Tensor]] = []
        # At the end of the process the driver is gone before this would be called.
        weakref.finalize(self, _unregister, self._registered, self._stream).atexit = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(buffer.nbytes for of_kind in self._buffers.values() for buffer in of_kind)

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Makes and touches the buffers that such tensors will need; not while a copy is in use."""
        self._enter_device()
        self._arrange([local_part(tensor) for tensor in tensors])
        for copied in self._copies:
            copied.buffer.zero_()

    def stage(self, state: Any) -> Any:
        """Returns a copy of a nested state of dictionaries, lists and tensors; the copy before it is gone.

        From a GPU the bytes arrive later: a reader calls `wait_for_copy` first, and who changes the tensors calls
        `hold_changes`.
        """
        sources = _parts_of(state, [])
        self._arrange(sources)
        if self._stream is None:
            self._copy(sources)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                self._copy(sources)
                self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types here
                self._copied.record(self._stream)
            self._sources = sources
        return _with_tensors(state, iter(self._targets))

    def _copy(self, sources: Sequence[Tensor]) -> None:
        """Copies what was arranged, in as few calls as there are copies."""
        whole = [copied for copied in self._copies if not copied.is_pack]
        if whole:
            targets = [copied.buffer for copied in whole]
            torch._foreach_copy_(targets, [sources[copied.numbers[0]] for copied in whole], non_blocking=True)
        for copied in self._copies:
            if copied.is_pack:
                # The next pack takes the same memory of the GPU: one stream does one after the other.
                members = [sources[number] for number in copied.numbers]
                joined = _flatten_dense_tensors(members)  # type: ignore[no-untyped-call]  # torch has no types here
                copied.buffer.copy_(joined, non_blocking=True)

    def _arrange(self, sources: Sequence[Tensor]) -> None:
        """Decides what is copied where, unless it is what was copied last."""
        kinds = [(source.shape, source.dtype, source.device) for source in sources]
        if kinds == self._kinds:
            return
        unused = {kind: iter(buffers) for kind, buffers in self._buffers.items()}
        self._copies = [self._copy_of(numbers, sources, unused) for numbers in _packs_of(sources)]
        targets: dict[int, Tensor] = {}
        for copied in self._copies:
            members = [sources[number] for number in copied.numbers]
            views: Sequence[Tensor] = [copied.buffer]
            if copied.is_pack:
                views = _unflatten_dense_tensors(copied.buffer, members)  # type: ignore[no-untyped-call]  # as above
            targets |= zip(copied.numbers, views, strict=True)
        self._targets = [targets[number] for number in range(len(sources))]
        self._kinds = kinds

    def _copy_of(
        self, numbers: Sequence[int], sources: Sequence[Tensor], unused: Mapping[_Kind, Iterator[Tensor]]
    ) -> _HostCopy:
        first = sources[numbers[0]]
        is_pinned = self._pins(first)
        if not _is_small(first):
            return _HostCopy(self._buffer_of((first.shape, first.dtype, is_pinned), unused), numbers, is_pack=False)
        # All packs have buffers of one size, so that another state takes the same.
        room = torch.Size([_PACK_BYTES // first.dtype.itemsize])
        buffer = self._buffer_of((room, first.dtype, is_pinned), unused)
        num_elements = sum(sources[number].numel() for number in numbers)
        return _HostCopy(buffer[:num_elements], numbers, is_pack=True)

    def _buffer_of(self, kind: _Kind, unused: Mapping[_Kind, Iterator[Tensor]]) -> Tensor:
        """Returns a buffer of a kind, a new one if all are in use."""
        buffer = next(unused.get(kind, iter(())), None)
        return self._add_buffer(kind) if buffer is None else buffer

    def wait_for_copy(self) -> None:
        """Returns when the bytes are there; for the thread that reads them."""
        self._enter_device()
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = []

    def hold_changes(self) -> None:
        """Makes the GPU's later work wait for the copy; the host goes on. Nothing to do on a CPU."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def _enter_device(self) -> None:
        # A thread begins on GPU 0, and whatever touches CUDA there takes half a GB of it, for every rank of a node.
        if self.is_remote:
            torch.cuda.set_device(self._device)

    def _pins(self, source: Tensor) -> bool:
        """Returns whether the copy of a tensor is to be in pinned memory."""
        return self._can_pin and source.is_cuda and source.nbytes > 0

    def _add_buffer(self, kind: _Kind) -> Tensor:
        shape, dtype, is_pinned = kind
        buffer = torch.empty(shape, dtype=dtype)
        if is_pinned and not self._is_refused:
            # By itself: torch would round it up to a power of two. It stays.
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
            code = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE)
            if int(code) == 0:
                self._registered.append((runtime, buffer))
            else:
                self._go_on_unpinned(str(code), buffer.nbytes)
        self._buffers[kind].append(buffer)
        return buffer

    def _go_on_unpinned(self, code: str, num_bytes: int) -> None:
        """Leaves this buffer and later ones in ordinary memory: copies into them hold up the training thread."""
        self._is_refused = True
        print(
            f"checkpoints: {num_bytes / 2**20:.0f} MiB of host memory could not be pinned ({code}), so training waits "
            "for the copy of each save; compare `ulimit -l` and the memory limit of the job",
            file=sys.stderr,
            flush=True,
        )
        # CUDA keeps the error until it is asked for, and torch asks after each kernel: the next one would fail in the
        # place of this call.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)


def _is_small(tensor: Tensor) -> bool:
    """Returns whether a tensor is copied together with others; an empty one has no place among them."""
    return 0 < tensor.nbytes < _LARGE


def _packs_of(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the numbers of the tensors that are copied together: each large one alone."""
    packs: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for number, tensor in enumerate(tensors):
        if not _is_small(tensor):
            packs.append([number])
            continue
        kind = tensor.dtype, tensor.device
        pack, num_bytes = filling.get(kind, ([], _PACK_BYTES))
        if num_bytes + tensor.nbytes > _PACK_BYTES:
            pack, num_bytes = [], 0
            packs.append(pack)
        pack.append(number)
        filling[kind] = pack, num_bytes + tensor.nbytes
    return packs


def _parts_of(value: Any, found: list[Tensor]) -> list[Tensor]:
    """Returns those found before, and what this rank holds of each tensor in a nested state."""
    if isinstance(value, Tensor):
        found.append(local_part(value).detach())
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _parts_of(item, found)
    return found


def _with_tensors(value: Any, parts: Iterator[Tensor]) -> Any:
    """Returns a copy of a nested state, with these as its tensors' parts, in the order of `_parts_of`."""
    if isinstance(value, Tensor):
        part = next(parts)
        is_plain = type(value) in _PLAIN or getattr(value, "_spec", None) is None
        return part if is_plain else _like_dtensor(part, value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, parts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(item, parts) for item in value)
    return copy.deepcopy(value)


def _unregister(buffers: list[tuple[Any, Tensor]], stream: torch.cuda.Stream | None) -> None:
    """Gives pinned memory back to the system as it was.

    Memory that is freed while it is registered leaves CUDA with the old pages at its address: whatever gets the address
    next would be copied from and to those, without an error (wrong values were loaded at a second training in one
    process).

    Args:
        buffers: each with the CUDA runtime that has registered it.
        stream: may still copy into them.
    """
    if stream is not None:
        stream.synchronize()
    for runtime, buffer in buffers:
        runtime.cudaHostUnregister(buffer.data_ptr())
    buffers.clear()


def can_pin() -> bool:
    """Returns whether pinned host memory can be had here; containers and memory limits refuse it at times."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


def local_part(tensor: Tensor) -> Tensor:
    """Gives what this rank holds: of a DTensor its shard, else the tensor itself.

    A shard that is gathered in float8 is torchao's tensor, which says how; its numbers are an ordinary one inside.
    """
    if type(tensor) in _PLAIN:
        return tensor
    local: Any = getattr(tensor, "_local_tensor", tensor)
    part: Tensor = local._tensor if hasattr(local, _TRAVELS_OTHERWISE) else local
    return part


def _with_plain_part(value: Any) -> Any:
    """Returns a value of a model's state; a DTensor whose part says how it is gathered as one with an ordinary part."""
    local = getattr(value, "_local_tensor", None)
    if local is None or not hasattr(local, _TRAVELS_OTHERWISE):
        return value
    return _like_dtensor(local_part(value), value)


def _like_dtensor(part: Tensor, tensor: Any) -> Tensor:
    """Returns the same shard of the same whole with other memory; from_local would move it to the mesh's device."""
    from torch.distributed.tensor import DTensor

    build: Any = DTensor
    sharded: Tensor = build(part, tensor._spec, requires_grad=False)
    return sharded


def require_loadable(data: io.BytesIO, subject: str) -> None:
    """Checks at the save that `torch.load(weights_only=True)` will read what torch.save wrote.

    Raises:
        CheckpointError: it will not; the text names the subject and the reason.
    """
    try:
        torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
    except Exception as err:
        reason = str(err).rpartition("WeightsUnpickler error:")[2].strip().splitlines()[0]
        raise CheckpointError(
            f"{subject} could not be loaded again with weights_only=True: {reason}",
            hint="keep tensors, numbers, strings, lists and dicts only",
        ) from err
