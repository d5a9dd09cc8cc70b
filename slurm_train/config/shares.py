"""Unequal local batches: how many samples of each micro-batch every rank computes, by weights or by its speed. Pure.

The global batch, its order and the number of micro-batches stay what they are; only the borders between the ranks'
slices move. A micro-batch takes as long as the rank that is last, so samples are dealt out one by one, each to the rank
that would be done with it first. That makes the last rank's time the shortest possible, which rounding shares to whole
samples would not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import ParallelLayout
from slurm_train.config.schema import RunConfig
from slurm_train.errors import BatchError

MOST = 2
"""Times an equal share that a measured one is at most: the ranks' memory has to do for it."""
_LEAST_GAIN = 0.05
_NODES_NAMED = 6


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a rank takes for a forward and backward pass: a straight line."""

    fixed: float
    per_sample: float

    def of(self, samples: int) -> float:
        """Returns what so many samples take."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Samples of a micro-batch, rank by rank, and what they were chosen for."""

    sizes: tuple[int, ...]
    equal_s: float
    """The slowest rank's pass with equal shares, in seconds; NaN: a rank has measured nonsense."""
    chosen_s: float
    """The slowest rank's pass with these shares, as expected."""


def deal_out(total: int, costs: Sequence[PassCost], *, most: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns how many of `total` samples each rank gets, at least one each, so that the last is done soonest.

    Args:
        total: at least one per rank, and not more than `most` allows.
        costs: of each rank.
        most: samples that each rank can take; None: any number.
    """
    limits = [total] * len(costs) if most is None else most
    assert len(costs) <= total <= sum(limits), f"{total} samples for {len(costs)} ranks of at most {limits}"
    sizes = [1] * len(costs)
    waiting = [(cost.of(2), rank) for rank, cost in enumerate(costs) if limits[rank] > 1]
    heapq.heapify(waiting)
    for _ in range(total - len(costs)):
        _, rank = heapq.heappop(waiting)
        sizes[rank] += 1
        if sizes[rank] < limits[rank]:
            heapq.heappush(waiting, (costs[rank].of(sizes[rank] + 1), rank))
    return tuple(sizes)


def sizes_by_weight(weights: Sequence[float], plan: BatchPlan, *, ranks_per_node: Sequence[int]) -> tuple[int, ...]:
    """Returns the samples of a micro-batch, rank by rank, in proportion to weights.

    Args:
        weights: one for each node, which each of its ranks has, or one for each rank.
        plan: the cut of the global batch.
        ranks_per_node: in rank order.

    Raises:
        BatchError: they are not so many, or one is no weight.
    """
    of_ranks = list(weights)
    if len(weights) == len(ranks_per_node):
        of_ranks = [weight for weight, ranks in zip(weights, ranks_per_node, strict=True) for _ in range(ranks)]
    if len(of_ranks) != plan.ranks:
        raise BatchError(
            f"batch.shares={_shown(weights)} has {len(weights)} weights, for {plan.ranks} ranks on nodes of "
            f"{' + '.join(map(str, ranks_per_node))}",
            hint="give one weight for each node or for each rank, or batch.shares=measured or even",
        )
    if not all(0 < weight < math.inf for weight in of_ranks):
        raise BatchError(
            f"batch.shares={_shown(weights)} has a weight that is not above 0",
            hint="give how fast a rank of each node is, e.g. [2,1]; a node that shall do nothing is not asked for",
        )
    return deal_out(plan.local_size * plan.ranks, [PassCost(0.0, 1 / weight) for weight in of_ranks])


def sizes_by_speed(seconds: Sequence[tuple[float, float]], plan: BatchPlan) -> Choice:
    """Returns the samples of a micro-batch, rank by rank, by what passes were measured to take.

    They are equal where unequal ones would save less than a twentieth of the slowest rank's pass, which also is the
    case where speeds differ by less than that, and where a rank's times are no times.

    Args:
        seconds: of each rank, what a pass over an equal share takes, and one over twice as many samples; infinite,
            where those have no room.
        plan: the cut of the global batch.
    """
    local = plan.local_size
    equal = (local,) * plan.ranks
    if not all(0 < once < math.inf and double > 0 for once, double in seconds):
        return Choice(sizes=equal, equal_s=math.nan, chosen_s=math.nan)
    costs = [_line_through(once, double, local) for once, double in seconds]
    most = [MOST * local if double < math.inf else local for _, double in seconds]
    sizes = deal_out(local * plan.ranks, costs, most=most)
    equal_s = max(once for once, _ in seconds)
    chosen_s = max(cost.of(size) for cost, size in zip(costs, sizes, strict=True))
    if chosen_s > (1 - _LEAST_GAIN) * equal_s:
        return Choice(sizes=equal, equal_s=equal_s, chosen_s=equal_s)
    return Choice(sizes=sizes, equal_s=equal_s, chosen_s=chosen_s)


def _line_through(once: float, double: float, local: int) -> PassCost:
    # Noise may make the line fall, or begin below nothing.
    slope = (double - once) / local if double < math.inf else math.inf
    per_sample = min(max(slope, 0.0), once / local)
    return PassCost(once - per_sample * local, per_sample)


def planned_sizes(config: RunConfig, plan: BatchPlan, *, ranks_per_node: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the samples of a micro-batch, rank by rank, None where they are equal or not known before the start.

    Raises:
        BatchError: the weights do not fit the ranks.
    """
    shares = config.batch.shares
    if not config.trains or isinstance(shares, str):
        return None
    return sizes_by_weight(shares, plan, ranks_per_node=ranks_per_node)


def sizes_as_mapping(config: RunConfig, plan: BatchPlan, *, ranks_per_node: Sequence[int]) -> dict[str, list[int]]:
    """Returns what `plan.json` says about unequal shares: the sizes, and nothing where `planned_sizes` knows none."""
    sizes = planned_sizes(config, plan, ranks_per_node=ranks_per_node)
    return {} if sizes is None else {"sizes": list(sizes)}


def largest_local_size(config: RunConfig, plan: BatchPlan, *, ranks_per_node: Sequence[int]) -> int:
    """Returns the samples of a micro-batch that a rank has to have room for."""
    if config.batch.shares == "measured" and plan.ranks > 1:
        return MOST * plan.local_size
    return max(planned_sizes(config, plan, ranks_per_node=ranks_per_node) or (plan.local_size,))


def require_shares(
    config: RunConfig, plan: BatchPlan, *, layout: ParallelLayout, ranks_per_node: Sequence[int]
) -> None:
    """Does nothing where the ranks may have the shares that were asked for.

    Raises:
        BatchError: they may not.
    """
    shares = config.batch.shares
    if not config.trains or shares == "even":
        return
    problem, hint = _conflict(config, layout)
    if problem:
        raise BatchError(f"batch.shares={_shown(shares)} was asked with {problem}", hint=hint)
    planned_sizes(config, plan, ranks_per_node=ranks_per_node)


def _conflict(config: RunConfig, layout: ParallelLayout) -> tuple[str, str]:
    if not layout.is_replicated:
        return f"a layout of {layout}, and is for whole replicas", "leave batch.shares at even, or use dp_replicate"
    if config.batch.by_length:
        return "batch.by_length=true, which shares out by length", "leave one of the two out"
    if config.ddp.comm == "post_local_sgd":
        what = "ddp.comm=post_local_sgd, whose averages give every node the same weight"
        return what, "leave batch.shares at even, or choose another ddp.comm"
    if config.batch.shares == "measured":
        what = "train.deterministic=true, and what is measured differs from start to start"
        return (what, "give weights, e.g. batch.shares=[2,1]") if config.train.deterministic else ("", "")
    if config.cluster is not None and config.cluster.launcher == "torchrun":
        what = "cluster.launcher=torchrun, which numbers the nodes anew at each start"
        return what, "use batch.shares=measured, or cluster.launcher=srun"
    return "", ""


def sizes_in_words(
    sizes: Sequence[int], *, ranks_per_node: Sequence[int], nodes: Sequence[str], seconds: Sequence[float] | None = None
) -> str:
    """Returns sizes for a person, e.g. "node1 3+3+3+3, node2 2+2".

    Args:
        sizes: rank by rank.
        ranks_per_node: in rank order.
        nodes: their names.
        seconds: a time for each rank, told as well.
    """
    parts, first = [], 0
    for node, ranks in zip(nodes, ranks_per_node, strict=True):
        part = slice(first, first + ranks)
        times = "" if seconds is None else f" ({_range_ms(seconds[part])})"
        parts.append(f"{node} {'+'.join(map(str, sizes[part]))}{times}")
        first += ranks
    more = len(parts) - _NODES_NAMED
    return ", ".join(parts[:_NODES_NAMED]) + (f" and {more} more nodes" if more > 0 else "")


def _range_ms(seconds: Sequence[float]) -> str:
    least, most = f"{1e3 * min(seconds):.3g}", f"{1e3 * max(seconds):.3g}"
    return f"{least} ms" if least == most else f"{least} to {most} ms"


def _shown(shares: str | Sequence[float]) -> str:
    return shares if isinstance(shares, str) else f"[{','.join(f'{weight:g}' for weight in shares)}]"
