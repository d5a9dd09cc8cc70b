from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.batch import (
    BatchPlan,
    assign_samples,
    check_batch,
    check_schedule,
    cut_equally,
    largest_local_size,
    num_batches,
    planned_lr,
    recut_batch,
    shares_by_weight,
    solve_batch,
    total_steps,
)
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import (
    BatchSection,
    ClusterSection,
    OptimSection,
    RunConfig,
    TrainSection,
)
from slurm_train.errors import BatchError, ConfigError
from tests.support.refusals import refusal

Numbers = tuple[int | None, int | None, int | None]


def section(numbers: Numbers) -> BatchSection:
    return BatchSection(local_size=numbers[0], accumulation=numbers[1], global_size=numbers[2])


def test_what_is_not_given_is_solved() -> None:
    def solved(*numbers: int | None, ranks: int) -> tuple[int, int]:
        plan = solve_batch(section(numbers), ranks=ranks)
        return plan.local_size, plan.accumulation

    assert solved(None, None, None, ranks=3) == (11, 1), "as near to the default as the ranks can share"
    assert solved(8, 3, None, ranks=4) == (8, 3)
    assert solved(2, None, 64, ranks=4) == (2, 8)
    assert solved(None, 4, 64, ranks=4) == (4, 4)
    assert solved(None, None, 64, ranks=3) == (22, 1), "slices of 21, 21 and 22"
    assert solved(8, None, 64, ranks=3) == (8, 3), "micro-batches of at most 8"
    assert solved(None, 2, 64, ranks=3) == (11, 2)


EPOCHS = [
    # epochs, (steps, samples) done at this global batch of 12, steps: an epoch has 97 samples
    (None, (0, 0), 50),
    (2, (0, 0), 17),
    (0.001, (0, 0), 1),
    (2, (10, 60), 22),
    (2, (10, 600), 10),
]


@pytest.mark.parametrize(("epochs", "since", "expected"), EPOCHS)
def test_epochs_are_whole_steps_of_what_is_left_of_their_samples(
    epochs: float | None, since: tuple[int, int], expected: int
) -> None:
    config = RunConfig(train=TrainSection(max_steps=50, max_epochs=epochs))
    assert total_steps(config, num_samples=97, global_size=12, since=since) == expected


def test_epochs_of_steps_that_grow_are_the_first_steps_that_have_their_samples() -> None:
    # 97 samples: four steps of 12, then steps of 24.
    config = RunConfig(train=TrainSection(max_epochs=1.0), batch=BatchSection(growth={"4": 2}))
    assert total_steps(config, num_samples=97, global_size=12) == 7
    assert total_steps(config, num_samples=97, global_size=12, since=(5, 72)) == 7


def test_a_step_takes_as_many_batches_as_the_newest_growth_says() -> None:
    growth = {"10": 3, "4": 2}
    assert [num_batches(growth, step) for step in (4, 5, 10, 11, 12)] == [4, 6, 16, 19, 22]


counts = st.none() | st.integers(1, 64)


@settings(deadline=None)
@given(local=counts, accumulation=counts, total=st.none() | st.integers(1, 4096), ranks=st.integers(1, 300))
def test_a_plan_covers_the_global_batch_and_keeps_what_was_asked(
    local: int | None, accumulation: int | None, total: int | None, ranks: int
) -> None:
    batch = section((local, accumulation, total))
    try:
        plan = solve_batch(batch, ranks=ranks)
    except BatchError as err:
        (size, *_) = re.findall(r"batch\.global_size=(\d+)", err.hint)
        assert solve_batch(replace(batch, global_size=int(size)), ranks=ranks), "what a refusal names works"
        return
    assert plan.ranks == ranks and min(plan.local_size, plan.accumulation) >= 1
    micro_batches = [
        size for share in cut_equally(plan.global_size, plan.ranks) for size in cut_equally(share, plan.accumulation)
    ]
    assert sum(micro_batches) == plan.global_size and len(micro_batches) == ranks * plan.accumulation
    assert max(micro_batches) == plan.local_size and min(micro_batches) >= max(1, plan.local_size - 1)
    assert plan.is_equal is (len(set(micro_batches)) == 1)
    assert plan.accumulation == accumulation or accumulation is None
    assert plan.global_size == total or total is None
    assert local is None or plan.local_size <= local, "memory was asked for so many samples"


