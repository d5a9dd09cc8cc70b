"""Cuts the model into this rank's part of the run's layout, with its first weights and an optimizer of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.checkpoint.state import names_of_groups
from slurm_train.config.parallel import gathers_float8, stages_of
from slurm_train.data.source import Batch, is_nested, map_tensors
from slurm_train.distributed.float8 import to_float8
from slurm_train.distributed.group import use_timeout
from slurm_train.distributed.parallelize import (
    build_mesh,
    gathers_in_bfloat16,
    has_own_loss,
    is_deep,
    leave_inputs,
    parallelize,
    prepare_blocks,
    require_blocks,
    units,
)
from slurm_train.distributed.pipeline import Pipeline, keep_stages, require_gloo_pipelines, split_stages
from slurm_train.errors import ConfigError, SlurmTrainError
from slurm_train.models.failures import call_in, cause_in_batch
from slurm_train.models.first_weights import fill, first_values
from slurm_train.models.own_loss import LABELS
from slurm_train.train.context import Parts, Rank, gather
from slurm_train.train.optimizer import begin_state, build_optimizer, can_call_kernel


def apply_parallelism(parts: Parts) -> None:
    """Replaces model and optimizer by this rank's part of them, with first weights. Collective over all ranks.

    Args:
        parts: a whole model, which is changed in place, and its optimizer, which is replaced.

    Raises:
        ConfigError: the model has no plan for the layout, or the layout does not suit it.
    """
    require_blocks(parts.model, settings=parts.rank.config.parallel)
    if parts.rank.config.train.precision == "fp8":
        to_float8(parts.model, blocks=units(parts.model), tp=parts.rank.layout.tp)
    if parts.rank.layout.is_replicated:
        _prepare_replica(parts)
    else:
        _prepare_shards(parts)


def _prepare_replica(parts: Parts) -> None:
    """Gives a whole model its weights, and prepares its blocks to be compiled or recomputed where configured."""
    rank = parts.rank
    model = parts.model
    config = rank.config
    fill([model], first_values(model), device=rank.device, progress=partial(rank.heartbeat.mark, "start"))
    # Built again: whether the update is fused depends on the device.
    parts.optimizer = build_optimizer(model, optim=config.optim)
    by_blocks = rank.compiles and is_deep(model)
    if by_blocks or config.parallel.activation_checkpointing != "none":
        prepare_blocks(model, settings=config.parallel, compiles=by_blocks)
    if config.ddp.find_unused_parameters:
        # A checkpoint needs the optimizer's state of every parameter, also of one that was never used.
        if not can_call_kernel(parts.optimizer):
            name = type(parts.optimizer).__name__
            raise ConfigError(
                f"ddp.find_unused_parameters was asked, but {name} has no state for unused parameters",
                hint="use optim=adamw, or optim=sgd with parameters in float32",
            )
        begin_state(parts.optimizer)


def _prepare_shards(parts: Parts) -> None:
    """Cuts the model into the parts of the layout, and gives this rank's part its weights."""
    rank = parts.rank
    model = parts.model
    config = rank.config
    layout = rank.layout
    values = first_values(model)
    mesh = build_mesh(layout, device=rank.device)
    gathers_half = gathers_in_bfloat16(model, layout=layout, settings=config.parallel, autocast=rank.autocast)
    rank.gathers_half = gathers_half
    rank.casts_shards = gathers_half and not has_own_loss(model)
    settings = replace(config.parallel, gather_dtype="bfloat16" if gathers_half else "float32")
    roots = [model]
    if layout.pp > 1:
        require_gloo_pipelines(rank.device)
        parts.group_names = names_of_groups(model, parts.optimizer)
        place = layout.coordinates(rank.place.rank).pp
        num_stages = layout.pp * settings.stages_per_rank
        stages = stages_of(place, num_ranks=layout.pp, per_rank=settings.stages_per_rank)
        keep_stages(model, stages=stages, num_stages=num_stages)
        _require_trained_stages(parts)
        roots = split_stages(model, stages=stages, num_stages=num_stages)
        group = mesh["pp"].get_group()
        parts.pipeline = Pipeline(parts=roots, place=place, num_ranks=layout.pp, device=rank.device, group=group)
    parallelize(
        model,
        layout=layout,
        mesh=mesh,
        roots=roots,
        settings=settings,
        compiles=rank.compiles,
        gathers_float8=gathers_half and gathers_float8(layout, config.parallel, precision=config.train.precision),
    )
    fill(
        [model, *roots],
        values,
        device=rank.device,
        # Each weight counts as progress for the supervisor's watchdog.
        progress=partial(rank.heartbeat.mark, "start"),
        shards_device=torch.device("cpu") if settings.cpu_offload else None,
    )
    use_timeout(rank.collective_timeout_s(config.train.start_timeout_s))
    # Sharding has replaced the parameters.
    parts.optimizer = build_optimizer(model, optim=config.optim)
    if can_call_kernel(parts.optimizer):
        begin_state(parts.optimizer)


