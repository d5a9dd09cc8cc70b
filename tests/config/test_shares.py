from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.batch import BatchPlan
from slurm_train.config.layout import ParallelLayout
from slurm_train.config.schema import BatchSection, ClusterSection, DdpSection, RunConfig, TrainSection
from slurm_train.config.shares import (
    PassCost,
    deal_out,
    largest_local_size,
    planned_sizes,
    require_shares,
    sizes_by_speed,
    sizes_by_weight,
    sizes_in_words,
)
from slurm_train.errors import BatchError

SIX = BatchPlan(local_size=6, ranks=6, accumulation=2)
FOUR_AND_TWO = (4, 2)


@settings(deadline=None)
@given(costs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4), more=st.integers(0, 12))
def test_no_other_shares_are_done_sooner(costs: list[tuple[int, int]], more: int) -> None:
    lines, total = [PassCost(*cost) for cost in costs], len(costs) + more
    sizes = deal_out(total, lines)
    assert sum(sizes) == total and min(sizes) >= 1
    last = max(line.of(size) for line, size in zip(lines, sizes, strict=True))
    # Whatever the ranks could do in less time than the last one takes is not enough.
    sooner = last - 1e-9
    room = [max(1, math.floor((sooner - line.fixed) / line.per_sample)) for line in lines]
    assert sum(room) < total or last == max(line.of(1) for line in lines)


@pytest.mark.parametrize(
    ("weights", "ranks_per_node", "sizes"),
    [
        ([2, 1], (1, 2), (6, 3, 3)),
        ([3, 2, 1], (3,), (6, 4, 2)),
        ([1], (3,), (4, 4, 4)),
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
    with pytest.raises(BatchError) as caught:
        sizes_by_weight([2, 1, 1], SIX, ranks_per_node=FOUR_AND_TWO)
    assert str(caught.value) == (
        "batch.shares=[2,1,1] has 3 weights, for 6 ranks on nodes of 4 + 2\n"
        "hint: give one weight for each node or for each rank, or batch.shares=measured or even"
    )
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BatchError, match="a weight that is not above 0"):
            sizes_by_weight([2, wrong], SIX, ranks_per_node=FOUR_AND_TWO)


MEASURED = [
    ("half as quick", [(0.1, 0.2)] * 4 + [(0.2, 0.4)] * 2, (8, 8, 7, 7, 3, 3)),
    ("alike within 5 %", [(0.100, 0.200)] * 4 + [(0.104, 0.208)] * 2, (6,) * 6),
    ("far slower: nobody gets more than twice an equal share", [(0.1, 0.2)] + [(9.0, 18.0)] * 5, (12, 5, 5, 5, 5, 4)),
    ("no room on two ranks", [(0.2, 0.4)] * 4 + [(0.1, math.inf)] * 2, (6,) * 6),
    ("time does not depend on the samples", [(0.1, 0.1)] * 4 + [(0.2, 0.2)] * 2, (6,) * 6),
    ("part of it does", [(0.2, 0.3)] * 4 + [(0.3, 0.5)] * 2, (7, 7, 7, 7, 4, 4)),
    ("not a number", [(0.1, 0.2)] * 5 + [(math.nan, 0.4)], (6,) * 6),
    ("nothing", [(0.1, 0.2)] * 5 + [(0.0, 0.4)], (6,) * 6),
]


@pytest.mark.parametrize(("seconds", "sizes"), [case[1:] for case in MEASURED], ids=[case[0] for case in MEASURED])
def test_measured_shares(seconds: list[tuple[float, float]], sizes: tuple[int, ...]) -> None:
    choice = sizes_by_speed(seconds, SIX)
    assert choice.sizes == sizes
    assert math.isnan(choice.equal_s) or choice.chosen_s <= choice.equal_s == max(once for once, _ in seconds)


CONFLICTS = [
    (RunConfig(), {"dp_shard": 2, "dp_replicate": 3}, "a layout of dp_replicate 3 x dp_shard 2"),
    (RunConfig(batch=BatchSection(by_length=True)), {}, "batch.by_length=true"),
    (RunConfig(ddp=DdpSection(comm="post_local_sgd")), {}, "ddp.comm=post_local_sgd"),
    (RunConfig(cluster=ClusterSection(launcher="torchrun")), {}, "cluster.launcher=torchrun"),
    (RunConfig(train=TrainSection(deterministic=True)), {}, "train.deterministic=true"),
]


@pytest.mark.parametrize(("config", "degrees", "problem"), CONFLICTS, ids=[case[2] for case in CONFLICTS])
def test_what_unequal_shares_do_not_go_with_is_refused(
    config: RunConfig, degrees: dict[str, int], problem: str
) -> None:
    layout = ParallelLayout(**degrees) if degrees else ParallelLayout(dp_replicate=6)
    refused = set()
    for name, shares in (("even", "even"), ("measured", "measured"), ("[2,1]", [2.0, 1.0])):
        asked = replace(config, batch=replace(config.batch, shares=shares))
        try:
            require_shares(asked, SIX, layout=layout, ranks_per_node=FOUR_AND_TWO)
        except BatchError as err:
            assert err.message.startswith(f"batch.shares={name} was asked with {problem}") and err.hint
            refused.add(name)
    only = {"cluster.launcher=torchrun": {"[2,1]"}, "train.deterministic=true": {"measured"}}
    assert refused == only.get(problem, {"measured", "[2,1]"})


def test_the_plan_knows_the_largest_share() -> None:
    def planned(shares: object) -> tuple[tuple[int, ...] | None, int]:
        config = RunConfig(batch=BatchSection(shares=shares))  # type: ignore[arg-type]
        sizes = planned_sizes(config, SIX, ranks_per_node=FOUR_AND_TWO)
        return sizes, largest_local_size(config, SIX, ranks_per_node=FOUR_AND_TWO)

    assert planned("even") == (None, 6)
    assert planned("measured") == (None, 12)
    assert planned([4, 1]) == ((8, 8, 8, 8, 2, 2), 8)


def test_many_nodes_are_said_in_short() -> None:
    nodes = [f"node{number}" for number in range(1, 9)]
    words = sizes_in_words([2, 1] * 8, ranks_per_node=[2] * 8, nodes=nodes, seconds=[0.03, 0.05] + [0.04] * 14)
    assert words.startswith("node1 2+1 (30 to 50 ms), node2 2+1 (40 ms)")
    assert words.endswith("node6 2+1 (40 ms) and 2 more nodes")
