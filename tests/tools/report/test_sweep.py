"""The document of a sweep: runs compared by one metric, who failed and why, values against results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.tools.report.attempts import Bar, Verdict
from slurm_train.tools.report.page import render
from slurm_train.tools.report.sweep import (
    Trial,
    best_so_far,
    best_trial,
    choose_metric,
    graded,
    parallel,
    sweep_document,
)
from tests.support.documents import blocks, column, text_of
from tests.support.html_pages import Page
from tests.support.sweep_files import RUNS, SweptRun, sweep_document_of, write_sweep


def test_a_run_that_failed_is_named_with_its_reason(tmp_path: Path) -> None:
    document = sweep_document_of(tmp_path)
    (failures,) = blocks(document, name="failures")
    assert failures["runs"] == [3] and column(failures, "why") == ["rank 3 on node2: ZeroDivisionError"]
    assert [column(failures, key) for key in ("state", "optim.lr", "seed")] == [["failed"], ["0.001"], ["1"]]
    assert document["chips"] == [
        ["3 finished", "good"],
        ["1 failed", "bad"],
        ["1 running", "busy"],
        ["1 not started", "calm"],
    ]


def test_every_run_is_a_line_and_a_row(tmp_path: Path) -> None:
    document = sweep_document_of(tmp_path)
    (values,), (runs,) = blocks(document, kind="parallel"), blocks(document, name="runs")
    assert [axis["name"] for axis in values["axes"]] == ["optim.lr", "seed", "eval loss"]
    lines = {one["run"]: one for one in values["runs"]}
    assert [lines[index]["at"] for index in (0, 1, 2, 3)] == [
        *([0.04, 0.04, 0.96], [0.5, 0.04, 0.04], [0.96, 0.04, 0.5], [0.04, 0.96, None])
    ]
    assert (lines[1]["colour"], lines[3]["colour"], lines[3]["has_value"]) == ("q0", "failed", False)
    assert [head["name"] for head in runs["columns"]][:6] == [
        "run",
        "id",
        "optim.lr",
        "seed",
        "state",
        "best eval loss",
    ]
    assert runs["runs"] == list(range(6)) and runs["sortable"]
    assert ("best eval loss", "1", "run 1: optim.lr=0.01 seed=0") in document["tiles"]
    assert [block["key"] for block in blocks(document, kind="plot")] == ["best", "runs_loss", "runs_eval_loss"]


def test_the_settings_leave_out_what_the_runs_do_not_share(tmp_path: Path) -> None:
    sweep, trials = write_sweep(tmp_path)
    path = tmp_path / "runs" / trials[1].run / "config.yaml"
    path.write_text(path.read_text().replace("precision: auto", "precision: float32"))
    (settings,) = blocks(sweep_document(sweep, trials, metric=None, now_unix_s=1.8e9), name="settings")
    names = column(settings, "key")
    assert "optim.betas" in names and not {"optim.lr", "seed", "train.precision"} & set(names)


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ((), "The runs differ in nothing"),
        (RUNS[5:], "No attempt has begun yet"),
        (RUNS[3:4], "rank 3 on node2"),
        (RUNS[:1], "run 0: optim.lr=0.001 seed=0"),
        ((SweptRun(given={}, value=1.0), SweptRun(given={}, value=1.0)), "The runs differ in nothing"),
    ],
    ids=["none", "not begun", "failed", "one", "nothing given"],
)
def test_a_sweep_of_any_size_has_a_page(runs: tuple[SweptRun, ...], text: str, tmp_path: Path) -> None:
    document = sweep_document_of(tmp_path, runs)
    assert text in text_of(document) and Page(render(document)).problems == []


def test_a_thousand_runs_fit(tmp_path: Path) -> None:
    """Files of a few, as the page reads them; a thousand as values."""
    sweep, trials = write_sweep(tmp_path)
    curve = (list(range(1, 41)), [2.345678] * 40)
    many = [
        replace(trials[index % 6], index=index, curves={"loss": curve, "eval_loss": curve}) for index in range(1000)
    ]
    document = sweep_document(sweep, many, metric=None, now_unix_s=1.8e9)
    assert len(json.dumps(document)) < 3_000_000
    assert len(blocks(document, kind="parallel")[0]["runs"]) == 1000


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


TRIALS = [trial(0, 3.0), trial(1, 1.0), trial(2, 2.0), trial(3, state="failed"), trial(4, state="not started")]

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
    asked: str | None, configured: str | None, trials: list[Trial], metric: str
) -> None:
    assert choose_metric(trials, asked=asked, configured=configured) == metric


def test_a_metric_that_no_run_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--metric bleu: no run has it\nhint: there are loss, eval_loss"):
        choose_metric(TRIALS, asked="bleu", configured=None)


def test_runs_are_graded_and_the_best_is_the_smallest_loss_or_the_largest_accuracy() -> None:
    trials = graded(TRIALS, "eval_loss")
    assert [one.value for one in trials] == [3.0, 1.0, 2.0, None, None]
    assert [one.colour for one in trials] == ["q3", "q0", "q2", "failed", "quiet"]
    assert best_trial(trials, "eval_loss") is trials[1]
    best = best_trial(graded(TRIALS, "eval_accuracy"), "eval_accuracy")
    assert best is not None and (best.index, best.grade) == (1, 0)
    grades = [one.grade for one in graded([trial(index, float(index)) for index in range(100)], "eval_loss")]
    assert [grades.count(grade) for grade in range(5)] == [10, 20, 30, 25, 15]


def test_the_best_so_far_only_gets_better_in_the_order_in_which_runs_ended() -> None:
    # The higher the number, the earlier it ended: 3 (failed), 2, 1, 0.
    block = best_so_far(graded(TRIALS, "eval_loss"), "eval_loss")
    best, runs = block["curves"]
    assert (block["x"], best["y"], runs["y"]) == ([2, 3, 4], [2, 1, 1], [2, 1, 3])
    assert [(at, text.rpartition(": ")[2]) for at, text, _ in block["marks"]] == [(1, "failed")]
    for trials in (graded(TRIALS[4:], "loss"), []):
        assert best_so_far(trials, "loss")["note"] == "no run has a value yet"


AXES = [
    ([{"lr": "1e-4"}, {"lr": "1e-2"}, {"lr": "1"}], [0.04, 0.5, 0.96]),
    ([{"seed": "0"}, {"seed": "1"}, {"seed": "2"}], [0.04, 0.5, 0.96]),
    ([{"m": "gpt"}, {"m": "cnn"}, {"m": "gpt"}], [0.25, 0.75, 0.25]),
    ([{"m": "1"}, {"m": "null"}, {"m": "2"}], [0.1667, 0.5, 0.8333]),
    ([{"a": "1"}, {"a": "2"}, {"b": "1"}], [0.04, 0.96, None]),
]


@pytest.mark.parametrize(("given", "places"), AXES, ids=str)
def test_an_axis_of_numbers_is_a_scale_and_one_of_words_is_even(
    given: list[dict[str, str]], places: list[float | None]
) -> None:
    block = parallel([trial(index, 1.0, **one) for index, one in enumerate(given)], "eval_loss")
    found = {one["run"]: one["at"][0] for one in block["runs"]}
    assert [found[index] for index in range(3)] == places
