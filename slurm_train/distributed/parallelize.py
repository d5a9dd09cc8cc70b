"""Puts torch's parallelism around a model that knows nothing of it, in one written order.

1. Tensor parallel: matrices are cut by the model's `tensor_parallel_plan`, and the positions between them are spread by
   its `sequence_parallel_plan`.
2. Context parallel: attention gathers keys and values (`distributed.sequence`).
3. Activation checkpointing of each block, around what computes, inside of what communicates for it.
4. torch.compile of each block, so that equal blocks are compiled once and gathering stays outside.
5. FSDP2 or HSDP over the data-parallel axes and `cp`: each block of `sharding_plan`, then what is left.

The parameters are then DTensors with their full shapes and names, which is what lets a checkpoint be read under another
layout. Scalars have nothing to cut: every rank keeps them whole. All functions that touch a mesh are collective.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.float8 import float8_styles, gather_in_float8, is_float8
from slurm_train.distributed.group import open_axis, torch_release
from slurm_train.distributed.pipeline import PassThrough, model_plan
from slurm_train.distributed.sequence import POSITIONS_DIM, share_context
from slurm_train.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

SHARD = "shard"
"""The axis of a mesh that parameters are sharded over."""
_BY_IDS = "vocabulary"
_POSITIONS_GROUP = "_positions_group"
_REDUCING_GROUPS = "_reducing_groups"
# Of so many equal blocks: GPT-2's 12 are one graph on one GPU, those of Llama 3 8B are not.
_DEEP = 24
# DDP has torch cut a graph at every bucket and compile each piece by itself.
_DEEP_IN_DDP = 4
_OWN_METHODS = ("training_loss", "evaluation_sums")


def build_mesh(layout: ParallelLayout, *, device: torch.device, offloads: bool = False) -> DeviceMesh:
    """Returns the mesh of all ranks over the axes that parameters lie along. Collective over all ranks.

    An axis of degree one exchanges nothing and is left out. Those that shards lie along, `dp_shard` and `cp`, are one,
    "shard". It is there with degree one, too, where parameters are only copied along `dp_replicate`: FSDP asks for it.

    Args:
        layout: the degrees; rank numbers run through the last axis first, as torch lays a mesh out.
        device: this rank's; its kind decides what carries the exchanges.
        offloads: shards are kept in host memory, so an optimizer may exchange there.
    """
    from torch.distributed.device_mesh import DeviceMesh

    degrees = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, SHARD: layout.shard_size, "tp": layout.tp}
    copies_alone = layout.shard_size == 1 and (layout.reducing_size > 1 or layout.world_size == 1)
    axes = {name: degree for name, degree in degrees.items() if degree > 1 or (name == SHARD and copies_alone)}
    groups = []
    for name in axes:
        members = ("dp_shard", "cp") if name == SHARD else (name,)
        groups.append(open_axis(layout.groups(members), name=name, on_host=offloads))
    ranks = torch.arange(layout.world_size).view(tuple(axes.values()))
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(axes))


def context_mesh(mesh: DeviceMesh, layout: ParallelLayout) -> DeviceMesh:
    """Returns the mesh of the ranks that share a sequence. Collective over all ranks.

    Args:
        mesh: what `build_mesh` gave.
        layout: the degrees, with `cp` above one.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if layout.dp_shard == 1:
        return mesh[SHARD]
    group = open_axis(layout.groups(("cp",)), name="cp")
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("cp",))


def sharding_mesh(mesh: DeviceMesh, layout: ParallelLayout) -> DeviceMesh:
    """Returns the axes that parameters are sharded over, behind the one that copies of them lie along."""
    return mesh[SHARD] if layout.dp_replicate == 1 else mesh["dp_replicate", SHARD]


