"""What the shipped GPT is made of and what a rank of a layout sends, by formula. Imports no torch.

`launch.layout_peak` puts the numbers together to what a rank holds. Activations are what autograd keeps, operation by
operation as the model's `forward` has them. Traffic is what one rank sends in one step with ring algorithms,
2 (n - 1) / n of a buffer for an all-reduce and half of it for a gather or a scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import AXES, ParallelLayout, stage_blocks, stages_of
from slurm_train.config.schema import ParallelSection, RunConfig
from slurm_train.launch.gpt_shape import FLOAT, HALF, GptShape
from slurm_train.launch.layout import positions_of
from slurm_train.launch.world import World


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends along one axis in one step."""

    axis: str
    num_bytes: int
    spans_nodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """What the estimates are made from."""

    shape: GptShape
    layout: ParallelLayout
    batch: BatchPlan
    settings: ParallelSection
    half: bool
    """Whether matrix products are in bfloat16."""
    positions: int
    """Of one sample: the data's, which may be shorter than what the model could take."""

    @property
    def tokens(self) -> int:
        """Positions of one micro-batch that a rank has."""
        return self.batch.local_size * self.positions // self.layout.cp

    def blocks(self, stage: int) -> int:
        """Blocks that a rank has, which is so many-th in its pipeline."""
        per_rank, ranks = self.settings.stages_per_rank, self.layout.pp
        own = stages_of(stage, num_ranks=ranks, per_rank=per_rank)
        return sum(len(stage_blocks(self.shape.layers, stage=one, num_stages=ranks * per_rank)) for one in own)

    def held(self, stage: int) -> int:
        """Numbers that such a rank would hold without sharding."""
        layout, shape = self.layout, self.shape
        ends = shape.end_parameters(is_first=stage == 0, is_last=stage == layout.pp - 1)
        return self.blocks(stage) * shape.block_parameters(tp=layout.tp) + ends


def facts_of(config: RunConfig, layout: ParallelLayout, batch: BatchPlan) -> LayoutFacts | None:
    """Returns what estimates can be made from; None where the model is not the shipped GPT."""
    shape = GptShape.of(config.model or {})
    if shape is None:
        return None
    half = config.train.precision == "bfloat16"
    positions = positions_of(config.data, default=shape.context)
    return LayoutFacts(
        shape=shape, layout=layout, batch=batch, settings=config.parallel, half=half, positions=positions
    )


def pipeline_bubble(layout: ParallelLayout, batch: BatchPlan, *, stages_per_rank: int = 1) -> float:
    """Returns the part of a step in which a rank waits: (ranks - 1) of (stages x micro-batches + ranks - 1) turns."""
    return (layout.pp - 1) / (stages_per_rank * batch.accumulation + layout.pp - 1)


def traffic(facts: LayoutFacts, world: World) -> list[Traffic]:
    """Returns what a rank of the stage that holds most sends in one step, axis by axis where there is more than one."""
    layout, passes = facts.layout, facts.batch.accumulation
    held = max(facts.held(stage) for stage in range(layout.pp))
    gathers = 2 if facts.settings.reshard_after_forward else 1
    gathered = HALF if facts.settings.gather_dtype == "bfloat16" else FLOAT
    # A pipeline keeps its parameters gathered and reduces once; else both happen for every micro-batch.
    rounds = 1 if layout.pp > 1 else passes
    hidden_state = facts.tokens * facts.shape.width * (HALF if facts.half else FLOAT)
    keys = hidden_state * facts.shape.shared_width // facts.shape.width
    blocks = -(-facts.shape.layers // layout.pp)
    sent = {
        "cp": passes * blocks * _context_rounds(facts) * (layout.cp - 1) * 2 * keys // layout.tp,
        "pp": 2 * passes * facts.settings.stages_per_rank * facts.tokens * facts.shape.width * FLOAT,
        "dp_replicate": _all_reduce(FLOAT * held // layout.shard_size, layout.dp_replicate),
        "dp_shard": 0,
        # Two sums in the forward pass of a block; in the backward pass one for each matrix that is cut by outputs. With
        # positions dealt out, two gathers and two sums of which each rank gets its part, there and back.
        "tp": passes
        * blocks
        * (4 if facts.settings.sequence_parallel else 2 + facts.shape.cut_by_outputs)
        * _all_reduce(hidden_state, layout.tp),
    }
    # Along both axes at once where there are both; told by the one that is there anyway.
    sharding = "dp_shard" if layout.dp_shard > 1 else "cp"
    sent[sharding] += rounds * (gathers * gathered + FLOAT) * held * (layout.shard_size - 1) // layout.shard_size
    return [
        Traffic(axis, num_bytes, spans_nodes(layout, world, axis))
        for axis, num_bytes in sent.items()
        if getattr(layout, axis) > 1
    ]


def _context_rounds(facts: LayoutFacts) -> int:
    """Returns how often keys and values, or their gradients, go round: there, back, and again where recomputed."""
    return 2 if facts.settings.activation_checkpointing == "none" else 3


def spans_nodes(layout: ParallelLayout, world: World, axis: str) -> bool:
    """Returns whether some group of an axis reaches over more than one node."""
    if world.is_even:
        members = math.prod(layout.degrees[AXES.index(axis) :])
        # A group and what lies between its members is that many ranks in a row.
        return getattr(layout, axis) > 1 and world.ranks_per_node[0] % members != 0
    nodes = [node for node, count in enumerate(world.ranks_per_node) for _ in range(count)]
    return any(len({nodes[rank] for rank in group}) > 1 for group in layout.groups((axis,)))


def _all_reduce(num_bytes: int, ranks: int) -> int:
    return 2 * num_bytes * (ranks - 1) // ranks
