"""The document of a run: right for every state, complete, short where files are damaged, small for every length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import OptimSection, RunConfig
from slurm_train.rundir import timing
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.step_times import Histogram, RankTimes
from slurm_train.tools.report.attempts import (
    CAUSES,
    Verdict,
    bar_of,
    by_rank,
    goodput,
    read_attempts,
    stragglers,
    totals,
)
from slurm_train.tools.report.origin import provenance
from slurm_train.tools.report.page import render
from slurm_train.tools.report.run import run_document
from tests.support.documents import HOSTILE, blocks, column, document_in, text_of
from tests.support.html_pages import Page
from tests.support.run_documents import SLOW, document_of, full_document, hostile_document, window
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, run_in, steps


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    document = full_document(tmp_path)
    assert [block["key"] for block in blocks(document, kind="plot")] == [
        *("loss", "eval_accuracy", "lr", "grad_norm", "tokens_per_s", "mfu", "step_time"),
        *("rank_step_time", "rank_data_wait", "saves"),
    ]
    assert [block["kind"] for block in blocks(document) if "key" in block and block["kind"] != "plot"] == [
        *("heatmap", "timeline")
    ]
    found = text_of(document)
    for text in ("rank 5 hangs", "rank 1: Killed", "no space left", "1 failed", "no rank", "with uncommitted changes"):
        assert (text in found) == (text != "no rank"), text
    assert "21 lines of metrics.jsonl are superseded" in found and SLOW.sentence in found and SLOW.advice in found
    assert document["chips"] == [["finished", "good"]]
    assert {name: value for name, value, _ in document["tiles"]}["eval loss"] == "1.5"


def test_the_newest_attempts_lines_are_those_that_are_drawn(tmp_path: Path) -> None:
    (loss,) = blocks(full_document(tmp_path), key="loss")
    train, held_out = loss["curves"]
    assert loss["x"] == list(range(1, 101)) and None not in train["y"]
    assert held_out["y"][98:] == [None, 1.5] and held_out["kind"] == "dots"
    assert loss["marks"] == [
        (51, "attempt 1", "attempt"),
        (90, "attempt 2", "attempt"),
        (50, "hang at step 50", "event"),
    ]


STATES: list[tuple[str, tuple[str, str], dict[str, Any], list[str]]] = [
    ("never begun", ("not started", ""), {}, ["no step is on record yet", "No attempt has begun yet"]),
    ("queued", ("queued", "waits: Priority"), {}, ["waits: Priority", "queued"]),
    ("only starting", ("running", ""), {"ledger": ended(0)[:1]}, ["no step is on record yet", "not accounted for"]),
    ("one step", ("running", ""), {"ledger": ended(0)[:1], "metrics": steps(1, 1)}, ["1.0 %", "node[1-2]"]),
    ("failed", ("failed", "rank 3: ZeroDivisionError"), {"metrics": steps(1, 3)}, ["rank 3: ZeroDivisionError"]),
    ("no loss", ("failed", ""), {"metrics": [*steps(1, 2), *steps(3, 3, loss=None, grad_norm=None)]}, ["Loss"]),
    ("code of one's own", ("finished", ""), {"ledger": ended(0), "max_steps": None}, ["finished"]),
    ("on nodes", ("running", ""), {"ledger": ended(0)[:1], "nodelist": "node[1-4]"}, ["on node[1-4]"]),
    ("zero and below", ("running", ""), {"metrics": steps(1, 9, loss=0.0, lr=0.0, grad_norm=-1.0)}, ["Loss"]),
    ("out of all bounds", ("running", ""), {"metrics": steps(1, 9, loss=1e300, lr=1e-300)}, ["no step is"]),
    ("config of another version", ("running", ""), {"config": None}, ["config.yaml cannot be read"]),
]


@pytest.mark.parametrize(("verdict", "files", "texts"), [case[1:] for case in STATES], ids=[case[0] for case in STATES])
def test_a_run_in_any_state_has_a_page(
    verdict: tuple[str, str], files: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    document = document_of(tmp_path, *verdict, **files)
    assert Page(render(document)).problems == []
    assert [text for text in texts if text not in text_of(document)] == []


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_anywhere_is_data(text: str, tmp_path: Path) -> None:
    page = Page(render(hostile_document(tmp_path, text)))
    tame = Page(render(hostile_document(tmp_path / "tame", "tame")))
    assert page.problems == [] and page.requests() == [] and page.handlers() == []
    assert [one.name for one in page.elements] == [one.name for one in tame.elements]
    assert text_of(document_in(page)).count(text) >= 10


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
        assert "why" in render(run_document(run, Verdict("failed", "why"), now_unix_s=1.8e9)), damage
    path.unlink()
    assert run_document(run, Verdict("failed"), now_unix_s=1.8e9)


def test_checkpoints_that_are_not_whole_are_told_apart(tmp_path: Path) -> None:
    run = RunFiles().write(run_in(tmp_path))
    (run.checkpoints / "checkpoint_0000004_attempt_0000_00000000").mkdir(parents=True)
    document = run_document(run, Verdict("finished"), now_unix_s=1.8e9)
    assert "1 on disk are not whole" in text_of(document)


def test_a_long_run_fits_and_its_spike_is_there(tmp_path: Path) -> None:
    lines = steps(1, 60_000, loss=1.5)
    lines[31_283]["loss"] = 77.75
    document = document_of(tmp_path, metrics=lines)
    (loss,) = blocks(document, key="loss")
    assert max(value for value in loss["curves"][0]["high"] if value is not None) == 77.75
    assert len(render(document)) < 400_000


def test_what_was_chosen_among_the_settings_is_marked(tmp_path: Path) -> None:
    document = document_of(tmp_path, config=RunConfig(optim=OptimSection(lr=0.5)))
    (chosen,), (every,) = blocks(document, name="chosen"), blocks(document, name="settings")
    assert ("optim.lr", "0.5") in list(zip(column(chosen, "key"), column(chosen, "value"), strict=True))
    assert "optim.betas" not in column(chosen, "key") and "optim.betas" in column(every, "key")
    assert [column(every, "key")[index] for index in every["marked"]] == column(chosen, "key")


# Attempts.


def bars_in(folder: Path, ledger: list[dict[str, Any]], state: str = "finished", **files: Any) -> list[Any]:
    run = RunFiles(ledger=ledger, **files).write(run_in(folder))
    return list(map(bar_of, read_attempts(run, Verdict(state), now_unix_s=BEGAN_UNIX_S + 1000)))


def test_the_causes_of_an_attempt_add_up_to_its_queue_and_its_hold(tmp_path: Path) -> None:
    (bar,) = bars_in(tmp_path, ended(0, queue_s=30.0, lost_work_s=20.0))
    assert sum(bar.seconds.values()) == pytest.approx(130)
    assert (bar.seconds["productive_s"], bar.seconds["lost_work_s"], bar.held_s) == (40.0, 20.0, 100.0)
    assert set(bar.seconds) <= set(CAUSES)


def test_goodput_is_that_of_status(tmp_path: Path) -> None:
    bars = bars_in(tmp_path, [*ended(0, lost_work_s=20.0), *ended(1, suspended_s=20.0, step_s=40.0)])
    assert goodput(bars) == pytest.approx(timing.goodput(read_ledger(run_in(tmp_path))).share)
    assert totals(bars)["suspended_s"] == 20.0


def test_code_of_ones_own_has_no_causes_and_an_end_before_the_begin_no_time(tmp_path: Path) -> None:
    lines = ended(0)
    lines[1] = {key: value for key, value in lines[1].items() if not key.endswith("_s") or key == "time_unix_s"}
    (bar,) = bars_in(tmp_path / "a", lines)
    assert bar.seconds == {"unknown_s": 100.0} and goodput([bar]) is None
    lines[1]["time_unix_s"] = BEGAN_UNIX_S - 50
    (bar,) = bars_in(tmp_path / "b", lines)
    assert bar.held_s == 0.0 and goodput([bar]) is None


def test_an_attempt_without_an_end_lasts_until_now_or_until_its_last_sign(tmp_path: Path) -> None:
    first, second = bars_in(tmp_path / "a", [*ended(0)[:1], *ended(1)[:1]], "running")
    assert [(bar.reason, bar.held_s) for bar in (first, second)] == [("no end on record", 0.0), ("running", 780.0)]
    line = {"step": 3, "attempt": 0, "loss": 1.0, "time_unix_s": BEGAN_UNIX_S + 17}
    (bar,) = bars_in(tmp_path / "b", ended(0)[:1], "interrupted", metrics=[line])
    assert (bar.reason, bar.held_s) == ("no end on record", 17.0)


# Ranks.


def rank_times(rank: int, host: str, num: int = 10) -> RankTimes:
    return RankTimes(rank, host, Histogram({320 + rank: num}, 3.0), Histogram({100: num}, 0.001))


def test_ranks_are_compared_in_the_attempt_with_the_most_steps() -> None:
    times = [rank_times(0, "node1"), rank_times(1, "node1"), rank_times(2, "node2")]
    found = by_rank({0: times[:1], 1: times, 2: [rank_times(0, "a", 5)]})
    assert by_rank({}) == [] and found[1]["text"].startswith("Attempt 1, the longest")
    step, wait = found[2:4]
    longest, _, middle = step["curves"]
    assert (step["x"], step["unit"], middle["labels"]) == ([0, 1, 2], "s", ["node1", "node1", "node2"])
    assert all(low <= at <= high for low, at, high in zip(middle["low"], middle["y"], middle["high"], strict=True))
    assert longest["y"] == [3, 3, 3] and (wait["unit"], wait["curves"][0]["y"]) == ("ms", [1, 1, 1])
    assert step["marks"] == [(-0.5, "node1", "node"), (1.5, "node2", "node")]
    assert by_rank({0: times[:2]})[2]["marks"] == []


def test_the_map_shows_causes_and_not_their_victims() -> None:
    slowed = [window(at, 0.1, 0.1, 0.16, 0.1, findings=(SLOW,)) for at in (1, 2)]
    findings, _, _, heat, ranks = stragglers([window(0, 0.1, 0.1, 0.1, 0.1), *slowed])
    assert heat["percent"] == [[0, 0, 0], [0, 0, 0], [0, 60, 60], [0, 0, 0]]
    assert (heat["hosts"][2], heat["edges_s"]) == ("node2", [0, 10, 20, 30])
    assert column(findings, "for") == ["20 s"] and column(findings, "of each step lost") == ["36 %"]
    assert column(ranks, "rank")[0] == "2" and column(ranks, "windows named") == ["2", "0", "0", "0"]


def test_the_map_is_of_the_longest_record_and_of_two_ranks_the_quick_one_is_the_measure() -> None:
    windows = [window(0, 0.1, 0.1), window(1, 0.1, 0.2, attempt=1), window(2, 0.1, 0.2, attempt=1)]
    healthy, _, note, heat, _ = stragglers(windows)
    assert note["text"].startswith("Attempt 1.") and heat["percent"] == [[0, 0], [100, 100]]
    assert healthy["text"] == "No rank has held the others up for long, in 3 windows."
    assert stragglers([window(0, 0.1)]) == [] and stragglers([]) == []


def test_a_map_of_many_windows_and_ranks_stays_small() -> None:
    windows = [window(number, *(0.1 + 0.05 * ((number + rank) % 3) for rank in range(64))) for number in range(1000)]
    heat = stragglers(windows)[3]
    assert len(heat["edges_s"]) <= 161 and len(json.dumps(heat)) < 60_000


# Provenance.

ENVIRONMENT = {
    "python": "3.11.7",
    "executable": "/venv/bin/python",
    "torch": "2.6.0",
    "cuda": "12.8",
    "gpus": ["NVIDIA H100"] * 8,
    "slurm": None,
    "packages": {"numpy": "2.1", "mine": "0.1"},
    "sources": {"mine": {"url": "file:///work/mine", "editable": True}},
}


def test_provenance_has_command_code_environment_and_what_this_version_does_not_know() -> None:
    folders = [{"path": "/work/lib", "git_commit": "a" * 40, "git_dirty": True, "git_diff": "+z"}]
    elsewhere = [{"path": "/opt/sdk", "packages": ["sdk"], "git_commit": None, "git_dirty": None}]
    origin = {"words": ["script=[a b]"], "folders": folders, "elsewhere": elsewhere, "cluster": "H200", "none": None}
    facts, *folded = provenance({**origin, "modules": {"cuda": "12"}}, ENVIRONMENT)
    pairs = dict(facts["pairs"])
    assert pairs["command"] == "python -m slurm_train 'script=[a b]'"
    assert pairs["also copied"] == "/work/lib, commit aaaaaaaaaaaa with uncommitted changes"
    assert pairs["not copied"] == "/opt/sdk (sdk), not in git"
    assert (pairs["python"], pairs["torch"]) == ("3.11.7 /venv/bin/python", "2.6.0, built for CUDA 12.8")
    assert (pairs["GPUs"], pairs["cluster"]) == ("8 x NVIDIA H100", "H200") and not {"none", "Slurm"} & set(pairs)
    assert [(block["summary"], block["text"]) for block in folded] == [
        ("2 packages", "numpy 2.1\nmine 0.1 (editable, file:///work/mine)"),
        ("modules: 1 lines", "cuda 12"),
        ("Uncommitted changes in /work/lib: 1 lines of difference", "+z"),
    ]


def test_a_long_difference_is_cut_and_says_where_the_rest_is() -> None:
    *_, difference = provenance({"git_diff": "\n".join(f"+line {number}" for number in range(5000))}, {})
    assert "line 2999" in difference["text"] and "line 3000" not in difference["text"]
    assert "2000 more lines in provenance.json" in difference["text"]
    assert provenance({}, {})[0]["text"] == "provenance.json is missing."
