"""What a rank of a layout holds and sends, by formula, from the configuration of the shipped GPT. Imports no torch.

Parameters, gradients and AdamW's two moments are float32. Activations are what autograd keeps of one micro-batch,
operation by operation as the model's `forward` has them, and as many micro-batches as a pipeline's schedule keeps at
once. Traffic is what one rank sends in one step with ring algorithms, 2 (n - 1) / n of a buffer for an all-reduce and
half of it for a gather or a scatter.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import ParallelLayout, stage_blocks, stages_of
from slurm_train.config.schema import ParallelSection, RunConfig
from slurm_train.launch.gpt_shape import FLOAT, HALF, GptShape
from slurm_train.launch.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole parameters of the two largest parts, while one is computed and the next is fetched."""
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


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
        """Positions of one micro-batch."""
        return self.batch.local_size * self.positions

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
    positions = int((config.data or {}).get("context") or shape.context)
    return LayoutFacts(
        shape=shape, layout=layout, batch=batch, settings=config.parallel, half=half, positions=positions
    )


def rank_memory(facts: LayoutFacts, *, stage: int) -> RankMemory:
    """Returns what a rank holds.

    Args:
        facts: model, layout and batch.
        stage: its place in its pipeline, 0 to pp - 1.
    """
    layout, shape, settings = facts.layout, facts.shape, facts.settings
    held = facts.held(stage)
    own = -(-held // layout.dp_shard)
    recompute = settings.activation_checkpointing
    per_block = shape.kept_in_block(tp=layout.tp, half=facts.half, recompute=recompute)
    kept = int(facts.tokens * facts.blocks(stage) * per_block * _in_flight(facts, stage))
    if recompute != "none":  # one block is computed again and held whole
        kept += facts.tokens * shape.kept_in_block(tp=layout.tp, half=facts.half, recompute="none")
    if stage == layout.pp - 1:
        kept += facts.tokens * shape.kept_at_end(half=facts.half)
    return RankMemory(
        parameters=FLOAT * own,
        gradients=FLOAT * own,
        optimizer=2 * FLOAT * own,
        gathered=_gathered(facts, stage) if layout.dp_shard > 1 else 0,
        activations=kept,
    )


def fullest_stage(facts: LayoutFacts) -> int:
    """Returns the stage whose ranks hold most."""
    return max(range(facts.layout.pp), key=lambda stage: rank_memory(facts, stage=stage).total)


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
    blocks = -(-facts.shape.layers // layout.pp)
    sent = {
        "pp": 2 * passes * facts.settings.stages_per_rank * facts.tokens * facts.shape.width * FLOAT,
        "dp_replicate": _all_reduce(FLOAT * held // layout.dp_shard, layout.dp_replicate),
        "dp_shard": rounds * (gathers * gathered + FLOAT) * held * (layout.dp_shard - 1) // layout.dp_shard,
        # Two sums in the forward pass of a block; in the backward pass one for each matrix that is cut by outputs.
        "tp": passes * blocks * (2 + facts.shape.cut_by_outputs) * _all_reduce(hidden_state, layout.tp),
    }
    return [
        Traffic(axis, num_bytes, spans_nodes(layout, world, axis))
        for axis, num_bytes in sent.items()
        if getattr(layout, axis) > 1
    ]


def spans_nodes(layout: ParallelLayout, world: World, axis: str) -> bool:
    """Returns whether some group of an axis reaches over more than one node."""
    nodes = [node for node, count in enumerate(world.ranks_per_node) for _ in range(count)]
    return any(len({nodes[rank] for rank in group}) > 1 for group in layout.groups((axis,)))


def _in_flight(facts: LayoutFacts, stage: int) -> float:
    """Returns how many micro-batches' activations a rank keeps, parts of them where it has several stages."""
    ranks, per_rank = facts.layout.pp, facts.settings.stages_per_rank
    if ranks == 1:
        return 1
    if per_rank > 1:  # what torch's schedule sends ahead before the first backward pass, and one
        ahead = (per_rank - 1) * ranks + 2 * (ranks - 1 - stage)
        return min(per_rank * facts.batch.accumulation, ahead + 1) / per_rank
    if facts.settings.pipeline_schedule == "gpipe":
        return facts.batch.accumulation
    return min(facts.batch.accumulation, facts.layout.pp - stage)


def _gathered(facts: LayoutFacts, stage: int) -> int:
    layout, shape = facts.layout, facts.shape
    size = HALF if facts.settings.gather_dtype == "bfloat16" else FLOAT
    if layout.pp > 1 or not facts.settings.reshard_after_forward:
        # Gathered parameters stay, and in a pipeline whole gradients add up beside them.
        return (size + (FLOAT if layout.pp > 1 else 0)) * facts.held(stage)
    ends = shape.end_parameters(is_first=stage == 0, is_last=stage == layout.pp - 1)
    block = shape.block_parameters(tp=layout.tp)
    return size * (max(block, ends) + block)


def _all_reduce(num_bytes: int, ranks: int) -> int:
    return 2 * num_bytes * (ranks - 1) // ranks
