"""`status` as a person types it, and its table; what a state is called and why is tested in tests/status."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli.status import note_of, table_lines
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element
from slurm_train.status.run_status import RunState, RunStatus
from tests.cli.conftest import Shell
from tests.support.run_facts import attempt, beat

LINE = {"step": 120, "loss": 1.23456, "tokens_per_s": 51234.5, "step_time_s": 0.5}
NOW_S = 1_800_000_000.0


def status(run_id: str = "3f9a1c07", index: int | None = None, given: Any = None, **facts: Any) -> Any:
    """Returns the status of a running run; what is not named is not known."""
    values: dict[str, Any] = {
        "subject": Element(run=RunDirectory(Path("/runs/gpt-stdlib") / run_id), index=index, overrides=given or {}),
        "state": RunState.RUNNING,
        "note": "",
        "job_id": "12",
        "max_steps": 400,
        "attempts": 2,
        "heartbeat_age_s": 2.0,
        "heartbeat_rank": 3,
        "heartbeat_host": "node2",
        "nodelist": "node[1-4]",
    }
    return RunStatus(**(dict.fromkeys(one.name for one in fields(RunStatus)) | values | LINE | facts))  # type: ignore[arg-type]


def waiting(**facts: Any) -> RunStatus:
    unknown = dict.fromkeys(("loss", "tokens_per_s", "heartbeat_age_s", "nodelist"))
    known = {"state": RunState.QUEUED, "note": "other jobs come first (Priority)", "step": 0, "attempts": 0}
    found: RunStatus = status("77aa0000", **(unknown | known | facts))
    return found


def lines_of(*statuses: RunStatus, width: int | None = None, **how: Any) -> list[str]:
    return table_lines(statuses, now_unix_s=NOW_S, width=width, **how)


def test_a_file_gets_every_column_that_has_a_value() -> None:
    assert lines_of(status(), waiting(jobs_ahead=2)) == [
        "RUN                  JOB  STATE    STEP     LOSS    SPEED         ETA       ATTEMPTS  HEARTBEAT  NODES"
        "      NOTE",
        "gpt-stdlib/3f9a1c07  12   running  120/400  1.2346  51,234 tok/s  00:02:20  2         2 s ago    node[1-4]  -",
        "gpt-stdlib/77aa0000  12   queued   0/400    -       -             -         0         -          -"
        "          other jobs come first (Priority); 2 jobs ahead",
    ]
    rows = [status("r0", 0, {"optim.lr": "0.1"}, mfu=0.412), status("r1", 1, {"optim.lr": "1"}, state=RunState.FAILED)]
    assert [line.split()[:5] for line in lines_of(*rows, of_sweep=True)] == [
        ["#", "optim.lr", "RUN", "JOB", "STATE"],
        ["0", "0.1", "r0", "12", "running"],
        ["1", "1", "r1", "12", "failed"],
    ]
    assert "41.2%" in lines_of(*rows)[1]


def test_a_narrow_terminal_loses_the_least_important_columns_after_the_notes_went_below() -> None:
    heads = {
        width: " ".join(lines_of(status(mfu=0.4, note="n"), width=width)[0].split()) for width in (200, 115, 90, 50)
    }
    assert heads == {
        200: "RUN JOB STATE STEP LOSS SPEED MFU ETA ATTEMPTS HEARTBEAT NODES NOTE",
        115: "RUN JOB STATE STEP LOSS SPEED MFU ETA ATTEMPTS HEARTBEAT NODES",
        90: "RUN JOB STATE STEP LOSS SPEED ETA NODES",
        50: "RUN STATE STEP ETA",
    }
    note = "rank 3 on node2: ZeroDivisionError: division by zero in a place that takes many words to tell"
    for width in range(40, 200, 7):
        lines = lines_of(status(), waiting(note=note), width=width)
        words = " ".join(" ".join(lines).split())
        assert max(map(len, lines)) <= width and "running 120/400" in words and note in words


def test_states_that_need_a_person_are_red() -> None:
    rows = [status(state=state) for state in (RunState.OUT_OF_MEMORY, RunState.RUNNING)]
    shown = lines_of(*rows, in_colour=True)
    assert "\x1b[1;31mout of memory\x1b[0m " in shown[1] and "\x1b[32mrunning\x1b[0m " in shown[2]
    assert re.sub(r"\x1b\[[\d;]+m", "", "\n".join(shown)) == "\n".join(lines_of(*rows)), "only colour is added"


START = {"expected_start_unix_s": datetime(2027, 1, 15, 10).timestamp()}
NOTES = [
    ({"jobs_ahead": 1}, 10, "other jobs come first (Priority); 1 job ahead"),
    ({"note": "", **START}, 10, "expected start Fri 15 Jan 10:00, in 5 d 10 h"),
    ({"note": "", **START}, 15, "expected start 10:00, in 10 h"),
    ({"note": "", **START}, 16, "expected start 10:00"),
    ({"note": "", "heartbeat_age_s": 59.0}, 10, ""),
    ({"note": "", "heartbeat_age_s": 185.0}, 10, "no heartbeat of rank 3 on node2 for 3 min 5 s"),
]


@pytest.mark.parametrize(("facts", "day", "note"), NOTES)
def test_what_is_said_about_a_run(facts: dict[str, Any], day: int, note: str) -> None:
    assert note_of(waiting(**facts), now_unix_s=datetime(2027, 1, day).timestamp()) == note


# The verb


def test_all_runs_are_one_table_from_one_squeue(shell: Shell) -> None:
    running = {"ledger": attempt(0), "metrics": (LINE,), "beats": (beat(0), beat(3, age_s=200, host="node2"))}
    shell.has_run("gpt", "aaaa0000", job_ids=("12",), **running)
    shell.has_run("gpt", "bbbb0000", job_ids=("13",))
    shell.has_run("old", job_ids=("7",), submitted_unix_s=1.0, ledger=attempt(0, action="stop", reason="failed"))
    shell.has_run("done", "1234abcd", job_ids=("8",), ledger=attempt(0, reason="done"), result={})
    shell.slurm.queue("12", "RUNNING", nodes="node[1-2]")
    shell.slurm.queue("13", "PENDING", reason="Priority")
    shell.slurm.others_wait(2, priority=200)
    rows = {line.split()[0]: " ".join(line.split()) for line in shell.types("status").out.splitlines()}
    assert "RUN" in rows and len(rows) == 5
    assert "running 120/400 1.2346 51,234 tok/s 00:02:20" in rows["gpt/aaaa0000"]
    assert rows["gpt/aaaa0000"].endswith("node[1-2] no heartbeat of rank 3 on node2 for 3 min 20 s")
    assert "other jobs come first (Priority); 2 jobs ahead; expected start " in rows["gpt/bbbb0000"]
    assert (shell.slurm.times_asked("squeue"), shell.slurm.times_asked("sacct")) == (1, 0), "the ends are known"


def test_slurm_is_asked_squeue_first_then_sacct_then_the_files(shell: Shell) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0, reason="failed", note="n", action="requeue"))
    shell.slurm.queue("12", "RUNNING")
    shell.slurm.account("12", "TIMEOUT")
    found = []
    for breaks in ((), ("squeue",), ("sacct",)):
        shell.slurm.break_down(*breaks)
        done = shell.types("status --json")
        found.append((json.loads(done.out)[0]["state"], "so this is from the files alone" in done.err))
    shell.leaves_slurm()
    assert found == [("running", False), ("failed", False), ("failed", True)]
    assert shell.types("status").err == ""


def test_one_run_shows_its_path_and_how_its_attempts_ended(shell: Shell) -> None:
    once = attempt(0, reason="preempted", action="requeue", last_step=180, step_s=3.0, start_s=2.0)
    run = shell.has_run("gpt", ledger=(*once, *attempt(1, reason="failed", note="rank 3 on node2: x"), *attempt(2)))
    assert shell.types("status").out.splitlines()[-4:] == [
        str(run.path),
        "goodput 30%: 3 s of steps that count in 10 s of allocation (attempts that have ended); "
        "most was lost to start: 2 s",
        "attempt 0: preempted after 5 s, step 180",
        "attempt 1: failed after 5 s: rank 3 on node2: x",
    ]
    shell.has_run("cnn", "77aa0000", ledger=once)
    assert "attempt 0" not in shell.types("status cnn").out, "the table has said it"


def test_no_run_yet_is_no_error(shell: Shell) -> None:
    done = shell.types("status")
    assert (done.code, done.out) == (0, "") and "starts one" in done.err
    assert json.loads(shell.types("status --json").out) == []


@pytest.fixture
def four(shell: Shell) -> Shell:
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


FILTERS = {
    "--state running,failed": "bc",
    "--state pending": "d",
    "gpt --state finished": "a",
    "--last 1": "d",
    "gpt --last 1": "b",
    "--since 1h": "d",
    "--since 1d": "bcd",
    "--where seed=0": "abcd",
    "cnn aaaa0000": "acd",
    "--since 1d --last 2 --state running": "c",
    "--state cancelled": "",
    "--where seed=99": "",
}


def test_runs_are_chosen(four: Shell) -> None:
    found = {words: json.loads(four.types(f"status --json {words}").out) for words in FILTERS}
    assert {words: "".join(sorted(row["run"][4] for row in rows)) for words, rows in found.items()} == FILTERS
    assert "none of 4 runs is in such a state" in four.types("status --state cancelled").err
    assert "no such run below" in four.types("status --where seed=99").err