def parallelize(
    model: nn.Module,
    *,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    roots: Sequence[nn.Module],
    settings: ParallelSection,
    compiles: bool,
    gathers_float8: bool = False,
) -> None:
    """Makes a whole model, equal on all ranks, this rank's part of it, in place. Collective over all ranks.

    Args:
        model: its parameters may have no memory yet.
        layout: the degrees.
        mesh: what `build_mesh` gave.
        roots: what is called: the model itself, or its stages.
        settings: how; the degrees in it have been solved already.
        compiles: whether each block is compiled.
        gathers_float8: whether matrices that are multiplied in float8 are gathered so, too.

    Raises:
        ConfigError: the model has no plan for what is asked.
    """
    # Gathering what is cut and sharded takes two exchanges; torch advises against it in every log, to no use here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    require_dimensions(model, layout=layout, offloads=settings.cpu_offload)
    if layout.tp > 1:
        require_equal_parts(model, tp=layout.tp)
        cut_matrices(model, mesh=mesh, layout=layout, roots=roots, splits_positions=settings.sequence_parallel)
    if layout.cp > 1:
        share_context(model, roots=roots, mesh=context_mesh(mesh, layout))
    if settings.async_tp:
        overlap_exchanges(mesh["tp"], compiles=compiles)
    prepare_blocks(model, settings=settings, compiles=compiles, has_parts=layout.tp > 1)
    if layout.reducing_size > 1:
        if gathers_float8:
            gather_in_float8(model, num_shards=layout.shard_size)
        shard(model, layout=layout, mesh=mesh, roots=roots, settings=settings)


def overlap_exchanges(mesh: DeviceMesh, *, compiles: bool) -> None:
    """Lets compiled blocks overlap the exchanges of `tp` with their matrix products (asynchronous tensor parallelism).

    Args:
        mesh: the `tp` axis.
        compiles: whether blocks are compiled.

    Raises:
        ConfigError: they are not, or there is no memory that GPUs share.
    """
    kind = mesh.device_type
    if kind != "cuda" or not compiles:
        device = f"a device of type {kind}" + ("" if compiles else ", where blocks are not compiled")
        raise ConfigError(
            f"parallel.async_tp=true was asked, and this rank has {device}",
            hint="leave parallel.async_tp out; it is for compiled blocks on GPUs",
        )
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # Since 2.11 torch says that nobody needs to call this. What overlaps them passes over any group for which it
        # was not called, all the same (2.7 to 2.14).
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)


