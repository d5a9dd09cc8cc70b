"""The parallel layout of a run before anything runs: solved for the world, and refused where it cannot work.

Checked here is what needs neither a GPU nor torch; a model of your own is checked further when it is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import AXES, ParallelLayout, solve_layout
from slurm_train.config.schema import ParallelSection, RunConfig
from slurm_train.errors import BatchError, ConfigError
from slurm_train.launch.world import World

_GPT = "slurm_train.models.gpt.GPT"
_CNN = "slurm_train.models.cnn.CNN"
CAUSAL_LM = "slurm_train.models.causal_lm.causal_lm"
"""The target of model=hf."""


def plan_layout(config: RunConfig, world: World) -> ParallelLayout:
    """Returns the degree of each axis of parallelism, checked against world and model.

    Args:
        config: the run's configuration.
        world: how many ranks run on which node.

    Raises:
        ConfigError: the degrees do not fit the world, the nodes or the model, or this version cannot do it.
    """
    layout = solve_layout(config.parallel, world_size=world.size)
    _check_options(layout, config.parallel)
    if layout.is_replicated:
        return layout
    if not config.trains:
        raise ConfigError(
            f"parallel asks for {layout}, but a task or script of your own has to make its own groups",
            hint="leave parallel.* at its defaults; ranks find their numbers and rank 0's address in the environment",
        )
    if config.ddp.comm != "none":
        raise ConfigError(
            f"ddp.comm={config.ddp.comm} sends less of whole gradients, which {layout} does not exchange",
            hint="leave ddp.comm at none, or parallel.* alone",
        )
    _check_nodes(layout, world, allowed=config.parallel.allow_tp_across_nodes)
    per_rank = config.parallel.stages_per_rank if layout.pp > 1 else 1
    _check_model(layout, config.model or {}, per_rank=per_rank)
    _check_positions(layout, config)
    if per_rank > 1 and config.parallel.pipeline_schedule != "1f1b":
        raise ConfigError(
            f"parallel.stages_per_rank={per_rank} was asked with pipeline_schedule={config.parallel.pipeline_schedule}",
            hint="several stages on a rank are interleaved in 1f1b order: leave pipeline_schedule out",
        )
    return layout


def check_pipeline(config: RunConfig, layout: ParallelLayout, batch: BatchPlan) -> None:
    """Refuses a number of micro-batches that torch's interleaved schedule cannot cut into equal rounds.

    Raises:
        BatchError: as said.
    """
    if layout.pp == 1 or config.parallel.stages_per_rank == 1 or not config.trains:
        return
    rounds = max(1, batch.accumulation // layout.pp)
    if batch.accumulation % rounds:
        raise BatchError(
            f"interleaved stages on {layout.pp} ranks need rounds of equally many micro-batches, the batch is "
            f"{batch.as_sum()}",
            hint=f"set batch.accumulation to a multiple of {layout.pp}",
        )


def pipeline_bubble(layout: ParallelLayout, batch: BatchPlan, *, stages_per_rank: int = 1) -> float:
    """Returns the part of a step in which a rank idles: (ranks - 1) of (stages x micro-batches + ranks - 1) turns."""
    return (layout.pp - 1) / (stages_per_rank * batch.accumulation + layout.pp - 1)


def spans_nodes(layout: ParallelLayout, world: World, axis: str) -> bool:
    """Returns whether some group of an axis reaches over more than one node."""
    if world.is_even:
        members = math.prod(layout.degrees[AXES.index(axis) :])
        # A group and what lies between its members is that many ranks in a row.
        return getattr(layout, axis) > 1 and world.ranks_per_node[0] % members != 0
    nodes = [node for node, count in enumerate(world.ranks_per_node) for _ in range(count)]
    return any(len({nodes[rank] for rank in group}) > 1 for group in layout.groups((axis,)))


def _check_nodes(layout: ParallelLayout, world: World, *, allowed: bool) -> None:
    if allowed or layout.tp == 1 or world.num_nodes == 1:
        return
    misfit = next((count for count in sorted(set(world.ranks_per_node)) if count % layout.tp), None)
    if misfit is not None:
        raise ConfigError(
            f"parallel.tp={layout.tp} does not fit into nodes of {misfit} ranks: "
            "every layer would wait for the network",
            hint="choose a tp that divides the ranks of a node, or parallel.allow_tp_across_nodes=true",
        )


def _check_options(layout: ParallelLayout, settings: ParallelSection) -> None:
    if settings.sequence_parallel and layout.tp == 1:
        raise ConfigError(
            f"parallel.sequence_parallel=true was asked of {layout}, but positions are split among the ranks of tp",
            hint="set parallel.tp=2 or more, or leave sequence_parallel out; parallel.cp cuts sequences without tp",
        )
    if settings.cpu_offload and layout.shard_size == 1:
        raise ConfigError(
            f"parallel.cpu_offload=true was asked of {layout}, but only sharded parameters are kept in host memory",
            hint="set parallel.dp_shard=2 or more, or leave cpu_offload out",
        )


def _check_model(layout: ParallelLayout, model: dict[str, Any], *, per_rank: int) -> None:
    target = model.get("_target_")
    if target == _CNN and layout.tp * layout.pp * layout.cp > 1:
        raise ConfigError(
            f"parallel asks for {layout}, which the CNN does not support",
            hint="use dp_replicate and dp_shard, or model=gpt",
        )
    if target == CAUSAL_LM and layout.pp > 1:
        raise ConfigError(
            f"parallel asks for {layout}, but model=hf has no pipeline stages",
            hint="use dp_replicate, dp_shard and tp, or the shipped GPT: model=llama3-8b",
        )
    if target == _GPT:
        _check_gpt(layout, model, per_rank=per_rank)


def _check_gpt(layout: ParallelLayout, model: dict[str, Any], *, per_rank: int) -> None:
    layers, stages = int(model.get("num_layers", 4)), layout.pp * per_rank
    if layers < stages:
        raise ConfigError(
            f"parallel asks for {stages} stages, but model.num_layers={layers} leaves some without a block",
            hint=f"choose a parallel.pp x parallel.stages_per_rank of at most {layers}",
        )
    if layout.pp > 1 and model.get("tied", True):
        raise ConfigError(
            "parallel.pp was asked, but model.tied=true makes embedding and head one weight, in two stages",
            hint="set model.tied=false",
        )
    width, heads = int(model.get("width", 160)), int(model.get("num_heads", 4))
    hidden = int(model.get("hidden", 0)) or 4 * width
    shared = int(model.get("num_kv_heads", 0)) or heads
    for name, value in (("num_heads", heads), ("num_kv_heads", shared), ("hidden", hidden)):
        if value % layout.tp:
            raise ConfigError(
                f"parallel.tp={layout.tp} cannot cut model.{name}={value} into equal parts",
                hint=f"choose a tp that divides {value}, or set model.{name} to a multiple of {layout.tp}",
            )


def _check_positions(layout: ParallelLayout, config: RunConfig) -> None:
    """Refuses sequences that the shipped models cannot split; a model of your own is checked when it is built."""
    model, splits = config.model or {}, config.parallel.sequence_parallel
    if layout.cp == 1 and not splits:
        return
    asked = f"parallel.cp={layout.cp}" if layout.cp > 1 else "parallel.sequence_parallel=true"
    if config.batch.by_length:
        raise ConfigError(
            f"{asked} was asked with batch.by_length=true, whose sequences have different lengths",
            hint="leave batch.by_length at false, or use dp_replicate, dp_shard and tp",
        )
    if model.get("_target_") == CAUSAL_LM:
        raise ConfigError(
            f"{asked} was asked, but model=hf cannot split sequences",
            hint="use dp_replicate, dp_shard and tp, or the shipped GPT: model=llama3-8b",
        )
    if model.get("_target_") != _GPT:
        return
    key = "data.context" if (config.data or {}).get("context") else "model.context"
    context = positions_of(config.data, default=int(model.get("context", 256)))
    if layout.cp > 1 and context % (2 * layout.cp):
        raise ConfigError(
            f"parallel.cp={layout.cp} cannot cut {key}={context} into {2 * layout.cp} equal chunks",
            hint=f"set {key} to a multiple of {2 * layout.cp}",
        )
    if splits and context // layout.cp % layout.tp:
        raise ConfigError(
            f"parallel.sequence_parallel cannot split {context // layout.cp} positions among tp {layout.tp} ranks",
            hint=f"set {key} to a multiple of {math.lcm(2 * layout.cp if layout.cp > 1 else 1, layout.cp * layout.tp)}",
        )


def positions_of(data: Mapping[str, Any] | None, *, default: int) -> int:
    """Returns the positions of one sample: the data's, which may be shorter than what the model could take."""
    return int((data or {}).get("context") or default)


