"""How much memory a rank needs at the fullest moment of a step, by formula. Imports no torch.

Parameters, gradients and AdamW's two moments are float32. A data-parallel replica is a layout with one axis.
`tests/estimate/test_memory.py` compares with torch's saved tensors, `tests.benchmarks.bench_layout_memory` and
`bench_memory` with what ranks allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import ParallelLayout, stage_blocks, stages_of
from slurm_train.config.schema import ParallelSection, RunConfig
from slurm_train.estimate.models import FLOAT, HALF, GptShape
from slurm_train.launch.layout import positions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """What memory, traffic and speed of the shipped GPT in a layout are computed from."""

    shape: GptShape
    layout: ParallelLayout
    batch: BatchPlan
    settings: ParallelSection
    half: bool
    """Whether matrix products are in bfloat16; the parameters stay float32."""
    positions: int
    """Of one sample: the data's, which may be shorter than the model's context."""

    @property
    def tokens(self) -> int:
        """Positions of one micro-batch that a rank has."""
        return self.batch.local_size * self.positions // self.layout.cp

    @property
    def gathers_half(self) -> bool:
        """Whether a shard's parameters are gathered in bfloat16."""
        return self.settings.gather_dtype == "bfloat16" and self.layout.shard_size > 1

    def blocks(self, stage: int) -> int:
        """Blocks that a rank at this place in its pipeline holds."""
        per_rank, ranks = self.settings.stages_per_rank, self.layout.pp
        own = stages_of(stage, num_ranks=ranks, per_rank=per_rank)
        return sum(len(stage_blocks(self.shape.layers, stage=one, num_stages=ranks * per_rank)) for one in own)

    def held(self, stage: int) -> int:
        """Numbers that such a rank would hold without sharding."""
        ends = self.shape.end_parameters(is_first=stage == 0, is_last=stage == self.layout.pp - 1)
        return self.blocks(stage) * self.shape.block_parameters(tp=self.layout.tp) + ends


