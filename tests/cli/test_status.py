"""`status` as a person types it, and its table; what a state is called and why is tested in tests/status."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli.status import table_lines
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


def test_a_narrow_terminal_does_without_every_column_but_these() -> None:
    # No column is left out for want of a value.
    unknown = [field.name for field in fields(RunStatus) if getattr(status(), field.name) is None]
    full = status(**dict.fromkeys(unknown, 1), note="slow")
    (head, *_) = lines_of(full, width=1)
    assert head == "R"
    # As wide as these three, and with room for the name of one more; ETA, the last to go, needs ten.
    (head, *_) = lines_of(full, width=len("gpt-stdlib/3f9a1c07  running  120/400") + 9)
    assert head.split() == ["RUN", "STATE", "STEP"], "add a new column to _LEAST_IMPORTANT"


# The verb


def test_all_runs_are_one_table_from_one_squeue(shell: Shell) -> None:
    running = {"ledger": attempt(0), "metrics": (LINE,), "beats": (beat(0), beat(3, age_s=200, host="node2"))}
    shell.has_run("gpt", "aaaa0000", job_ids=("12",), **running)
    shell.has_run("gpt", "bbbb0000", job_ids=("13",))
    shell.has_run("done", "1234abcd", job_ids=("8",), ledger=attempt(0, reason="done"), result={})
    shell.slurm.queue("12", "RUNNING", nodes="node[1-2]")
    shell.slurm.queue("13", "PENDING", reason="Priority")
    shell.slurm.others_wait(2, priority=200)
    rows = {line.split()[0]: " ".join(line.split()) for line in shell.types("status").out.splitlines()}
    assert "running 120/400 1.2346 51,234 tok/s 00:02:20" in rows["gpt/aaaa0000"]
    assert re.search(r"node\[1-2\] no heartbeat of rank 3 on node2 for 3 min \d+ s$", rows["gpt/aaaa0000"])
    assert "other jobs come first (Priority); 2 jobs ahead; expected start " in rows["gpt/bbbb0000"]
    assert (shell.slurm.times_asked("squeue"), shell.slurm.times_asked("sacct")) == (1, 0), "the ends are known"


def test_one_run_shows_its_path_and_how_its_attempts_ended(shell: Shell) -> None:
    once = attempt(0, reason="preempted", action="requeue", last_step=180, step_s=3.0, start_s=2.0)
    run = shell.has_run("gpt", ledger=(*once, *attempt(1, reason="failed", note="rank 3 on node2: x"), *attempt(2)))
    path, goodput, *ends = shell.types("status").out.splitlines()[-4:]
    assert path == str(run.path) and goodput.startswith("goodput 30%: 3 s of steps that count in 10 s of allocation")
    assert ends == ["attempt 0: preempted after 5 s, step 180", "attempt 1: failed after 5 s: rank 3 on node2: x"]
    run.result.write_text("{}")
    for words in ("-w 9 gpt", "gpt -w"):
        assert json.loads(shell.types(f"status --json {words}").out)[0]["state"] == "finished"


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
    "gpt --state finished": "a",
    "--since 1d": "bcd",
    "--where seed=0": "abcd",
    "cnn aaaa0000": "acd",
    "--since 1d --last 2 --state running": "c",
    "--where seed=99": "",
    "--state cancelled": "",
    "--since 2099-01-31T09:00": "",
    "--where cluster=null": "",
    "--since 90m --where seed=0.0 --where +seed=0": "d",
}


def test_runs_are_chosen(four: Shell) -> None:
    found = {words: json.loads(four.types(f"status --json {words}").out) for words in FILTERS}
    assert {words: "".join(sorted(row["run"][4] for row in rows)) for words, rows in found.items()} == FILTERS
    assert "none of 4 runs is in such a state" in four.types("status --state cancelled").err
    assert "no such run below" in four.types("status --where seed=99").err
    four.refuses("--where 'optim.lr' is not KEY=VALUE", "status --where optim.lr")
    four.refuses("no run has the key 'optim.lrr'", "status --where optim.lrr=1")


@pytest.mark.parametrize(
    ("reason", "time_min", "is_named"),
    [("PartitionTimeLimit", 99999, True), ("QOSMaxGRESPerUser", 60, False), ("Resources", 99999, False)],
)
def test_a_job_that_will_never_start_names_the_owner_of_the_limit(
    reason: str, time_min: int, is_named: bool, shell: Shell
) -> None:
    run = shell.has_run(job_ids=("4711",))
    run.submit_script.write_text(f"#!/bin/bash\n#SBATCH --partition=main\n#SBATCH --time={time_min}\n")
    (shell.slurm.folder / "partitions.out").write_text("PartitionName=main\n   MaxTime=1-00:00:00 State=UP\n")
    shell.slurm.queue("4711", "PENDING", reason=reason)
    out = shell.types("status").out
    assert reason in out
    assert ("cluster.time_limit_min=99999 is more than partition main allows" in out) is is_named
