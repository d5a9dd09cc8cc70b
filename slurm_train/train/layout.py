"""Cuts the model into this rank's part of the run's layout, with its first weights and an optimizer of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slurm_train.checkpoint.state import names_of_groups
from slurm_train.config.parallel import gathers_float8, stages_of
from slurm_train.distributed.float8 import to_float8
from slurm_train.distributed.group import use_timeout
from slurm_train.distributed.parallelize import (
    build_mesh,
    gathers_in_bfloat16,
    has_own_loss,
    is_deep,
    parallelize,
    prepare_blocks,
    require_blocks,
    units,
)
from slurm_train.distributed.pipeline import Pipeline, keep_stages, require_gloo_pipelines, split_stages
from slurm_train.distributed.sequence import SequencePart
from slurm_train.errors import ConfigError, SlurmTrainError
from slurm_train.models.failures import call_in, cause_in_batch
from slurm_train.models.first_weights import fill, first_values
from slurm_train.train.context import Built, Parts, Rank, gather
from slurm_train.train.inputs import ModelInputs
from slurm_train.train.optimizer import begin_state, build_optimizer, can_call_kernel


def apply_parallelism(rank: Rank, built: Built) -> Parts:
    """Returns this rank's part of model and optimizer, with first weights. Collective over all ranks.

    Args:
        rank: has joined the others.
        built: the whole model, which is changed in place.

    Raises:
        ConfigError: the model has no plan for the layout, or the layout does not suit it.
    """
    require_blocks(built.model, settings=rank.config.parallel)
    if rank.config.train.precision == "fp8":
        to_float8(built.model, blocks=units(built.model), tp=rank.layout.tp)
    return _prepare_replica(rank, built) if rank.layout.is_replicated else _prepare_shards(rank, built)


def _prepare_replica(rank: Rank, built: Built) -> Parts:
    """Gives a whole model its weights, and prepares its blocks to be compiled or recomputed where configured."""
    model = built.model
    config = rank.config
    fill([model], first_values(model), device=rank.device, progress=partial(rank.heartbeat.mark, "start"))
    # Built again: whether the update is fused depends on the device.
    optimizer = build_optimizer(model, optim=config.optim)
    by_blocks = rank.compiles and is_deep(model, num_replicas=rank.place.world_size)
    if by_blocks or config.parallel.activation_checkpointing != "none":
        prepare_blocks(model, settings=config.parallel, compiles=by_blocks)
    if config.ddp.find_unused_parameters:
        # A checkpoint needs the optimizer's state of every parameter, also of one that was never used.
        if not can_call_kernel(optimizer):
            name = type(optimizer).__name__
            raise ConfigError(
                f"ddp.find_unused_parameters was asked, but {name} has no state for unused parameters",
                hint="use optim=adamw, or optim=sgd with parameters in float32",
            )
        begin_state(optimizer)
    return _parts_of(rank, built, optimizer, inputs=build_inputs(rank))


def _prepare_shards(rank: Rank, built: Built) -> Parts:
    """Cuts the model into the parts of the layout, and gives this rank's part its weights."""
    model = built.model
    config = rank.config
    layout = rank.layout
    values = first_values(model)
    mesh = build_mesh(layout, device=rank.device, offloads=config.parallel.cpu_offload)
    gathers_half = gathers_in_bfloat16(model, layout=layout, settings=config.parallel, autocast=rank.autocast)
    inputs = build_inputs(rank, gathers_half=gathers_half, casts_shards=gathers_half and not has_own_loss(model))
    settings = replace(config.parallel, gather_dtype="bfloat16" if gathers_half else "float32")
    roots = [model]
    group_names = pipeline = None
    if layout.pp > 1:
        require_gloo_pipelines(rank.device)
        group_names = names_of_groups(model, built.optimizer)
        place = layout.coordinates(rank.place.rank).pp
        num_stages = layout.pp * settings.stages_per_rank
        stages = stages_of(place, num_ranks=layout.pp, per_rank=settings.stages_per_rank)
        keep_stages(model, stages=stages, num_stages=num_stages)
        _require_trained_stages(rank, model)
        roots = split_stages(model, stages=stages, num_stages=num_stages)
        group = mesh["pp"].get_group()
        pipeline = Pipeline(parts=roots, place=place, num_ranks=layout.pp, device=rank.device, group=group)
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
    optimizer = build_optimizer(model, optim=config.optim)
    if can_call_kernel(optimizer):
        begin_state(optimizer)
    return _parts_of(rank, built, optimizer, inputs=inputs, group_names=group_names, pipeline=pipeline)


def _parts_of(rank: Rank, built: Built, optimizer: Optimizer, *, inputs: ModelInputs, **of_pipeline: Any) -> Parts:
    return Parts(
        rank=rank,
        model=built.model,
        optimizer=optimizer,
        train_data=built.train_data,
        heldout=built.heldout,
        flops_per_token=built.flops_per_token,
        inputs=inputs,
        **of_pipeline,
    )


def build_inputs(rank: Rank, *, gathers_half: bool = False, casts_shards: bool = False) -> ModelInputs:
    """Returns the way of batches to this rank's model."""
    layout = rank.layout
    return ModelInputs(
        rank.device,
        autocast=rank.autocast,
        sequence_part=SequencePart(layout.coordinates(rank.place.rank).cp, layout.cp) if layout.cp > 1 else None,
        gathers_half=gathers_half,
        casts_shards=casts_shards,
        is_stage=layout.pp > 1,
    )


@contextmanager
def failures_explained(parts: Parts) -> Iterator[None]:
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
        if isinstance(err, RuntimeError) and parts.inputs.casts_shards and "BFloat16" in str(err):
            remedies = "cast it to the type of the inputs, buffer.to(x.dtype)"
            if parts.rank.config.train.param_dtype != "bfloat16":
                remedies += "; or set parallel.gather_dtype=float32"
            # The traceback that follows has the line of the model.
            print(
                "shards and inputs are in bfloat16, and the model computes with another type, e.g. that of a buffer: "
                f"{remedies}",
                file=sys.stderr,
            )
        raise


def _require_trained_stages(rank: Rank, model: nn.Module) -> None:
    """Checks that each rank of a pipeline has trained parameters, once the model is cut. Collective over all ranks.

    Raises:
        ConfigError: on all ranks: the parameters of some ranks are all frozen.
    """
    layout = rank.layout
    trains = gather(any(parameter.requires_grad for parameter in model.parameters()))
    frozen = sorted({layout.coordinates(number).pp for number, is_trained in enumerate(trains) if not is_trained})
    if frozen:
        raise ConfigError(
            f"parallel.pp={layout.pp} was asked, and {type(model).__name__} has nothing to train on rank "
            f"{', '.join(map(str, frozen))} of the pipeline, whose parameters are all frozen",
            hint="choose a smaller parallel.pp, so that each rank has a part that is trained, or parallel.dp_shard, "
            "which spreads frozen parameters, too",
        )
