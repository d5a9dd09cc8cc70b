from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.batch import (
    BatchPlan,
    nearest_divisors,
    nearest_multiples,
    planned_lr,
    require_parts,
    retune_lr,
    solve_batch,
)
from slurm_train.config.schema import BatchSection, LrRetune, OptimSection
from slurm_train.errors import BatchError

# (local, accumulation, global) as asked, ranks, (local, accumulation, global) as planned
SOLVED = [
    ((None, None, None), 4, (8, 1, 32)),
    ((None, None, None), 24, (1, 1, 24)),
    ((None, None, None), 3, (11, 1, 33)),
    ((None, None, None), 100, (1, 1, 100)),
    ((8, None, None), 4, (8, 1, 32)),
    ((None, 3, None), 4, (1, 3, 12)),
    ((8, 3, None), 4, (8, 3, 96)),
    ((None, None, 64), 32, (2, 1, 64)),
    ((None, None, 64), 1, (64, 1, 64)),
    ((2, None, 64), 4, (2, 8, 64)),
    ((None, 4, 64), 4, (4, 4, 64)),
    ((4, 4, 64), 4, (4, 4, 64)),
    ((1, None, 6), 6, (1, 1, 6)),
]


@pytest.mark.parametrize(("asked", "ranks", "expected"), SOLVED)
def test_what_is_not_given_is_solved(
    asked: tuple[int | None, int | None, int | None], ranks: int, expected: tuple[int, int, int]
) -> None:
    local, accumulation, total = asked
    section = BatchSection(local_size=local, accumulation=accumulation, global_size=total)
    plan = solve_batch(section, ranks=ranks)
    assert (plan.local_size, plan.accumulation, plan.global_size) == expected


counts = st.one_of(st.none(), st.integers(1, 64))


@settings(deadline=None)
@given(local=counts, accumulation=counts, total=st.one_of(st.none(), st.integers(1, 4096)), ranks=st.integers(1, 300))
def test_a_plan_multiplies_up_and_keeps_what_was_asked(
    local: int | None, accumulation: int | None, total: int | None, ranks: int
) -> None:
    asked = BatchSection(local_size=local, accumulation=accumulation, global_size=total)
    try:
        plan = solve_batch(asked, ranks=ranks)
    except BatchError as err:
        check_refusal(err, asked, ranks)
        return
    assert plan.ranks == ranks
    assert plan.global_size == plan.local_size * plan.ranks * plan.accumulation
    assert min(plan.local_size, plan.accumulation) >= 1
    assert local in (None, plan.local_size)
    assert accumulation in (None, plan.accumulation)
    assert total in (None, plan.global_size)


def check_refusal(err: BatchError, asked: BatchSection, ranks: int) -> None:
    """Every size and rank count that a refusal names must work."""
    sizes = re.search(r"batch\.global_size=(\d+)(?: or (\d+))?", err.hint)
    assert sizes is not None
    for size in filter(None, sizes.groups()):
        changed = BatchSection(local_size=asked.local_size, accumulation=asked.accumulation, global_size=int(size))
        assert solve_batch(changed, ranks=ranks).global_size == int(size)
    named = re.search(r"or use (\d+)(?: or (\d+))? ranks", err.hint)
    for count in filter(None, named.groups() if named else ()):
        assert solve_batch(asked, ranks=int(count)).ranks == int(count)


REFUSED = [
    (
        (None, None, 65),
        32,
        "batch.global_size=65 cannot be split over 32 ranks (32 does not divide it)",
        "set batch.global_size=64 or 96, or use 5 or 13 ranks",
    ),
    (
        (2, None, 7),
        2,
        "batch.global_size=7 cannot be split over 2 ranks x 2 local (4 does not divide it)",
        "set batch.global_size=4 or 8",
    ),
    (
        (None, 3, 10),
        5,
        "batch.global_size=10 cannot be split over 5 ranks x 3 accumulation (15 does not divide it)",
        "set batch.global_size=15",
    ),
    (
        (4, 4, 65),
        4,
        "batch.global_size=65 was asked, but local x ranks x accumulation is 64 = 4 local x 4 ranks x 4 accumulation",
        "set batch.global_size=64, or leave one of the three out to have it solved",
    ),
    ((0, None, None), 4, "batch.local_size=0 is not a batch", "set batch.local_size to 1 or more"),
    ((None, -1, None), 4, "batch.accumulation=-1 is not a batch", "set batch.accumulation to 1 or more"),
    ((None, None, 0), 4, "batch.global_size=0 is not a batch", "set batch.global_size to 1 or more"),
]


@pytest.mark.parametrize(("asked", "ranks", "message", "hint"), REFUSED)
def test_what_does_not_multiply_up_is_refused_with_the_nearest_that_do(
    asked: tuple[int | None, int | None, int | None], ranks: int, message: str, hint: str
) -> None:
    local, accumulation, total = asked
    with pytest.raises(BatchError) as caught:
        solve_batch(BatchSection(local_size=local, accumulation=accumulation, global_size=total), ranks=ranks)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@settings(deadline=None)
@given(value=st.integers(1, 10_000), unit=st.integers(1, 500))
def test_nearest_multiples_enclose_the_value(value: int, unit: int) -> None:
    below, above = nearest_multiples(value, unit)
    assert below % unit == above % unit == 0
    assert below <= value <= above < below + 2 * unit


@pytest.mark.parametrize(("value", "near", "expected"), [(64, 6, [4, 8]), (1, 9, [1]), (7, 3, [1, 7]), (12, 4, [3, 4])])
def test_nearest_divisors(value: int, near: int, expected: list[int]) -> None:
    assert nearest_divisors(value, near) == expected


@pytest.mark.parametrize(
    ("rule", "expected"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)], ids=["none", "linear", "sqrt"]
)
def test_the_learning_rate_follows_its_rule(rule: LrRetune, expected: float) -> None:
    assert retune_lr(1e-3, rule=rule, tuned_for=64, global_size=256) == pytest.approx(expected)
    section = OptimSection(lr=1e-3, lr_retune=rule, lr_global_size=64)
    assert planned_lr(section, global_size=256) == pytest.approx(expected)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_the_learning_rate_stays_where_it_was_tuned_for_this_very_batch(rule: LrRetune) -> None:
    assert planned_lr(OptimSection(lr=1e-3, lr_retune=rule), global_size=256) == 1e-3


def test_the_arithmetic_reads_as_a_sum() -> None:
    plan = BatchPlan(local_size=2, ranks=32, accumulation=1)
    assert plan.as_sum() == "64 = 2 local x 32 ranks x 1 accumulation"


def test_batches_by_length_need_four_samples_per_micro_batch() -> None:
    asked = BatchSection(global_size=24, by_length=True)
    require_parts(asked, solve_batch(asked, ranks=6))
    with pytest.raises(BatchError, match="as few as 6 of them, for 8 micro-batches") as caught:
        require_parts(asked, solve_batch(asked, ranks=8))
    assert caught.value.hint == "set batch.global_size to 32 or more, or lower batch.accumulation"
    require_parts(BatchSection(global_size=24), solve_batch(asked, ranks=8))
    require_parts(asked, BatchPlan(local_size=1, ranks=1, accumulation=1))
    with pytest.raises(BatchError, match="in a pipeline of 2 stages"):
        require_parts(asked, solve_batch(asked, ranks=2), stages=2)
