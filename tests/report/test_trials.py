"""Runs of a sweep compared: the metric they are judged by, the best, the grades, the axes."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.report.parallel import axes_of
from slurm_train.report.record import Verdict
from slurm_train.report.sweep_plots import best_so_far, run_curves
from slurm_train.report.timeline import Bar
from slurm_train.report.trials import Trial, best_trial, choose_metric, graded


def trial(index: int, value: float | None = None, *, state: str = "finished", **given: str) -> Trial:
    bar = Bar(attempt=0, start_unix_s=0, end_unix_s=100 - index, world_size=1, seconds={}, reason="done")
    cells: dict[str, Any] = {"index": index, "best_loss": 2.0}
    cells |= {} if value is None else {"best_eval_loss": value, "best_eval_loss_step": 10, "best_eval_accuracy": -value}
    return Trial(
        index=index,
        run=f"gpt/{index:08x}",
        given=given or {"optim.lr": str(10.0**-index), "seed": "0"},
        verdict=Verdict(state),
        is_active=state == "running",
        cells=cells,
        bars=[] if state == "not started" else [bar],
        curves={"loss": ([1, 2], [3.0, 2.0])},
    )


RUNS = [trial(0, 3.0), trial(1, 1.0), trial(2, 2.0), trial(3, state="failed"), trial(4, state="not started")]

CHOICES = [
    (None, None, RUNS, "eval_loss"),
    ("eval_accuracy", None, RUNS, "eval_accuracy"),
    (None, "eval_accuracy", RUNS, "eval_accuracy"),
    (None, "nobody_has_it", RUNS, "eval_loss"),
    (None, None, RUNS[3:], "loss"),
    (None, None, [], "loss"),
]


@pytest.mark.parametrize(("asked", "configured", "trials", "metric"), CHOICES)
def test_the_metric_that_a_sweep_is_judged_by(
    asked: str | None, configured: str | None, trials: list[Trial], metric: str
) -> None:
    assert choose_metric(trials, asked=asked, configured=configured) == metric


def test_a_metric_that_no_run_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--metric bleu: no run has it\nhint: there are loss, eval_loss"):
        choose_metric(RUNS, asked="bleu", configured=None)


def test_runs_are_graded_by_their_rank_and_the_best_is_the_smallest_loss() -> None:
    trials = graded(RUNS, "eval_loss")
    assert [one.value for one in trials] == [3.0, 1.0, 2.0, None, None]
    assert [one.colour for one in trials] == ["q3", "q0", "q2", "failed", "quiet"]
    assert best_trial(trials, "eval_loss") is trials[1]


def test_of_an_accuracy_the_largest_is_the_best() -> None:
    trials = graded(RUNS, "eval_accuracy")
    best = best_trial(trials, "eval_accuracy")
    assert best is not None and best.index == 1
    assert trials[1].grade == 0


def test_a_hundred_runs_have_ten_of_the_best_grade() -> None:
    grades = [one.grade for one in graded([trial(index, float(index)) for index in range(100)], "eval_loss")]
    assert [grades.count(grade) for grade in range(5)] == [10, 20, 30, 25, 15]


def test_the_best_so_far_only_gets_better_in_the_order_in_which_runs_ended() -> None:
    # The higher the number, the earlier it ended: 3 (failed), 2, 1, 0.
    plot = best_so_far(graded(RUNS, "eval_loss"), "eval_loss")
    best, runs = plot.curves
    assert (list(best.x), list(best.y)) == ([2, 3, 3, 4, 4, 4], [2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    assert (list(runs.x), list(runs.y)) == ([2, 3, 4], [2.0, 1.0, 3.0])
    assert [(mark.x, mark.text.rpartition(": ")[2]) for mark in plot.marks] == [(1, "failed")]


def test_a_sweep_without_a_value_has_an_empty_plot_that_says_so() -> None:
    plot = best_so_far(graded(RUNS[4:], "loss"), "loss")
    assert plot.is_empty and plot.note == "no run has a value yet"
    assert best_so_far([], "loss").note == "no run has a value yet"


def test_the_best_curve_is_drawn_last() -> None:
    (plot,) = run_curves(graded(RUNS, "eval_loss"), "eval_loss")
    assert [curve.key for curve in plot.curves][-1] == "1"
    assert len(plot.curves) == 5


AXES = [
    ([{"lr": "1e-4"}, {"lr": "1e-2"}, {"lr": "1"}], True, [0.04, 0.5, 0.96]),
    ([{"seed": "0"}, {"seed": "1"}, {"seed": "2"}], False, [0.04, 0.5, 0.96]),
    ([{"m": "gpt"}, {"m": "cnn"}, {"m": "gpt"}], None, [0.25, 0.75, 0.25]),
    ([{"m": "1"}, {"m": "null"}, {"m": "2"}], None, [1 / 6, 0.5, 5 / 6]),
    ([{"a": "1"}, {"a": "2"}, {"b": "1"}], False, [0.04, 0.96, None]),
]


@pytest.mark.parametrize(("given", "is_log", "places"), AXES, ids=str)
def test_an_axis_of_numbers_is_a_scale_and_one_of_words_is_even(
    given: list[dict[str, str]], is_log: bool | None, places: list[float | None]
) -> None:
    trials = [trial(index, 1.0, **one) for index, one in enumerate(given)]
    axis = axes_of(trials, "eval_loss")[0]
    assert (None if axis.scale is None else axis.scale.is_log) == is_log
    assert [None if place is None else round(place, 2) for place in axis.places] == [
        None if place is None else round(place, 2) for place in places
    ]


def test_a_key_with_one_value_has_no_axis_and_the_metric_always_has_one() -> None:
    axes = axes_of(graded([trial(0, 1.0, a="1", b="2"), trial(1, 2.0, a="1", b="3")], "eval_loss"), "eval_loss")
    assert [axis.name for axis in axes] == ["b", "eval loss"]
    assert [text for _, text in axes[1].ticks] == ["1", "2"]