def cut_matrices(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    layout: ParallelLayout,
    roots: Sequence[nn.Module] = (),
    splits_positions: bool = False,
) -> None:
    """Cuts the matrices that the model's plan names over the `tp` axis; the inputs and outputs of each pair are whole.

    Args:
        model: all that this rank has.
        mesh: what `build_mesh` gave.
        layout: the degrees.
        roots: what is called: the model itself, or its stages.
        splits_positions: whether inputs and outputs are of a part of the positions each (sequence parallelism).

    Raises:
        ConfigError: the model has no plan, or one that names no matrix or an unknown way.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rowwise: dict[str, Any] = {"output_layouts": Shard(POSITIONS_DIM)} if splits_positions else {}
    styles: dict[str, ParallelStyle] = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel(**rowwise)}
    style_of: dict[str, ParallelStyle] = {}
    ways = _ways_of(model, "tensor_parallel_plan", key="parallel.tp", ways=(*styles, _BY_IDS))
    for name, way in ways.items():
        if way != _BY_IDS:
            lowered = is_float8(model.get_submodule(name))
            style_of[name] = copy.copy((float8_styles(rowwise=rowwise) if lowered else styles)[way])
    _spread_ids([name for name, way in ways.items() if way == _BY_IDS], model, mesh=mesh["tp"], layout=layout)
    if splits_positions:
        style_of |= _position_styles(model, style_of, group=mesh["tp"].get_group().group_name)
        for root in roots:
            if root is not model:
                # What another stage has is passed through here, split and gathered all the same.
                parts = dict(root.named_modules())
                passed = {name: style for name, style in style_of.items() if isinstance(parts.get(name), PassThrough)}
                parallelize_module(root, mesh["tp"], passed)
    parallelize_module(model, mesh["tp"], style_of)
    for module in model.modules():
        if hasattr(module, "score_group"):
            setattr(module, "score_group", mesh["tp"].get_group().group_name)  # noqa: B010  # no tensor, no module


def _spread_ids(names: Sequence[str], model: nn.Module, *, mesh: DeviceMesh, layout: ParallelLayout) -> None:
    """Spreads the rows of embeddings and heads, one for each token id, over `tp`, if they give equal parts."""
    from torch.distributed.tensor import Shard, distribute_tensor

    spread: dict[Tensor, nn.Parameter] = {}
    for module in map(model.get_submodule, names):
        weight: Any = getattr(module, "weight", None)
        if weight is None or not layout.cuts_vocabulary(len(weight)):
            continue
        if weight not in spread:
            # All ranks have the same, or nothing yet.
            rows = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            spread[weight] = nn.Parameter(rows, requires_grad=weight.requires_grad)
            vars(spread[weight]).update(vars(weight))
        # Tied weights stay one.
        module.register_parameter("weight", spread[weight])


def _position_styles(model: nn.Module, cut: Mapping[str, ParallelStyle], *, group: str) -> dict[str, ParallelStyle]:
    """Returns what is done around each part that the model's `sequence_parallel_plan` names.

    Between cut matrices the ranks of `tp` then have a part of the positions each: what a rank keeps of norms, residuals
    and dropout is divided by `tp`. The sum behind a matrix that is cut by inputs becomes a sum of which each rank gets
    its positions, and before the next cut matrix they are gathered.

    Args:
        model: all that this rank has.
        cut: the matrices that are cut, by name.
        group: name of the ranks of `tp`.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleOutput

    own_positions = Shard(POSITIONS_DIM)

    class GatherFirst(ParallelStyle):
        """Puts the positions of a module's first argument together before it is called; the others are left alone.

        Cut matrices that come first in the module (`stays_spread`) take what is gathered as it is, and their gradients
        of it are added up once for all of them.
        """

        def __init__(self, *, stays_spread: bool) -> None:
            super().__init__()
            self.stays_spread = stays_spread

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            def gather(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
                part = DTensor.from_local(arguments[0], device_mesh, [own_positions], run_check=False)
                whole = part.redistribute(placements=[Replicate()])
                return (whole if self.stays_spread else whole.to_local(), *arguments[1:])

            module.register_forward_pre_hook(gather)
            return module

    def style(name: str, way: str) -> ParallelStyle:
        if way == "gather":
            return GatherFirst(stays_spread=any(cut_name.startswith(f"{name}.") for cut_name in cut))
        return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=own_positions)

    key = "parallel.sequence_parallel"
    parts = dict(model.named_modules())
    ways = _ways_of(model, "sequence_parallel_plan", key=key, ways=("gather", "own", "split"))
    for name in (name for name, way in ways.items() if way == "own"):
        setattr(parts[name], _POSITIONS_GROUP, group)
    # Stages send whole sequences to each other: a part that is passed through splits and gathers, too.
    return {name: style(name, way) for name, way in ways.items() if way != "own"}


def own_positions(model: nn.Module) -> tuple[set[Tensor], str]:
    """Returns the parameters whose gradients are of a rank's own positions, and the name of the group that has all."""
    parts = [module for module in model.modules() if hasattr(module, _POSITIONS_GROUP)]
    group = getattr(parts[0], _POSITIONS_GROUP) if parts else ""
    return {parameter for part in parts for parameter in part.parameters()}, group


def whole_parameters(model: nn.Module) -> tuple[set[Tensor], tuple[str, ...]]:
    """Returns the parameters that every rank keeps whole beside its shards.

    Returns:
        The parameters, and the names of the groups over which their gradients are added up, one group after the other.
    """
    groups: tuple[str, ...] = getattr(model, _REDUCING_GROUPS, ())
    return {parameter for parameter in model.parameters() if groups and not parameter.dim()}, groups


