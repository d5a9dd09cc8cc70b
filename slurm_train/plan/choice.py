"""What a run does where the shipped GPT does not fit into a GPU as whole replicas: `parallel.dp_shard=auto`.

It shards parameters (FSDP2), within a node as long as that is enough and computes about as fast (HSDP), and where
needed takes smaller micro-batches of the same global batch and computes activations again. All of it comes from
formulas; where there are none, for a model of a user's own, replicas stay replicas. What is typed stays as it is.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from slurm_train.config.batch import BatchPlan, solve_batch
from slurm_train.config.parallel import AUTO, ParallelLayout, solve_layout
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError
from slurm_train.formatting import byte_size
from slurm_train.plan.cards import card_of, has_gpus, in_half
from slurm_train.plan.layouts import ALIKE, RECOMPUTES, USABLE, slowness
from slurm_train.plan.memory import facts_of, fullest_rank
from slurm_train.plan.placement import World, check_pipeline, plan_layout

# So much fits into every card, and need not be compared with one.
_FITS_ANYWHERE = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to run the configuration."""

    config: RunConfig
    shards: int
    memory_bytes: int
    """On the fullest rank."""
    slowness: float
    """Of the computation; what is sent does not count, since it is hidden or not known."""


def settle_parallel(config: RunConfig, world: World, env: Mapping[str, str]) -> tuple[RunConfig, str]:
    """Returns the configuration with a number of shards in place of `parallel.dp_shard=auto`, and the reason.

    Where a layout was typed it stays, and the words say if it does not fit; "" where there is nothing to say.

    Args:
        config: the run's configuration.
        world: its ranks.
        env: environment, for looking at local GPUs.
    """
    if config.parallel.dp_shard == AUTO:
        config = replace(config, parallel=replace(config.parallel, auto_shards=1))
    typed = _way(config, world, half=False)
    if typed is None or typed.memory_bytes < _FITS_ANYWHERE:
        return config, ""
    half = in_half(config, on_gpu=has_gpus(config, env))
    # Of a range of nodes the fewest: on more nodes each rank has less.
    is_range = bool(world.node_counts)
    world = next(world.possible())
    card = card_of(config, env)
    typed = _way(config, world, half=half)
    if card is None or typed is None or typed.memory_bytes <= USABLE * card.memory_bytes:
        return config, ""
    section = config.parallel
    shown = solve_layout(section, world_size=world.num_ranks)
    needed = f"a layout of {shown} needs {byte_size(typed.memory_bytes)} per rank, more than fit into {card}"
    if section.dp_shard != AUTO or section.dp_replicate != -1:
        return config, f"does not fit: {needed}; leave parallel.dp_replicate and dp_shard out, or see `plan --suggest`"
    ways = list(_ways(config, world, shown, half=half, is_range=is_range))
    fitting = [way for way in ways if way.memory_bytes <= USABLE * card.memory_bytes]
    for cp in _degrees_of_context(config, world) if not fitting else ():
        # Sequences that no rank has room for: each rank gets a part of the positions.
        cut = replace(config, parallel=replace(section, cp=cp))
        by_context = _ways(
            cut, world, solve_layout(cut.parallel, world_size=world.num_ranks), half=half, is_range=False
        )
        fitting = [way for way in by_context if way.memory_bytes <= USABLE * card.memory_bytes]
        if fitting:
            break
    if not fitting:
        least = min([typed, *ways], key=lambda way: way.memory_bytes)
        return least.config, (
            f"does not fit: {needed}; the least, {_in_words(least, typed)}, needs {byte_size(least.memory_bytes)}; "
            f"take more GPUs, or see `plan --suggest {card.memory_bytes >> 30}`"
        )
    slowest = (1 + ALIKE) * min(way.slowness for way in fitting)
    chosen = next(way for way in _fastest_of_each(fitting) if way.slowness <= slowest)
    return chosen.config, f"{_in_words(chosen, typed)}, since {needed}; this one {byte_size(chosen.memory_bytes)}"


