"""The page of a sweep: who failed and why, values against results, every run in the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.report.page import BAD, mood
from slurm_train.report.record import read_config
from slurm_train.report.sweep_page import sweep_page
from slurm_train.report.sweep_record import _shared
from slurm_train.standing.states import RunState
from tests.report.test_markup import HOSTILE
from tests.support.html_pages import Page
from tests.support.sweep_files import RUNS, SweptRun, sweep_record


def page_of(folder: Path, runs: tuple[SweptRun, ...] = RUNS) -> Page:
    return Page(sweep_page(sweep_record(folder, runs)))


def test_a_run_that_failed_is_named_with_its_reason(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    (table,) = page.of("table", class_="failures")
    assert table.text == "runstatewhyoptim.lrseed3failedrank 3 on node2: ZeroDivisionError0.0011"
    assert {one.text for one in page.of("p", class_="counts")} == {"3 finished1 failed1 running1 not started"}


def test_every_run_is_a_line_and_a_row(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    lines = {one.attributes["data-run"]: one for one in page.of("path", class_="run-line")}
    assert sorted(lines) == [str(index) for index in range(6)]
    assert [one.text for one in page.of("span", class_="name")][1:] == ["optim.lr", "seed", "eval loss"]
    places = [lines[str(index)].attributes["data-v"] for index in (0, 1, 2, 3)]
    assert places == ["0.0370,0.0370,0.9630", "0.5000,0.0370,0.0370", "0.9630,0.0370,0.5000", "0.0370,0.9630,"]
    assert "q0" in (lines["1"].attributes["class"] or "") and "failed" in (lines["3"].attributes["class"] or "")
    (table,) = page.of("table", class_="runs")
    assert table.text.startswith("runidoptim.lrseedstatebest eval loss")
    assert page.problems == []


def test_the_best_run_is_said_with_what_it_was_given(tmp_path: Path) -> None:
    tiles = [one.text for one in page_of(tmp_path).of("div", class_="tile")]
    assert "best eval loss1run 1: optim.lr=0.01 seed=0" in tiles
    assert "runs63 finished" in tiles


def test_the_settings_leave_out_what_the_sweep_sets(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    names = {one.text for one in page.of("th", scope="row")}
    assert "optim.betas" in names and not {"optim.lr", "seed"} & names
    assert page.of("code", class_="command")[0].text.endswith("-m optim.lr=1e-3,1e-2,1e-1 seed=0,1")


def test_the_settings_leave_out_what_a_file_of_the_sweep_sets(tmp_path: Path) -> None:
    sweep_record(tmp_path)
    folders = sorted((tmp_path / "runs").glob("*/0*/config.yaml"))
    text = folders[1].read_text()
    assert "name:" in text and "precision:" in text
    folders[1].write_text(text.replace("precision: auto", "precision: float32"))
    shared = _shared([read_config(path) for path in folders])
    assert "precision" not in shared["train"] and shared["train"]["max_steps"] == 1000


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
    page = page_of(tmp_path, runs)
    assert page.problems == [] and text in page.text


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_anywhere_is_shown_and_does_nothing(text: str, tmp_path: Path) -> None:
    runs = tuple(
        SweptRun(given={"a": f"{text}{index}", text: str(index)}, value=float(index), state="failed", note=text)
        for index in range(3)
    )
    page = page_of(tmp_path, runs)
    assert page.problems == [] and page.requests() == [] and page.handlers() == []
    (script,) = page.running_scripts()
    assert page.allows(script)
    for one in page.of("script", type="application/json"):
        json.loads(one.text)
    assert page.text.count(text) > 10


def test_a_thousand_runs_fit(tmp_path: Path) -> None:
    """Files of a few, as the page reads them; a thousand as values."""
    record = sweep_record(tmp_path)
    curve = (list(range(1, 41)), [2.345678] * 40)
    trials = [
        replace(record.trials[index % 6], index=index, curves={"loss": curve, "eval_loss": curve})
        for index in range(1000)
    ]
    text = sweep_page(replace(record, trials=trials))
    assert len(text) < 3_000_000
    assert text.count('class="run-line') == 1000


@pytest.mark.parametrize("state", RunState)
def test_every_state_has_its_mood(state: RunState) -> None:
    """A new state is bad until somebody says otherwise."""
    calm = {"finished", "running", "queued", "requeued", "finishing", "not_started", "stopped", "completed"}
    assert (mood(state.value) == mood(state.label) == BAD) == (state.value not in calm)
