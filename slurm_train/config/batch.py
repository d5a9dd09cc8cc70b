"""The batch plan: global batch = local x ranks x accumulation, solved or refused before anything happens. Pure.

Any of local, accumulation and global may be given; the rest is solved. An inconsistent set is refused with the
nearest ones that work. The learning rate follows a changed global batch by a named rule, or not at all.

The global batch need not be a multiple of the ranks: slices of ranks, and micro-batches within them, differ by one
sample then. Ranks may also have unequal slices by weights. The global batch, its order and the number of micro-batches
stay the same; only the borders between the ranks' slices move. A step takes as long as the slowest rank, so samples are
assigned one by one, each to the rank that would finish it first. That makes the slowest rank's time as short as
possible; rounding shares to whole samples would not.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.program import program_of
from slurm_train.config.schema import BatchSection, OptimSection, RunConfig
from slurm_train.errors import BatchError, Check, ConfigError, require_all
from slurm_train.formatting import shorten

LEAST_SHARE = 4
"""A batch by length has at least a fourth of the mean number of samples, however long they are."""
_WARMUP_SHARE = 0.05
_DECAY_SHARE = 0.2
_BATCHES_PER_STAGE = 4
_NODES_NAMED = 6
_MOST_LOCAL = 32
"""Samples of a micro-batch where nothing says how many: its memory has to have room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A consistent cut of the global batch."""

    global_size: int
    """Samples per optimizer step over all ranks."""
    local_size: int
    """Samples per rank and micro-batch; where they are not all of one size, of the largest."""
    ranks: int
    """Data-parallel ranks."""
    accumulation: int
    """Micro-batches per optimizer step."""

    @classmethod
    def equal(cls, *, local_size: int, ranks: int, accumulation: int) -> BatchPlan:
        """Returns the plan whose micro-batches all have one size."""
        total = local_size * ranks * accumulation
        return cls(global_size=total, local_size=local_size, ranks=ranks, accumulation=accumulation)

    @property
    def is_equal(self) -> bool:
        """Whether all micro-batches have one size."""
        return self.global_size == self.local_size * self.ranks * self.accumulation

    def share(self, rank: int, *, sizes: Sequence[int] | None = None) -> BatchShare:
        """Returns how one data-parallel rank shares the global batches.

        Args:
            rank: its place among the data-parallel ranks, from 0.
            sizes: samples of a global batch for each rank; None: equally many, as far as that goes.
        """
        shares = cut_equally(self.global_size, self.ranks) if sizes is None else tuple(sizes)
        return BatchShare(rank=rank, accumulation=self.accumulation, shares=shares)

    def grown(self, factor: int) -> BatchPlan:
        """Returns the plan of a step that takes so many global batches."""
        return replace(self, global_size=self.global_size * factor, accumulation=self.accumulation * factor)

    def as_sum(self) -> str:
        """Returns the arithmetic in words.

        For example "64 = 2 local x 32 ranks x 1 accumulation" or "64 = 10 or 11 local x 3 ranks x 2 accumulation".
        """
        smallest = self.global_size // (self.ranks * self.accumulation)
        local = str(self.local_size) if self.is_equal else f"{smallest} or {self.local_size}"
        return f"{self.global_size} = {local} local x {self.ranks} ranks x {self.accumulation} accumulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """How one data-parallel rank shares the global batches."""

    rank: int
    """Place of this rank among the data-parallel ranks, from 0."""
    accumulation: int
    """Micro-batches of one optimizer step."""
    shares: tuple[int, ...]
    """Samples of a global batch for each rank; batches by length use only their number."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.shares)

    @property
    def num_parts(self) -> int:
        """Micro-batches that a global batch is cut into over all ranks."""
        return self.ranks * self.accumulation

    @property
    def micro_sizes(self) -> tuple[int, ...]:
        """Samples of this rank's micro-batches of one step; not for batches by length."""
        return cut_equally(self.shares[self.rank], self.accumulation)

    @property
    def work(self) -> float:
        """This rank's samples of a global batch as a multiple of the mean."""
        return self.shares[self.rank] * self.ranks / sum(self.shares)

    def share_of(self, samples: int) -> int:
        """Returns how many samples of whole global batches are this rank's; not for batches by length."""
        return samples * self.shares[self.rank] // sum(self.shares)