def _degrees_of_context(config: RunConfig, world: World) -> list[int]:
    """Returns the degrees of context parallelism to try: within a node, if none was typed and the data can be cut."""
    if config.parallel.cp != 1 or world.node_counts or (config.data or {}).get("document_mask"):
        return []
    ranks = world.ranks_per_node[0]
    return [cp for cp in range(2, ranks + 1) if world.is_even and ranks % (cp * config.parallel.tp) == 0]


def _fastest_of_each(ways: list[_Way]) -> list[_Way]:
    """Returns the fastest way of each number of shards, the fewest shards first."""
    best: dict[int, _Way] = {}
    for way in ways:
        if way.shards not in best or way.slowness < best[way.shards].slowness:
            best[way.shards] = way
    return [best[shards] for shards in sorted(best)]


def _ways(config: RunConfig, world: World, typed: ParallelLayout, *, half: bool, is_range: bool) -> Iterator[_Way]:
    """Yields the ways to run a configuration with other shards, micro-batches and kinds of checkpointing."""
    batch = solve_batch(config.batch, ranks=typed.data_parallel_size, stages=typed.pp)
    # The batch of a range of nodes suits all of its sizes.
    is_open = config.batch.local_size is None and config.batch.accumulation is None and not is_range
    sizes = [batch.local_size]
    if is_open:
        share = batch.local_size * batch.accumulation
        sizes = [size for size in range(batch.local_size, 0, -1) if share % size == 0]
    first = RECOMPUTES.index(config.parallel.activation_checkpointing)
    for shards in _numbers_of_shards(world, typed):
        for size in sizes:
            cut = config.batch
            if size != batch.local_size:
                cut = replace(cut, global_size=batch.global_size, local_size=size)
            for recompute in RECOMPUTES[first:]:
                parallel = replace(config.parallel, auto_shards=shards, activation_checkpointing=recompute)
                way = _way(replace(config, parallel=parallel, batch=cut), world, half=half)
                if way is not None:
                    yield way


def _numbers_of_shards(world: World, typed: ParallelLayout) -> list[int]:
    """Returns how many shards to try: none, those of a node, and of more and more nodes."""
    left = typed.dp_replicate
    on_node = world.ranks_per_node[0] // (typed.tp * typed.cp)
    if not world.is_even or on_node < 1 or left % on_node:
        return [1, left]
    num_nodes = left // on_node
    return [1, *(on_node * nodes for nodes in range(1, num_nodes + 1) if num_nodes % nodes == 0)]


def _way(config: RunConfig, world: World, *, half: bool) -> _Way | None:
    """Returns what is expected of a configuration as it is; None where it is refused, or no formula is known."""
    try:
        layout = plan_layout(config, world)
        batch = solve_batch(config.batch, ranks=layout.data_parallel_size, stages=layout.pp)
        check_pipeline(config, layout, batch)
    except ConfigError:
        return None
    facts = facts_of(config, layout, _grown(config, batch), half=half)
    if facts is None:
        return None
    memory = fullest_rank(facts)[1].total_bytes
    return _Way(config=config, shards=layout.dp_shard, memory_bytes=memory, slowness=slowness(facts))


def _grown(config: RunConfig, batch: BatchPlan) -> BatchPlan:
    return batch.grown(max(config.batch.growth.values(), default=1))


def _in_words(way: _Way, typed: _Way) -> str:
    """Returns what is chosen, e.g. "parallel.dp_shard=8 (FSDP2), batch.local_size=1"."""
    config = way.config
    old = typed.config
    parts = [f"parallel.cp={config.parallel.cp}"] if config.parallel.cp != old.parallel.cp else []
    parts += [f"parallel.dp_shard={way.shards}"] if way.shards > 1 else []
    if config.parallel.activation_checkpointing != old.parallel.activation_checkpointing:
        parts.append(f"parallel.activation_checkpointing={config.parallel.activation_checkpointing}")
    if config.batch.local_size != old.batch.local_size:
        parts.append(f"batch.local_size={config.batch.local_size}")
    return ", ".join(parts) or "as it is"
