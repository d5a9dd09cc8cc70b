"""The document of a run: right for every state, complete, short where files are damaged, small for every length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import OptimSection, RunConfig
from slurm_train.rundir import timing
from slurm_train.rundir.attempts import read_ledger
from slurm_train.tools.report.page import render
from slurm_train.tools.report.run import CAUSES, provenance, read_attempts, run_document, time_by_cause
from tests.support.documents import HOSTILE, document_in, plots, strings
from tests.support.html_pages import Page
from tests.support.run_documents import SLOW, document_of, full_document, hostile_document, window
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, run_in, steps


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    document = full_document(tmp_path)
    assert list(plots(document)) == [
        *("loss", "eval_accuracy", "lr", "grad_norm", "tokens_per_s", "mfu", "step_time"),
        *("rank_step_time", "rank_data_wait", "saves"),
    ]
    assert (document["state"], document["num_superseded"], document["num_events"]) == ("finished", 21, 1)
    assert document["progress"]["evaluations"] == [("eval_loss", 1.4999, None), ("eval_accuracy", 0.9, 100)]
    assert [save.get("error") for save in document["saves"]] == [None, "no space left"]
    assert [one["note"] for one in document["attempts"] if "note" in one] == ["rank 1: Killed"]
    (finding,) = document["stragglers"]["findings"]
    assert (finding["sentence"], finding["advice"]) == (SLOW.sentence, SLOW.advice)


def test_the_newest_attempts_lines_are_those_that_are_drawn(tmp_path: Path) -> None:
    loss = plots(full_document(tmp_path))["loss"]
    train, held_out = loss["curves"]
    assert loss["x"] == list(range(1, 101)) and None not in train["y"]
    assert held_out["y"][98:] == [None, 1.5] and held_out["kind"] == "dots"
    assert loss["marks"] == [
        (51, "attempt 1", "attempt"),
        (90, "attempt 2", "attempt"),
        (50, "hang at step 50", "event"),
    ]


def test_profiles_are_named_by_their_place_beside_the_page(tmp_path: Path) -> None:
    run = RunFiles(ledger=ended(0), metrics=steps(1, 5)).write(run_in(tmp_path))
    assert run_document(run, state="finished", now_unix_s=1.8e9)["profiles"] == []
    run.profiles.mkdir()
    (run.profiles / "step_5_attempt_0_rank_0.json.gz").touch()
    document = run_document(run, state="finished", now_unix_s=1.8e9)
    assert document["profiles"] == ["profiles/step_5_attempt_0_rank_0.json.gz"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_anywhere_is_data(text: str, tmp_path: Path) -> None:
    page = Page(render(hostile_document(tmp_path, text)))
    tame = Page(render(hostile_document(tmp_path / "tame", "tame")))
    assert page.problems == [] and page.requests() == [] and page.handlers() == []
    assert [one.name for one in page.elements] == [one.name for one in tame.elements]
    assert "\n".join(strings(document_in(page))).count(text) >= 10


FILES = ("config", "plan", "attempts", "metrics", "events", "saves", "provenance", "result", "changes")
DAMAGE = [
    *(b"", b"{", b"\x00\xff\xfe garbage", b"[]\n", b"null\n", b'{"attempt": 0}\n', b"a: [b: {c: \n- d"),
    b'{"attempt": "x", "step": "y", "event": 3, "time_unix_s": "now"}\n',
    b'{"step": 1, "attempt": 0, "loss": 1e999}\n',
    b'{"words": 3, "versions": [1], "git_diff": 5, "max_steps": "many", "names": 1}\n',
]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_costs_what_it_held(name: str, tmp_path: Path) -> None:
    files = RunFiles(ledger=ended(0), metrics=steps(1, 5), result={"step": 5}, slow_ranks={0: 0.1})
    run = files.write(run_in(tmp_path))
    path = getattr(run, name)
    for damage in DAMAGE:
        path.write_bytes(damage)
        assert "why" in render(run_document(run, state="failed", note="why", now_unix_s=1.8e9)), damage
    path.unlink()
    assert run_document(run, state="failed", now_unix_s=1.8e9)


def test_checkpoints_that_are_not_whole_are_told_apart(tmp_path: Path) -> None:
    run = RunFiles().write(run_in(tmp_path))
    (run.checkpoints / "checkpoint_0000004_attempt_0000_00000000").mkdir(parents=True)
    assert run_document(run, state="finished", now_unix_s=1.8e9)["stored"] == [(4, None)]


def test_a_long_run_fits_and_its_spike_is_there(tmp_path: Path) -> None:
    lines = steps(1, 60_000, loss=1.5)
    lines[31_283]["loss"] = 77.75
    document = document_of(tmp_path, metrics=lines)
    assert max(value for value in plots(document)["loss"]["curves"][0]["high"] if value is not None) == 77.75
    assert len(render(document)) < 400_000


def test_what_was_chosen_among_the_settings_is_marked(tmp_path: Path) -> None:
    found = {one["key"]: one for one in document_of(tmp_path, config=RunConfig(optim=OptimSection(lr=0.5)))["settings"]}
    assert (found["optim.lr"]["value"], found["optim.lr"]["is_chosen"]) == (0.5, True)
    assert not found["optim.betas"]["is_chosen"]


def test_a_long_difference_is_cut_and_says_where_the_rest_is() -> None:
    long = "\n".join(f"+line {number}" for number in range(5000))
    found = provenance(
        {"git_diff": long, "folders": [{"git_diff": long}], "environment": {"packages": {}}, "host": "a"}
    )
    assert "line 2999" in found["git_diff"] and "line 3000" not in found["git_diff"]
    assert "2000 more lines in provenance.json" in found["folders"][0]["git_diff"]
    assert set(found) == {"git_diff", "folders", "host"}


# Attempts.


def attempts_in(folder: Path, ledger: list[dict[str, Any]], *, is_running: bool = False, **files: Any) -> list[Any]:
    run = RunFiles(ledger=ledger, **files).write(run_in(folder))
    return read_attempts(run, until_unix_s=BEGAN_UNIX_S + 1000 if is_running else None)


def test_the_causes_of_an_attempt_add_up_to_its_queue_and_its_hold(tmp_path: Path) -> None:
    (one,) = attempts_in(tmp_path, ended(0, queue_s=30.0, lost_work_s=20.0))
    assert sum(one["seconds"].values()) == pytest.approx(130)
    assert (one["seconds"]["productive_s"], one["seconds"]["lost_work_s"]) == (40.0, 20.0)
    assert set(one["seconds"]) <= set(CAUSES)


def test_goodput_is_that_of_status(tmp_path: Path) -> None:
    attempts = attempts_in(tmp_path, [*ended(0, lost_work_s=20.0), *ended(1, suspended_s=20.0, step_s=40.0)])
    found = time_by_cause(attempts)
    assert found["goodput"] == pytest.approx(timing.goodput(read_ledger(run_in(tmp_path))).share)
    assert found["seconds"]["suspended_s"] == 20.0 and found["device_s"]["suspended_s"] == 40.0


def test_code_of_ones_own_has_no_causes_and_an_end_before_the_begin_no_time(tmp_path: Path) -> None:
    lines = ended(0)
    lines[1] = {key: value for key, value in lines[1].items() if not key.endswith("_s") or key == "time_unix_s"}
    attempts = attempts_in(tmp_path / "a", lines)
    assert attempts[0]["seconds"] == {"unknown_s": 100.0} and time_by_cause(attempts)["goodput"] is None
    lines[1]["time_unix_s"] = BEGAN_UNIX_S - 50
    attempts = attempts_in(tmp_path / "b", lines)
    assert attempts[0]["seconds"] == {} and time_by_cause(attempts)["held_s"] == 0.0


def test_an_attempt_without_an_end_lasts_until_now_or_until_its_last_sign(tmp_path: Path) -> None:
    def ends_of(attempts: list[Any]) -> list[tuple[str, float]]:
        return [(one["reason"], one["end_time_unix_s"] - one["time_unix_s"]) for one in attempts]

    attempts = attempts_in(tmp_path / "a", [*ended(0)[:1], *ended(1)[:1]], is_running=True)
    assert ends_of(attempts) == [("no end on record", 0.0), ("running", 780.0)]
    line = {"step": 3, "attempt": 0, "loss": 1.0, "time_unix_s": BEGAN_UNIX_S + 17}
    assert ends_of(attempts_in(tmp_path / "b", ended(0)[:1], metrics=[line])) == [("no end on record", 17.0)]


# Ranks.


def test_ranks_are_compared_in_the_attempt_with_the_most_steps(tmp_path: Path) -> None:
    document = document_of(tmp_path, ledger=[*ended(0), *ended(1)], slow_ranks={0: 3.0, 1: 3.0, 2: 6.0})
    assert (document["ranks"]["attempt"], document["ranks"]["num_attempts"]) == (0, 1)
    assert [(one["rank"], one["host"], one["steps"]) for one in document["ranks"]["ranks"]][2] == (2, "node2", 20)
    step, wait = plots(document)["rank_step_time"], plots(document)["rank_data_wait"]
    longest, _, middle = step["curves"]
    assert (step["x"], step["unit"], middle["labels"]) == ([0, 1, 2], "s", ["node1", "node1", "node2"])
    assert all(low <= at <= high for low, at, high in zip(middle["low"], middle["y"], middle["high"], strict=True))
    assert longest["y"] == [3, 3, 6] and (wait["unit"], wait["curves"][0]["y"]) == ("ms", [30, 30, 60])
    assert step["marks"] == [(-0.5, "node1", "node"), (1.5, "node2", "node")]
    assert document_of(tmp_path / "none")["ranks"] is None


def test_the_map_shows_causes_and_not_their_victims(tmp_path: Path) -> None:
    slowed = [window(at, 0.1, 0.1, 0.16, 0.1, findings=(SLOW,)) for at in (1, 2)]
    found = document_of(tmp_path, windows=[window(0, 0.1, 0.1, 0.1, 0.1), *slowed])["stragglers"]
    assert found["map"]["percent"] == [(0, 0, 0), (0, 0, 0), (0, 60, 60), (0, 0, 0)]
    assert [edge - BEGAN_UNIX_S for edge in found["map"]["edges_unix_s"]] == [0, 10, 20, 30]
    (finding,) = found["findings"]
    assert finding["end_unix_s"] - finding["begin_unix_s"] == 20 and finding["lost_share"] == 0.36
    assert [one["named"] for one in found["ranks"]] == [0, 0, 2, 0] and found["ranks"][2]["host"] == "node2"


def test_the_map_is_of_the_longest_record_and_of_two_ranks_the_quick_one_is_the_measure(tmp_path: Path) -> None:
    windows = [window(0, 0.1, 0.1), window(1, 0.1, 0.2, attempt=1), window(2, 0.1, 0.2, attempt=1)]
    found = document_of(tmp_path, windows=windows)["stragglers"]
    assert (found["attempt"], found["num_windows"], found["findings"]) == (1, 3, [])
    assert found["map"]["percent"] == [(0, 0), (100, 100)]
    assert document_of(tmp_path / "alone", windows=[window(0, 0.1)])["stragglers"] is None


def test_a_map_of_many_windows_and_ranks_stays_small(tmp_path: Path) -> None:
    windows = [window(number, *(0.1 + 0.05 * ((number + rank) % 3) for rank in range(64))) for number in range(1000)]
    heat = document_of(tmp_path, windows=windows)["stragglers"]["map"]
    assert len(heat["edges_unix_s"]) <= 161 and len(json.dumps(heat)) < 60_000
