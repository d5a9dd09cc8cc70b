"""`status` as a person types it; what a state is called and why is tested in tests/status."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.run_facts import attempt, beat

LINE = {"step": 120, "loss": 1.23456, "tokens_per_s": 51234.5, "step_time_s": 0.5}


def shown(done: Any) -> dict[str, dict[str, str]]:
    """Returns the rows of a plain table by run id."""
    header, *lines = done.out.splitlines()
    names = header.split()
    starts = [header.index(name) for name in names] + [10_000]
    rows = [
        {name: line[begin:end].strip() for name, begin, end in zip(names, starts, starts[1:], strict=False)}
        for line in lines
        if len(line) > starts[-2]
    ]
    return {row["RUN"].partition("/")[2]: row for row in rows}


def state_in_table(done: Any) -> str:
    header, row = done.out.splitlines()[:2]
    column = header.index("STATE")
    return str(row[column : header.index("STEP")].strip())


def test_a_table_of_runs_with_state_and_reason_in_words(shell: Any) -> None:
    running = {"ledger": attempt(0), "metrics": (LINE,), "beats": (beat(0), beat(3, age_s=200, host="node2"))}
    shell.has_run("gpt", "aaaa0000", job_ids=("12",), **running)
    shell.has_run("gpt", "bbbb0000", job_ids=("13",))
    shell.slurm.queue("12", "RUNNING", nodes="node[1-2]")
    shell.slurm.queue("13", "PENDING", reason="Priority")
    shell.slurm.others_wait(2, priority=200)
    rows = shown(shell.types("status"))
    assert rows["aaaa0000"] == {
        "RUN": "gpt/aaaa0000",
        "JOB": "12",
        "STATE": "running",
        "STEP": "120/400",
        "LOSS": "1.2346",
        "SPEED": "51,234 tok/s",
        "ETA": "00:02:20",
        "ATTEMPTS": "1",
        "HEARTBEAT": "3 min 20 s ago",
        "NODES": "node[1-2]",
        "NOTE": "no heartbeat of rank 3 on node2 for 3 min 20 s",
    }
    assert rows["bbbb0000"]["STATE"] == "queued"
    assert rows["bbbb0000"]["NOTE"].startswith("other jobs come first (Priority); 2 jobs ahead; expected start ")


def test_slurm_is_asked_squeue_first_then_sacct_then_the_files(shell: Any) -> None:
    ledger = attempt(0, reason="failed", note="n", action="requeue")
    shell.has_run(job_ids=("12",), ledger=ledger)
    shell.slurm.queue("12", "RUNNING")
    shell.slurm.account("12", "FAILED")
    assert state_in_table(shell.types("status")) == "running"
    shell.slurm.break_down("squeue")
    done = shell.types("status")
    assert (done.code, done.err) == (0, "") and state_in_table(done) == "failed"
    shell.slurm.break_down("sacct")
    done = shell.types("status")
    assert done.code == 0 and "Slurm does not answer, so this is from the files alone" in done.err
    assert state_in_table(done) == "failed"
    shell.leaves_slurm()
    done = shell.types("status")
    assert (done.code, done.err) == (0, "") and state_in_table(done) == "failed"


def test_one_squeue_for_all_runs_and_no_sacct_for_ends_that_are_known(shell: Any) -> None:
    for number in range(20):
        shell.has_run("gpt", f"{number:02d}aa0000", job_ids=(str(100 + number),), ledger=attempt(0))
        shell.slurm.queue(str(100 + number), "RUNNING")
    shell.has_run("old", job_ids=("7",), submitted_unix_s=1.0, ledger=attempt(0, action="stop", reason="failed"))
    shell.has_run("done", "1234abcd", job_ids=("8",), ledger=attempt(0, reason="done"), result={})
    assert len(shell.types("status").out.splitlines()) == 23
    assert (shell.slurm.times_asked("squeue"), shell.slurm.times_asked("sacct")) == (1, 0)
    shell.has_run("lost", "5678abcd", job_ids=("9",), ledger=attempt(0))
    shell.types("status")
    assert (shell.slurm.times_asked("squeue"), shell.slurm.times_asked("sacct")) == (2, 1)
    assert shell.slurm.said("sacct_words").rstrip().endswith("-j 9")


def test_one_run_shows_its_path_and_json_shows_all(shell: Any) -> None:
    one = shell.has_run("gpt", "3f9a1c07")
    shell.has_run("cnn", "77aa0000")
    assert shell.types("status", "gpt").out.splitlines()[-1] == str(one.path)
    rows = json.loads(shell.types("status", "--json").out)
    assert {row["run"] for row in rows} == {"gpt/3f9a1c07", "cnn/77aa0000"}
    assert len(shell.types("status").out.splitlines()) == 3


def test_one_run_tells_how_its_attempts_ended(shell: Any) -> None:
    once = attempt(0, reason="preempted", action="requeue", last_step=180)
    twice = (*once, *attempt(1, reason="failed", note="rank 3 on node2: x"))
    shell.has_run("gpt", "3f9a1c07", ledger=(*twice, *attempt(2)))
    assert shell.types("status").out.splitlines()[-2:] == [
        "attempt 0: preempted after 5 s, step 180",
        "attempt 1: failed after 5 s: rank 3 on node2: x",
    ]
    shell.has_run("cnn", "77aa0000", ledger=once)
    assert "attempt 0" not in shell.types("status", "cnn").out, "the table has said it"


def test_no_run_yet_is_no_error(shell: Any) -> None:
    done = shell.types("status")
    assert (done.code, done.out) == (0, "")
    assert "no run below" in done.err and "starts one" in done.err
    assert json.loads(shell.types("status", "--json").out) == []


@pytest.fixture
def four(shell: Any) -> Any:
    """Four runs, the newest last: finished, failed, running, queued."""
    now_s = time.time()
    shell.has_run("gpt", "aaaa0000", job_ids=("1",), submitted_unix_s=now_s - 400_000, result={})
    failed = attempt(0, reason="failed", action="stop", note="n", time_unix_s=now_s)
    shell.has_run("gpt", "bbbb0000", job_ids=("2",), submitted_unix_s=now_s - 80_000, ledger=failed)
    shell.has_run("cnn", "cccc0000", job_ids=("3",), submitted_unix_s=now_s - 7_000, ledger=attempt(0))
    shell.has_run("cnn", "dddd0000", job_ids=("4",), submitted_unix_s=now_s - 60)
    shell.slurm.queue("3", "RUNNING")
    shell.slurm.queue("4", "PENDING", reason="Resources")
    return shell


FILTERS = [
    (["--state", "running,failed"], {"bbbb0000", "cccc0000"}),
    (["--state", "pending"], {"dddd0000"}),
    (["gpt", "--state", "finished"], {"aaaa0000"}),
    (["--last", "1"], {"dddd0000"}),
    (["gpt", "--last", "1"], {"bbbb0000"}),
    (["--since", "1h"], {"dddd0000"}),
    (["--since", "1d"], {"bbbb0000", "cccc0000", "dddd0000"}),
    (["--where", "seed=0"], {"aaaa0000", "bbbb0000", "cccc0000", "dddd0000"}),
    (["cnn", "aaaa0000"], {"aaaa0000", "cccc0000", "dddd0000"}),
    (["--since", "1d", "--last", "2", "--state", "running"], {"cccc0000"}),
]


@pytest.mark.parametrize(("words", "ids"), FILTERS, ids=[" ".join(words) for words, _ in FILTERS])
def test_runs_are_chosen(words: list[str], ids: set[str], four: Any) -> None:
    done = four.types("status", "--json", *words)
    assert done.code == 0, done.err
    assert {row["run"].partition("/")[2] for row in json.loads(done.out)} == ids


NOTHING = [
    (["--state", "cancelled"], 0, "none of 4 runs is in such a state"),
    (["--where", "seed=99"], 0, "no such run below"),
    (["--where", "no.key=1"], 2, "no run has the key 'no.key'"),
    (["--state", "asleep"], 2, "there is no state 'asleep'"),
    (["--last", "0"], 2, "--last must be at least 1, got 0"),
    (["--since", "soon"], 2, "neither a span of time nor a date"),
    (["-w", "0.5"], 2, "--watch must be at least 1 s, got 0.5"),
    (["other"], 2, "no run matches 'other'"),
]


@pytest.mark.parametrize(("words", "code", "message"), NOTHING, ids=[" ".join(words) for words, _, _ in NOTHING])
def test_what_means_no_run_says_so(words: list[str], code: int, message: str, four: Any) -> None:
    done = four.types("status", *words)
    assert done.code == code and message in done.err and done.out == ""
