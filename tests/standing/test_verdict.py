from __future__ import annotations

import time
from typing import Any

import pytest

from slurm_train.rundir.jobs import Holder, take_lock, this_process
from slurm_train.rundir.step_times import Finding, PaceWindow, append_window
from slurm_train.slurm.queue_view import Look
from slurm_train.standing.facts import Standing, Subject, standing_of
from slurm_train.standing.files import read_files
from slurm_train.standing.states import RunState
from tests.fakes.slurm_commands import job_state
from tests.support.run_facts import attempt, beat

NODE_1 = {"nodelist": "node[1-4]"}


def standing(has_run: Any, job: Any = None, *, answers: bool = True, **facts: Any) -> Standing:
    if job is not None:
        facts.setdefault("job_ids", (job.job_id,))
    run = has_run(**facts)
    look = Look(jobs={} if job is None else {job.job_id: job}, age_s=0.0 if answers else None)
    return standing_of(Subject(run), read_files(run), look, now_unix_s=time.time())


STATES = [
    ("never started", None, {}, "not_started", ""),
    (
        "queued",
        job_state("12", "PENDING", reason="Resources"),
        {},
        "queued",
        "waits for free nodes (Resources)",
    ),
    ("nodes that wake up", job_state("12", "CONFIGURING"), {}, "queued", "its nodes are made ready"),
    ("running", job_state("12", "RUNNING", **NODE_1), {"ledger": attempt(0)}, "running", ""),
    ("starting", job_state("12", "RUNNING", **NODE_1), {}, "running", ""),
    ("suspended", job_state("12", "SUSPENDED"), {"ledger": attempt(0)}, "running", "Slurm has suspended the job"),
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
        {"ledger": attempt(0, reason="preempted", action="requeue", note="preempted; requeued")},
        "queued",
        "was preempted; its earliest start has not come yet; after a requeue Slurm waits for two minutes (BeginTime)",
    ),
    (
        "cancelled and submitted again",
        job_state("12", "PENDING", reason="Resources"),
        {"ledger": attempt(0, reason="cancelled", action="stop", note="n")},
        "queued",
        "waits for free nodes (Resources)",
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
    ("killed with its node", job_state("12", "NODE_FAIL", source="sacct"), {"ledger": attempt(0)}, "node_failure", ""),
    (
        "its time ran out, files alone",
        None,
        {"ledger": attempt(0, reason="time_limit", note="n")},
        "timeout",
        "n",
    ),
    ("a reason of a later version", None, {"ledger": attempt(0, reason="novel", note="n")}, "unknown", "n"),
    (
        "no end, and Slurm knows nothing",
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
    (
        "submitted, and Slurm has forgotten it",
        None,
        {"job_ids": ("12",)},
        "not_started",
        "Slurm does not know job 12 any more; `resume 3f9a1c07` submits it again",
    ),
]


@pytest.mark.parametrize(
    ("job", "facts", "state", "note"), [case[1:] for case in STATES], ids=[case[0] for case in STATES]
)
def test_state_and_note(job: Any, facts: dict[str, Any], state: str, note: str, has_run: Any) -> None:
    found = standing(has_run, job, **facts)
    assert (found.state.value, found.note) == (state, note)


SILENT = [
    ("fresh heartbeats", (0, 20), "running", ""),
    (
        "one rank is silent",
        (0, 100),
        "interrupted",
        "no sign of life from its ranks, and Slurm is not there to ask",
    ),
    (
        "nobody keeps a heartbeat",
        (),
        "interrupted",
        "no sign of life from its ranks, and Slurm is not there to ask",
    ),
]


@pytest.mark.parametrize(("ages_s", "state", "note"), [case[1:] for case in SILENT], ids=[case[0] for case in SILENT])
def test_without_slurm_the_heartbeats_tell(ages_s: tuple[int, ...], state: str, note: str, has_run: Any) -> None:
    beats = tuple(beat(rank, age_s=age_s) for rank, age_s in enumerate(ages_s))
    found = standing(has_run, None, answers=False, job_ids=("12",), ledger=attempt(0), beats=beats)
    assert (found.state.value, found.note) == (state, note)


def test_slurm_counts_more_than_a_heartbeat(has_run: Any) -> None:
    found = standing(has_run, job_state("12", "FAILED"), ledger=attempt(0), beats=(beat(0),))
    assert found.state is RunState.FAILED


def test_a_submitted_job_that_nobody_can_ask_about_has_not_started(has_run: Any) -> None:
    found = standing(has_run, None, answers=False, job_ids=("12",))
    assert (found.state, found.note) == (RunState.NOT_STARTED, "job 12 was submitted")


def test_a_living_process_here_is_running(has_run: Any) -> None:
    run = has_run(cluster=False, ledger=attempt(0, job_id=None))
    take_lock(run, this_process(), is_alive=lambda _holder: True)
    found = standing_of(Subject(run), read_files(run), Look(), now_unix_s=time.time())
    assert found.state is RunState.RUNNING and found.is_active


def test_a_dead_process_is_not(has_run: Any) -> None:
    run = has_run(cluster=False, ledger=attempt(0, job_id=None))
    dead = Holder(job_id=None, host=this_process().host, pid=4_194_300, started="1")
    take_lock(run, dead, is_alive=lambda _holder: True)
    found = standing_of(Subject(run), read_files(run), Look(), now_unix_s=time.time())
    assert (found.state, found.note) == (RunState.INTERRUPTED, "what ran it is gone; `resume 3f9a1c07` continues")


def test_a_running_attempt_says_who_slows_it_down(has_run: Any) -> None:
    run = has_run(ledger=attempt(0) + attempt(1), job_ids=("12",))
    finding = Finding(
        kind="straggler",
        ranks=(3,),
        hosts=("node2",),
        factor=1.6,
        lost_share=0.3,
        sentence="rank 3 on node2 is 1.60x as slow as the others",
        advice="leave its node out",
    )
    for number, note in ((0, ""), (1, "rank 3 on node2 is 1.60x as slow as the others (leave its node out)")):
        facts = {"begin_unix_s": 1.0, "end_unix_s": 2.0, "from_step": 1, "to_step": 9, "samples": 4}
        append_window(run, PaceWindow(attempt=number, ranks=(), findings=(finding,), **facts))
        look = Look(jobs={"12": job_state("12", "RUNNING", **NODE_1)}, age_s=0.0)
        found = standing_of(Subject(run), read_files(run), look, now_unix_s=time.time())
        assert (found.state, found.note) == (RunState.RUNNING, note)