def _ways_of(model: nn.Module, method: str, *, key: str, ways: Iterable[str]) -> dict[str, str]:
    """Returns name -> way of all parts that the patterns of a plan name.

    Raises:
        ConfigError: the model has no such plan, or it has an unknown way or a pattern that names no part.
    """
    way_of: dict[str, str] = {}
    for pattern, way in model_plan(model, method, key=key).items():
        names = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
        if way not in ways or not names:
            raise ConfigError(
                f"{type(model).__name__}.{method}() has {pattern!r}: {way!r}, which "
                + ("names no part of the model" if way in ways else "is not a known way"),
                hint=f"the ways are {', '.join(sorted(ways))}; patterns are names with *, e.g. 'blocks.*.up'",
            )
        way_of |= dict.fromkeys(names, way)
    return way_of


def require_equal_parts(model: nn.Module, *, tp: int) -> None:
    """Checks that what a model counts (heads, for instance) can be divided by so many ranks.

    Raises:
        ConfigError: it cannot; torch would cut the matrices all the same.
    """
    counts: Mapping[str, int] = getattr(model, "tensor_parallel_counts", dict)()
    for name, count in counts.items():
        if count % tp:
            raise ConfigError(
                f"parallel.tp={tp} cannot cut {name}={count} into equal parts",
                hint=f"choose a tp that divides {count}, or set {name} to a multiple of {tp}",
            )


def is_deep(model: nn.Module, *, num_replicas: int) -> bool:
    """Returns whether a whole replica is compiled block by block: equal blocks are one graph then.

    A graph of the whole model has all of its blocks one after the other, and torch compiles each of them anew. Fewer
    blocks are fused with what is around them. With several replicas that ends at the buckets of DDP in any case.
    """
    kinds = Counter(map(type, units(model)))
    return max(kinds.values(), default=0) >= (_DEEP if num_replicas == 1 else _DEEP_IN_DDP)


def require_blocks(model: nn.Module, *, settings: ParallelSection) -> None:
    """Checks that a model has blocks to compute again, where that is asked; before ranks exchange anything.

    Raises:
        ConfigError: it has none.
    """
    if settings.activation_checkpointing != "none" and not any(True for _ in units(model)):
        raise ConfigError(
            f"parallel.activation_checkpointing={settings.activation_checkpointing} was asked, but "
            f"{type(model).__name__} has no blocks",
            hint="put them into an nn.ModuleList, or define sharding_plan() on the model (docs/parallel.md)",
        )


def prepare_blocks(model: nn.Module, *, settings: ParallelSection, compiles: bool, has_parts: bool = False) -> None:
    """Lets each block compute its activations again and compiles it, where asked; names of parameters stay.

    Args:
        model: has the blocks.
        settings: what is computed again.
        compiles: whether blocks are compiled.
        has_parts: their matrices are cut.

    Raises:
        ConfigError: activation checkpointing is asked of a model without blocks.
    """
    require_blocks(model, settings=settings)
    blocks = list(units(model))
    # torch 2.13 cannot compile a cut block that is computed again as a whole: its graph would have to save the mesh.
    is_apart = compiles and has_parts and settings.activation_checkpointing == "full"
    for block in blocks:
        if is_apart:
            block.forward = torch.compile(block.forward)
        if settings.activation_checkpointing != "none":
            _recompute(block, kind=settings.activation_checkpointing)
        if compiles and not is_apart:
            block.compile()


