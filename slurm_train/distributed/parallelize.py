"""Puts torch's parallelism around a model that knows nothing of it, in one written order.

1. Tensor parallel: matrices are cut as the model's `tensor_parallel_plan` says, and positions between them dealt out
   as `sequence_parallel_plan` says.
2. Context parallel: attention gathers keys and values (`distributed.context`).
3. Activation checkpointing of each block, around what computes, inside of what communicates for it.
4. torch.compile of each block, so that equal blocks are compiled once and gathering stays outside.
5. FSDP2 or HSDP over the data-parallel axes and `cp`: each block of `sharding_plan`, then what is left.

The parameters are then DTensors with their full shapes and names, which is what lets a checkpoint be read under another
layout. All functions that touch a mesh are collective.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slurm_train.config.layout import ParallelLayout
from slurm_train.config.schema import ParallelSection
from slurm_train.distributed.context import share_context
from slurm_train.distributed.mesh import sharding_mesh
from slurm_train.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OWN_METHODS = ("training_loss", "evaluation_sums")


def parallelize(
    model: nn.Module,
    *,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    roots: Sequence[nn.Module],
    settings: ParallelSection,
    compiles: bool,
) -> None:
    """Makes a whole model, equal on all ranks, this rank's part of it, in place. Collective over all ranks.

    Args:
        model: with its first weights.
        layout: the degrees.
        mesh: what `build_mesh` gave.
        roots: what is called: the model itself, or its stages.
        settings: how; the degrees in it have been solved already.
        compiles: whether each block is compiled.

    Raises:
        ConfigError: the model does not say how it can be cut.
    """
    # Gathering what is cut and sharded takes two exchanges; torch advises against it in every log, to no use here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if layout.tp > 1:
        require_equal_parts(model, tp=layout.tp)
        cut_matrices(model, mesh=mesh, roots=roots, splits_positions=settings.sequence_parallel)
    if layout.cp > 1:
        share_context(model, roots=roots, mesh=mesh["cp"])
    prepare_blocks(model, settings=settings, compiles=compiles)
    if layout.reducing_size > 1:
        shard(model, layout=layout, mesh=mesh, roots=roots, settings=settings)
    else:
        model.to(mesh.device_type)


def cut_matrices(
    model: nn.Module, *, mesh: DeviceMesh, roots: Sequence[nn.Module] = (), splits_positions: bool = False
) -> None:
    """Cuts the matrices that the model's plan names over the `tp` axis; the inputs and outputs of each pair are whole.

    Args:
        model: all that this rank has.
        mesh: what `build_mesh` gave.
        roots: what is called: the model itself, or its stages.
        splits_positions: whether inputs and outputs are of a part of the positions each (sequence parallelism).

    Raises:
        ConfigError: the model has no plan, or one that names no matrix or an unknown way.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    styles: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan: Mapping[str, str] = _plan_of(model, "tensor_parallel_plan", "parallel.tp")
    found: dict[str, ParallelStyle] = {}
    for pattern, way in plan.items():
        names = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
        if way not in styles or not names:
            raise ConfigError(
                f"{type(model).__name__}.tensor_parallel_plan() has {pattern!r}: {way!r}, which "
                + ("names no part of the model" if way in styles else "is no way to cut a matrix"),
                hint=f"the ways are {', '.join(sorted(styles))}; patterns are names with *, e.g. 'blocks.*.up'",
            )
        found |= {name: styles[way]() for name in names}
    if splits_positions:
        from slurm_train.distributed.sequence import OWN_POSITIONS, passing_styles, position_styles

        by_inputs = [name for name, style in found.items() if isinstance(style, RowwiseParallel)]
        found |= {name: RowwiseParallel(output_layouts=OWN_POSITIONS) for name in by_inputs}
        found |= position_styles(model, found)
        for root in roots:
            if root is not model:
                parallelize_module(root, mesh["tp"], passing_styles(root, found))
    parallelize_module(model, mesh["tp"], found)


def require_equal_parts(model: nn.Module, *, tp: int) -> None:
    """Does nothing where what a model counts (heads, for instance) can be dealt out to so many ranks.

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


def prepare_blocks(model: nn.Module, *, settings: ParallelSection, compiles: bool) -> None:
    """Lets each block compute its activations again and compiles it, where asked; names of parameters stay.

    Raises:
        ConfigError: activation checkpointing is asked of a model without blocks.
    """
    blocks = list(units(model))
    if settings.activation_checkpointing != "none" and not blocks:
        raise ConfigError(
            f"parallel.activation_checkpointing={settings.activation_checkpointing} was asked, but "
            f"{type(model).__name__} has no blocks",
            hint="put them into an nn.ModuleList, or define sharding_plan() on the model (docs/parallel.md)",
        )
    for block in blocks:
        if settings.activation_checkpointing != "none":
            _recompute(block, selective=settings.activation_checkpointing == "selective")
        if compiles:
            block.compile()


def shard(
    model: nn.Module,
    *,
    layout: ParallelLayout,
    mesh: DeviceMesh,
    roots: Sequence[nn.Module],
    settings: ParallelSection,
) -> None:
    """Shards the parameters over `dp_shard` and `cp` and keeps copies of the shards over `dp_replicate`."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    lower = settings.gather_dtype == "bfloat16"
    # Gradients are added up in float32 also where they were computed in bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if lower else None
    options: dict[str, Any] = {"mesh": sharding_mesh(mesh, layout), **({"mp_policy": policy} if policy else {})}
    if settings.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for block in units(model):
        fully_shard(block, **options, reshard_after_forward=settings.reshard_after_forward)
    for root in roots:
        fully_shard(root, **options, reshard_after_forward=settings.reshard_after_forward)
    for name in _OWN_METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def units(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks of a model: what its `sharding_plan` names, else the members of its lists of modules."""
    own = getattr(model, "sharding_plan", None)
    if own is None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        yield from (block for members in lists for block in members if any(True for _ in block.parameters()))
        return
    patterns = own()
    for name, module in model.named_modules():
        # A pattern stands for one level of names per part: "blocks.*" is no name below a block.
        if any(fnmatchcase(name, pattern) and name.count(".") == pattern.count(".") for pattern in patterns):
            # What another stage has is without parameters here.
            yield from (module,) if any(True for _ in module.parameters()) else ()


def _plan_of(model: nn.Module, name: str, key: str) -> Any:
    own = getattr(model, name, None)
    if own is None:
        raise ConfigError(
            f"{key} was asked, but {type(model).__name__} does not say how it can be cut",
            hint=f"define {name}() on the model (docs/parallel.md), or leave {key} at 1",
        )
    return own()


def _recompute(block: nn.Module, *, selective: bool) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    # The method is replaced rather than the module wrapped, so parameters keep their names.
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _kept_operations())
    block.forward = functools.partial(checkpoint, block.forward, **options)


def _kept_operations() -> list[Any]:
    """Returns the operations whose results are dear to compute again: matrix products and attention."""
    aten = torch.ops.aten
    names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    packets = [aten.mm, aten.bmm, aten.addmm, *(getattr(aten, f"_scaled_dot_product_{name}", None) for name in names)]
    return [packet.default for packet in packets if packet is not None]
