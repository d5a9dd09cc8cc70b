"""The status of runs: state, note and numbers, from what is on disk and what Slurm says."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import pytest

from slurm_train.errors import ClusterError, ConfigError
from slurm_train.rundir.jobs import Holder, take_lock, this_process
from slurm_train.rundir.sweep import Element
from slurm_train.rundir.timing import PaceWindow, Slowdown, append_window
from slurm_train.slurm.queue_view import Look, QueueView, Wanted
from slurm_train.slurm.records import Phase
from slurm_train.status.run_status import (
    RunState,
    RunStatus,
    Survey,
    Surveyor,
    read_files,
    read_states,
    read_statuses,
    status_of,
    wanted_of,
)
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.run_facts import attempt, beat

NODE_1 = {"nodelist": "node[1-4]"}
LINE = {"step": 120, "loss": 1.25, "tokens_per_s": 51234.5, "step_time_s": 0.5, "mfu": 0.41}


def seen(run: Any, look: Look, **values: Any) -> RunStatus:
    return status_of(Element(run=run, **values), read_files(run), look, now_unix_s=time.time())


def status(has_run: Any, job: Any = None, *, answers: bool = True, **facts: Any) -> RunStatus:
    if job is not None:
        facts.setdefault("job_ids", (job.job_id,))
    return seen(has_run(**facts), Look(jobs={} if job is None else {job.job_id: job}, age_s=0.0 if answers else None))


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
    found = status(has_run, job, **facts)
    assert (found.state.value, found.note) == (state, note)


SILENT = [
    ("fresh heartbeats", (0, 20), "running", ""),
    (
        "one rank is silent",
        (0, 100),
        "interrupted",
        "no recent heartbeat from its ranks, and Slurm does not answer or is not installed here",
    ),
    (
        "there are no heartbeats",
        (),
        "interrupted",
        "no recent heartbeat from its ranks, and Slurm does not answer or is not installed here",
    ),
]


@pytest.mark.parametrize(("ages_s", "state", "note"), [case[1:] for case in SILENT], ids=[case[0] for case in SILENT])
def test_without_slurm_the_heartbeats_decide(ages_s: tuple[int, ...], state: str, note: str, has_run: Any) -> None:
    beats = tuple(beat(rank, age_s=age_s) for rank, age_s in enumerate(ages_s))
    found = status(has_run, None, answers=False, job_ids=("12",), ledger=attempt(0), beats=beats)
    assert (found.state.value, found.note) == (state, note)


def test_a_living_process_here_is_running(has_run: Any) -> None:
    run = has_run(cluster=False, ledger=attempt(0, job_id=None))
    take_lock(run.lock, this_process(), is_alive=lambda _holder: True)
    found = seen(run, Look())
    assert found.state is RunState.RUNNING and found.is_active


def test_a_dead_process_is_not(has_run: Any) -> None:
    run = has_run(cluster=False, ledger=attempt(0, job_id=None))
    dead = Holder(job_id=None, host=this_process().host, pid=4_194_300, started="1")
    take_lock(run.lock, dead, is_alive=lambda _holder: True)
    found = seen(run, Look())
    assert (found.state, found.note) == (RunState.INTERRUPTED, "its process is gone; `resume 3f9a1c07` continues")


def test_a_running_attempt_says_who_slows_it_down(has_run: Any) -> None:
    run = has_run(ledger=attempt(0) + attempt(1), job_ids=("12",))
    finding = Slowdown(
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
        found = seen(run, look)
        assert (found.state, found.note) == (RunState.RUNNING, note)


def test_a_running_run_in_numbers(has_run: Any) -> None:
    run = has_run(
        job_ids=("12",),
        ledger=(*attempt(0, reason="preempted"), *attempt(1)),
        metrics=(LINE,),
        beats=(beat(0, age_s=1), beat(3, age_s=200, host="node2"), beat(4, age_s=900, phase="end")),
    )
    job = job_state("12", "RUNNING", nodelist="node[1-4]", partition="main")
    found = seen(run, Look(jobs={"12": job}, age_s=0.0), index=3, overrides={"seed": "1"}).as_json()
    age_s = found.pop("heartbeat_age_s")
    assert age_s == pytest.approx(200, abs=20), "of the most silent rank that is at work"
    assert found == {
        "run": "gpt-stdlib/3f9a1c07",
        "path": str(run.path),
        "index": 3,
        "overrides": {"seed": "1"},
        "state": "running",
        "note": "",
        "is_active": True,
        "job_id": "12",
        "slurm_state": "RUNNING",
        "slurm_reason": None,
        "slurm_source": "squeue",
        "partition": "main",
        "nodelist": "node[1-4]",
        "jobs_ahead": None,
        "expected_start_unix_s": None,
        "submit_time_unix_s": 100.0,
        "attempt_start_time_unix_s": 10.0,
        "attempts": 2,
        "step": 120,
        "max_steps": 400,
        "loss": 1.25,
        "tokens_per_s": 51234.5,
        "samples_per_s": None,
        "mfu": 0.41,
        "step_time_s": 0.5,
        "time_left_s": 140.0,
        "heartbeat_rank": 3,
        "heartbeat_host": "node2",
    }


def test_a_waiting_run_has_its_place_and_its_expected_start(has_run: Any) -> None:
    job = job_state("12", "PENDING", reason="Priority", start="2026-01-31T09:41:24")
    look = Look(jobs={"12": job}, jobs_ahead={"12": 4}, age_s=0.0)
    found = seen(has_run(job_ids=("12",)), look).as_json()
    assert (found["state"], found["slurm_reason"], found["jobs_ahead"]) == ("queued", "Priority", 4)
    assert found["expected_start_unix_s"] == datetime(2026, 1, 31, 9, 41, 24).timestamp()
    assert found["heartbeat_age_s"] is None and found["time_left_s"] is None


def test_behind_a_job_without_a_limit_no_start_is_expected(has_run: Any) -> None:
    """Slurm takes such a job to last a year: 20.11 says 364 days."""
    start = datetime.fromtimestamp(time.time() + 364 * 86400).isoformat(timespec="seconds")
    look = Look(jobs={"12": job_state("12", "PENDING", reason="Resources", start=start)}, age_s=0.0)
    assert seen(has_run(job_ids=("12",)), look).as_json()["expected_start_unix_s"] is None


def test_steps_that_the_ranks_counted_are_those_of_the_run(has_run: Any) -> None:
    run = has_run(metrics=({"step": 1, "loss": 2.0, "max_steps": 17},))
    assert seen(run, Look()).max_steps == 17


def test_a_loss_that_is_no_number_is_null_in_json(has_run: Any) -> None:
    run = has_run(metrics=({"step": 1, "loss": float("nan")},))
    found = seen(run, Look()).as_json()
    assert found["loss"] is None and "NaN" not in json.dumps(found)


def test_a_torn_run_directory_still_has_numbers(has_run: Any) -> None:
    run = has_run(ledger=attempt(0))
    for path in (run.plan, run.job, run.metrics):
        path.write_text("{")
    found = seen(run, Look())
    assert (found.job_id, found.max_steps, found.loss, found.step) == (None, None, None, 0)


def test_what_slurm_is_asked(has_run: Any) -> None:
    runs = {
        "finished": has_run("aaaa0000", job_ids=("1",), result={}),
        "running": has_run("bbbb0000", job_ids=("2",), ledger=attempt(0)),
        "stopped": has_run("cccc0000", job_ids=("3",), submitted_unix_s=1.0, ledger=attempt(0, action="stop")),
        "here": has_run("dddd0000"),
    }
    files = {name: read_files(run) for name, run in runs.items()}
    assert wanted_of(list(files.values())) == Wanted(job_ids=["2", "3"], may_wait=False, settled=["3"])
    waiting = read_files(has_run("eeee0000", job_ids=("5",)))
    requeued = read_files(has_run("ffff0000", job_ids=("6",), ledger=attempt(0, action="requeue")))
    assert wanted_of([files["running"], waiting]).may_wait and wanted_of([requeued]).may_wait


def test_files_of_a_run_that_has_ended_are_read_once_until_they_change(has_run: Any) -> None:
    reader, run = Surveyor(QueueView(FakeSlurmCommands())), has_run(ledger=attempt(0, action="stop", reason="failed"))
    first = reader.read(run)
    run.metrics.write_text(json.dumps(LINE) + "\n")
    assert reader.read(run) is first
    run.attempts.write_text(run.attempts.read_text() + json.dumps(attempt(1)[0]) + "\n")
    assert reader.read(run).line == LINE


def test_a_survey_asks_slurm_once_about_all_runs(has_run: Any) -> None:
    subjects = [Element(run=has_run(f"{number}aaa0000", job_ids=(str(number),))) for number in range(1, 4)]
    asked = []

    class Slurm(FakeSlurmCommands):
        def queue(self, job_ids: Any, *, whole: bool = False) -> Any:
            asked.append(list(job_ids))
            return super().queue(job_ids, whole=whole)

    slurm = Slurm([job_state("1"), job_state("2", "PENDING", reason="Priority")])
    survey = Surveyor(QueueView(slurm)).look(subjects)
    assert [one.state.value for one in survey.statuses] == ["running", "queued", "not_started"]
    assert asked == [["1", "2", "3"]]


def test_a_survey_is_over_when_nothing_is_active_and_slurm_says_so(has_run: Any) -> None:
    stopped = seen(has_run("aaaa0000", job_ids=("1",), submitted_unix_s=1.0, ledger=attempt(0, action="stop")), Look())
    waiting = seen(has_run("bbbb0000", job_ids=("2",)), Look())
    running = seen(has_run("cccc0000", job_ids=("3",)), Look(jobs={"3": job_state("3")}, age_s=0.0))
    answered, silent = Look(age_s=0.0), Look(problem="no answer")
    assert Survey((stopped,), silent).is_over and Survey((stopped,), silent).is_settled
    assert Survey((stopped, waiting), answered).is_over and not Survey((stopped, waiting), answered).is_settled
    assert not Survey((stopped, waiting), silent).is_over, "the job may well be waiting"
    assert not Survey((stopped, running), answered).is_over


def test_an_answer_from_before_the_end_is_about_the_past(has_run: Any) -> None:
    ledger = attempt(0, action="stop", reason="failed", time_unix_s=time.time() - 2)
    run = has_run(job_ids=("12",), submitted_unix_s=1.0, ledger=ledger)
    states = [seen(run, Look(jobs={"12": job_state("12")}, age_s=age_s)).state.value for age_s in (4.0, 0.5)]
    assert states == ["failed", "running"], "asked before the end, and after it (somebody requeued the job)"


def test_who_acts_upon_a_status_is_refused_while_slurm_does_not_answer(has_run: Any) -> None:
    slurm, subject = FakeSlurmCommands([job_state("12")]), Element(run=has_run(job_ids=("12",)))
    assert [one.state for one in read_statuses([subject], slurm)] == [RunState.RUNNING]  # type: ignore[arg-type]  # the fake
    slurm.error = ClusterError("nobody there")
    with pytest.raises(ClusterError, match="nobody there"):
        read_statuses([subject], slurm)  # type: ignore[arg-type]  # the fake


def test_every_phase_of_a_job_is_a_state() -> None:
    assert {phase.value for phase in Phase} <= {state.label for state in RunState}


def test_states_are_read_as_people_write_them() -> None:
    found = read_states("running, not started,missing,Time-Limit,pending", option="--state")
    assert found == {RunState.RUNNING, RunState.NOT_STARTED, RunState.TIMEOUT, RunState.QUEUED}


@pytest.mark.parametrize(
    ("text", "message"),
    [("runing", "--state runing: there is no state 'runing'"), (",", "--state ,: no state is named")],
)
def test_a_word_that_is_no_state_is_refused_with_those_that_are(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_states(text, option="--state")
    assert caught.value.message == message and "running" in caught.value.hint