def shard(
    model: nn.Module,
    *,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    roots: Sequence[nn.Module],
    settings: ParallelSection,
) -> None:
    """Shards the parameters over `dp_shard` and `cp` and keeps copies of the shards over `dp_replicate`.

    Each block of `units` is gathered by itself, then the parts of the model's `sharding_ends`, then what is left. With
    what is left, an embedding and a head would be gathered through the whole forward and backward pass.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    lower = settings.gather_dtype == "bfloat16"
    # Gradients are added up in float32 also where they were computed in bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if lower else None
    reducing = sharding_mesh(mesh, layout)
    require_gloo_means(mesh.device_type)
    options: dict[str, Any] = {"mesh": reducing, **({"mp_policy": policy} if policy else {})}
    scalars = {parameter for parameter in model.parameters() if not parameter.dim()}
    if scalars:
        options["ignored_params"] = scalars
        axes = reducing.mesh_dim_names or ()
        # No tensor, no module.
        setattr(model, _REDUCING_GROUPS, tuple(reducing.get_group(axis).group_name for axis in axes))
    if settings.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for part in (*shared_parts(model), *units(model)):
        fully_shard(part, **options, reshard_after_forward=settings.reshard_after_forward)
    ends: Sequence[Sequence[str]] = getattr(model, "sharding_ends", tuple)()
    in_order: list[Any] = list(units(model))
    for end in ends:
        # What another stage has is without parameters here.
        parts = [part for part in map(model.get_submodule, end) if any(True for _ in part.parameters())]
        # What ends the forward pass begins the backward pass: it stays gathered in between.
        frees = settings.reshard_after_forward and end != ends[-1]
        if parts:
            fully_shard(parts, **options, reshard_after_forward=frees)
            in_order = [*in_order, parts[0]] if end == ends[-1] else [parts[0], *in_order]
    # A host that is slow to launch kernels would launch the next gathering too late for it to hide behind this part's
    # work. The order of the backward pass torch finds out by itself. A pipeline's parameters stay gathered.
    for part, following in itertools.pairwise(in_order if layout.pp == 1 else []):
        part.set_modules_to_forward_prefetch([following])
    # An embedding whose output is dealt out by positions returns a view; nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if policy and has_own_loss(model):
        # A batch goes into such a loss as it is, targets that are no whole numbers too.
        options["mp_policy"] = replace(policy, cast_forward_inputs=False)
    for root in roots:
        fully_shard(root, **options, reshard_after_forward=settings.reshard_after_forward)
    for name in _OWN_METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def leave_inputs(model: nn.Module) -> None:
    """Has the shards of a model no longer cast what goes into them; autocast has to do it where it is needed."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torch (2.7 to 2.13) has no public way to change it, and batches are not known when shards are made.
            state = module._get_fsdp_state()
            state._mp_policy = replace(state._mp_policy, cast_forward_inputs=False)


def require_gloo_means(device_type: str) -> None:
    """Refuses shards on CPUs where gloo gives sums for the means of gradients that `fully_shard` asks for.

    torch 2.7 and 2.8 do so without an error: on N ranks all gradients would be N times too large. NCCL computes means.

    Raises:
        ConfigError: it is such a torch.
    """
    if device_type == "cpu" and torch_release() < (2, 9):
        raise ConfigError(
            f"parallel.dp_shard on CPUs needs torch 2.9 or newer, and this is {torch.__version__}: its gloo adds up "
            "gradients where their mean is asked for",
            hint="install it, or use parallel.dp_replicate",
        )


def has_own_loss(model: nn.Module) -> bool:
    """Returns whether a model computes losses itself, for which autocast's rules are needed: it keeps them precise."""
    return any(hasattr(model, name) for name in _OWN_METHODS)


def gathers_in_bfloat16(
    model: nn.Module, *, layout: ParallelLayout, settings: ParallelSection, autocast: torch.dtype | None
) -> bool:
    """Returns whether shards of a model are gathered in bfloat16, and so what is computed with them is so, too.

    Args:
        model: whole.
        layout: the degrees.
        settings: `gather_dtype` says what is asked.
        autocast: type of the forward pass, None for the parameters' own.
    """
    if layout.is_replicated or layout.reducing_size == 1:
        return False
    # Running statistics are not cast, and batch norm refuses parameters of another type.
    has_statistics = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())
    suits = autocast == torch.bfloat16 and not has_statistics
    return settings.gather_dtype == "bfloat16" or (settings.gather_dtype == "auto" and suits)


