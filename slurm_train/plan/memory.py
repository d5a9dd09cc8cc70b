"""How much memory a rank needs at the fullest moment of a step. Imports no torch.

There is one estimator, `memory_at_fullest`: what a rank holds all through a step, and the fullest of its moments. What
it adds up comes from formulas for the shipped GPT, in every layout, and from `train.measure` for models without a
formula, which a rank holds whole. A model has one of the two, never both.

Formulas from the configuration alone. Parameters, gradients and what the optimizer keeps of them are of one type;
a data-parallel replica is a layout with one axis. Of activations they count what autograd keeps of a micro-batch until
the backward pass has used it, operation by operation as the model's `forward` has them. The way of counting is that of
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section 4.1; the
numbers differ, since this model is another one (rotary positions, attention that keeps no matrix of positions).

`tests/plan/test_memory.py` compares with torch's saved tensors, `tests/train/test_measure.py` the two sources with
each other, `tests.benchmarks.bench_layout_memory` and `bench_memory` with what ranks allocate.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import ParallelLayout, gathers_float8, stage_blocks, stages_of
from slurm_train.config.program import program_of
from slurm_train.config.schema import EMA, GPT_TARGET, GptSection, OptimSection, ParallelSection, RunConfig
from slurm_train.plan.placement import positions_of

FLOAT = 4
HALF = 2
FLOAT8 = 1
INDEX = 8
"""Bytes of a number in float32, in bfloat16, in float8, and of a token id."""
PLAIN_SCORES = 2**22
CHUNK_SCORES = 2**27
"""Scores of a micro-batch above which they exist in chunks, and those of one chunk on a GPU (`models.head`)."""


class Part(NamedTuple):
    """A parameter, of all blocks the first one's."""

    name: str
    dims: int
    numbers: int
    """How many a rank holds."""
    rows: int = 0
    """Of a matrix: in how many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape(GptSection):
    """What decides how large the shipped GPT is: arguments of its constructor, with their defaults."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> GptShape | None:
        """Returns the shape that the `model` part of a configuration asks for; None for any other model."""
        if model.get("_target_") != GPT_TARGET:
            return None
        return cls(**{field_.name: model[field_.name] for field_ in fields(cls) if field_.name in model})

    @property
    def keys_width(self) -> int:
        """Width of all keys of a position, and of all values."""
        return self.width // self.num_heads * (self.num_kv_heads or self.num_heads)

    @property
    def hidden_width(self) -> int:
        """Width of the feed-forward's inside."""
        return self.hidden or 4 * self.width

    @property
    def inner_width(self) -> int:
        """Width of the results of the feed-forward's first matrices together; SwiGLU has two of them."""
        return (2 if self.activation == "swiglu" else 1) * self.hidden_width

    @property
    def cut_by_outputs(self) -> int:
        """Matrices of a block that tensor parallelism cuts by their outputs: q, k, v, up, gate."""
        return 5 if self.activation == "swiglu" else 4

    @property
    def product_widths(self) -> tuple[int, ...]:
        """Widths of the results of a block's matrix products, in the order in which `forward` computes them."""
        num_inner = 2 if self.activation == "swiglu" else 1
        projections = (self.width, self.keys_width, self.keys_width, self.width)
        return (*projections, *[self.hidden_width] * num_inner, self.width)

    @property
    def repeated_part(self) -> float:
        """Part of a block's matrix products that is computed again where every second result is kept.

        The last one is not: what needs its result is no longer the block.
        """
        inner = [self.width] * (len(self.product_widths) - 1)
        numbers = [size * width for size, width in zip(self.product_widths, [*inner, self.hidden_width], strict=True)]
        return sum(numbers[1:-1:2]) / sum(numbers)

    @property
    def norm_parameters(self) -> int:
        """Numbers in one norm."""
        return self.width * (2 if self.bias and self.norm != "rmsnorm" else 1)

    @property
    def parameters(self) -> int:
        """Numbers in the whole model."""
        return self.num_layers * self.block_parameters(tp=1) + self.end_parameters(is_first=True, is_last=True)

    def operations_per_token(self, positions: int) -> float:
        """Floating-point operations of a forward and a backward pass, as `mfu_6n_12ltc` counts them.

        Args:
            positions: of a sequence.
        """
        looked_up = 0 if self.tied else self.vocab_size * self.width
        looked_up += self.context * self.width if self.positions == "learned" else 0
        return 6.0 * (self.parameters - looked_up) + 12.0 * self.num_layers * positions * self.width

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the tables that positions are looked up in."""
        return self.context * (INDEX if self.positions == "learned" else 2 * FLOAT * (self.width // self.num_heads))

    def block_parameters(self, *, tp: int) -> int:
        """Numbers in one block."""
        return sum(part.numbers for part in block_parts(self, tp))

    def matrices_in_block(self, *, tp: int) -> int:
        """Numbers in one block's matrices that a rank holds."""
        return sum(part.numbers for part in block_parts(self, tp) if part.dims == 2)

    def end_parts(self, *, is_first: bool, is_last: bool, id_parts: int = 1) -> list[Part]:
        """What a stage holds of the embeddings (first stage), and of the last norm and the head (last).

        Args:
            is_first: of a pipeline.
            is_last: of a pipeline.
            id_parts: ranks that have a part of the token ids each.
        """
        table = self.vocab_size * self.width // id_parts
        places = self.context * self.width if self.positions == "learned" else 0
        first = [Part("embedding.weight", 2, table), Part("embedding.positions.weight", 2, places)]
        last = [
            Part("norm.weight", 1, self.norm_parameters),
            Part("head.weight", 2, 0 if self.tied and is_first else table),
        ]
        return [*(first if is_first else []), *(last if is_last else [])]

    def end_parameters(self, *, is_first: bool, is_last: bool) -> int:
        """Numbers in them."""
        return sum(part.numbers for part in self.end_parts(is_first=is_first, is_last=is_last))


