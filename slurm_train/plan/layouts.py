"""How fast the shipped GPT would train in a layout, and which layouts fit into a cluster. Imports no torch.

The model of speed knows arithmetic, links, a pipeline's idle time and what is computed again; kernels, latency and a
busy network are not in it. `FLOPS` and `_CUT` are fitted to 14 published runs of 1 to 32 H200 (KempnerForge,
benchmarks/mfu_scaling, 2026-04-05): the model gives 0.94 to 1.23 times their speeds (`tests/plan/test_published.py`).
That order is what it is for; `expected_tokens_per_s` is what a run may expect.
Traffic is what one rank sends in one step with ring algorithms, 2 (n - 1) / n of a buffer for an all-reduce and half of
it for a gather or a scatter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from slurm_train.config.batch import BatchPlan, solve_batch
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError
from slurm_train.plan.memory import FLOAT, LayoutFacts, facts_of, fullest_rank
from slurm_train.plan.placement import World, check_pipeline, pipeline_bubble, plan_layout, ranks_on_node, spans_nodes

FLOPS = 650e12
"""Floating-point operations per second of the fastest published runs; 66 % of an H100's or H200's bfloat16 peak."""
_FLOPS_OF_PEAK = 989e12
"""That peak."""
_CUT = 1.3
"""How much longer a rank computes where its matrices are cut (tp): narrower products, and sums that wait."""
_EXPECTED = 0.57
"""Part of the model's speed that public runs on H100 have: torchtitan's Llama 3 8B, llm.c's GPT-2 124M. Those on H200,
with more power and bandwidth, have 0.6 to 1."""
_FLOAT8 = 1.28
"""How much faster products in float8 make a step: torchtitan's Llama 3 8B, 8,532 tokens/s in place of 6,667."""
INSIDE_NODE = 300e9
"""Bytes per second that a device sends to its node's other devices."""
BETWEEN_NODES = 40e9
"""Bytes per second that it sends to other nodes."""
_RECOMPUTED = {"none": 1.0, "selective": 1.03, "alternate": 1.03, "full": 4 / 3}
"""Arithmetic beside that of an ordinary step: all of the forward pass again, or what is cheap of it; alternate's matrix
products come on top."""
_ROWS_AT_HALF_SPEED = 256
"""Positions of a micro-batch at which reading a matrix takes as long as multiplying with it."""
_HIDDEN = 0.8
"""Part of the computation under which torch can send parameters and gradients."""
USABLE = 0.9
"""Part of a device's memory that is planned with; torch's allocator, NCCL and kernels take the rest."""
RECOMPUTES: tuple[Literal["none", "selective", "alternate", "full"], ...] = ("none", "selective", "alternate", "full")
ALIKE = 0.05
"""Speeds that differ by less than this part count as equal: the model of them is not better than that."""
_SAMPLES_PER_RANK = 4
_TOKENS_PER_STEP = 1 << 24
"""At most, where the global batch is left open: about what the largest published models were trained with."""


