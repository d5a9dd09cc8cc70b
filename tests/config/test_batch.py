from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.batch import (
    BatchPlan,
    assign_samples,
    check_batch,
    num_batches,
    planned_lr,
    sizes_by_speed,
    sizes_by_weight,
    solve_batch,
    total_steps,
)
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.schema import (
    BatchSection,
    ClusterSection,
    DdpSection,
    LrRetune,
    OptimSection,
    RunConfig,
    TrainSection,
)
from slurm_train.errors import BatchError
from tests.support.refusals import refusal

Asked = tuple[int | None, int | None, int | None]


def section(asked: Asked) -> BatchSection:
    return BatchSection(local_size=asked[0], accumulation=asked[1], global_size=asked[2])


# (local, accumulation, global) as asked, ranks, (local, accumulation, global) as planned
SOLVED = [
    ((None, None, None), 4, (8, 1, 32)),
    ((None, None, None), 3, (11, 1, 33)),
    ((None, None, None), 100, (1, 1, 100)),
    ((8, 3, None), 4, (8, 3, 96)),
    ((None, None, 64), 32, (2, 1, 64)),
    ((2, None, 64), 4, (2, 8, 64)),
    ((None, 4, 64), 4, (4, 4, 64)),
]


@pytest.mark.parametrize(("asked", "ranks", "expected"), SOLVED)
def test_what_is_not_given_is_solved(asked: Asked, ranks: int, expected: tuple[int, int, int]) -> None:
    plan = solve_batch(section(asked), ranks=ranks)
    assert (plan.local_size, plan.accumulation, plan.global_size) == expected


EPOCHS = [
    # epochs, (steps, samples) done at this global batch of 12, steps: an epoch has 97 samples
    (None, (0, 0), 50),
    (1, (0, 0), 9),
    (2, (0, 0), 17),
    (0.5, (0, 0), 4),
    (0.001, (0, 0), 1),
    (12, (0, 0), 97),
    (2, (10, 60), 22),
    (2, (10, 600), 10),
]


@pytest.mark.parametrize(("epochs", "since", "expected"), EPOCHS)
def test_epochs_are_whole_steps_of_what_is_left_of_their_samples(
    epochs: float | None, since: tuple[int, int], expected: int
) -> None:
    config = RunConfig(train=TrainSection(max_steps=50, max_epochs=epochs))
    assert total_steps(config, num_samples=97, global_size=12, since=since) == expected


@given(
    st.dictionaries(st.integers(0, 12).map(str), st.integers(1, 4), max_size=3),
    st.integers(0, 400),
    st.integers(0, 5),
)
def test_epochs_of_steps_that_grow_are_the_first_steps_that_have_their_samples(
    growth: dict[str, int], samples: int, done_steps: int
) -> None:
    def step_size(step: int) -> int:
        return (
            12 * max(((int(after), factor) for after, factor in growth.items() if int(after) < step), default=(0, 1))[1]
        )

    done = sum(map(step_size, range(1, done_steps + 1)))
    config = RunConfig(train=TrainSection(max_epochs=1.0), batch=BatchSection(growth=growth))
    steps = done_steps
    while 12 * num_batches(growth, steps) < samples or steps < 1:
        steps += 1
    assert 12 * num_batches(growth, steps) == sum(map(step_size, range(1, steps + 1)))
    found = total_steps(config, num_samples=samples, global_size=12, since=(done_steps, done))
    assert found == max(1, steps if done < samples else done_steps)


@pytest.mark.parametrize(
    ("growth", "layout", "text"),
    [
        ({"soon": 2}, ParallelLayout(), "batch.growth has 'soon' where a number of steps is wanted"),
        ({"5": 2}, ParallelLayout(pp=2), "batch.growth in a pipeline of 2 stages"),
    ],
)
def test_growth_that_makes_no_sense_is_refused(growth: dict[str, int], layout: ParallelLayout, text: str) -> None:
    config = RunConfig(batch=BatchSection(growth=growth))
    with pytest.raises(BatchError, match=text):
        check_batch(config, BatchPlan(local_size=4, ranks=1, accumulation=4), layout=layout, ranks_per_node=[1])


counts = st.one_of(st.none(), st.integers(1, 64))