def keep_float_inputs(rank: Rank, model: nn.Module, batch: Batch) -> None:
    """Has shards in bfloat16 compute with autocast, and without a cast of inputs, where a batch has float inputs.

    To be called before the first forward pass of a training or an evaluation, on all ranks alike. A clock or a
    coordinate would be rounded (526 to 528) that whole replicas see as it is. Models of whole numbers, texts, compute
    in bfloat16 throughout, which takes less memory than autocast. The stages of a pipeline go on to cast what they get,
    and so does a model of float64, which autocast leaves alone.

    Args:
        rank: this rank; `casts_shards` is set.
        model: this rank's part.
        batch: (inputs, ...), or tensors by name.
    """
    if not rank.gathers_half or rank.layout.pp > 1:
        return
    # Targets beside the inputs do not go into the model, and a loss of its own takes a batch of names apart itself.
    is_apart = has_own_loss(model)
    inputs: Any = batch[:1] if isinstance(batch, tuple) else batch
    if isinstance(batch, dict) and is_apart:
        inputs = {name: part for name, part in batch.items() if name != LABELS}
    are_floats: list[bool] = []

    def look(tensor: Tensor) -> Tensor:
        are_floats.append(tensor.is_floating_point() and tensor.dtype != torch.float64)
        return tensor

    map_tensors(look, batch if is_nested(batch) else inputs)
    if any(are_floats):
        leave_inputs(model)
        rank.casts_shards = False


@contextmanager
def failures_explained(rank: Rank) -> Iterator[None]:
    """Says how a model was called that raises, and what to do where its shards are cast and it computes otherwise.

    Raises:
        ConfigError: in place of what torch says of a batch without naming the cause.
    """
    try:
        yield
    except Exception as err:
        if isinstance(err, SlurmTrainError):
            raise
        call = call_in(err)
        if call:
            print(call, file=sys.stderr)
        cause = cause_in_batch(err)
        if cause is not None:
            raise cause from err
        if isinstance(err, RuntimeError) and rank.casts_shards and "BFloat16" in str(err):
            remedies = "cast it to the type of the inputs, buffer.to(x.dtype)"
            if rank.config.train.param_dtype != "bfloat16":
                remedies += "; or set parallel.gather_dtype=float32"
            # The traceback that follows has the line of the model.
            print(
                "shards and inputs are in bfloat16, and the model computes with another type, e.g. that of a buffer: "
                f"{remedies}",
                file=sys.stderr,
            )
        raise


def _require_trained_stages(parts: Parts) -> None:
    """Checks that each rank of a pipeline has trained parameters, once the model is cut. Collective over all ranks.

    Raises:
        ConfigError: on all ranks: the parameters of some ranks are all frozen.
    """
    layout = parts.rank.layout
    trains = gather(any(parameter.requires_grad for parameter in parts.model.parameters()))
    frozen = sorted({layout.coordinates(rank).pp for rank, is_trained in enumerate(trains) if not is_trained})
    if frozen:
        raise ConfigError(
            f"parallel.pp={layout.pp} was asked, and {type(parts.model).__name__} has nothing to train on rank "
            f"{', '.join(map(str, frozen))} of the pipeline, whose parameters are all frozen",
            hint="choose a smaller parallel.pp, so that each rank has a part that is trained, or parallel.dp_shard, "
            "which spreads frozen parameters, too",
        )
