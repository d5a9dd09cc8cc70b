"""The document of a sweep: runs compared by one metric, who failed and why, values against results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.tools.report.collate import choose_metric
from slurm_train.tools.report.page import render
from slurm_train.tools.report.sweep import grade
from tests.support.documents import plots
from tests.support.html_pages import Page
from tests.support.sweep_files import RUNS, SweptRun, sweep_document_of


def test_every_run_is_there_with_what_it_was_given_and_how_it_ended(tmp_path: Path) -> None:
    document = sweep_document_of(tmp_path)
    (failed,) = [run for run in document["runs"] if run["has_failed"]]
    assert (failed["index"], failed["note"]) == (3, "rank 3 on node2: ZeroDivisionError")
    assert failed["given"] == {"optim.lr": "0.001", "seed": "1"}
    values = document["parallel"]
    assert [axis["name"] for axis in values["axes"]] == ["optim.lr", "seed", "eval loss"]
    lines = {one["run"]: (one["at"], one["colour"]) for one in values["runs"]}
    assert (lines[1], lines[3]) == (((0.5, 0.04, 0.04), "q0"), ((0.04, 0.96, None), "failed"))
    (best,) = [run for run in document["runs"] if run["place"] == 0]
    assert (document["metric"], best["value"], best["label"]) == ("eval_loss", 1.0, "run 1: optim.lr=0.01 seed=0")
    assert list(plots(document)) == ["best", "runs_loss", "runs_eval_loss"]


@pytest.mark.parametrize("runs", [(), RUNS[5:], RUNS[3:4], (SweptRun(given={}, value=1.0),) * 2])
def test_a_sweep_of_any_size_has_a_page(runs: tuple[SweptRun, ...], tmp_path: Path) -> None:
    document = sweep_document_of(tmp_path, runs)
    assert document["parallel"] is None and Page(render(document)).problems == []


def trial(index: int, value: float | None = None, *, has_failed: bool = False) -> dict[str, Any]:
    cells: dict[str, Any] = {"index": index, "best_loss": 2.0}
    cells |= {} if value is None else {"best_eval_loss": value, "best_eval_loss_step": 10, "best_eval_accuracy": -value}
    return {"index": index, "cells": cells, "has_failed": has_failed}


TRIALS = [trial(0, 3.0), trial(1, 1.0), trial(2, 2.0), trial(3, has_failed=True), trial(4)]


@pytest.mark.parametrize(
    ("asked", "configured", "trials", "metric"),
    [
        ("eval_accuracy", None, TRIALS, "eval_accuracy"),
        (None, "eval_accuracy", TRIALS, "eval_accuracy"),
        (None, "nobody_has_it", TRIALS, "eval_loss"),
        (None, None, TRIALS[3:], "loss"),
        (None, None, [], "loss"),
    ],
)
def test_the_metric_that_a_sweep_is_judged_by(
    asked: str | None, configured: str | None, trials: list[dict[str, Any]], metric: str
) -> None:
    assert choose_metric([one["cells"] for one in trials], asked=asked, configured=configured) == metric


def test_runs_are_graded_and_the_best_is_the_smallest_loss_or_the_largest_accuracy() -> None:
    graded = grade(TRIALS, "eval_loss")
    assert [one["place"] for one in graded] == [2, 0, 1, None, None]
    assert [one["colour"] for one in graded] == ["q3", "q0", "q2", "failed", "quiet"]
    assert [one["place"] for one in grade(TRIALS, "eval_accuracy")][:3] == [2, 0, 1]


def test_the_best_so_far_only_gets_better_in_the_order_in_which_runs_ended(tmp_path: Path) -> None:
    values = {"0": 3.0, "1": 2.0, "2": None, "3": 5.0}
    states = {None: "failed"}
    runs = [
        SweptRun(given={"seed": seed}, value=one, state=states.get(one, "finished")) for seed, one in values.items()
    ]
    block = plots(sweep_document_of(tmp_path, runs))["best"]
    best, every = block["curves"]
    assert (block["x"], best["y"], every["y"]) == ([1, 2, 4], [3, 2, 2], [3, 2, 5])
    assert [at for at, _, _ in block["marks"]] == [3]


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ([{"lr": "1e-4"}, {"lr": "1e-2"}, {"lr": "1"}], [0.04, 0.5, 0.96]),
        ([{"m": "gpt"}, {"m": "cnn"}, {"m": "gpt"}], [0.25, 0.75, 0.25]),
        ([{"a": "1"}, {"a": "2"}, {"b": "1"}], [0.04, 0.96, None]),
    ],
)
def test_an_axis_of_numbers_is_a_scale_and_one_of_words_is_even(
    given: list[dict[str, str]], places: list[float | None], tmp_path: Path
) -> None:
    document = sweep_document_of(tmp_path, [SweptRun(given=one, value=1.0) for one in given])
    found = {one["run"]: one["at"][0] for one in document["parallel"]["runs"]}
    assert [found[index] for index in range(3)] == places
