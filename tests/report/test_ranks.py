from __future__ import annotations

from slurm_train.report.ranks import rank_plots, shown_attempt
from slurm_train.rundir.step_times import Histogram, RankTimes


def times(rank: int, host: str, num: int = 10) -> RankTimes:
    step = Histogram({320 + rank: num}, 3.0)
    return RankTimes(rank, host, step, Histogram({100: num}, 0.001))


def test_the_attempt_with_the_most_steps_is_shown_and_the_newest_of_equals() -> None:
    assert shown_attempt({}) is None
    assert (
        shown_attempt({0: [times(0, "a", 5)], 1: [times(0, "a", 9)], 2: [times(0, "a", 9)], 3: [times(0, "a", 1)]}) == 2
    )


def test_a_rank_stands_with_its_percentiles_and_its_node() -> None:
    step, wait = rank_plots([times(0, "node1"), times(1, "node1"), times(2, "node2")])
    longest, late, middle = step.curves
    assert list(middle.x) == [0.0, 1.0, 2.0] and list(middle.labels) == ["node1", "node1", "node2"]
    assert all(low <= at <= high for low, at, high in zip(middle.low, middle.y, middle.high, strict=True))
    assert list(longest.y) == [3.0, 3.0, 3.0] and step.y_label == "s"
    assert (wait.y_label, list(wait.curves[0].y)) == ("ms", [1.0, 1.0, 1.0])
    assert [(mark.x, mark.text) for mark in step.marks] == [(-0.5, "node1"), (1.5, "node2")]
    assert len(late.y) == 3


def test_one_node_needs_no_mark() -> None:
    assert rank_plots([times(0, "node1"), times(1, "node1")])[0].marks == []
