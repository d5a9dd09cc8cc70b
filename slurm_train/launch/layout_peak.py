"""How much a rank of a layout holds at the fullest moment of a step, by formula. Imports no torch.

Parameters, gradients and AdamW's two moments are float32. A step has four moments at which a rank may be fullest: when
the loss is differentiated, in the backward pass of the head and in that of the last block, and at the end of the
backward pass, when gradients are whole and activations are gone. `python -m tests.benchmarks.bench_layout_memory`
compares with what ranks measure.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_train.launch.gpt_shape import FLOAT, HALF
from slurm_train.launch.layout_memory import LayoutFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step."""

    parameters: int
    gradients: int
    """Those that are there at that moment."""
    optimizer: int
    gathered: int
    """Whole parameters where a rank holds a part: while one block is computed and the next is fetched."""
    activations: int
    """What the forward pass keeps, and what comes and goes in the backward pass."""
    host: int = 0
    """In host memory instead; not in `total`."""

    @property
    def total(self) -> int:
        """All of it on the device."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


def rank_memory(facts: LayoutFacts, *, stage: int) -> RankMemory:
    """Returns what a rank holds.

    Args:
        facts: model, layout and batch.
        stage: its place in its pipeline, 0 to pp - 1.
    """
    moments = [_in_last_block(facts, stage), _after_backward(facts, stage)]
    if stage == facts.layout.pp - 1:
        moments += [_at_loss(facts, stage), _in_head(facts, stage)]
    return max(moments, key=lambda memory: memory.total)


def fullest_stage(facts: LayoutFacts) -> int:
    """Returns the stage whose ranks hold most."""
    # Between the ends no stage has more blocks, micro-batches or tables than the first.
    return max((0, facts.layout.pp - 1), key=lambda stage: rank_memory(facts, stage=stage).total)


def kept_by_forward(facts: LayoutFacts, *, stage: int) -> int:
    """Returns what the forward passes that are under way keep for their backward passes, casts of matrices aside."""
    return int(_kept(facts, stage) + (_end(facts) if stage == facts.layout.pp - 1 else 0))


def _at_loss(facts: LayoutFacts, stage: int) -> RankMemory:
    """Returns what is held when the loss of the last micro-batch is differentiated."""
    kept = kept_by_forward(facts, stage=stage) + _casts(facts, stage) + _passed_on(facts, stage)
    activations = int(kept + _loss_gradients(facts))
    copies = _gradients_before(facts, stage)
    return _with_state(facts, stage, copies=copies, num_blocks=2, activations=activations)


def _in_head(facts: LayoutFacts, stage: int) -> RankMemory:
    """Returns what is held when the scores' gradients go back through the head, which is gathered for it."""
    kept = _kept(facts, stage) + _casts(facts, stage) + _passed_on(facts, stage)
    activations = int(kept + FLOAT * facts.tokens * (2 * facts.shape.width + facts.shape.vocabulary))
    copies = _gradients_before(facts, stage)
    return _with_state(facts, stage, copies=copies, num_blocks=0, activations=activations)


def _in_last_block(facts: LayoutFacts, stage: int) -> RankMemory:
    """Returns what is held in the backward pass of the last block: all of the others, and its own passing values."""
    kept = _kept(facts, stage) + _casts(facts, stage) + _passed_on(facts, stage)
    activations = int(kept + _again(facts) + _passing(facts))
    copies = _gradients_before(facts, stage)
    # Its parameters and their gradients, and the parameters of the next one.
    return _with_state(facts, stage, copies=copies, num_blocks=3, activations=activations)


def _after_backward(facts: LayoutFacts, stage: int) -> RankMemory:
    """Returns what is held when the backward pass comes to its first block."""
    block = facts.tokens * _block(facts, recompute=facts.settings.activation_checkpointing)
    activations = int(block + _again(facts) + _passing(facts) + (_casts(facts, stage) if facts.layout.pp > 1 else 0))
    copies = max(1, _gradients_before(facts, stage))
    # The gradients of the block before are still on their way.
    return _with_state(facts, stage, copies=copies, num_blocks=4, activations=activations)