TABLE_HEADER = ("rank", "node", "local", *AXES)


def table_rows(layout: ParallelLayout, world: World) -> list[tuple[str, ...]]:
    """Returns one row per rank: rank, node, local rank, then its place on each axis of `AXES`."""
    places = [(node, local) for node, count in enumerate(world.ranks_per_node) for local in range(count)]
    return [
        (str(rank), str(node), str(local), *map(str, layout.coordinates(rank)))
        for rank, (node, local) in enumerate(places)
    ]


def layout_rows(
    layout: ParallelLayout, world: World, batch: BatchPlan, *, stages_per_rank: int
) -> list[tuple[str, str]]:
    """Returns the rows of the plan's table about groups and idle time; none where every rank is a whole replica."""
    if layout.is_replicated:
        return []
    rows = [("layout", f"{layout}; {layout.data_parallel_size} read different samples")]
    for axis in (axis for axis in reversed(AXES) if getattr(layout, axis) > 1):
        members = layout.members((axis,), 0)
        step = members[1] - members[0]
        ranks = f"{members[0]}-{members[-1]}" if step == 1 else f"{members[0]}, {members[1]}, .. {members[-1]}"
        if len(members) == 2:
            ranks = f"{members[0]}, {members[1]}"
        where = "over several nodes" if spans_nodes(layout, world, axis) else "on one node each"
        count = layout.world_size // len(members)
        rows.append(("", f"{axis}: {count} groups of {len(members)}, {where}; the first: ranks {ranks}"))
    if layout.pp > 1:
        idle = pipeline_bubble(layout, batch, stages_per_rank=stages_per_rank)
        stages = layout.pp * stages_per_rank
        rows.append(("bubble", f"{idle:.0%} of a step: {stages} stages, {batch.accumulation} micro-batches"))
    return rows