def traffic(facts: LayoutFacts) -> dict[str, int]:
    """Returns the bytes that a rank of the stage that holds most sends in one step, by axis of more than one rank."""
    shape = facts.shape
    layout = facts.layout
    settings = facts.settings
    passes = facts.batch.accumulation
    fullest = max(range(layout.pp), key=facts.held)
    held = facts.held(fullest)
    gathers = 2 if settings.reshard_after_forward else 1
    # A pipeline keeps its parameters gathered and reduces once; else both happen for every micro-batch.
    rounds = 1 if layout.pp > 1 else passes
    hidden_state = facts.tokens * shape.width * facts.kept_size
    keys = hidden_state * shape.keys_width // shape.width
    blocks = -(-shape.num_layers // layout.pp)
    # Keys and values, or their gradients, go round: there, back, and again where recomputed.
    turns = 2 if settings.activation_checkpointing == "none" else 3
    # Two sums in the forward pass of a block; in the backward pass one for each matrix that is cut by outputs. With
    # positions dealt out, two gathers and two sums of which each rank gets its part, there and back.
    sums = 4 if settings.sequence_parallel else 2 + shape.cut_by_outputs
    sent = {
        "cp": passes * blocks * turns * (layout.cp - 1) * 2 * keys // layout.tp,
        "pp": 2 * passes * settings.stages_per_rank * facts.tokens * shape.width * facts.stream_size,
        "dp_replicate": _all_reduce(facts.param_size * held // layout.shard_size, layout.dp_replicate),
        "dp_shard": 0,
        "tp": passes * blocks * sums * _all_reduce(hidden_state, layout.tp),
    }
    # Shards are along both axes at once where there are both; they count for the one that is there anyway.
    sharding = "dp_shard" if layout.dp_shard > 1 else "cp"
    sizes = gathers * facts.gathered(fullest) + FLOAT * held
    sent[sharding] += rounds * sizes * (layout.shard_size - 1) // layout.shard_size
    return {axis: num_bytes for axis, num_bytes in sent.items() if getattr(layout, axis) > 1}


def _all_reduce(num_bytes: int, ranks: int) -> int:
    return 2 * num_bytes * (ranks - 1) // ranks


def slowness(facts: LayoutFacts) -> float:
    """Returns how much longer a rank computes than it would with large micro-batches of which nothing is recomputed."""
    recompute = facts.settings.activation_checkpointing
    again = _RECOMPUTED[recompute]
    if recompute == "alternate":
        # The forward pass is a third of a step.
        again += facts.shape.repeated_part / 3
    if facts.layout.tp > 1:
        again *= _CUT
    return again * (1 + _ROWS_AT_HALF_SPEED / facts.tokens)


def expected_tokens_per_s(facts: LayoutFacts, world: World, *, peak_flops: float, in_float8: bool) -> float:
    """Returns what a run may expect, where nothing was measured: tokens of all ranks together per second.

    Args:
        facts: of the run.
        world: its ranks.
        peak_flops: of one device in bfloat16, dense.
        in_float8: whether the products of blocks are in float8.
    """
    modelled = tokens_per_s(facts, world, flops=FLOPS * peak_flops / _FLOPS_OF_PEAK)
    return modelled * _EXPECTED * (_FLOAT8 if in_float8 else 1.0)


def tokens_per_s(facts: LayoutFacts, world: World, *, flops: float = FLOPS) -> float:
    """Returns the tokens of all ranks together per second, by the model alone.

    Args:
        facts: of the run.
        world: its ranks.
        flops: operations per second of a device.
    """
    shape = facts.shape
    layout = facts.layout
    batch = facts.batch
    tokens = batch.global_size * facts.positions
    matrices = shape.num_layers * shape.matrices_in_block(tp=1) + shape.vocab_size * shape.width
    # Six operations per number of a matrix; attention's two products look back half a sequence on average.
    operations = tokens * (6 * matrices + 6 * shape.num_layers * facts.positions * shape.width)
    share = facts.blocks(0) * layout.pp / shape.num_layers  # of the stage that has most
    compute_s = operations * slowness(facts) * share / (layout.world_size * flops)
    waits = 0.0
    hidden = 0.0
    for axis, num_bytes in traffic(facts).items():
        sending_s = num_bytes / INSIDE_NODE
        if spans_nodes(layout, world, axis):
            # Of a group with several ranks on a node each carries a part to other nodes.
            on_node = ranks_on_node(layout, world, axis)
            sending_s = max(sending_s if on_node > 1 else 0.0, num_bytes / (on_node * BETWEEN_NODES))
        if axis in ("dp_shard", "dp_replicate"):
            hidden += sending_s
        else:
            waits += sending_s
    waits += max(0.0, hidden - _HIDDEN * compute_s)
    settings = facts.settings
    idle = pipeline_bubble(layout, batch, stages_per_rank=settings.stages_per_rank, schedule=settings.pipeline_schedule)
    return tokens / ((compute_s + waits) / (1 - idle))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A layout that fits."""

    label: str = ""
    """What it is the first of: "best", "fastest" or "smallest"; "" for the others."""
    world: World
    facts: LayoutFacts
    memory_bytes: int
    """On the fullest rank."""
    tokens_per_s: float
    """Of all ranks, by the simple model."""

    @property
    def words(self) -> str:
        """What to type for it."""
        layout = self.facts.layout
        settings = self.facts.settings
        batch = self.facts.batch
        chosen: dict[str, object] = {"dp_replicate": layout.dp_replicate, **layout.as_mapping}
        if settings.sequence_parallel:
            chosen["sequence_parallel"] = "true"
        if settings.activation_checkpointing != "none":
            chosen["activation_checkpointing"] = settings.activation_checkpointing
        inside = ",".join(f"{key}:{value}" for key, value in chosen.items())
        return f'"parallel={{{inside}}}" batch.global_size={batch.global_size} batch.local_size={batch.local_size}'


def suggest_layouts(
    config: RunConfig, world: World, *, memory_bytes: int, count: int = 5
) -> tuple[int, list[Suggestion]]:
    """Returns how many layouts are legal on all nodes, and the best of those that fit.

    Of about equally fast ones the simplest comes first, and the fastest is always one. The last is the best one on as
    few nodes as possible, where those are not all.

    Legal is what `plan_layout`, the batch's arithmetic and `check_pipeline` do not refuse, so what is suggested can be
    typed. All train with the same global batch, else their speeds could not be compared; how it is cut, and what is
    computed again, is chosen for each.

    Args:
        config: the run's configuration; its degrees are ignored, its options are kept. `train.precision=auto` counts as
            bfloat16.
        world: all nodes that there are, with equally many ranks each.
        memory_bytes: of one device.
        count: how many layouts.

    Raises:
        ConfigError: the nodes differ, or no formula is known for the model.
    """
    if not world.is_even:
        raise ConfigError(
            f"layouts are suggested for equal nodes, not for {list(world.ranks_per_node)}",
            hint=f"ask for equal ones, e.g. cluster.gpus_per_node={min(world.ranks_per_node)}",
        )
    one_rank = solve_batch(config.batch, ranks=1)
    alone = facts_of(config, ParallelLayout(), one_rank, half=False)
    if alone is None:
        raise ConfigError(
            "there is no estimate for this model, so no layout can be suggested",
            hint="model=gpt has one; a model of your own is measured by `plan --measure`",
        )
    if config.batch.global_size is None and config.batch.accumulation is None:
        # A global batch that does not depend on the layout, and that all ranks share equally.
        share = (config.batch.local_size or 1) * _SAMPLES_PER_RANK
        most = min(_TOKENS_PER_STEP // (share * alone.positions), world.num_ranks)
        shares = max((part for part in range(1, most + 1) if world.num_ranks % part == 0), default=1)
        config = replace(config, batch=replace(config.batch, global_size=share * shares))
    legal = list(_legal(config, world))
    num_legal = len({layout for layout, _ in legal})
    fitting = _fitting(legal, world, memory_bytes)
    if not fitting:
        return num_legal, []
    best = fitting[:count]
    fastest = max(fitting, key=lambda suggestion: suggestion.tokens_per_s)
    if fastest not in best:
        best = [*fitting[: count - 1], fastest]
    labels = {id(fastest): "fastest", id(best[0]): "best"}
    chosen = [replace(suggestion, label=labels.get(id(suggestion), "")) for suggestion in best]
    smallest = _smallest(config, world, memory_bytes)
    if smallest is not None:
        chosen.append(replace(smallest, label="smallest"))
    return num_legal, chosen


def _smallest(config: RunConfig, world: World, memory_bytes: int) -> Suggestion | None:
    """Returns the best layout on as few nodes as possible; None where that takes all nodes."""
    for num_nodes in _divisors(world.num_nodes)[:-1]:
        part = World(world.ranks_per_node[:num_nodes])
        fitting = _fitting(list(_legal(config, part)), part, memory_bytes)
        if fitting:
            return fitting[0]
    return None


def _fitting(legal: list[tuple[ParallelLayout, LayoutFacts]], world: World, memory_bytes: int) -> list[Suggestion]:
    """Returns what fits, best first; of a layout the way of cutting the batch and recomputing that is fastest."""
    suggestions: dict[ParallelLayout, Suggestion] = {}
    ended: set[ParallelLayout] = set()
    fitting: tuple[ParallelLayout, BatchPlan] | None = None
    for layout, facts in legal:
        # Where a batch fits, computing more of it again is only slower.
        if layout in ended or fitting == (layout, facts.batch):
            continue
        needed = fullest_rank(facts)[1].total_bytes
        if needed > USABLE * memory_bytes:
            if facts.settings.activation_checkpointing == RECOMPUTES[-1]:
                ended.add(layout)  # larger micro-batches come after this one
            continue
        fitting = layout, facts.batch
        speed = tokens_per_s(facts, world)
        if layout not in suggestions or speed > suggestions[layout].tokens_per_s:
            suggestions[layout] = Suggestion(world=world, facts=facts, memory_bytes=needed, tokens_per_s=speed)
    best = max((suggestion.tokens_per_s for suggestion in suggestions.values()), default=1.0)
    return sorted(suggestions.values(), key=lambda suggestion: _order(suggestion, best=best))


def _order(suggestion: Suggestion, *, best: float) -> tuple[int, int, float, int, str]:
    """Returns what suggestions are sorted by: of about equally fast ones the simplest, then the fastest."""
    num_axes = sum(degree > 1 for axis, degree in suggestion.facts.layout.as_mapping.items() if axis != "dp_replicate")
    behind = int((1 - suggestion.tokens_per_s / best) / ALIKE)
    return behind, num_axes, -float(f"{suggestion.tokens_per_s:.3g}"), suggestion.memory_bytes, suggestion.words


def _legal(config: RunConfig, world: World) -> Iterator[tuple[ParallelLayout, LayoutFacts]]:
    """Yields each layout that a run could have, with every way to cut the batch and to compute activations again."""
    first = RECOMPUTES.index(config.parallel.activation_checkpointing)
    for degrees in _degrees(world.num_ranks):
        chosen: dict[str, Any] = {**degrees, "sequence_parallel": degrees["tp"] > 1}
        settings = replace(config.parallel, **chosen)
        asked = replace(config, parallel=settings)
        try:
            layout = plan_layout(asked, world)
        except ConfigError:
            continue
        for facts in _cuts(asked, layout):
            for recompute in RECOMPUTES[first:]:
                yield layout, replace(facts, settings=replace(settings, activation_checkpointing=recompute))


def _cuts(config: RunConfig, layout: ParallelLayout) -> Iterator[LayoutFacts]:
    """Yields what is known of a layout for each size of micro-batch that the batch can be cut into."""
    asked = config.batch
    half = config.train.precision not in ("float32", "tf32")
    size = 1
    while asked.local_size is not None or size * layout.data_parallel_size <= (asked.global_size or 1):
        try:
            cut = asked if asked.local_size is not None else replace(asked, local_size=size)
            batch = solve_batch(cut, ranks=layout.data_parallel_size, stages=layout.pp)
            check_pipeline(config, layout, batch)
        except ConfigError:
            return
        facts = facts_of(config, layout, batch, half=half)
        assert facts is not None
        yield facts
        if asked.local_size is not None or asked.accumulation is not None:
            return
        size *= 2


def _degrees(ranks: int) -> Iterator[dict[str, int]]:
    """Yields all ways to multiply up to the world."""
    for tp in _divisors(ranks):
        for pp in _divisors(ranks // tp):
            for cp in _divisors(ranks // (tp * pp)):
                left = ranks // (tp * pp * cp)
                for shard in _divisors(left):
                    yield {"tp": tp, "pp": pp, "cp": cp, "dp_shard": shard, "dp_replicate": left // shard}


@functools.cache
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
