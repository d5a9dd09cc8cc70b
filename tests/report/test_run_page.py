"""The page of a run: right for every state, safe for every name, small for every length."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import CheckpointSection, OptimSection, RunConfig, RunSection
from slurm_train.metrics.series import Series
from slurm_train.report.record import RunRecord, Verdict, read_record
from slurm_train.report.run_page import run_page
from tests.report.test_markup import HOSTILE
from tests.support.html_pages import Page
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, evaluated, run_in, steps

NOW = BEGAN_UNIX_S + 5000
HANG = {"event": "hang", "attempt": 0, "step": 50, "time_unix_s": BEGAN_UNIX_S + 50, "sentence": "rank 5 hangs"}
SAVE = {"attempt": 0, "step": 50, "bytes": 2048, "stall_s": 0.01, "save_s": 0.4, "time_unix_s": BEGAN_UNIX_S + 50}


def record_of(folder: Path, verdict: Verdict, **files: Any) -> RunRecord:
    return read_record(RunFiles(**files).write(run_in(folder)), verdict, now_unix_s=NOW)


def full(folder: Path) -> RunRecord:
    """Three attempts, evaluations, events, saves, ranks."""
    metrics = [*steps(1, 60), *steps(51, 100, attempt=1), *steps(90, 100, attempt=2, mfu=0.4)]
    return record_of(
        folder,
        Verdict("finished"),
        ledger=[*ended(0, reason="preempted"), *ended(1, reason="failed", note="rank 1: Killed"), *ended(2)],
        metrics=[*metrics, evaluated(100, attempt=2, eval_loss=1.5, eval_accuracy=0.9)],
        events=[HANG],
        saves=[SAVE, {**SAVE, "step": 60, "bytes": 0, "error": "no space left"}],
        result={"step": 100, "eval_loss": 1.4999},
        provenance={"words": ["optim.lr=1e-3"], "git_commit": "abc", "git_dirty": True, "git_diff": "+x\n-y\n z"},
        slow_ranks={0: 0.1, 1: 0.1, 2: 0.2},
    )


def page_of(record: RunRecord) -> Page:
    return Page(run_page(record))


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    page = page_of(full(tmp_path))
    assert page.problems == []
    titles = [one.text for one in page.of("span", class_="title")]
    assert titles == [
        "Loss",
        "Held-out accuracy",
        "Learning rate",
        "Gradient norm before clipping",
        "Throughput of all ranks",
        "Model FLOP utilisation",
        "Step time on rank 0",
        "Step time by rank",
        "Wait for data by rank",
        "Time of a save",
    ]
    for text in ("attempt 1", "attempt 2", "rank 5 hangs", "rank 1: Killed", "no space left", "1 failed", "1.5"):
        assert text in page.text, text
    assert "21 lines of metrics.jsonl are superseded" in page.text
    assert next(one.text for one in page.of("span", class_="chip")) == "finished"


def test_the_newest_attempts_lines_are_those_that_are_drawn(tmp_path: Path) -> None:
    page = page_of(full(tmp_path))
    data = json.loads(page.of("script", type="application/json")[0].text)
    (train, held_out) = data["curves"]
    assert train["x"] == list(range(1, 101))
    assert (held_out["x"], held_out["y"]) == ([100], [1.5])


STATES: list[tuple[str, Verdict, dict[str, Any], list[str]]] = [
    ("never begun", Verdict("not started"), {}, ["no step is on record yet", "No attempt has begun yet"]),
    ("queued", Verdict("queued", "waits: Priority"), {}, ["waits: Priority", "queued"]),
    ("only starting", Verdict("running"), {"ledger": ended(0)[:1]}, ["no step is on record yet", "not accounted for"]),
    ("one step", Verdict("running"), {"ledger": ended(0)[:1], "metrics": steps(1, 1)}, ["1.0 %", "node[1-2]"]),
    (
        "failed",
        Verdict("failed", "rank 3 on node2: ZeroDivisionError"),
        {"ledger": ended(0, reason="failed"), "metrics": steps(1, 3)},
        ["rank 3 on node2: ZeroDivisionError", "failed"],
    ),
    (
        "a step without a loss",
        Verdict("failed"),
        {"metrics": [*steps(1, 2), *steps(3, 3, loss=None, grad_norm=None)]},
        ["Loss"],
    ),
    ("code of one's own", Verdict("finished"), {"ledger": ended(0), "max_steps": None}, ["finished"]),
    ("running on nodes", Verdict("running", nodelist="node[1-4]"), {"ledger": ended(0)[:1]}, ["on node[1-4]"]),
    ("zero and below", Verdict("running"), {"metrics": steps(1, 9, loss=0.0, lr=0.0, grad_norm=-1.0)}, ["Loss"]),
    ("out of all bounds", Verdict("running"), {"metrics": steps(1, 9, loss=1e300, lr=1e-300)}, ["no step is"]),
    ("config of another version", Verdict("running"), {"config": None}, ["config.yaml cannot be read"]),
]


@pytest.mark.parametrize(("verdict", "files", "texts"), [case[1:] for case in STATES], ids=[case[0] for case in STATES])
def test_a_run_in_any_state_has_a_page(
    verdict: Verdict, files: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    page = page_of(record_of(tmp_path, verdict, **files))
    assert page.problems == []
    assert [text for text in texts if text not in page.text] == []


def test_the_page_asks_nobody_and_runs_its_own_script_only(tmp_path: Path) -> None:
    page = page_of(full(tmp_path))
    assert page.requests() == [] and page.handlers() == []
    (script,) = page.running_scripts()
    assert page.allows(script)
    assert "url(" not in page.source and "@import" not in page.source and "//" not in page.of("style")[0].text


def hostile_record(folder: Path, text: str) -> RunRecord:
    name = text.replace("/", "_").replace("\x00", "")
    config = RunConfig(
        run=RunSection(name=name),
        optim=OptimSection(lr=0.5),
        checkpoint=CheckpointSection(local_dir=text),
        model={"_target_": text, text: text},
        data={text: [text]},
    )
    entry = ended(0, reason=text, note=text * 40, job_id=text)
    entry[0]["nodes"] = [text, f"{text}1"]
    return record_of(
        folder / "x",
        Verdict(text, text),
        config=config,
        ledger=entry,
        metrics=[*steps(1, 3), evaluated(3, **{"eval_loss": 1.0, f"eval_{text}": 2.0})],
        events=[{"event": text, "attempt": 0, "step": 2, "time_unix_s": BEGAN_UNIX_S, "sentence": text, text: text}],
        saves=[SAVE, {**SAVE, "error": text}],
        provenance={"words": [text], "git_diff": f"+{text}", "versions": {text: text}, text: text, "git_commit": text},
        slow_ranks={0: 0.1},
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_anywhere_is_shown_and_does_nothing(text: str, tmp_path: Path) -> None:
    page, tame = page_of(hostile_record(tmp_path, text)), page_of(hostile_record(tmp_path / "tame", "tame"))
    assert page.problems == []
    assert page.requests() == [] and page.handlers() == []
    (script,) = page.running_scripts()
    assert page.allows(script)
    assert {one.name for one in page.elements} == {one.name for one in tame.elements}
    assert page.text.count(text) >= 10
    for one in page.of("script", type="application/json"):
        json.loads(one.text)


def test_many_steps_fit_and_their_spike_is_there(tmp_path: Path) -> None:
    num = 200_000
    columns = {name: array("d", [1.5]) * num for name in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu")}
    columns |= {name: array("d", [0.25]) * num for name in ("step_time_s", "data_time_s")}
    columns |= {"step": array("d", range(1, num + 1)), "attempt": array("d", [0.0]) * num}
    columns["loss"][61_283] = 77.75
    record = replace(record_of(tmp_path, Verdict("finished")), series=Series(columns))
    text = run_page(record)
    assert len(text) < 700_000
    (train,) = json.loads(Page(text).of("script", type="application/json")[0].text)["curves"]
    assert max(train["high"]) == 77.75


def test_what_was_chosen_among_the_settings_is_marked(tmp_path: Path) -> None:
    record = record_of(tmp_path, Verdict("finished"), config=RunConfig(optim=OptimSection(lr=0.5)))
    page = page_of(record)
    rows = [row.text for row in page.of("tr", class_="chosen")]
    assert "optim.lr0.5" in rows
    assert not [row for row in rows if row.startswith("optim.betas")]