def facts_of(config: RunConfig, layout: ParallelLayout, batch: BatchPlan, *, half: bool) -> LayoutFacts | None:
    """Returns what the estimates are computed from; None for a model other than the shipped GPT."""
    shape = GptShape.of(config.model or {})
    if shape is None:
        return None
    positions = positions_of(config.data, default=shape.context)
    return LayoutFacts(
        shape=shape, layout=layout, batch=batch, settings=config.parallel, half=half, positions=positions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step."""

    weight_bytes: int
    """Parameters and, in a whole replica, buffers."""
    gradient_bytes: int
    """Those that are held at that moment."""
    optimizer_bytes: int
    gathered_bytes: int = 0
    """Whole parameters where a rank holds a shard: while one block is computed and the next is fetched."""
    activation_bytes: int
    """What the forward pass keeps, and what is held for a moment in the backward pass."""
    offloaded_bytes: int = 0
    """In host memory instead of the device (`parallel.cpu_offload`); not in the total."""

    @property
    def total_bytes(self) -> int:
        """All of it on the device."""
        state = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.gathered_bytes + self.activation_bytes


def replica_memory(*, trained: int, other: int, activations: int, accumulation: int) -> RankMemory:
    """Returns what a rank holds that has a whole model.

    Args:
        trained: bytes of the parameters that are trained.
        other: bytes of buffers and frozen parameters.
        activations: bytes of one micro-batch, at the peak.
        accumulation: micro-batches of a step; the gradients of those before the last lie beside DDP's buckets.
    """
    return RankMemory(
        weight_bytes=trained + other,
        gradient_bytes=trained * (2 if accumulation > 1 else 1),
        optimizer_bytes=2 * trained,
        activation_bytes=activations,
    )


def rank_memory(facts: LayoutFacts, *, stage: int) -> RankMemory:
    """Returns what a rank holds at the fullest of four moments of a step.

    These are: the loss is differentiated, the backward pass of the head, that of the last block, and the end of the
    backward pass, when gradients are whole and activations are gone.

    Args:
        facts: model, layout and batch.
        stage: its place in its pipeline, 0 to pp - 1.
    """
    shape, layout, tokens = facts.shape, facts.layout, facts.tokens
    recompute = facts.settings.activation_checkpointing
    block, casts, before = _block(facts, recompute=recompute), _casts(facts, stage), _gradients_before(facts, stage)
    kept = _kept_in_blocks(facts, stage) + _passed_on(facts, stage)
    # What one block holds in addition while it is computed again, and what is held for a moment.
    again = max(0.0, _block(facts, recompute="none") - (0 if recompute == "full" else block))
    passing = _passing(facts) + (0 if recompute == "none" else tokens * again)
    # Bytes of activations, whole blocks that are gathered, copies of the gradients. In the last block: its parameters,
    # their gradients and the next one's parameters; at the end also the gradients of the block before, in transit.
    moments = [
        (kept + passing, 3, before),
        (tokens * block + passing + (casts if layout.pp > 1 else 0), 4, max(1, before)),
    ]
    if stage == layout.pp - 1:
        scores = FLOAT * tokens * shape.vocabulary
        moments.append((kept + tokens * shape.kept_at_end(half=facts.half) + 2 * scores, 2, before))
        moments.append((kept + FLOAT * tokens * 2 * shape.width + scores, 0, before))
    own = FLOAT * -(-facts.held(stage) // layout.shard_size)
    on_device = 0 if facts.settings.cpu_offload else own
    activations, gathered, copies = max(
        ((int(kept), _gathered(facts, stage, num_blocks=count), copies) for kept, count, copies in moments),
        key=lambda moment: moment[0] + moment[1] + moment[2] * on_device,
    )
    return RankMemory(
        weight_bytes=on_device + (shape.buffer_bytes if layout.is_replicated else 0),
        gradient_bytes=copies * on_device,
        optimizer_bytes=2 * on_device,
        gathered_bytes=gathered,
        activation_bytes=activations,
        offloaded_bytes=(3 + copies) * (own - on_device),
    )


def fullest_rank(facts: LayoutFacts) -> tuple[int, RankMemory]:
    """Returns the stage whose ranks hold most, and what each of them holds."""
    # Between the ends no stage has more blocks, micro-batches or tables than the first.
    stages = ((stage, rank_memory(facts, stage=stage)) for stage in sorted({0, facts.layout.pp - 1}))
    return max(stages, key=lambda one: one[1].total_bytes)


def kept_by_forward(facts: LayoutFacts, *, stage: int) -> int:
    """Returns the bytes that the forward passes under way keep for their backward passes, with autocast's copies."""
    is_last = stage == facts.layout.pp - 1
    at_end = facts.tokens * facts.shape.kept_at_end(half=facts.half) if is_last else 0
    return int(_kept_in_blocks(facts, stage) + at_end)


def _kept_in_blocks(facts: LayoutFacts, stage: int) -> float:
    """Returns the bytes that the blocks of a stage keep for the backward passes, with autocast's copies."""
    block = _block(facts, recompute=facts.settings.activation_checkpointing)
    return facts.tokens * facts.blocks(stage) * block * _in_flight(facts, stage) + _casts(facts, stage)


def _gradients_before(facts: LayoutFacts, stage: int) -> int:
    """Returns how many copies of the gradients are held already when activations are fullest."""
    layout, batches = facts.layout, facts.batch.accumulation
    if layout.is_replicated:
        # DDP's buckets stay; the sum of the micro-batches before the last lies beside them.
        return 2 if batches > 1 else 1
    if layout.pp == 1:
        return 1 if batches > 1 else 0
    # A pipeline adds whole gradients up, which count as gathered, and reduces them at the end.
    return 1 if layout.shard_size == 1 and _in_flight(facts, stage) < batches else 0


def _block(facts: LayoutFacts, *, recompute: str) -> float:
    """Returns the bytes that a block keeps per position."""
    shape, layout = facts.shape, facts.layout
    splits = facts.settings.sequence_parallel
    kept = shape.kept_in_block(tp=layout.tp, half=facts.half, recompute=recompute, splits=splits)
    if recompute == "none":
        kept += shape.kept_for_context(cp=layout.cp, tp=layout.tp, half=facts.half)
    return kept * _scale(facts)


def _passing(facts: LayoutFacts) -> float:
    if facts.layout.is_replicated:
        return facts.shape.passing_in_replica(tokens=facts.tokens, half=facts.half)
    return facts.tokens * facts.shape.passing_in_block(tp=facts.layout.tp, cp=facts.layout.cp) * _scale(facts)


def _scale(facts: LayoutFacts) -> float:
    # Parameters that are gathered in bfloat16 make all that is computed with them bfloat16.
    return HALF / FLOAT if facts.gathers_half else 1.0


def _casts(facts: LayoutFacts, stage: int) -> int:
    """Returns the bytes of the bfloat16 copies of matrices that autocast keeps for the backward pass."""
    if not facts.half or facts.gathers_half:
        return 0
    head = facts.shape.vocabulary * facts.shape.width if stage == facts.layout.pp - 1 else 0
    return HALF * (facts.blocks(stage) * facts.shape.matrices_in_block(tp=facts.layout.tp) + head)


def _passed_on(facts: LayoutFacts, stage: int) -> float:
    """Returns what a pipeline keeps for its neighbours: room for every micro-batch, and what was sent; the last scores.

    GPipe has the last parts of all micro-batches under way at once, the others those of one.
    """
    ranks, batches, per_rank = facts.layout.pp, facts.batch.accumulation, facts.settings.stages_per_rank
    if ranks == 1:
        return 0
    hidden = FLOAT * facts.tokens * facts.shape.width
    own = range(stage, ranks * per_rank, ranks)
    received = sum((one > 0) + (one < ranks * per_rank - 1) for one in own)
    passed = batches * received * hidden + _in_flight(facts, stage) * per_rank * hidden
    if stage < ranks - 1:
        return passed
    ends = batches if facts.settings.pipeline_schedule == "gpipe" else 1
    scores = FLOAT * facts.tokens * facts.shape.vocabulary
    return passed + ends * scores + (ends - 1) * facts.tokens * facts.shape.kept_at_end(half=facts.half)


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
    return min(facts.batch.accumulation, ranks - stage)


def _gathered(facts: LayoutFacts, stage: int, *, num_blocks: int) -> int:
    """Returns the bytes of whole parameters; `num_blocks` 0 stands for the head."""
    layout, shape = facts.layout, facts.shape
    if layout.shard_size == 1:
        return 0
    size, block = HALF if facts.gathers_half else FLOAT, shape.block_parameters(tp=layout.tp)
    if layout.pp > 1:  # gathered parameters stay, and whole gradients add up beside them
        return (size + FLOAT) * facts.held(stage) + size * block
    if not facts.settings.reshard_after_forward:
        return size * (facts.held(stage) + block)
    if num_blocks:
        return size * num_blocks * block
    ends = shape.end_parameters(is_first=stage == 0, is_last=stage == layout.pp - 1)
    return size * (ends + shape.vocabulary * shape.width)
