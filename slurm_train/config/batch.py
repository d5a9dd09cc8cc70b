"""The batch plan: global batch = local x ranks x accumulation, solved or refused before anything happens.

Any of local, accumulation and global may be given; the rest is solved. An inconsistent set is refused with the
nearest ones that work. The learning rate follows a changed global batch by a named rule, or not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from slurm_train.config.schema import BatchSection, LrRetune, OptimSection
from slurm_train.errors import BatchError

_BATCHES_PER_STAGE = 4
LEAST_SHARE = 4
"""A batch by length has at least a fourth of the mean number of samples, however long they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A consistent cut of the global batch."""

    local_size: int
    """Samples per rank and micro-batch."""
    ranks: int
    """Data-parallel ranks."""
    accumulation: int
    """Micro-batches per optimizer step."""

    @property
    def global_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.local_size * self.ranks * self.accumulation

    def as_sum(self) -> str:
        """Returns the arithmetic in words, e.g. "64 = 2 local x 32 ranks x 1 accumulation"."""
        return f"{self.global_size} = {self.local_size} local x {self.ranks} ranks x {self.accumulation} accumulation"


def solve_batch(asked: BatchSection, *, ranks: int, stages: int = 1) -> BatchPlan:
    """Returns the plan for what was asked on so many data-parallel ranks.

    With only the global size given there is one micro-batch per step; with nothing given, the default global size is
    rounded to what the ranks can share. Through a pipeline flow at least as many micro-batches as it has stages, and
    where that is left open four times as many: its stages then stand idle for a fifth of the time at most.

    Raises:
        BatchError: a value below one, or numbers that do not multiply up.
    """
    if stages == 1:
        return _solve(asked, ranks)
    plan = _solve(_fill_pipeline(asked, ranks, stages), ranks)
    if plan.accumulation < stages:
        raise BatchError(
            f"a pipeline of {stages} stages needs {stages} micro-batches or more, the batch is {plan.as_sum()}",
            hint=f"set batch.accumulation={stages} or more, or a larger batch.global_size",
        )
    return plan


def _fill_pipeline(asked: BatchSection, ranks: int, stages: int) -> BatchSection:
    wanted = _BATCHES_PER_STAGE * stages
    if asked.accumulation is not None or (asked.global_size is not None and asked.local_size is not None):
        return asked
    if asked.global_size is None:
        local = asked.local_size or max(1, round(asked.default_global_size / (ranks * wanted)))
        return replace(asked, local_size=local, accumulation=wanted)
    share = asked.global_size // ranks if asked.global_size > 0 else 0
    fitting = [count for count in range(stages, share + 1) if share % count == 0]
    if not fitting or asked.global_size % ranks:
        return asked
    return replace(asked, accumulation=min(fitting, key=lambda count: abs(count - wanted)))


def _solve(asked: BatchSection, ranks: int) -> BatchPlan:
    for name in ("local_size", "accumulation", "global_size", "default_global_size"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise BatchError(f"batch.{name}={value} is not a batch", hint=f"set batch.{name} to 1 or more")
    if asked.local_size is asked.accumulation is asked.global_size is None:
        return BatchPlan(local_size=max(1, round(asked.default_global_size / ranks)), ranks=ranks, accumulation=1)
    if asked.global_size is None:
        return BatchPlan(local_size=asked.local_size or 1, ranks=ranks, accumulation=asked.accumulation or 1)
    if asked.local_size is not None and asked.accumulation is not None:
        return _check_all(asked, ranks)
    unit = ranks * (asked.local_size or asked.accumulation or 1)
    if asked.global_size % unit:
        raise _indivisible(asked, ranks, unit)
    rest = asked.global_size // unit
    if asked.local_size is not None:
        return BatchPlan(local_size=asked.local_size, ranks=ranks, accumulation=rest)
    return BatchPlan(local_size=rest, ranks=ranks, accumulation=asked.accumulation or 1)


def require_parts(asked: BatchSection, plan: BatchPlan, *, stages: int = 1) -> None:
    """Does nothing where every micro-batch gets a sample, however long the samples of a batch are.

    Raises:
        BatchError: batches by length may have fewer samples than there are micro-batches, or flow through a pipeline.
    """
    if asked.by_length and stages > 1:
        raise BatchError(
            f"batch.by_length=true in a pipeline of {stages} stages, which exchange micro-batches of one shape",
            hint="leave batch.by_length at false, or parallel.pp at 1",
        )
    parts = plan.ranks * plan.accumulation
    if not asked.by_length or parts == 1 or plan.global_size >= LEAST_SHARE * parts:
        return
    raise BatchError(
        f"batch.by_length=true with a global batch of {plan.as_sum()}: a batch of long samples has as few as "
        f"{max(1, plan.global_size // LEAST_SHARE)} of them, for {parts} micro-batches",
        hint=f"set batch.global_size to {LEAST_SHARE * parts} or more, or lower batch.accumulation",
    )


def recut_batch(global_size: int, *, ranks: int, local_size: int, stages: int = 1) -> BatchPlan:
    """Returns the plan that keeps the global batch on another number of ranks.

    Args:
        global_size: samples per optimizer step, as before.
        ranks: data-parallel ranks now.
        local_size: samples of a micro-batch before, which fitted into memory: there are not more now.
        stages: stages of the pipeline, which needs as many micro-batches.

    Raises:
        BatchError: the global batch cannot be shared by so many ranks, or fill the pipeline.
    """
    if global_size % ranks:
        raise _indivisible(BatchSection(global_size=global_size), ranks, ranks)
    share = global_size // ranks
    if share < stages:
        raise BatchError(
            f"batch.global_size={global_size} gives each of {ranks} data-parallel ranks {share} samples, which do not "
            f"fill a pipeline of {stages} stages",
            hint=f"set batch.global_size={ranks * stages} or more, or a smaller parallel.pp",
        )
    local = max(size for size in range(1, min(local_size, share // stages) + 1) if share % size == 0)
    return BatchPlan(local_size=local, ranks=ranks, accumulation=share // local)


def _check_all(asked: BatchSection, ranks: int) -> BatchPlan:
    assert asked.local_size and asked.accumulation and asked.global_size
    plan = BatchPlan(local_size=asked.local_size, ranks=ranks, accumulation=asked.accumulation)
    if plan.global_size != asked.global_size:
        raise BatchError(
            f"batch.global_size={asked.global_size} was asked, but local x ranks x accumulation is {plan.as_sum()}",
            hint=f"set batch.global_size={plan.global_size}, or leave one of the three out to have it solved",
        )
    return plan


def _indivisible(asked: BatchSection, ranks: int, unit: int) -> BatchError:
    assert asked.global_size
    below, above = nearest_multiples(asked.global_size, unit)
    factors = f"{ranks} ranks"
    if asked.local_size:
        factors += f" x {asked.local_size} local"
    elif asked.accumulation:
        factors += f" x {asked.accumulation} accumulation"
    per_rank = unit // ranks
    counts = nearest_divisors(asked.global_size // per_rank, ranks) if asked.global_size % per_rank == 0 else []
    hint = f"set batch.global_size={' or '.join(str(size) for size in (below, above) if size)}"
    return BatchError(
        f"batch.global_size={asked.global_size} cannot be split over {factors} ({unit} does not divide it)",
        hint=f"{hint}, or use {' or '.join(map(str, counts))} ranks" if counts else hint,
    )


def nearest_multiples(value: int, unit: int) -> tuple[int, int]:
    """Returns the multiples of `unit` next below (0 if there is none) and next above a value."""
    return value // unit * unit, -(-value // unit) * unit


def nearest_divisors(value: int, near: int) -> list[int]:
    """Returns the divisors of a value closest to `near`, at most two, ascending."""
    divisors = {d for k in range(1, math.isqrt(value) + 1) if value % k == 0 for d in (k, value // k)}
    return sorted(sorted(divisors, key=lambda d: (abs(d - near), d))[:2])


def retune_lr(lr: float, *, rule: LrRetune, tuned_for: int, global_size: int) -> float:
    """Returns the learning rate for a global batch other than the one it was tuned for.

    linear: Goyal et al. 2017, arXiv 1706.02677 (SGD). sqrt: Krizhevsky 2014, arXiv 1404.5997, and for Adam
    Malladi et al. 2022, arXiv 2205.10287.
    """
    ratio = global_size / tuned_for
    if rule == "linear":
        return lr * ratio
    if rule == "sqrt":
        return lr * math.sqrt(ratio)
    return lr


def planned_lr(optim: OptimSection, *, global_size: int) -> float:
    """Returns the peak learning rate of a run with this global batch, retuned by its rule."""
    tuned_for = optim.lr_global_size or global_size
    return retune_lr(optim.lr, rule=optim.lr_retune, tuned_for=tuned_for, global_size=global_size)
