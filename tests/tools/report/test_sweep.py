"""The document of a sweep: runs compared by one metric, who failed and why, values against results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.tools.report.page import render
from slurm_train.tools.report.sweep import choose_metric, grade, sweep_document
from tests.support.documents import plots
from tests.support.html_pages import Page
from tests.support.sweep_files import RUNS, SweptRun, sweep_document_of, write_sweep


def test_every_run_is_there_with_what_it_was_given_and_how_it_ended(tmp_path: Path) -> None:
    document = sweep_document_of(tmp_path)
    failed = [run for run in document["runs"] if run["has_failed"]]
    assert [(run["index"], run["note"]) for run in failed] == [(3, "rank 3 on node2: ZeroDivisionError")]
    assert failed[0]["given"] == {"optim.lr": "0.001", "seed": "1"}
    values = document["parallel"]
    assert [axis["name"] for axis in values["axes"]] == ["optim.lr", "seed", "eval loss"]
    lines = {one["run"]: one for one in values["runs"]}
    assert [lines[index]["at"] for index in (0, 1, 2, 3)] == [
        *((0.04, 0.04, 0.96), (0.5, 0.04, 0.04), (0.96, 0.04, 0.5), (0.04, 0.96, None))
    ]
    assert (lines[1]["colour"], lines[3]["colour"], lines[3]["has_value"]) == ("q0", "failed", False)
    (best,) = [run for run in document["runs"] if run["place"] == 0]
    assert (document["metric"], best["value"], best["label"]) == ("eval_loss", 1.0, "run 1: optim.lr=0.01 seed=0")
    assert list(plots(document)) == ["best", "runs_loss", "runs_eval_loss"]
    assert document["time"]["num_attempts"] == 5


def test_the_settings_leave_out_what_the_runs_do_not_share(tmp_path: Path) -> None:
    sweep, elements, trials = write_sweep(tmp_path)
    path = elements[1].run.config
    path.write_text(path.read_text().replace("precision: auto", "precision: float32"))
    document = sweep_document(sweep, elements, trials, metric=None, now_unix_s=1.8e9)
    names = {one["key"] for one in document["settings"]}
    assert "optim.betas" in names and not {"optim.lr", "seed", "train.precision"} & names


@pytest.mark.parametrize(
    "runs",
    [(), RUNS[5:], RUNS[3:4], RUNS[:1], (SweptRun(given={}, value=1.0), SweptRun(given={}, value=1.0))],
    ids=["none", "not begun", "failed", "one", "nothing given"],
)
def test_a_sweep_of_any_size_has_a_page(runs: tuple[SweptRun, ...], tmp_path: Path) -> None:
    document = sweep_document_of(tmp_path, runs)
    assert document["parallel"] is None and Page(render(document)).problems == []


def test_a_thousand_runs_fit(tmp_path: Path) -> None:
    """Files of a few, as the page reads them; a thousand as values."""
    sweep, elements, trials = write_sweep(tmp_path)
    many = [trials[index % 6] | {"index": index} for index in range(1000)]
    elements = [elements[index % 6] for index in range(1000)]
    numbered = [type(one)(index=index, run=one.run, overrides=one.overrides) for index, one in enumerate(elements)]
    document = sweep_document(sweep, numbered, many, metric=None, now_unix_s=1.8e9)
    assert len(json.dumps(document)) < 3_000_000
    assert len(document["parallel"]["runs"]) == 1000


def trial(index: int, value: float | None = None, *, has_failed: bool = False) -> dict[str, Any]:
    cells: dict[str, Any] = {"index": index, "best_loss": 2.0}
    cells |= {} if value is None else {"best_eval_loss": value, "best_eval_loss_step": 10, "best_eval_accuracy": -value}
    return {"index": index, "cells": cells, "has_failed": has_failed}


TRIALS = [trial(0, 3.0), trial(1, 1.0), trial(2, 2.0), trial(3, has_failed=True), trial(4)]

CHOICES = [
    (None, None, TRIALS, "eval_loss"),
    ("eval_accuracy", None, TRIALS, "eval_accuracy"),
    (None, "eval_accuracy", TRIALS, "eval_accuracy"),
    (None, "nobody_has_it", TRIALS, "eval_loss"),
    (None, None, TRIALS[3:], "loss"),
    (None, None, [], "loss"),
]


@pytest.mark.parametrize(("asked", "configured", "trials", "metric"), CHOICES)
def test_the_metric_that_a_sweep_is_judged_by(
    asked: str | None, configured: str | None, trials: list[dict[str, Any]], metric: str
) -> None:
    assert choose_metric([one["cells"] for one in trials], asked=asked, configured=configured) == metric


def test_a_metric_that_no_run_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--metric bleu: no run has it\nhint: there are loss, eval_loss"):
        choose_metric([one["cells"] for one in TRIALS], asked="bleu", configured=None)


def test_runs_are_graded_and_the_best_is_the_smallest_loss_or_the_largest_accuracy() -> None:
    graded = grade(TRIALS, "eval_loss")
    assert [one["value"] for one in graded] == [3.0, 1.0, 2.0, None, None]
    assert [one["place"] for one in graded] == [2, 0, 1, None, None]
    assert [one["colour"] for one in graded] == ["q3", "q0", "q2", "failed", "quiet"]
    assert [one["place"] for one in grade(TRIALS, "eval_accuracy")][:3] == [2, 0, 1]
    colours = [one["colour"] for one in grade([trial(index, float(index)) for index in range(100)], "eval_loss")]
    assert [colours.count(f"q{number}") for number in range(5)] == [10, 20, 30, 25, 15]


def test_the_best_so_far_only_gets_better_in_the_order_in_which_runs_ended(tmp_path: Path) -> None:
    values = (3.0, 2.0, None, 5.0)
    runs = [
        SweptRun(given={"seed": str(at)}, value=one, state="finished" if one else "failed")
        for at, one in enumerate(values)
    ]
    block = plots(sweep_document_of(tmp_path, runs))["best"]
    best, every = block["curves"]
    assert (block["x"], best["y"], every["y"]) == ([1, 2, 4], [3, 2, 2], [3, 2, 5])
    assert [(at, text.rpartition(": ")[2]) for at, text, _ in block["marks"]] == [(3, "failed")]


AXES = [
    ([{"lr": "1e-4"}, {"lr": "1e-2"}, {"lr": "1"}], [0.04, 0.5, 0.96]),
    ([{"seed": "0"}, {"seed": "1"}, {"seed": "2"}], [0.04, 0.5, 0.96]),
    ([{"m": "gpt"}, {"m": "cnn"}, {"m": "gpt"}], [0.25, 0.75, 0.25]),
    ([{"m": "1"}, {"m": "null"}, {"m": "2"}], [0.1667, 0.5, 0.8333]),
    ([{"a": "1"}, {"a": "2"}, {"b": "1"}], [0.04, 0.96, None]),
]


@pytest.mark.parametrize(("given", "places"), AXES, ids=str)
def test_an_axis_of_numbers_is_a_scale_and_one_of_words_is_even(
    given: list[dict[str, str]], places: list[float | None], tmp_path: Path
) -> None:
    document = sweep_document_of(tmp_path, [SweptRun(given=one, value=1.0) for one in given])
    found = {one["run"]: one["at"][0] for one in document["parallel"]["runs"]}
    assert [found[index] for index in range(3)] == places
