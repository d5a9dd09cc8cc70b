from __future__ import annotations

import json
from typing import Any

import pytest

from slurm_train.cli.status import Row, read_row
from slurm_train.rundir.lock import Holder, take_lock, this_process
from tests.cli.conftest import attempt
from tests.fakes.slurm_commands import job_state

LINE = {"step": 120, "loss": 1.23456, "tokens_per_s": 51234.5, "step_time_s": 0.5}
NODE_1 = {"nodelist": "node[1-4]"}


def row_of(shell: Any, job: Any = None, **facts: Any) -> Row:
    if job is not None:
        facts.setdefault("job_ids", (job.job_id,))
    run = shell.has_run(**facts)
    return read_row(run, {} if job is None else {job.job_id: job})


STATES = [
    ("never started", None, {}, "not started", ""),
    ("queued", job_state("12", "PENDING", reason="Resources"), {}, "queued", "waits: Resources"),
    (
        "queued with a start",
        job_state("12", "PENDING", reason="Priority", start="2026-01-31T09:41:24"),
        {},
        "queued",
        "waits: Priority, expected start 2026-01-31T09:41:24",
    ),
    ("running", job_state("12", "RUNNING", **NODE_1), {"ledger": attempt(0)}, "running", "node[1-4]"),
    ("starting", job_state("12", "RUNNING", **NODE_1), {}, "running", "node[1-4]"),
    (
        "finished, whatever Slurm says",
        job_state("12", "RUNNING"),
        {"ledger": attempt(0, reason="done", note="x"), "result": {}},
        "finished",
        "",
    ),
    (
        "preempted and queued again",
        job_state("12", "PENDING", reason="BeginTime"),
        {"ledger": attempt(0, reason="preempted", note="preempted; requeued")},
        "queued",
        "waits: BeginTime",
    ),
    (
        "failed",
        job_state("12", "FAILED", source="sacct"),
        {"ledger": attempt(0, reason="failed", note="the ranks ended with code 1")},
        "failed",
        "the ranks ended with code 1",
    ),
    (
        "cancelled",
        job_state("12", "CANCELLED by 0", source="sacct"),
        {"ledger": attempt(0, reason="cancelled", note="the job was cancelled")},
        "cancelled",
        "the job was cancelled",
    ),
    (
        "cancelled while it waited to come back",
        job_state("12", "CANCELLED by 0"),
        {"ledger": attempt(0, reason="preempted", action="requeue", note="the job is requeued")},
        "cancelled",
        "the job was cancelled while it waited to come back; `resume 3f9a1c07` continues",
    ),
    (
        "failed before it began",
        job_state("12", "FAILED", source="sacct", nodelist="node3"),
        {},
        "failed",
        "ended before it began: does node3 see the run directory? (run.root=/shared/path)",
    ),
    ("killed with its node", job_state("12", "NODE_FAIL", source="sacct"), {"ledger": attempt(0)}, "node failure", ""),
    ("files alone, ended", None, {"ledger": attempt(0, reason="time_limit", note="n")}, "time_limit", "n"),
    (
        "files alone, no end",
        None,
        {"job_ids": ("12",), "ledger": attempt(0)},
        "interrupted",
        "the batch script was killed; `resume 3f9a1c07` continues",
    ),
    (
        "its batch script was killed",
        job_state("12", "FAILED"),
        {"ledger": attempt(0)},
        "failed",
        "the batch script was killed (Slurm: FAILED); `resume 3f9a1c07` continues",
    ),
]


@pytest.mark.parametrize(
    ("job", "facts", "state", "note"), [case[1:] for case in STATES], ids=[case[0] for case in STATES]
)
def test_state_and_note(job: Any, facts: dict[str, Any], state: str, note: str, shell: Any) -> None:
    row = row_of(shell, job, **facts)
    assert (row.state, row.note) == (state, note)