@functools.cache  # asked for each of thousands of layouts
def block_parts(shape: GptShape, tp: int) -> tuple[Part, ...]:
    """The parameters of one block, of which a rank holds its part of the matrices and the whole of the norms."""
    width = shape.width
    hidden = shape.hidden_width
    by_outputs = {"attention.q": width, "attention.k": shape.keys_width, "attention.v": shape.keys_width}
    by_outputs |= {"feed_forward.gate": hidden} if shape.activation == "swiglu" else {}
    by_outputs |= {"feed_forward.up": hidden}
    by_inputs = {"attention.out": width, "feed_forward.out": hidden}
    parts = [Part(f"{name}.weight", 2, width * size // tp, size // tp) for name, size in by_outputs.items()]
    parts += [Part(f"{name}.weight", 2, width * size // tp, width) for name, size in by_inputs.items()]
    if shape.bias:
        parts += [Part(f"{name}.bias", 1, size // tp) for name, size in by_outputs.items()]
        parts += [Part(f"{name}.bias", 1, width) for name in by_inputs]
    parts += [Part(f"{name}_norm.weight", 1, shape.norm_parameters) for name in ("attention", "feed_forward")]
    return tuple(part._replace(name=f"blocks.0.{part.name}") for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """What memory, traffic and speed of the shipped GPT in a layout are computed from."""

    shape: GptShape
    layout: ParallelLayout
    batch: BatchPlan
    settings: ParallelSection
    half: bool
    """Whether matrix products are in a type of two bytes; the parameters need not be."""
    positions: int
    """Of one sample: the data's, which may be shorter than the model's context."""
    optim: OptimSection = field(default_factory=OptimSection)
    num_averages: int = 0
    """Averages of the parameters, e.g. of a callback `EMA`; they are float32."""
    param_size: int = FLOAT
    """Bytes of a number of the parameters, of their gradients and of what the optimizer keeps."""
    is_float16: bool = False
    """Whether that type of two bytes is float16, which residual stream and norms are not in."""
    gathers_float8: bool = False
    """Whether matrices of blocks are gathered in float8 where their sizes allow it."""

    @property
    def tokens(self) -> int:
        """Positions of one micro-batch that a rank has."""
        return self.batch.local_size * self.positions // self.layout.cp

    @property
    def id_parts(self) -> int:
        """Ranks that have a part of the token ids each, in the embedding and in the head."""
        return self.layout.tp if self.layout.cuts_vocabulary(self.shape.vocab_size) else 1

    @property
    def gathered_size(self) -> int:
        """Bytes of a number of a shard's parameters once they are gathered."""
        gather_dtype = self.settings.gather_dtype
        is_half = gather_dtype == "bfloat16" or (gather_dtype == "auto" and self.half and not self.is_float16)
        return HALF if is_half and self.layout.shard_size > 1 else self.param_size

    @property
    def gathered_block(self) -> int:
        """Bytes of the parameters of one block once they are gathered."""
        parts = block_parts(self.shape, self.layout.tp)
        return sum(part.numbers * (FLOAT8 if self._travels_in_float8(part) else self.gathered_size) for part in parts)

    def _travels_in_float8(self, part: Part) -> bool:
        if not self.gathers_float8 or part.dims != 2:
            return False
        columns = part.numbers // part.rows
        # As the ranks decide it (`distributed.float8`).
        return part.rows % 16 == columns % 16 == part.rows % self.layout.shard_size == 0

    def gathered(self, stage: int) -> int:
        """Bytes of all that such a rank would hold without sharding, once it is gathered."""
        return self.blocks(stage) * self.gathered_block + self.gathered_size * self.ends(stage)

    @property
    def kept_size(self) -> int:
        """Bytes of a number that matrix products keep."""
        return HALF if self.half else self.stream_size

    @property
    def stream_size(self) -> int:
        """Bytes of a number of the residual stream, and of what norms give and keep."""
        # Parameters that are gathered in bfloat16 make all that is computed with them bfloat16.
        return HALF if (self.half and not self.is_float16) or self.gathered_size == HALF else FLOAT

    def blocks(self, stage: int) -> int:
        """Blocks that a rank at this place in its pipeline holds."""
        return _num_blocks(self.shape.num_layers, stage, self.layout.pp, self.settings.stages_per_rank)

    def ends(self, stage: int) -> int:
        """Numbers of embeddings, last norm and head that such a rank holds without sharding."""
        return sum(part.numbers for part in self.end_parts(stage))

    def end_parts(self, stage: int) -> list[Part]:
        """What they are of."""
        is_last = stage == self.layout.pp - 1
        return self.shape.end_parts(is_first=stage == 0, is_last=is_last, id_parts=self.id_parts)

    def held(self, stage: int) -> int:
        """Numbers that such a rank would hold without sharding."""
        return self.blocks(stage) * self.shape.block_parameters(tp=self.layout.tp) + self.ends(stage)

    def kept_by_optimizer(self, stage: int) -> int:
        """Numbers that the optimizer of such a rank would keep without sharding."""
        parts = [(self.blocks(stage), part) for part in block_parts(self.shape, self.layout.tp)]
        parts += [(1, part) for part in self.end_parts(stage)]
        return sum(many * part.numbers * self.optim.num_kept(part.name, dims=part.dims) for many, part in parts)

    def kept_in_block(self, recompute: str) -> float:
        """Bytes that one block keeps for the backward pass per position.

        Args:
            recompute: kind of activation checkpointing.
        """
        shape = self.shape
        kept = self.kept_size
        tp = self.layout.tp
        cp = self.layout.cp
        stream = self.stream_size
        # With sequence parallelism the ranks of `tp` have positions of their own between the matrices.
        dealt = tp if self.settings.sequence_parallel else 1
        width = shape.width
        keys = shape.keys_width
        sums = FLOAT * shape.num_heads // tp
        attention = kept * 2 * (width + keys) // tp
        inner = kept * shape.inner_width // tp
        # A product of matrices that are cut by inputs is a part of a sum; where it is kept, the sum is kept, too.
        added = 2 * width // dealt if tp > 1 else 0
        if recompute == "full":
            num_bytes = stream * width // dealt
        elif recompute == "selective":
            # Its input, and the results of the matrix products and of attention.
            num_bytes = stream * width // dealt + attention + inner + kept * (2 * width + added) + sums
        elif recompute == "alternate":
            # Its input, the result of attention, and those of the first, third, fifth ... matrix product.
            *by_outputs, last = [size if index % 2 == 0 else 0 for index, size in enumerate(shape.product_widths)]
            num_bytes = stream * width // dealt + kept * (width + sum(by_outputs)) // tp + kept * (last + added) + sums
        else:
            # Two norms; q, k, v and attention's result; input and result of the activation, and of SwiGLU's product.
            # Autocast casts a float32 output of a norm for each of the matrices behind it anew. Dropout keeps a byte a
            # number.
            outputs = kept * width * (2 if kept == stream else shape.cut_by_outputs)
            dropped = 2 * width // dealt if shape.dropout else 0
            num_bytes = 2 * self._kept_in_norm // dealt + outputs + attention + sums + 2 * inner + dropped
            if cp > 1:
                # Keys and values as far as either of two chunks looks back, in place of the rank's own, and the
                # joined result.
                num_bytes += kept * ((2 * cp - 1) * keys + width) // tp
        return num_bytes

    def passing(self) -> float:
        """Bytes held for a moment in the backward pass of one block: two gradients, or those of keys."""
        shape = self.shape
        kept = self.kept_size
        tp = self.layout.tp
        cp = self.layout.cp
        if self.layout.is_replicated:
            # Of the last feed-forward, where a rank has the whole model.
            matrix = shape.width * max(shape.hidden_width, 3 * shape.width)
            per_token = self._kept_in_norm + kept * shape.inner_width + 2 * INDEX
            return self.tokens * per_token + matrix * (FLOAT + (kept if self.half else 0))
        feed_forward = shape.inner_width // tp + shape.width
        widest = max(feed_forward, 4 * cp * shape.keys_width // tp if cp > 1 else 0)
        return self.tokens * self.stream_size * widest

    @property
    def scores(self) -> int:
        """Scores of a micro-batch on a rank; each exists for a moment only if they come in chunks."""
        return self.tokens * self.shape.vocab_size // self.id_parts

    @property
    def has_chunks(self) -> bool:
        """Whether they do."""
        return self.id_parts > 1 or self.scores > PLAIN_SCORES

    def kept_at_end(self) -> int:
        """Bytes that last norm, head and loss keep of a micro-batch, with the input and target tokens."""
        kept = self.tokens * (self._kept_in_norm + self.kept_size * self.shape.width + INDEX)
        if not self.has_chunks:
            return kept + self.tokens * INDEX + FLOAT * self.scores
        # In chunks the forward pass ends with both gradients, and the targets are not needed again.
        return kept + FLOAT * self.table

    def passing_at_end(self) -> tuple[int, int]:
        """Bytes held for a moment: when the loss is differentiated beside what is kept, and in the head's backward."""
        behind = self.stream_size * self.tokens * 2 * self.shape.width
        if not self.has_chunks:
            return 2 * FLOAT * self.scores, behind + FLOAT * self.scores
        one_chunk = min(self.scores, CHUNK_SCORES) * (self.kept_size + FLOAT)
        copy = HALF * self.table if self.half else 0
        # The kept gradient of the weight is multiplied, which makes another.
        return max(one_chunk + copy, FLOAT * self.table), behind + FLOAT * self.table

    def casts(self, stage: int) -> int:
        """Bytes of the bfloat16 copies of matrices that autocast keeps for the backward pass."""
        if not self.half or self.gathered_size == HALF:
            return 0
        keeps_head = stage == self.layout.pp - 1 and not self.has_chunks
        head = self.table if keeps_head else 0
        return HALF * (self.blocks(stage) * self.shape.matrices_in_block(tp=self.layout.tp) + head)

    def in_flight(self, stage: int) -> float:
        """How many micro-batches' activations a rank keeps, parts of them where it has several stages."""
        ranks = self.layout.pp
        per_rank = self.settings.stages_per_rank
        if ranks == 1:
            return 1
        # A later stage computes the gradients of weights so many turns later.
        later = stage if self.settings.pipeline_schedule == "zero_bubble" else 0
        if per_rank > 1:  # what torch's schedule sends ahead before the first backward pass, and one
            ahead = (per_rank - 1) * ranks + 2 * (ranks - 1 - stage) + later
            return min(per_rank * self.batch.accumulation, ahead + 1) / per_rank
        if self.settings.pipeline_schedule == "gpipe":
            return self.batch.accumulation
        return min(self.batch.accumulation, ranks - stage + later)

    @property
    def table(self) -> int:
        """Numbers of an embedding or a head on a rank."""
        return self.shape.vocab_size * self.shape.width // self.id_parts

    @property
    def _kept_in_norm(self) -> int:
        """Bytes per position beside the output: the input and two float32 numbers, of RMSNorm one.

        torch has no RMSNorm kernel for CPUs, where float32 is usual: it keeps the scaled input, too.
        """
        is_rms = self.shape.norm == "rmsnorm"
        width = self.shape.width
        if is_rms and self.stream_size == FLOAT:
            return FLOAT * (2 * width + 1)
        return self.stream_size * width + FLOAT * (1 if is_rms else 2)


def facts_of(config: RunConfig, layout: ParallelLayout, batch: BatchPlan, *, half: bool) -> LayoutFacts | None:
    """Returns what the estimates are computed from; None for a model other than the shipped GPT, or no training."""
    shape = GptShape.of(program_of(config).used.model or {})
    if shape is None:
        return None
    positions = positions_of(config.data, default=shape.context)
    return LayoutFacts(
        shape=shape,
        layout=layout,
        batch=batch,
        settings=config.parallel,
        half=half,
        positions=positions,
        optim=config.optim,
        num_averages=num_averages(config),
        param_size=param_size(config),
        is_float16=config.train.precision == "float16",
        gathers_float8=gathers_float8(layout, config.parallel, precision=config.train.precision),
    )


def param_size(config: RunConfig) -> int:
    """Returns the bytes of a number of the parameters."""
    return HALF if config.train.param_dtype == "bfloat16" else FLOAT


def num_averages(config: RunConfig) -> int:
    """Returns how many averages of the parameters callbacks keep."""
    return sum(callback.get("_target_") == EMA for callback in config.callbacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step."""

    weight_bytes: int
    """Parameters and, in a whole replica, buffers."""
    gradient_bytes: int
    """Those that are held at that moment."""
    optimizer_bytes: int
    average_bytes: int = 0
    """Averages of the parameters (callback `EMA`)."""
    gathered_bytes: int = 0
    """Whole parameters where a rank holds a shard: while one block is computed and the next is fetched."""
    activation_bytes: int
    """What the forward pass keeps, and what is held for a moment in the backward pass."""
    offloaded_bytes: int = 0
    """In host memory instead of the device (`parallel.cpu_offload`); not in the total."""

    @property
    def total_bytes(self) -> int:
        """All of it on the device."""
        state = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.average_bytes
        return state + self.gathered_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Bytes that a rank holds all through a step: its part of a model, or the whole of it."""

    trained: int
    """Parameters that are trained; a copy of their gradients is as large."""
    other: int
    """Buffers and frozen parameters."""
    optimizer: int
    averages: int
    is_on_device: bool = True
    """False where they are kept in host memory (`parallel.cpu_offload`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a rank holds beside that at one moment of a step."""

    activations: float
    """Bytes that the forward pass keeps, and that the backward pass holds for a moment."""
    gradient_copies: int
    gathered: int = 0
    """Bytes of whole parameters beside shards."""


def memory_at_fullest(holdings: Holdings, moments: Sequence[Moment]) -> RankMemory:
    """Returns what a rank holds at the fullest moment: the one sum of every estimate, computed or measured."""
    is_here = holdings.is_on_device
    on_device = holdings.trained if is_here else 0

    def varying_bytes(moment: Moment) -> int:
        return int(moment.activations) + moment.gathered + moment.gradient_copies * on_device

    fullest = max(moments, key=varying_bytes)
    offloaded = (1 + fullest.gradient_copies) * holdings.trained + holdings.averages + holdings.optimizer
    return RankMemory(
        weight_bytes=on_device + holdings.other,
        gradient_bytes=fullest.gradient_copies * on_device,
        optimizer_bytes=holdings.optimizer if is_here else 0,
        average_bytes=holdings.averages if is_here else 0,
        gathered_bytes=fullest.gathered,
        activation_bytes=int(fullest.activations),
        offloaded_bytes=0 if is_here else offloaded,
    )


def measured_memory(measured: Mapping[str, Any], *, accumulation: int, averages: int) -> RankMemory:
    """Returns what a rank holds that has the whole of a model that was measured.

    Args:
        measured: bytes of the model and of what its forward pass keeps, as `train.measure` gives them.
        accumulation: micro-batches of a step; the gradients of those before the last are held beside DDP's buckets.
        averages: how many averages of the parameters there are, in the parameters' type.
    """
    holdings = Holdings(
        trained=measured["trained_bytes"],
        other=measured["other_bytes"],
        optimizer=measured["optimizer_bytes"],
        averages=averages * measured["trained_bytes"],
    )
    backward = Moment(activations=measured.get("activation_bytes", 0), gradient_copies=2 if accumulation > 1 else 1)
    return memory_at_fullest(holdings, [backward])


@functools.lru_cache(maxsize=4096)
def _num_blocks(num_layers: int, rank: int, num_ranks: int, stages_per_rank: int) -> int:
    """Returns how many blocks a rank of a pipeline holds; asked hundreds of thousands of times by `plan --suggest`."""
    num_stages = num_ranks * stages_per_rank
    held_stages = stages_of(rank, num_ranks=num_ranks, per_rank=stages_per_rank)
    return sum(len(stage_blocks(num_layers, stage=stage, num_stages=num_stages)) for stage in held_stages)


def rank_memory(facts: LayoutFacts, *, stage: int) -> RankMemory:
    """Returns what a rank of the shipped GPT holds at the fullest moment of a step.

    Args:
        facts: model, layout and batch.
        stage: its place in its pipeline, 0 to pp - 1.
    """
    layout = facts.layout
    parameters = facts.param_size * -(-facts.held(stage) // layout.shard_size)
    optimizer = facts.param_size * -(-facts.kept_by_optimizer(stage) // layout.shard_size)
    holdings = Holdings(
        trained=parameters,
        other=facts.shape.buffer_bytes if layout.is_replicated else 0,
        optimizer=optimizer,
        averages=parameters * facts.num_averages * FLOAT // facts.param_size,
        is_on_device=not facts.settings.cpu_offload,
    )
    return memory_at_fullest(holdings, _moments(facts, stage))


def _moments(facts: LayoutFacts, stage: int) -> list[Moment]:
    """Returns the moments of a step of which one is the fullest.

    These are: the last backward pass of a block, the end of the backward pass, when gradients are whole and activations
    are gone, and on the last stage the moment when the loss is differentiated and the backward pass of the head.
    """
    layout = facts.layout
    tokens = facts.tokens
    recompute = facts.settings.activation_checkpointing
    block = facts.kept_in_block(recompute)
    before = _gradients_before(facts, stage)
    passing = facts.passing()
    kept = _kept_in_blocks(facts, stage) + _passed_on(facts, stage)
    if recompute != "none":
        # What one block holds in addition while it is computed again.
        passing += tokens * max(0.0, facts.kept_in_block("none") - (0 if recompute == "full" else block))
    # Whole blocks that are gathered in the last block: its parameters, their gradients and the next one's parameters;
    # at the end also the gradients of the block before, in transit. A block that is wholly computed again has all of
    # its activations before the first of its gradients is there.
    num_gathered = 2 if recompute == "full" else 3
    casts = facts.casts(stage) if layout.pp > 1 else 0
    moments = [
        Moment(
            activations=kept + passing,
            gathered=_gathered(facts, stage, num_blocks=num_gathered),
            gradient_copies=before,
        ),
        Moment(
            activations=tokens * block + passing + casts,
            gathered=_gathered(facts, stage, num_blocks=num_gathered + 1),
            gradient_copies=max(1, before),
        ),
    ]
    if stage == layout.pp - 1:
        loss, behind = facts.passing_at_end()
        moments += [
            Moment(
                activations=kept + facts.kept_at_end() + loss,
                gathered=_gathered(facts, stage, num_blocks=2),
                gradient_copies=before,
            ),
            Moment(
                activations=kept + behind,
                gathered=_gathered(facts, stage, num_blocks=0),
                gradient_copies=before,
            ),
        ]
    return moments


def fullest_rank(facts: LayoutFacts) -> tuple[int, RankMemory]:
    """Returns the stage whose ranks hold most, and what each of them holds."""
    # Between the ends no stage has more blocks, micro-batches or tables than the first.
    stages = ((stage, rank_memory(facts, stage=stage)) for stage in sorted({0, facts.layout.pp - 1}))
    return max(stages, key=lambda stage: stage[1].total_bytes)


def kept_by_forward(facts: LayoutFacts, *, stage: int) -> int:
    """Returns the bytes that the forward passes under way keep for their backward passes, with autocast's copies."""
    return int(_kept_in_blocks(facts, stage) + (facts.kept_at_end() if stage == facts.layout.pp - 1 else 0))


def _kept_in_blocks(facts: LayoutFacts, stage: int) -> float:
    block = facts.kept_in_block(facts.settings.activation_checkpointing)
    return facts.tokens * facts.blocks(stage) * block * facts.in_flight(stage) + facts.casts(stage)


def _gradients_before(facts: LayoutFacts, stage: int) -> int:
    """Returns how many copies of the gradients are held already when activations are fullest."""
    layout = facts.layout
    batches = facts.batch.accumulation
    if layout.is_replicated and layout.world_size > 1:
        # DDP's buckets stay; the sum of the micro-batches before the last is held beside them.
        return 2 if batches > 1 else 1
    if layout.pp == 1:
        return 1 if batches > 1 else 0
    # A pipeline adds whole gradients up, which count as gathered, and reduces them at the end.
    return 1 if layout.shard_size == 1 and facts.in_flight(stage) < batches else 0


def _passed_on(facts: LayoutFacts, stage: int) -> float:
    """Returns what a pipeline keeps for its neighbours: room for every micro-batch, and what was sent.

    GPipe has the last parts of all micro-batches under way at once, zero_bubble those of as many as there are ranks,
    1f1b those of one.
    """
    ranks = facts.layout.pp
    batches = facts.batch.accumulation
    per_rank = facts.settings.stages_per_rank
    if ranks == 1:
        return 0
    hidden = facts.stream_size * facts.tokens * facts.shape.width
    stages = range(stage, ranks * per_rank, ranks)
    received = sum((stage > 0) + (stage < ranks * per_rank - 1) for stage in stages)
    passed = batches * received * hidden + facts.in_flight(stage) * per_rank * hidden
    if stage < ranks - 1:
        return passed
    ends = {"gpipe": batches, "zero_bubble": min(batches, ranks)}.get(facts.settings.pipeline_schedule, 1)
    return passed + (ends - 1) * facts.kept_at_end()


def _gathered(facts: LayoutFacts, stage: int, *, num_blocks: int) -> int:
    """Returns the bytes of whole parameters; `num_blocks` 0 stands for the head."""
    size = facts.gathered_size
    # Gradients of matrices that are gathered in float8 are of the other parameters' type.
    gradients = size * facts.shape.block_parameters(tp=facts.layout.tp)
    if facts.layout.shard_size == 1:
        return 0
    if facts.layout.pp > 1:  # gathered parameters stay, and whole gradients add up beside them
        return facts.gathered(stage) + FLOAT * facts.held(stage) + gradients
    if not facts.settings.reshard_after_forward:
        return facts.gathered(stage) + gradients
    if num_blocks == 0:
        return size * (facts.ends(stage) + facts.table)
    # Two are parameters, of this block and of the next one.
    return 2 * facts.gathered_block + (num_blocks - 2) * gradients