def cut_equally(total: int, num_parts: int) -> tuple[int, ...]:
    """Returns the sizes of consecutive parts of a whole, which differ by one at most, e.g. (2, 3, 3) of 8."""
    return tuple((part + 1) * total // num_parts - part * total // num_parts for part in range(num_parts))


def solve_batch(section: BatchSection, *, ranks: int, stages: int = 1) -> BatchPlan:
    """Returns the plan for what was asked on so many data-parallel ranks.

    With only the global size given there is one micro-batch per step; with nothing given, the default global size is
    rounded to what the ranks can share equally, in micro-batches of at most 32 samples. Through a pipeline flow at
    least as many micro-batches as it has stages, all of one size, and where that is left open four times as many: its
    stages are then idle for a fifth of the time at most.

    Raises:
        BatchError: numbers that do not multiply up, a micro-batch without a sample, or what does not fill a pipeline.
    """
    if stages > 1:
        section = _fill_pipeline(section, ranks, stages)
    plan = _solve(section, ranks)
    if stages > 1 and not plan.is_equal:
        raise _unequal_in_pipeline(plan, stages)
    if plan.accumulation < stages:
        raise BatchError(
            f"a pipeline of {stages} stages needs {stages} micro-batches or more, the batch is {plan.as_sum()}",
            hint=f"set batch.accumulation={stages} or more, or a larger batch.global_size",
        )
    return plan


def _fill_pipeline(section: BatchSection, ranks: int, stages: int) -> BatchSection:
    wanted = _BATCHES_PER_STAGE * stages
    if section.accumulation is not None or (section.global_size is not None and section.local_size is not None):
        return section
    if section.global_size is None:
        local = section.local_size or max(1, round(section.default_global_size / (ranks * wanted)))
        return replace(section, local_size=local, accumulation=wanted)
    share = section.global_size // ranks
    fitting = [count for count in range(stages, share + 1) if share % count == 0]
    if not fitting or section.global_size % ranks:
        return section
    return replace(section, accumulation=min(fitting, key=lambda count: abs(count - wanted)))


def _solve(section: BatchSection, ranks: int) -> BatchPlan:
    local = section.local_size
    accumulation = section.accumulation
    total = section.global_size
    if total is None:
        if local is accumulation is None:
            share = max(1, round(section.default_global_size / ranks))
            accumulation = _ceil_div(share, _MOST_LOCAL)
            local = round(share / accumulation)
        return BatchPlan.equal(local_size=local or 1, ranks=ranks, accumulation=accumulation or 1)
    if local and accumulation:
        plan = BatchPlan.equal(local_size=local, ranks=ranks, accumulation=accumulation)
        if plan.global_size != total:
            raise BatchError(
                f"batch.global_size={total} was asked, but local x ranks x accumulation is {plan.as_sum()}",
                hint=f"set batch.global_size={plan.global_size}, or leave one of the three out to have it solved",
            )
        return plan
    if local:
        accumulation = _ceil_div(total, ranks * local)
    return _cut(total, ranks, accumulation or 1)


def recut_batch(global_size: int, *, ranks: int, local_size: int, stages: int = 1) -> BatchPlan:
    """Returns the plan that keeps the global batch on another number of ranks.

    Args:
        global_size: samples per optimizer step, as before.
        ranks: data-parallel ranks now.
        local_size: samples of a micro-batch before, which fitted into memory: there are more now only where some
            micro-batches would have no sample otherwise.
        stages: stages of the pipeline, which needs as many micro-batches, all of one size.

    Raises:
        BatchError: there are more ranks than samples, or the global batch does not fill the pipeline.
    """
    if stages > 1:
        return _recut_pipeline(global_size, ranks=ranks, local_size=local_size, stages=stages)
    accumulation = min(_ceil_div(global_size, ranks * local_size), max(1, global_size // ranks))
    return _cut(global_size, ranks, accumulation)


def _recut_pipeline(global_size: int, *, ranks: int, local_size: int, stages: int) -> BatchPlan:
    if global_size % ranks:
        raise _unequal_in_pipeline(_cut(global_size, ranks, 1), stages)
    share = global_size // ranks
    if share < stages:
        raise BatchError(
            f"batch.global_size={global_size} gives each of {ranks} data-parallel ranks {share} samples, which do not "
            f"fill a pipeline of {stages} stages",
            hint=f"set batch.global_size={ranks * stages} or more, or a smaller parallel.pp",
        )
    local = max(size for size in range(1, min(local_size, share // stages) + 1) if share % size == 0)
    return BatchPlan.equal(local_size=local, ranks=ranks, accumulation=share // local)


def _cut(total: int, ranks: int, accumulation: int) -> BatchPlan:
    """Returns the cut into so many micro-batches; their sizes differ by one at most.

    Raises:
        BatchError: some micro-batches would have no sample.
    """
    num_parts = ranks * accumulation
    if total < num_parts:
        fewer = f"batch.accumulation={total // ranks} or a larger batch.local_size, " if total >= ranks else ""
        raise BatchError(
            f"batch.global_size={total} has no sample for each of {ranks} ranks x {accumulation} micro-batches",
            hint=f"set {fewer or 'fewer ranks, '}or batch.global_size={num_parts} or more",
        )
    local_size = _ceil_div(total, num_parts)
    return BatchPlan(global_size=total, local_size=local_size, ranks=ranks, accumulation=accumulation)


def _ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


def _unequal_in_pipeline(plan: BatchPlan, stages: int) -> BatchError:
    sizes = [str(size) for size in nearest_multiples(plan.global_size, plan.ranks * plan.accumulation) if size]
    return BatchError(
        f"a pipeline of {stages} stages needs micro-batches of one size, the batch is {plan.as_sum()}",
        hint=f"set batch.global_size={' or '.join(sizes)}",
    )


def nearest_multiples(value: int, unit: int) -> tuple[int, int]:
    """Returns the multiples of `unit` next below (0 if there is none) and next above a value."""
    return value // unit * unit, -(-value // unit) * unit


def num_batches(growth: Mapping[str, int], step: int) -> int:
    """Returns how many global batches the steps up to this one take, e.g. 1002 up to step 1001 of {"1000": 2}."""
    total = step
    before = 1
    for after, factor in sorted((int(after), factor) for after, factor in growth.items()):
        total += (factor - before) * max(0, step - after)
        before = factor
    return total


def total_steps(config: RunConfig, *, num_samples: int, global_size: int, since: Sequence[int] = (0, 0)) -> int:
    """Returns the steps of a whole run; the last one of `max_epochs` may begin the next epoch.

    Args:
        config: how long it is to be, and how its steps grow.
        num_samples: samples of an epoch.
        global_size: samples of a global batch.
        since: steps and samples done when the global batch got this size.
    """
    if config.train.max_epochs is None:
        return config.train.max_steps
    done_steps, done_samples = since
    left = max(0, -(-(round(config.train.max_epochs * num_samples) - done_samples) // global_size))
    done = num_batches(config.batch.growth, done_steps)
    growth = config.batch.growth
    more = bisect.bisect_left(range(left), done + left, key=lambda steps: num_batches(growth, done_steps + steps))
    return max(1, done_steps + more)


def planned_lr(optim: OptimSection, *, global_size: int) -> float:
    """Returns the peak learning rate for a global batch other than the one it was tuned for.

    linear: Goyal et al. 2017, arXiv 1706.02677 (SGD). sqrt: Krizhevsky 2014, arXiv 1404.5997, and for Adam
    Malladi et al. 2022, arXiv 2205.10287.
    """
    ratio = global_size / (optim.lr_global_size or global_size)
    return optim.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.lr_retune]


def schedule_samples(optim: OptimSection, *, total_samples: int) -> tuple[int, int]:
    """Returns over how many samples the learning rate rises at the beginning, and falls at the end of wsd.

    Args:
        optim: says how many, or leaves it at shares of the run.
        total_samples: samples of the whole run.
    """
    warmup = round(total_samples * _WARMUP_SHARE) if optim.warmup_samples is None else optim.warmup_samples
    decay = round(total_samples * _DECAY_SHARE) if optim.decay_samples is None else optim.decay_samples
    return warmup, decay


def check_schedule(optim: OptimSection, *, total_samples: int, global_size: int) -> None:
    """Checks that a run is long enough for its schedule.

    Args:
        optim: the schedule; a function of the user's own is not looked at.
        total_samples: samples of the whole run.
        global_size: samples of a step, for the hint.

    Raises:
        ConfigError: the warm-up takes the whole run, or in wsd the fall would begin before its end; or a fall was asked
            of a schedule that has none.
    """
    if not isinstance(optim.schedule, str):
        return
    warmup, decay = schedule_samples(optim, total_samples=total_samples)
    length = f"the run has {total_samples:,} samples"
    steps = f"both count samples, steps x {global_size} here"
    require_all(
        [
            (
                bool(optim.warmup_samples) and warmup >= total_samples,
                f"optim.warmup_samples={warmup} was asked, and {length}: the rate would never reach optim.lr",
                f"leave it out or at null (5 % of the run), or make it shorter: {steps}",
            ),
            (
                optim.schedule == "wsd" and warmup + decay > total_samples,
                f"optim.schedule=wsd was asked with a warm-up over {warmup:,} samples and a fall over the last "
                f"{decay:,}, and {length}: the rate would jump where one meets the other",
                f"leave optim.warmup_samples (5 % of the run) or optim.decay_samples (20 %) out, or at null: {steps}",
            ),
            (
                optim.decay_samples is not None and optim.schedule != "wsd",
                f"optim.decay_samples={optim.decay_samples} was asked with optim.schedule={optim.schedule}, which does "
                "not use it",
                "set optim.schedule=wsd, or leave optim.decay_samples out",
            ),
        ],
        ConfigError,
    )


def check_batch(config: RunConfig, plan: BatchPlan, *, layout: ParallelLayout, ranks_per_node: Sequence[int]) -> None:
    """Checks that every micro-batch of every rank gets samples, by length and in the shares that were asked for.

    Raises:
        BatchError: batches by length may have fewer samples than there are micro-batches, or flow through a pipeline;
            unequal shares were asked with something that they do not go with, or weights do not fit the ranks.
    """
    require_all(_conflicts(program_of(config).used, plan, layout), BatchError)
    planned_shares(config, plan, ranks_per_node=ranks_per_node)


def _conflicts(config: RunConfig, plan: BatchPlan, layout: ParallelLayout) -> Iterator[Check]:
    parts = plan.ranks * plan.accumulation
    for after in config.batch.growth:
        yield (
            not after.isdecimal(),
            f"batch.growth has {after!r} where a number of steps is wanted",
            'write for example "batch.growth={1000: 2}": after 1000 steps each takes two global batches',
        )
        yield (
            layout.pp > 1,
            f"batch.growth in a pipeline of {layout.pp} stages, whose schedule has a fixed number of micro-batches",
            "leave batch.growth out, or parallel.pp at 1",
        )
    if config.batch.by_length:
        yield (
            layout.pp > 1,
            f"batch.by_length=true in a pipeline of {layout.pp} stages, which exchange micro-batches of one shape",
            "leave batch.by_length at false, or parallel.pp at 1",
        )
        yield (
            parts > 1 and plan.global_size < LEAST_SHARE * parts,
            f"batch.by_length=true with a global batch of {plan.as_sum()}: a batch of long samples has as few as "
            f"{max(1, plan.global_size // LEAST_SHARE)} of them, for {parts} micro-batches",
            f"set batch.global_size to {LEAST_SHARE * parts} or more, or lower batch.accumulation",
        )
    if isinstance(config.batch.shares, str):
        return
    conflict = f"batch.shares={_shown(config.batch.shares)} was asked with"
    nodes = config.slurm.nodes
    yield (
        not layout.is_replicated,
        f"{conflict} a layout of {layout}",
        "leave batch.shares at even, or use dp_replicate alone",
    )
    yield (
        config.batch.by_length,
        f"{conflict} batch.by_length=true, which shares out by length",
        "leave one of the two out",
    )
    yield (
        config.slurm.launcher == "torchrun",
        f"{conflict} cluster.launcher=torchrun, which numbers the nodes anew at each start",
        "use cluster.launcher=srun, or leave batch.shares at even",
    )
    yield (
        isinstance(nodes, str),
        f"{conflict} cluster.nodes={nodes}, of which each number has other ranks",
        "give one number of nodes, or leave batch.shares at even",
    )


def assign_samples(total: int, sample_times: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """Returns how many of `total` samples each rank gets, so that the slowest finishes soonest.

    Args:
        total: at least `least` per rank.
        sample_times: of each rank, the time of one sample, in any unit.
        least: samples that every rank gets.
    """
    assert least * len(sample_times) <= total, f"{total} samples for {len(sample_times)} ranks x {least}"
    sizes = [least] * len(sample_times)
    # When each rank would have finished one more sample than it has, soonest first.
    finish_times = [((least + 1) * sample_time, rank) for rank, sample_time in enumerate(sample_times)]
    heapq.heapify(finish_times)
    for _ in range(total - sum(sizes)):
        _, rank = finish_times[0]
        sizes[rank] += 1
        heapq.heapreplace(finish_times, ((sizes[rank] + 1) * sample_times[rank], rank))
    return tuple(sizes)


def planned_shares(config: RunConfig, plan: BatchPlan, *, ranks_per_node: Sequence[int]) -> tuple[int, ...]:
    """Returns the samples of a global batch, rank by rank: equal but for one sample, or by weights.

    Args:
        config: says which.
        plan: the cut of the global batch.
        ranks_per_node: in rank order; only weights depend on it.

    Raises:
        BatchError: the weights do not fit the ranks.
    """
    weights = program_of(config).used.batch.shares
    if isinstance(weights, str):
        return cut_equally(plan.global_size, plan.ranks)
    return shares_by_weight(weights, plan, ranks_per_node=ranks_per_node)


def largest_local_size(config: RunConfig, plan: BatchPlan, *, ranks_per_node: Sequence[int]) -> int:
    """Returns the samples of the largest micro-batch that a rank computes; its memory must have room for them."""
    largest = max(planned_shares(config, plan, ranks_per_node=ranks_per_node))
    return _ceil_div(largest, plan.accumulation)


def shares_by_weight(weights: Sequence[float], plan: BatchPlan, *, ranks_per_node: Sequence[int]) -> tuple[int, ...]:
    """Returns the samples of a global batch, rank by rank, in proportion to weights; each micro-batch has one at least.

    Args:
        weights: one for each node, which each of its ranks has, or one for each rank.
        plan: the cut of the global batch.
        ranks_per_node: in rank order.

    Raises:
        BatchError: their number fits neither nodes nor ranks, or one is not above 0.
    """
    rank_weights = list(weights)
    if len(weights) == len(ranks_per_node):
        rank_weights = []
        for weight, num_ranks in zip(weights, ranks_per_node, strict=True):
            rank_weights += [weight] * num_ranks
    if len(rank_weights) != plan.ranks:
        raise BatchError(
            f"batch.shares={_shown(weights)} has {len(weights)} weights, for {plan.ranks} ranks on nodes of "
            f"{' + '.join(map(str, ranks_per_node))}",
            hint="give one weight for each node or for each rank, or batch.shares=even",
        )
    if not all(0 < weight < math.inf for weight in rank_weights):
        raise BatchError(
            f"batch.shares={_shown(weights)} has a weight that is not above 0",
            hint="give how fast a rank of each node is, e.g. [2,1]; leave a node that is to have no samples out",
        )
    return assign_samples(plan.global_size, [1 / weight for weight in rank_weights], least=plan.accumulation)


def shares_in_words(shares: Sequence[int], *, ranks_per_node: Sequence[int], nodes: Sequence[str]) -> str:
    """Returns the ranks' shares for a person, e.g. "node1 6+6+6+6, node2 4+4 of the 32 samples of a global batch".

    Args:
        shares: rank by rank.
        ranks_per_node: in rank order.
        nodes: their names.
    """
    parts = []
    first_rank = 0
    for node, num_ranks in zip(nodes, ranks_per_node, strict=True):
        node_shares = shares[first_rank : first_rank + num_ranks]
        parts.append(f"{node} {'+'.join(map(str, node_shares))}")
        first_rank += num_ranks
    return f"{shorten(parts, _NODES_NAMED)} of the {sum(shares)} samples of a global batch"


def _shown(weights: Sequence[float]) -> str:
    return f"[{','.join(f'{weight:g}' for weight in weights)}]"
