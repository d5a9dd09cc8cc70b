"""What a layout other than plain data parallelism changes in a training: the parts that are built otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.digest import saved_weights, weights_digest
from slurm_train.checkpoint.state import names_of_groups
from slurm_train.config.layout import stages_of
from slurm_train.distributed.context import SequencePart
from slurm_train.distributed.pipeline import Pipeline, keep_stages, split_stages
from slurm_train.errors import ConfigError
from slurm_train.models.objective import Objective
from slurm_train.rundir.layout import list_checkpoints, name_of
from slurm_train.train.build import autocast_dtype, build_optimizer
from slurm_train.train.layout_evaluate import LayoutEvaluator
from slurm_train.train.layout_step import LayoutStepParts, LayoutStepper, Passes
from slurm_train.train.replicas import check_replicas
from slurm_train.train.update import begin_state, can_be_short

if TYPE_CHECKING:
    from slurm_train.train.trainer import Built, RankRun


def lay_out(rank_run: RankRun, built: Built) -> Built:
    """Returns the parts with this rank's part of the model and an optimizer of it. Collective over all ranks.

    Of whole replicas only the blocks change, where activation checkpointing is asked for.

    Raises:
        ConfigError: the model does not say how it can be cut.
    """
    start, layout = rank_run.start, rank_run.start.layout
    if layout.is_replicated and start.config.parallel.activation_checkpointing == "none":
        return built
    from slurm_train.distributed.mesh import build_mesh
    from slurm_train.distributed.parallelize import parallelize, prepare_blocks

    if layout.is_replicated:
        prepare_blocks(built.model, settings=start.config.parallel, compiles=False)
        return built

    mesh = build_mesh(layout, device=rank_run.device)
    group_names, pipeline = None, None
    if layout.pp > 1:
        group_names = names_of_groups(built.model, built.optimizer)
        pipeline = _take_stages(rank_run, built.model, group=mesh["pp"].get_group())
    parallelize(
        built.model,
        layout=layout,
        mesh=mesh,
        roots=[built.model] if pipeline is None else pipeline.parts,
        settings=start.config.parallel,
        compiles=start.config.train.compile,
    )
    # The parameters are other objects now.
    optimizer = build_optimizer(built.model, optim=start.config.optim)
    if can_be_short(optimizer):
        begin_state(optimizer)
    elif layout.tp > 1:
        raise ConfigError(
            f"the parameters of {type(built.model).__name__} are of several types, which tensor parallelism "
            "cannot update together",
            hint="give all parameters one type, or leave parallel.tp at 1",
        )
    return replace(built, optimizer=optimizer, group_names=group_names, pipeline=pipeline)


def _take_stages(rank_run: RankRun, model: nn.Module, *, group: dist.ProcessGroup) -> Pipeline:
    """Returns this rank's stages; the model is nothing else afterwards."""
    layout, per_rank = rank_run.start.layout, rank_run.start.config.parallel.stages_per_rank
    place = layout.coordinates(rank_run.start.place.rank).pp
    stages, num_stages = stages_of(place, num_ranks=layout.pp, per_rank=per_rank), layout.pp * per_rank
    keep_stages(model, stages=stages, num_stages=num_stages)
    parts = split_stages(model, stages=stages, num_stages=num_stages)
    return Pipeline(parts=parts, place=place, num_ranks=layout.pp, device=rank_run.device, group=group)


def build_layout_stepper(
    rank_run: RankRun, built: Built, *, objective: Objective, before_update: Callable[[], None]
) -> LayoutStepper:
    """Returns what takes steps with parts of a model."""
    start = rank_run.start
    parts = LayoutStepParts(
        passes=_build_passes(rank_run, built, objective),
        optimizer=built.optimizer,
        clip_norm=start.config.optim.grad_clip_norm,
        layout=start.layout,
        device=rank_run.device,
        before_update=before_update,
        applies_spikes=start.config.health.on_spike == "log",
    )
    return LayoutStepper(parts)


def _build_passes(rank_run: RankRun, built: Built, objective: Objective) -> Passes:
    start, pipeline = rank_run.start, built.pipeline
    facts: dict[str, Any] = {
        "model": built.model,
        "objective": objective,
        "accumulation": start.plan.accumulation,
        "device": rank_run.device,
        "autocast": autocast_dtype(start.config.train, device=rank_run.device),
        "stop": start.stop,
        "counts": start.layout.owns_items(start.place.rank),
        "part": _sequence_part(rank_run),
        "heartbeat": start.heartbeat,
    }
    if pipeline is None:
        return Passes(**facts)
    from slurm_train.train.pipeline_step import PipelinePasses, summed_loss, without_outputs

    name, num_batches = start.config.parallel.pipeline_schedule, start.plan.accumulation
    schedule = pipeline.build_schedule(name=name, num_batches=num_batches, loss=summed_loss)
    facts |= {"schedule": schedule, "is_first": pipeline.is_first, "is_last": pipeline.is_last}
    return PipelinePasses(**facts, options=without_outputs(schedule))


def build_layout_evaluator(
    rank_run: RankRun, built: Built, *, objective: Objective, autocast: torch.dtype | None
) -> LayoutEvaluator:
    """Returns what measures the held-out samples with parts of a model."""
    start, heldout = rank_run.start, built.heldout
    assert heldout is not None
    return LayoutEvaluator(
        objective=objective,
        source=heldout,
        layout=start.layout,
        rank=start.place.rank,
        device=rank_run.device,
        batch_size=start.plan.local_size,
        autocast=autocast,
        stop=start.stop,
        pipeline=built.pipeline,
        part=_sequence_part(rank_run),
        heartbeat=start.heartbeat,
    )


def _sequence_part(rank_run: RankRun) -> SequencePart | None:
    layout = rank_run.start.layout
    place = layout.coordinates(rank_run.start.place.rank).cp
    return SequencePart(place, layout.cp) if layout.cp > 1 else None


def build_replica_check(rank_run: RankRun, model: nn.Module) -> Callable[[int], None]:
    """Returns what compares the ranks' parameters at a step: those that hold the same part of them. Collective."""
    start = rank_run.start
    groups = None if start.layout.is_replicated else list(start.layout.groups(("dp_replicate",)))
    return lambda step: check_replicas(
        model.parameters(), step=step, device=rank_run.device, host=start.place.host, groups=groups
    )


def digest_weights(rank_run: RankRun, built: Built, *, step: int) -> str:
    """Returns the identity of all weights at the end, on rank 0. Collective where ranks hold parts of them."""
    if built.group_names is None:
        return weights_digest(built.model.named_parameters())
    if not rank_run.start.place.is_first:
        return ""
    # No rank has a way to the parameters of all stages but the checkpoint that was just saved.
    names = [name for group in built.group_names for name in group]
    saved = next(path for path in list_checkpoints(rank_run.start.run.checkpoints) if name_of(path).step == step)
    return weights_digest(saved_weights(saved, names))