def test_a_run_in_full(shell: Any) -> None:
    row = row_of(
        shell,
        job_state("12", "RUNNING", **NODE_1),
        ledger=(*attempt(0, reason="preempted"), *attempt(1)),
        metrics=(LINE,),
    )
    assert row == Row(
        run="gpt-stdlib/3f9a1c07",
        job="12",
        state="running",
        step="120/400",
        loss="1.2346",
        speed="51,234 tok/s",
        eta="00:02:20",
        attempts="2",
        note="node[1-4]",
        path=str(shell.folder / "runs" / "gpt-stdlib" / "3f9a1c07"),
    )


@pytest.mark.parametrize(
    ("line", "speed", "eta"),
    [
        ({"step": 120, "loss": 1.0}, "-", "-"),
        ({"step": 400, "loss": 1.0, "samples_per_s": 12.0, "step_time_s": 1.0}, "12 samples/s", "00:00:00"),
        ({"step": 0, "loss": 1.0, "step_time_s": 3600.0}, "-", "16.7 days"),
    ],
)
def test_speed_and_time_left(line: dict[str, Any], speed: str, eta: str, shell: Any) -> None:
    row = row_of(shell, job_state("12", "RUNNING"), metrics=(line,))
    assert (row.speed, row.eta) == (speed, eta)


def test_a_living_process_here_is_running(shell: Any) -> None:
    run = shell.has_run(cluster=False, ledger=attempt(0, job_id=None))
    take_lock(run, this_process(), is_alive=lambda _holder: True)
    assert read_row(run, {}).state == "running"


def test_a_dead_process_is_not(shell: Any) -> None:
    run = shell.has_run(cluster=False, ledger=attempt(0, job_id=None))
    dead = Holder(job_id=None, host=this_process().host, pid=4_194_300, started="1")
    take_lock(run, dead, is_alive=lambda _holder: True)
    assert read_row(run, {}).state == "interrupted"


def state_in_table(done: Any) -> str:
    header, row = done.out.splitlines()[:2]
    column = header.index("STATE")
    return str(row[column : header.index("STEP")].strip())


def test_slurm_is_asked_squeue_first_then_sacct_then_the_files(shell: Any) -> None:
    shell.has_run(job_ids=("12",), ledger=attempt(0, reason="failed", note="n", action="stop"))
    shell.slurm.queue("12", "RUNNING")
    shell.slurm.account("12", "CANCELLED")
    assert state_in_table(shell.types("status")) == "running"
    shell.slurm.break_down("squeue")
    done = shell.types("status")
    assert (done.code, done.err) == (0, "") and state_in_table(done) == "failed", "the ledger knows more than sacct"
    shell.slurm.break_down("sacct")
    done = shell.types("status")
    assert done.code == 0 and "Slurm does not answer, so this is from the files alone" in done.err
    assert state_in_table(done) == "failed"
    shell.leaves_slurm()
    done = shell.types("status")
    assert (done.code, done.err) == (0, "") and state_in_table(done) == "failed"


def test_one_run_shows_its_path_and_json_shows_all(shell: Any) -> None:
    one = shell.has_run("gpt", "3f9a1c07")
    shell.has_run("cnn", "77aa0000")
    assert shell.types("status", "gpt").out.splitlines()[-1] == str(one.path)
    rows = json.loads(shell.types("status", "--json").out)
    assert {row["run"] for row in rows} == {"gpt/3f9a1c07", "cnn/77aa0000"}
    assert len(shell.types("status").out.splitlines()) == 3


def test_no_run_yet_is_no_error(shell: Any) -> None:
    done = shell.types("status")
    assert (done.code, done.out) == (0, "")
    assert "no run below" in done.err


def test_a_torn_run_directory_still_has_a_row(shell: Any) -> None:
    run = shell.has_run(ledger=attempt(0))
    for path in (run.plan, run.job, run.metrics):
        path.write_text("{")
    row = read_row(run, {})
    assert (row.job, row.step, row.loss) == ("-", "-", "-")
