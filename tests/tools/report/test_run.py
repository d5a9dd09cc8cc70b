"""The document of a run: right for every state, complete, short where files are damaged, small for every length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir import timing
from slurm_train.rundir.ledger import read_ledger
from slurm_train.tools.report.page import render
from slurm_train.tools.report.run import CAUSES, read_attempts, run_document, time_by_cause
from tests.support.documents import HOSTILE, document_in, plots, strings
from tests.support.html_pages import Page
from tests.support.run_documents import SLOW, document_of, full_document, hostile_document, window
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, run_in, steps


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    document = full_document(tmp_path)
    assert {"loss", "eval_accuracy", "lr", "mfu", "rank_data_wait", "saves"} <= plots(document).keys()
    assert (document["state"], document["num_superseded"], document["num_events"]) == ("finished", 21, 1)
    assert document["progress"]["evaluations"] == [("eval_loss", 1.4999, None), ("eval_accuracy", 0.9, 100)]
    assert [save.get("error") for save in document["saves"]] == [None, "no space left"]
    assert [one["note"] for one in document["attempts"] if one["note"]] == ["rank 1: Killed"]
    loss = plots(document)["loss"]
    train, held_out = loss["curves"]
    assert loss["x"] == list(range(1, 101)) and None not in train["y"], "the newest attempt's lines are drawn"
    assert held_out["y"][98:] == [None, 1.5]
    assert [at for at, _, _ in loss["marks"]] == [51, 90, 50]


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


def test_a_long_run_fits_and_its_spike_is_there(tmp_path: Path) -> None:
    lines = steps(1, 60_000, loss=1.5)
    lines[31_283]["loss"] = 77.75
    document = document_of(tmp_path, metrics=lines)
    assert max(value for value in plots(document)["loss"]["curves"][0]["high"] if value is not None) == 77.75
    assert len(render(document)) < 400_000


# Attempts.


def attempts_in(folder: Path, ledger: list[dict[str, Any]], *, is_running: bool = False, **files: Any) -> list[Any]:
    run = RunFiles(ledger=ledger, **files).write(run_in(folder))
    return read_attempts(run, until_unix_s=BEGAN_UNIX_S + 1000 if is_running else None)


def test_the_causes_of_an_attempt_add_up_and_goodput_is_that_of_status(tmp_path: Path) -> None:
    ledger = [*ended(0, queue_s=30.0, lost_work_s=20.0), *ended(1, suspended_s=20.0, step_s=40.0)]
    attempts = attempts_in(tmp_path, ledger)
    seconds = attempts[0]["seconds"]
    assert sum(seconds.values()) == pytest.approx(130) and set(seconds) <= set(CAUSES)
    assert (seconds["productive_s"], seconds["lost_work_s"]) == (40.0, 20.0)
    found = time_by_cause(attempts)
    assert found["goodput"] == pytest.approx(timing.goodput(read_ledger(run_in(tmp_path))).share)
    assert found["seconds"]["suspended_s"] == 20.0 and found["device_s"]["suspended_s"] == 40.0


def test_code_of_ones_own_has_no_causes_and_an_end_before_the_begin_no_time(tmp_path: Path) -> None:
    begin, end = ended(0)
    end = {key: value for key, value in end.items() if not key.endswith("_s") or key == "time_unix_s"}
    (one,) = attempts_in(tmp_path / "a", [begin, end])
    assert one["seconds"] == {"unknown_s": 100.0} and time_by_cause([one])["goodput"] is None
    (one,) = attempts_in(tmp_path / "b", [begin, end | {"time_unix_s": BEGAN_UNIX_S - 50}])
    assert one["seconds"] == {} and time_by_cause([one])["held_s"] == 0.0


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
    step = plots(document)["rank_step_time"]
    assert (step["curves"][0]["y"], step["unit"]) == ([3, 3, 6], "s")
    assert step["marks"] == [(-0.5, "node1", "node"), (1.5, "node2", "node")]
    assert document_of(tmp_path / "none")["ranks"] is None


def test_the_map_shows_causes_and_not_their_victims(tmp_path: Path) -> None:
    slowed = [window(at, 0.1, 0.1, 0.16, 0.1, findings=(SLOW,)) for at in (1, 2)]
    found = document_of(tmp_path, windows=[window(0, 0.1, 0.1, 0.1, 0.1), *slowed])["stragglers"]
    assert found["map"]["percent"] == [(0, 0, 0), (0, 0, 0), (0, 60, 60), (0, 0, 0)]
    (finding,) = found["findings"]
    assert finding["end_unix_s"] - finding["begin_unix_s"] == 20 and finding["sentence"] == SLOW.sentence
    assert [one["named"] for one in found["ranks"]] == [0, 0, 2, 0] and found["ranks"][2]["host"] == "node2"