@settings(deadline=None)
@given(total=st.integers(1, 4096), ranks=st.integers(1, 300), local=st.integers(1, 64))
def test_a_batch_is_cut_anew_for_any_number_of_ranks_that_have_a_sample_each(
    total: int, ranks: int, local: int
) -> None:
    if total < ranks:
        assert "no sample for each" in refusal(BatchError, recut_batch, total, ranks=ranks, local_size=local).message
        return
    plan = recut_batch(total, ranks=ranks, local_size=local)
    assert plan.global_size == total and plan.ranks == ranks
    # More samples in a micro-batch than before only where no smaller ones would do.
    assert plan.local_size <= local or ranks * (plan.accumulation + 1) > total


REFUSED = [
    (
        *((None, None, 31), 32, "batch.global_size=31 has no sample for each of 32 ranks x 1 micro-batches"),
        "set fewer ranks, or batch.global_size=32 or more",
    ),
    (
        *((1, None, 40), 32, "batch.global_size=40 has no sample for each of 32 ranks x 2 micro-batches"),
        "set batch.accumulation=1 or a larger batch.local_size, or batch.global_size=64 or more",
    ),
    (
        (4, 4, 65),
        4,
        "batch.global_size=65 was asked, but local x ranks x accumulation is 64 = 4 local x 4 ranks x 4 accumulation",
        "set batch.global_size=64, or leave one of the three out to have it solved",
    ),
]


@pytest.mark.parametrize(("numbers", "ranks", "message", "hint"), REFUSED)
def test_what_does_not_multiply_up_is_refused_with_what_does(
    numbers: Numbers, ranks: int, message: str, hint: str
) -> None:
    error = refusal(BatchError, solve_batch, section(numbers), ranks=ranks)
    assert (error.message, error.hint) == (message, hint)


def test_a_pipeline_has_micro_batches_of_one_size() -> None:
    error = refusal(BatchError, solve_batch, section((None, 4, 65)), ranks=2, stages=2)
    assert "of one size" in error.message and error.hint == "set batch.global_size=64 or 72"
    error = refusal(BatchError, recut_batch, 64, ranks=3, local_size=8, stages=2)
    assert "of one size" in error.message and error.hint == "set batch.global_size=63 or 66"
    assert recut_batch(64, ranks=4, local_size=8, stages=2).accumulation == 2


def test_a_pipeline_gets_micro_batches_near_four_for_each_stage_and_never_fewer_than_stages() -> None:
    numbers: list[Numbers] = [(None, None, 64), (None, None, 24), (4, None, None)]
    assert [solve_batch(section(given), ranks=2, stages=2).accumulation for given in numbers] == [8, 6, 8]
    error = refusal(BatchError, solve_batch, section((None, 1, 64)), ranks=2, stages=2)
    assert "needs 2 micro-batches or more" in error.message and "batch.accumulation=2" in error.hint


def test_a_plan_is_shown_as_arithmetic() -> None:
    assert solve_batch(section((2, None, 64)), ranks=32).as_sum() == "64 = 2 local x 32 ranks x 1 accumulation"
    assert solve_batch(section((None, 2, 64)), ranks=3).as_sum() == "64 = 10 or 11 local x 3 ranks x 2 accumulation"


SIX = BatchPlan.equal(local_size=6, ranks=6, accumulation=2)
FOUR_AND_TWO = (4, 2)


def test_the_learning_rate_follows_its_rule() -> None:
    tuned = OptimSection(lr=1e-3, lr_global_size=64)
    rates = [planned_lr(replace(tuned, lr_retune=rule), global_size=256) for rule in ("none", "linear", "sqrt")]
    assert rates == pytest.approx([1e-3, 4e-3, 2e-3])


@settings(deadline=None)
@given(sample_times=st.lists(st.integers(1, 9), min_size=1, max_size=4), more=st.integers(0, 12))
def test_no_other_shares_finish_sooner(sample_times: list[int], more: int) -> None:
    total = len(sample_times) + more
    sizes = assign_samples(total, sample_times)
    assert sum(sizes) == total and min(sizes) >= 1
    finish_time = max(size * time for size, time in zip(sizes, sample_times, strict=True))
    # In any shorter time the ranks together could not compute all samples.
    shorter = finish_time - 1e-9
    capacity = sum(max(1, math.floor(shorter / time)) for time in sample_times)
    assert capacity < total or finish_time == max(sample_times)