def require_dimensions(model: nn.Module, *, layout: ParallelLayout, offloads: bool = False) -> None:
    """Checks that every parameter can be cut, or kept whole beside what is cut.

    A scalar between cut matrices would get a part of its gradient on each rank of `tp`. One that the model itself has
    would be a different copy on each stage.

    Args:
        model: whole, or all that this rank has.
        layout: the degrees.
        offloads: shards are kept in host memory.

    Raises:
        ConfigError: a parameter is a scalar where shards are offloaded or matrices or layers are divided, or it gets
            sparse gradients.
    """
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    degrees = (("tp", layout.tp), ("pp", layout.pp))
    conflicts = [f"parallel.{axis}={degree}" for axis, degree in degrees if degree > 1]
    conflicts += ["parallel.cpu_offload=true"] if offloads else []
    if scalars and conflicts:
        raise ConfigError(
            f"{scalars[0]} of {type(model).__name__} is a scalar parameter, and does not work with "
            f"{', '.join(conflicts)}",
            hint="scalars work with parallel.dp_replicate, dp_shard and cp; make it a vector of one number, "
            "nn.Parameter(torch.tensor([1.0])), or leave out what does not work",
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(
                f"{name} of {type(model).__name__} gives sparse gradients, which cannot be spread over ranks",
                hint="leave its sparse=True out, or leave `parallel` out",
            )


def units(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks of a model: what its `sharding_plan` names, else the members of its lists of modules.

    A block that stands in several places, as ALBERT's do, comes once.
    """
    sharding_plan = getattr(model, "sharding_plan", None)
    if sharding_plan is None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = {id(block): block for members in lists for block in members}
        yield from (block for block in blocks.values() if any(True for _ in block.parameters()))
        return
    patterns = sharding_plan()
    for name, module in model.named_modules():
        # Each part of a pattern matches one level of names: "blocks.*" is no name below a block.
        if any(fnmatchcase(name, pattern) and name.count(".") == pattern.count(".") for pattern in patterns):
            # What another stage has is without parameters here.
            yield from (module,) if any(True for _ in module.parameters()) else ()


def shared_parts(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that several units have in common; FSDP wants them gathered by themselves."""
    blocks = list(units(model))
    are_units = set(map(id, blocks))
    owners: dict[int, set[int]] = {}
    shared: dict[int, nn.Module] = {}
    for block in blocks:
        waiting = list(block.children())
        while waiting:
            part = waiting.pop()
            # What is below a unit of its own is that unit's.
            if id(part) in are_units:
                continue
            owners.setdefault(id(part), set()).add(id(block))
            if len(owners[id(part)]) > 1 and any(True for _ in part.parameters()):
                # As a whole, with what is in it.
                shared[id(part)] = part
            else:
                waiting += part.children()
    return list(shared.values())


def _recompute(block: nn.Module, *, kind: str) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    # The method is replaced rather than the module wrapped, so parameters keep their names.
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _kept_operations())
    elif kind == "alternate":
        options["context_fn"] = functools.partial(_keep_every_second, _kept_operations(), _matrix_products())
    computed = block.forward

    # A function and no `partial`: dynamo does not enter that, and the block would be left uncompiled (torch 2.13).
    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(computed, *args, **options, **kwargs)

    block.forward = forward


def _keep_every_second(kept: Sequence[Any], products: Sequence[Any]) -> Any:
    """Returns torch's contexts for one call of a block: of its matrix products the first, third, fifth ... are kept.

    torchtitan counts them in the same way. Each call counts anew, so all blocks keep the same products.

    Args:
        kept: operations whose results are kept.
        products: those of them that are counted.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    # torch asks once in the forward pass and once more when the block is computed again.
    counts = {False: 0, True: 0}

    def decide(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation in products:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]  # torch has no types here


def _matrix_products() -> list[Any]:
    aten = torch.ops.aten
    return [packet.default for packet in (aten.mm, aten.bmm, aten.addmm, aten._scaled_mm)]


def _kept_operations() -> list[Any]:
    """Returns the operations whose results are dear to compute again: matrix products, attention, exchanges of sums."""
    aten = torch.ops.aten
    exchanges = torch.ops._c10d_functional
    names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    sums = [exchanges.all_reduce, exchanges.reduce_scatter_tensor]
    packets = [*sums, *(getattr(aten, f"_scaled_dot_product_{name}", None) for name in names)]
    # Attention within documents (`models.documents`) is an operation of another kind.
    flex = importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention
    return [*_matrix_products(), *(packet.default for packet in packets if packet is not None), flex]
