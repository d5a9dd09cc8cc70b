"""What a rank of a layout holds and sends, by formula, from the configuration of the shipped GPT. Imports no torch.

Parameters, gradients and AdamW's two moments are float32. Activations are what autograd keeps of one micro-batch,
operation by operation as the model's `forward` has them, and as many micro-batches as a pipeline's schedule keeps at
once. Traffic is what one rank sends in one step with ring algorithms, 2 (n - 1) / n of a buffer for an all-reduce and
half of it for a gather or a scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import ParallelLayout, stage_blocks, stages_of
from slurm_train.config.schema import ParallelSection, RunConfig
from slurm_train.launch.world import World

_GPT = "slurm_train.models.gpt.GPT"
_FLOAT, _HALF, _INDEX = 4, 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """The numbers that decide how large the shipped GPT is."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    hidden: int
    dropout: bool
    tied: bool

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> GptShape | None:
        """Returns the shape that the `model` part of a configuration asks for; None for any other model."""
        if model.get("_target_") != _GPT:
            return None
        width = int(model.get("width", 160))
        return cls(
            vocabulary=int(model.get("vocab_size", 257)),
            context=int(model.get("context", 256)),
            layers=int(model.get("num_layers", 4)),
            heads=int(model.get("num_heads", 4)),
            width=width,
            hidden=int(model.get("hidden", 0)) or 4 * width,
            dropout=bool(float(model.get("dropout", 0.0))),
            tied=bool(model.get("tied", True)),
        )

    def block_parameters(self, *, tp: int) -> int:
        """Numbers in one block, of which a rank holds its part of the matrices and the whole of the norms."""
        return (4 * self.width**2 + 2 * self.width * self.hidden) // tp + 2 * self.width

    def end_parameters(self, *, is_first: bool, is_last: bool) -> int:
        """Numbers in the embedding, and in the last norm and the head, as far as a stage has them."""
        table = self.vocabulary * self.width
        head = self.width + (0 if self.tied and is_first else table)
        return (table if is_first else 0) + (head if is_last else 0)

    def kept_in_block(self, *, tp: int, half: bool, recompute: str) -> int:
        """Bytes that one block keeps for the backward pass per position."""
        kept = _HALF if half else _FLOAT
        if recompute == "full":
            return _FLOAT * self.width
        attention, inner = kept * 4 * self.width // tp, kept * self.hidden // tp
        if recompute == "selective":
            # Its input, and the results of the six matrix products and of attention.
            return _FLOAT * self.width + attention + inner + kept * 2 * self.width + _FLOAT * self.heads // tp
        # Two norms: input, output and two numbers each; q, k, v and attention's result; GELU's input and result.
        # Autocast casts a norm's output for each of q, k and v anew.
        norms = 2 * _FLOAT * (self.width + 2) + kept * self.width * (4 if half else 2)
        dropped = 2 * self.width if self.dropout else 0
        return norms + attention + _FLOAT * self.heads // tp + 2 * inner + dropped

    def kept_at_end(self, *, half: bool) -> int:
        """Bytes that last norm, head and loss keep per position, with the input and target tokens."""
        kept = _HALF if half else _FLOAT
        return _FLOAT * (self.width + self.vocabulary + 2) + kept * self.width + 2 * _INDEX


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

    @property
    def tokens(self) -> int:
        """Positions of one micro-batch."""
        return self.batch.local_size * self.shape.context

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
    return LayoutFacts(shape=shape, layout=layout, batch=batch, settings=config.parallel, half=half)


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
        parameters=_FLOAT * own,
        gradients=_FLOAT * own,
        optimizer=2 * _FLOAT * own,
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
    gathered = _HALF if facts.settings.gather_dtype == "bfloat16" else _FLOAT
    # A pipeline keeps its parameters gathered and reduces once; else both happen for every micro-batch.
    rounds = 1 if layout.pp > 1 else passes
    hidden_state = facts.tokens * facts.shape.width * (_HALF if facts.half else _FLOAT)
    blocks = -(-facts.shape.layers // layout.pp)
    sent = {
        "pp": 2 * passes * facts.settings.stages_per_rank * facts.tokens * facts.shape.width * _FLOAT,
        "dp_replicate": _all_reduce(_FLOAT * held // layout.dp_shard, layout.dp_replicate),
        "dp_shard": rounds * (gathers * gathered + _FLOAT) * held * (layout.dp_shard - 1) // layout.dp_shard,
        # Two sums in the forward pass of a block; in the backward pass one for each matrix that is cut by outputs.
        "tp": passes * blocks * (2 + 4) * _all_reduce(hidden_state, layout.tp),
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
    size = _HALF if facts.settings.gather_dtype == "bfloat16" else _FLOAT
    if layout.pp > 1 or not facts.settings.reshard_after_forward:
        # Gathered parameters stay, and in a pipeline whole gradients add up beside them.
        return (size + (_FLOAT if layout.pp > 1 else 0)) * facts.held(stage)
    ends = shape.end_parameters(is_first=stage == 0, is_last=stage == layout.pp - 1)
    block = shape.block_parameters(tp=layout.tp)
    return size * (max(block, ends) + block)


def _all_reduce(num_bytes: int, ranks: int) -> int:
    return 2 * num_bytes * (ranks - 1) // ranks