def test_weights_are_of_nodes_or_of_ranks() -> None:
    plan = BatchPlan.equal(local_size=4, ranks=3, accumulation=5)
    assert shares_by_weight([2, 1], plan, ranks_per_node=(1, 2)) == (30, 15, 15)
    assert shares_by_weight([3, 2, 1], plan, ranks_per_node=(3,)) == (30, 20, 10)
    assert shares_by_weight([100, 1], plan, ranks_per_node=(1, 2)) == (50, 5, 5), "each micro-batch has a sample"
    config = RunConfig(batch=WEIGHTS)
    assert largest_local_size(config, plan, ranks_per_node=(1, 2)) == 6, "memory for a fifth of 30 samples"


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    assert str(refusal(BatchError, shares_by_weight, [2, 1, 1], SIX, ranks_per_node=FOUR_AND_TWO)) == (
        "batch.shares=[2,1,1] has 3 weights, for 6 ranks on nodes of 4 + 2\n"
        "hint: give one weight for each node or for each rank, or batch.shares=even"
    )
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BatchError, match="a weight that is not above 0"):
            shares_by_weight([2, wrong], SIX, ranks_per_node=FOUR_AND_TWO)


WEIGHTS = BatchSection(shares=[2.0, 1.0])
TORCHRUN = ClusterSection(launcher="torchrun")
# Configuration, (local size, ranks, accumulation) of the plan, degrees of the layout, what is refused.
CONFLICTS: list[tuple[RunConfig, tuple[int, int, int], dict[str, int], str | None]] = [
    (RunConfig(batch=BatchSection(growth={"soon": 2})), (4, 1, 4), {}, "'soon' where a number of steps is wanted"),
    (RunConfig(batch=BatchSection(growth={"5": 2})), (4, 1, 4), {"pp": 2}, "batch.growth in a pipeline of 2 stages"),
    (RunConfig(batch=BatchSection(by_length=True)), (3, 8, 1), {}, "as few as 6 of them, for 8 micro-batches"),
    (RunConfig(batch=BatchSection(by_length=True)), (4, 8, 1), {}, None),
    (RunConfig(batch=BatchSection(by_length=True)), (1, 1, 1), {}, None),
    (RunConfig(batch=BatchSection(by_length=True)), (8, 2, 1), {"pp": 2}, "in a pipeline of 2 stages"),
    (RunConfig(batch=WEIGHTS), (12, 6, 2), {"dp_shard": 2}, "a layout of dp_replicate 6 x dp_shard 2"),
    (RunConfig(batch=replace(WEIGHTS, by_length=True)), (12, 6, 2), {}, "batch.by_length=true"),
    (RunConfig(batch=WEIGHTS, cluster=TORCHRUN), (12, 6, 2), {}, "cluster.launcher=torchrun"),
    (RunConfig(batch=WEIGHTS, train=TrainSection(deterministic=True)), (12, 6, 2), {}, None),
]


@pytest.mark.parametrize(("config", "sizes", "degrees", "text"), CONFLICTS)
def test_what_does_not_go_together_is_refused(
    config: RunConfig, sizes: tuple[int, int, int], degrees: dict[str, int], text: str | None
) -> None:
    local, ranks, accumulation = sizes
    plan = BatchPlan.equal(local_size=local, ranks=ranks, accumulation=accumulation)
    layout = ParallelLayout(**({"dp_replicate": ranks} | degrees))

    def check() -> None:
        check_batch(config, plan, layout=layout, ranks_per_node=FOUR_AND_TWO)

    if text is None:
        check()
    else:
        assert text in refusal(BatchError, check).message


@pytest.mark.parametrize(
    ("optim", "fits"),
    [
        ({"warmup_samples": 9599}, True),
        ({"warmup_samples": 9600}, False),
        ({"schedule": "inverse_sqrt", "warmup_samples": 10_000}, False),
        ({"schedule": "wsd", "warmup_samples": 5000, "decay_samples": 4600}, True),
        ({"schedule": "wsd", "warmup_samples": 5000, "decay_samples": 4601}, False),
        ({"schedule": "wsd", "warmup_samples": 8000}, False),
        ({"schedule": "wsd", "decay_samples": 9600}, False),
        ({"schedule": "linear", "decay_samples": 96}, False),
        # What a function of the user's own makes of them is its business.
        ({"schedule": {"_target_": "my.schedule"}, "warmup_samples": 20_000}, True),
        ({"warmup_samples": 0}, True),
        ({"schedule": "constant"}, True),
    ],
)
def test_a_schedule_fits_into_its_run_or_is_refused(optim: dict[str, Any], fits: bool) -> None:
    """A warm-up that is over before the end, and in wsd a fall that begins after it."""
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError):
        check_schedule(OptimSection(**optim), total_samples=9600, global_size=32)