@settings(deadline=None)
@given(local=counts, accumulation=counts, total=st.one_of(st.none(), st.integers(1, 4096)), ranks=st.integers(1, 300))
def test_a_plan_multiplies_up_and_keeps_what_was_asked(
    local: int | None, accumulation: int | None, total: int | None, ranks: int
) -> None:
    asked = section((local, accumulation, total))
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
    """Every size that a refusal names must work."""
    sizes = re.search(r"batch\.global_size=(\d+)(?: or (\d+))?", err.hint)
    for size in filter(None, sizes.groups()):
        assert solve_batch(replace(asked, global_size=int(size)), ranks=ranks).global_size == int(size)


REFUSED = [
    (
        (None, None, 65),
        32,
        "batch.global_size=65 cannot be split over 32 ranks",
        "set batch.global_size=64 or 96",
    ),
    (
        (2, None, 7),
        2,
        "batch.global_size=7 cannot be split over 2 ranks x 2 (batch.local_size or batch.accumulation)",
        "set batch.global_size=4 or 8",
    ),
    (
        (None, 3, 10),
        5,
        "batch.global_size=10 cannot be split over 5 ranks x 3 (batch.local_size or batch.accumulation)",
        "set batch.global_size=15",
    ),
    (
        (4, 4, 65),
        4,
        "batch.global_size=65 was asked, but local x ranks x accumulation is 64 = 4 local x 4 ranks x 4 accumulation",
        "set batch.global_size=64, or leave one of the three out to have it solved",
    ),
]


@pytest.mark.parametrize(("asked", "ranks", "message", "hint"), REFUSED)
def test_what_does_not_multiply_up_is_refused_with_the_nearest_that_do(
    asked: Asked, ranks: int, message: str, hint: str
) -> None:
    error = refusal(BatchError, solve_batch, section(asked), ranks=ranks)
    assert (error.message, error.hint) == (message, hint)