def _with_state(facts: LayoutFacts, stage: int, *, copies: int, num_blocks: int, activations: int) -> RankMemory:
    own = -(-facts.held(stage) // facts.layout.shard_size)
    state = {"parameters": FLOAT * own, "gradients": copies * FLOAT * own, "optimizer": 2 * FLOAT * own}
    gathered = _gathered(facts, stage, num_blocks=num_blocks) if facts.layout.shard_size > 1 else 0
    if not facts.settings.cpu_offload:
        return RankMemory(**state, gathered=gathered, activations=activations)
    host = sum(state.values())
    return RankMemory(parameters=0, gradients=0, optimizer=0, gathered=gathered, activations=activations, host=host)


def _gradients_before(facts: LayoutFacts, stage: int) -> int:
    """Returns how many times gradients are held already when activations are fullest."""
    layout, batches = facts.layout, facts.batch.accumulation
    if layout.is_replicated:
        # DDP's buckets stay; what is added up before the last micro-batch lies beside them.
        return 2 if batches > 1 else 1
    if layout.pp == 1:
        return 1 if batches > 1 else 0
    # A pipeline adds whole gradients up, which count as gathered, and reduces them at the end.
    return 1 if layout.shard_size == 1 and _in_flight(facts, stage) < batches else 0


def _kept(facts: LayoutFacts, stage: int) -> float:
    """Returns what the blocks keep of all micro-batches that are under way."""
    per_block = _block(facts, recompute=facts.settings.activation_checkpointing)
    return facts.tokens * facts.blocks(stage) * per_block * _in_flight(facts, stage)


def _block(facts: LayoutFacts, *, recompute: str) -> float:
    shape, layout = facts.shape, facts.layout
    splits = facts.settings.sequence_parallel
    kept = shape.kept_in_block(tp=layout.tp, half=facts.half, recompute=recompute, splits=splits)
    if recompute == "none":
        kept += shape.kept_for_context(cp=layout.cp, tp=layout.tp, half=facts.half)
    return kept * _scale(facts)


def _again(facts: LayoutFacts) -> float:
    """Returns what one block holds in addition while it is computed again."""
    recompute = facts.settings.activation_checkpointing
    if recompute == "none":
        return 0
    kept = 0 if recompute == "full" else _block(facts, recompute=recompute)
    return facts.tokens * max(0.0, _block(facts, recompute="none") - kept)


def _passing(facts: LayoutFacts) -> float:
    layout = facts.layout
    return facts.tokens * facts.shape.passing_in_block(tp=layout.tp, cp=layout.cp) * _scale(facts)


def _end(facts: LayoutFacts) -> int:
    return facts.tokens * facts.shape.kept_at_end(half=facts.half)


def _loss_gradients(facts: LayoutFacts) -> int:
    """Returns the two gradients of the scores that are there at once."""
    return 2 * FLOAT * facts.tokens * facts.shape.vocabulary


def _scale(facts: LayoutFacts) -> float:
    # Parameters that are gathered in bfloat16 make all that is computed with them bfloat16.
    return HALF / FLOAT if _gathers_half(facts) else 1.0


def _gathers_half(facts: LayoutFacts) -> bool:
    return facts.settings.gather_dtype == "bfloat16" and facts.layout.shard_size > 1


def _casts(facts: LayoutFacts, stage: int) -> int:
    """Returns the bfloat16 copies of matrices that autocast makes and keeps for the backward pass."""
    if not facts.half or _gathers_half(facts):
        return 0
    shape, layout = facts.shape, facts.layout
    head = shape.vocabulary * shape.width if stage == layout.pp - 1 else 0
    return HALF * (facts.blocks(stage) * shape.matrices_in_block(tp=layout.tp) + head)


def _passed_on(facts: LayoutFacts, stage: int) -> float:
    """Returns what a pipeline keeps for its neighbours: room for every micro-batch, and what was sent; the last scores.

    GPipe has the last parts of all micro-batches under way at once, the others those of one.
    """
    ranks, batches = facts.layout.pp, facts.batch.accumulation
    if ranks == 1:
        return 0
    hidden = FLOAT * facts.tokens * facts.shape.width
    stages, per_rank = ranks * facts.settings.stages_per_rank, facts.settings.stages_per_rank
    own = range(stage, stages, ranks)
    received = sum((one > 0) + (one < stages - 1) for one in own)
    sent = _in_flight(facts, stage) * per_rank * hidden
    if stage < ranks - 1:
        return batches * received * hidden + sent
    ends = batches if facts.settings.pipeline_schedule == "gpipe" else 1
    scores = FLOAT * facts.tokens * facts.shape.vocabulary
    return batches * received * hidden + sent + ends * scores + (ends - 1) * _end(facts)


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
    layout, shape = facts.layout, facts.shape
    size = HALF if _gathers_half(facts) else FLOAT
    block = shape.block_parameters(tp=layout.tp)
    if layout.pp > 1:  # gathered parameters stay, and whole gradients add up beside them
        return (size + FLOAT) * facts.held(stage) + size * block
    if not facts.settings.reshard_after_forward:
        return size * (facts.held(stage) + block)
    if num_blocks:
        return size * num_blocks * block
    ends = shape.end_parameters(is_first=stage == 0, is_last=stage == layout.pp - 1)
    return size * (ends + shape.vocabulary * shape.width)
