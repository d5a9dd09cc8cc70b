"""Layouts that a model could be trained in on a cluster: all legal ones, those that fit, the fastest by the model.

Legal is what `plan_layout`, the batch's arithmetic and `check_pipeline` do not refuse, so what is suggested can be
typed. All of them train with the same global batch, else their speeds could not be compared; how it is cut, and what is
computed again, is chosen for each. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from slurm_train.config.batch import solve_batch
from slurm_train.config.layout import ParallelLayout
from slurm_train.config.schema import BatchSection, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.launch.layout import check_pipeline, plan_layout
from slurm_train.launch.layout_memory import LayoutFacts, facts_of
from slurm_train.launch.layout_peak import fullest_stage, rank_memory
from slurm_train.launch.layout_speed import Machine, tokens_per_s
from slurm_train.launch.world import World

_USABLE = 0.9
"""Part of a device's memory that is planned with; torch's allocator, NCCL and kernels take the rest."""
_RECOMPUTES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
_ALIKE = 0.05
"""Speeds that differ by less than this part are taken for equal: the model of them is not better than that."""
_SAMPLES_PER_RANK = 4
_TOKENS_PER_STEP = 1 << 24
"""At most, where the global batch is left open: about what the largest published models were trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A layout that fits."""

    world: World
    facts: LayoutFacts
    memory_bytes: int
    """On the fullest rank."""
    tokens_per_s: float
    """Of all ranks, by the model of `launch.layout_speed`."""

    @property
    def words(self) -> str:
        """What to type for it."""
        layout, settings, batch = self.facts.layout, self.facts.settings, self.facts.batch
        degrees = {axis: degree for axis, degree in layout.as_mapping.items() if axis != "dp_replicate" or degree > 1}
        chosen: dict[str, object] = {"dp_replicate": layout.dp_replicate, **degrees}
        if settings.sequence_parallel:
            chosen["sequence_parallel"] = "true"
        if settings.activation_checkpointing != "none":
            chosen["activation_checkpointing"] = settings.activation_checkpointing
        inside = ",".join(f"{key}:{value}" for key, value in chosen.items())
        return f'"parallel={{{inside}}}" batch.global_size={batch.global_size} batch.local_size={batch.local_size}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """What was found for a model and a cluster."""

    num_legal: int
    """Combinations of degrees that nothing refuses on the whole cluster."""
    best: list[Suggestion]
    """On the whole cluster; where speeds are about equal, the simplest comes first. The fastest is always one."""
    smallest: Suggestion | None
    """On as few nodes as possible, the best there; None where nothing fits."""


def suggest_layouts(config: RunConfig, world: World, *, memory_bytes: int, count: int = 5) -> Suggestions:
    """Returns the best layouts.

    Args:
        config: the run's configuration; its degrees are not looked at, its options are kept. `train.precision=auto` is
            taken for bfloat16.
        world: all nodes that there are, with equally many ranks each.
        memory_bytes: of one device.
        count: how many of them.

    Raises:
        ConfigError: no formula is known for the model.
    """
    if not world.is_even:
        raise ConfigError(
            f"layouts are suggested for equal nodes, not for {list(world.ranks_per_node)}",
            hint=f"ask for equal ones, e.g. cluster.gpus_per_node={min(world.ranks_per_node)}",
        )
    if config.train.precision == "auto":
        config = replace(config, train=replace(config.train, precision="bfloat16"))
    alone = facts_of(config, ParallelLayout(), solve_batch(config.batch, ranks=1)) if config.trains else None
    if alone is None:
        raise ConfigError(
            "there is no estimate for this model, so no layout can be suggested",
            hint="model=gpt has one; a model of your own is measured by `plan --measure`",
        )
    config = replace(config, batch=_one_batch(config.batch, world, positions=alone.positions))
    legal = list(_legal(config, world))
    found = _fitting(legal, world, memory_bytes)
    return Suggestions(
        num_legal=len({layout for layout, _ in legal}),
        best=_with_fastest(found, count=count),
        smallest=_smallest(config, world, memory_bytes) if found else None,
    )


def _with_fastest(found: list[Suggestion], *, count: int) -> list[Suggestion]:
    fastest = max(found, key=lambda one: one.tokens_per_s, default=None)
    if fastest is None or fastest in found[:count]:
        return found[:count]
    return [*found[: count - 1], fastest]


def _one_batch(asked: BatchSection, world: World, *, positions: int) -> BatchSection:
    """Returns a batch whose global size does not depend on the layout."""
    if asked.global_size is not None or asked.accumulation is not None:
        return asked
    share = (asked.local_size or 1) * _SAMPLES_PER_RANK
    most = _TOKENS_PER_STEP // (share * positions)
    # A divisor of their number, so that the ranks share it equally.
    shares = max((part for part in range(1, min(most, world.size) + 1) if world.size % part == 0), default=1)
    return replace(asked, global_size=share * shares)


def _smallest(config: RunConfig, world: World, memory_bytes: int) -> Suggestion | None:
    for num_nodes in (count for count in range(1, world.num_nodes + 1) if world.num_nodes % count == 0):
        part = World(world.ranks_per_node[:num_nodes])
        if found := _fitting(list(_legal(config, part)), part, memory_bytes):
            return found[0]
    return None


def _fitting(legal: list[tuple[ParallelLayout, LayoutFacts]], world: World, memory_bytes: int) -> list[Suggestion]:
    """Returns what fits, best first; of a layout the way of cutting the batch and recomputing that is fastest."""
    found: dict[ParallelLayout, Suggestion] = {}
    ended: set[ParallelLayout] = set()
    for layout, facts in legal:
        if layout in ended:
            continue
        needed = rank_memory(facts, stage=fullest_stage(facts)).total
        if needed > _USABLE * memory_bytes:
            if facts.settings.activation_checkpointing == _RECOMPUTES[-1]:
                ended.add(layout)  # larger micro-batches come after this one
            continue
        speed = tokens_per_s(facts, world, machine=Machine())
        one = Suggestion(world=world, facts=facts, memory_bytes=needed, tokens_per_s=speed)
        if layout not in found or speed > found[layout].tokens_per_s:
            found[layout] = one
    best = max((one.tokens_per_s for one in found.values()), default=1.0)
    return sorted(found.values(), key=lambda one: _order(one, best=best))


def _order(one: Suggestion, *, best: float) -> tuple[int, int, float, int, str]:
    """Returns what suggestions are put in order by: of about equally fast ones the simplest, then the fastest."""
    num_axes = sum(degree > 1 for axis, degree in one.facts.layout.as_mapping.items() if axis != "dp_replicate")
    behind = int((1 - one.tokens_per_s / best) / _ALIKE)
    return behind, num_axes, -float(f"{one.tokens_per_s:.3g}"), one.memory_bytes, one.words


def _legal(config: RunConfig, world: World) -> Iterator[tuple[ParallelLayout, LayoutFacts]]:
    """Yields each layout that a run could have, with every way to cut the batch and to compute activations again."""
    first = _RECOMPUTES.index(config.parallel.activation_checkpointing)
    for degrees in _degrees(world.size):
        chosen: dict[str, Any] = {**degrees, "sequence_parallel": degrees["tp"] > 1}
        settings = replace(config.parallel, **chosen)
        asked = replace(config, parallel=settings)
        try:
            layout = plan_layout(asked, world)
        except ConfigError:
            continue
        for facts in _cuts(asked, layout):
            for recompute in _RECOMPUTES[first:]:
                yield layout, replace(facts, settings=replace(settings, activation_checkpointing=recompute))


def _cuts(config: RunConfig, layout: ParallelLayout) -> Iterator[LayoutFacts]:
    """Yields what is known of a layout for each size of micro-batch that the batch can be cut into."""
    asked, size = config.batch, 1
    while asked.local_size is not None or size * layout.data_parallel_size <= (asked.global_size or 1):
        try:
            cut = asked if asked.local_size is not None else replace(asked, local_size=size)
            batch = solve_batch(cut, ranks=layout.data_parallel_size, stages=layout.pp)
            check_pipeline(config, layout, batch)
        except ConfigError:
            return
        facts = facts_of(config, layout, batch)
        assert facts is not None
        yield facts
        if asked.local_size is not None or asked.accumulation is not None:
            return
        size *= 2


def _degrees(world_size: int) -> Iterator[dict[str, int]]:
    """Yields all ways to multiply up to the world."""
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    for tp in divisors:
        for pp in (one for one in divisors if world_size % (tp * one) == 0):
            for cp in (one for one in divisors if world_size % (tp * pp * one) == 0):
                left = world_size // (tp * pp * cp)
                for shard in (one for one in divisors if left % one == 0):
                    yield {"tp": tp, "pp": pp, "cp": cp, "dp_shard": shard, "dp_replicate": left // shard}