@pytest.mark.parametrize(("rule", "expected"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_the_learning_rate_follows_its_rule(rule: LrRetune, expected: float) -> None:
    optim = OptimSection(lr=1e-3, lr_retune=rule, lr_global_size=64)
    assert planned_lr(optim, global_size=256) == pytest.approx(expected)
    assert planned_lr(replace(optim, lr_global_size=None), global_size=256) == 1e-3, "tuned for this very batch"


def check(batch: BatchSection, plan: BatchPlan, *, pp: int = 1) -> None:
    layout = ParallelLayout(dp_replicate=plan.ranks, pp=pp)
    check_batch(RunConfig(batch=batch), plan, layout=layout, ranks_per_node=(plan.ranks * pp,))


def test_batches_by_length_need_four_samples_per_micro_batch() -> None:
    asked = BatchSection(global_size=24, by_length=True)
    check(asked, solve_batch(asked, ranks=6))
    with pytest.raises(BatchError, match="as few as 6 of them, for 8 micro-batches") as caught:
        check(asked, solve_batch(asked, ranks=8))
    assert caught.value.hint == "set batch.global_size to 32 or more, or lower batch.accumulation"
    check(BatchSection(global_size=24), solve_batch(asked, ranks=8))
    check(asked, BatchPlan(local_size=1, ranks=1, accumulation=1))
    with pytest.raises(BatchError, match="in a pipeline of 2 stages"):
        check(asked, solve_batch(asked, ranks=2), pp=2)


SIX = BatchPlan(local_size=6, ranks=6, accumulation=2)
FOUR_AND_TWO = (4, 2)


@settings(deadline=None)
@given(costs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4), more=st.integers(0, 12))
def test_no_other_shares_finish_sooner(costs: list[tuple[int, int]], more: int) -> None:
    total = len(costs) + more
    sizes = assign_samples(total, costs)
    assert sum(sizes) == total and min(sizes) >= 1
    last = max(fixed + each * size for (fixed, each), size in zip(costs, sizes, strict=True))
    # Whatever the ranks could do in less time than the last one takes is not enough.
    sooner = last - 1e-9
    room = [max(1, math.floor((sooner - fixed) / each)) for fixed, each in costs]
    assert sum(room) < total or last == max(fixed + each for fixed, each in costs)


@pytest.mark.parametrize(
    ("weights", "ranks_per_node", "sizes"),
    [
        ([2, 1], (1, 2), (6, 3, 3)),
        ([3, 2, 1], (3,), (6, 4, 2)),
        ([100, 1], (1, 2), (10, 1, 1)),
        ([0.2, 0.1, 0.1], (1, 1, 1), (6, 3, 3)),
    ],
)
def test_weights_are_of_nodes_or_of_ranks(
    weights: list[float], ranks_per_node: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    plan = BatchPlan(local_size=4, ranks=3, accumulation=5)
    assert sizes_by_weight(weights, plan, ranks_per_node=ranks_per_node) == sizes


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    assert str(refusal(BatchError, sizes_by_weight, [2, 1, 1], SIX, ranks_per_node=FOUR_AND_TWO)) == (
        "batch.shares=[2,1,1] has 3 weights, for 6 ranks on nodes of 4 + 2\n"
        "hint: give one weight for each node or for each rank, or batch.shares=measured or even"
    )
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BatchError, match="a weight that is not above 0"):
            sizes_by_weight([2, wrong], SIX, ranks_per_node=FOUR_AND_TWO)


MEASURED = [
    ("half as quick", [(0.1, 0.2)] * 4 + [(0.2, 0.4)] * 2, (8, 8, 7, 7, 3, 3)),
    ("alike within 5 %", [(0.100, 0.200)] * 4 + [(0.104, 0.208)] * 2, (6,) * 6),
    ("far slower: no rank gets more than twice an equal share", [(0.1, 0.2)] + [(9.0, 18.0)] * 5, (12, 5, 5, 5, 5, 4)),
    ("no room on two ranks", [(0.2, 0.4)] * 4 + [(0.1, math.inf)] * 2, (6,) * 6),
    ("time does not depend on the samples", [(0.1, 0.1)] * 4 + [(0.2, 0.2)] * 2, (6,) * 6),
    ("part of it does", [(0.2, 0.3)] * 4 + [(0.3, 0.5)] * 2, (7, 7, 7, 7, 4, 4)),
    ("not a number", [(0.1, 0.2)] * 5 + [(math.nan, 0.4)], (6,) * 6),
]


@pytest.mark.parametrize(("seconds", "sizes"), [case[1:] for case in MEASURED], ids=[case[0] for case in MEASURED])
def test_measured_shares(seconds: list[tuple[float, float]], sizes: tuple[int, ...]) -> None:
    choice = sizes_by_speed(seconds, SIX)
    assert choice.sizes == sizes
    assert math.isnan(choice.equal_s) or choice.chosen_s <= choice.equal_s == max(once for once, _ in seconds)


BOTH = {"measured", "[2,1]"}
CONFLICTS = [
    (RunConfig(), {"dp_shard": 2, "dp_replicate": 3}, "a layout of dp_replicate 3 x dp_shard 2", BOTH),
    (RunConfig(batch=BatchSection(by_length=True)), {}, "batch.by_length=true", BOTH),
    (RunConfig(ddp=DdpSection(comm="post_local_sgd")), {}, "ddp.comm=post_local_sgd", BOTH),
    (RunConfig(cluster=ClusterSection(launcher="torchrun")), {}, "cluster.launcher=torchrun", {"[2,1]"}),
    (RunConfig(train=TrainSection(deterministic=True)), {}, "train.deterministic=true", {"measured"}),
]


@pytest.mark.parametrize(("config", "degrees", "problem", "expected"), CONFLICTS, ids=[case[2] for case in CONFLICTS])
def test_what_unequal_shares_do_not_go_with_is_refused(
    config: RunConfig, degrees: dict[str, int], problem: str, expected: set[str]
) -> None:
    layout = ParallelLayout(**degrees) if degrees else ParallelLayout(dp_replicate=6)
    refused = set()
    for name, shares in (("even", "even"), ("measured", "measured"), ("[2,1]", [2.0, 1.0])):
        asked = replace(config, batch=replace(config.batch, shares=shares))
        try:
            check_batch(asked, replace(SIX, local_size=12), layout=layout, ranks_per_node=FOUR_AND_TWO)
        except BatchError as err:
            assert err.message.startswith(f"batch.shares={name} was asked with {problem}") and err.hint
            refused.add(name)
    assert refused == expected
