"""Which runs a study makes."""

from __future__ import annotations

from slurm_train.scaling.points import Point, Size, plan_points, plan_sizes


def test_sizes_go_from_one_rank_over_one_node_to_all() -> None:
    def names(nodes: int, per_node: int) -> list[str]:
        return [str(size) for size in plan_sizes(nodes, per_node)]

    assert names(4, 8) == ["1x1", "1x8", "2x8", "4x8"]
    assert names(4, 1) == ["1x1", "2x1", "4x1"]
    assert names(6, 2) == ["1x1", "1x2", "2x2", "4x2", "6x2"]
    assert names(1, 4) == ["1x1", "1x4"]


def test_the_largest_size_is_one_run_for_both_series() -> None:
    points = plan_points(4, 2, local_size=4, comms=["none"])
    assert [(str(p.size), p.local_size, p.accumulation, p.global_size, p.modes) for p in points] == [
        ("1x1", 4, 1, 4, ("local",)),
        ("1x2", 4, 1, 8, ("local",)),
        ("2x2", 4, 1, 16, ("local",)),
        ("4x2", 4, 1, 32, ("local", "global")),
        ("1x1", 4, 8, 32, ("global",)),
        ("1x2", 4, 4, 32, ("global",)),
        ("2x2", 4, 2, 32, ("global",)),
    ]


def test_other_ways_of_exchanging_are_tried_where_nodes_are_spanned() -> None:
    points = plan_points(4, 2, local_size=4, comms=["none", "bf16", "powersgd"])
    assert points[-4:] == [
        Point(Size(2, 2), 4, 1, "bf16", ("local",)),
        Point(Size(4, 2), 4, 1, "bf16", ("local",)),
        Point(Size(2, 2), 4, 1, "powersgd", ("local",)),
        Point(Size(4, 2), 4, 1, "powersgd", ("local",)),
    ]
    on_one_node = plan_points(1, 2, local_size=4, comms=["none", "bf16"])
    assert [str(p.size) for p in on_one_node if p.comm == "bf16"] == ["1x2"]


def test_sizes_that_cannot_share_the_global_batch_are_left_out_of_that_series() -> None:
    points = plan_points(3, 1, local_size=1, comms=["none"])
    assert [(str(p.size), p.modes) for p in points if "global" in p.modes] == [
        ("3x1", ("local", "global")),
        ("1x1", ("global",)),
    ]
