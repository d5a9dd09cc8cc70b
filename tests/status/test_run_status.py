"""The status of runs: state, note and numbers, from what is on disk and what Slurm says."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ClusterError, ConfigError
from slurm_train.rundir.jobs import Holder, record_job, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory
from slurm_train.rundir.timing import PaceWindow, Slowdown, append_window
from slurm_train.slurm.queue_view import KnownJobs, QueueView, Wanted
from slurm_train.status.activity import find_active
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
from tests.support.command_line import write
from tests.support.run_facts import attempt, beat

LINE = {"step": 120, "loss": 1.25, "tokens_per_s": 51234.5, "step_time_s": 0.5, "mfu": 0.41}


def look(*jobs: Any, **more: Any) -> KnownJobs:
    """What Slurm has just said of the jobs."""
    return KnownJobs(**{"jobs": {job.job_id: job for job in jobs}, "age_s": 0.0} | more)


def seen(run: Any, look: KnownJobs, **values: Any) -> RunStatus:
    return status_of(Element(run=run, **values), read_files(run), look, now_unix_s=time.time())


PREEMPTED = attempt(0, reason="preempted", action="requeue", note="preempted; requeued")
NOT_BACK = attempt(0, reason="preempted", action="requeue", outcome="not_requeued", note="preempted; not allowed")
# The job, what is on disk; the state, and how the note begins.
STATES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "never started": (None, {"job_ids": ()}, "not_started", ""),
    "queued": (job_state("12", "PENDING", reason="Resources"), {}, "queued", "waits for free nodes (Resources)"),
    "suspended": (job_state("12", "SUSPENDED"), {"ledger": attempt(0)}, "running", "Slurm has suspended the job"),
    "finished, whatever Slurm says": (
        *(job_state("12", "RUNNING"), {"ledger": attempt(0, reason="done", note="x"), "result": {}}, "finished", ""),
    ),
    "preempted and queued again": (
        *(job_state("12", "PENDING", reason="BeginTime"), {"ledger": PREEMPTED}),
        *("queued", "was preempted; its earliest start has not come yet"),
    ),
    "decided, and not requeued by Slurm": (
        *(job_state("12", "FAILED"), {"ledger": PREEMPTED}),
        *("preempted", "preempted; Slurm did not requeue the job (FAILED); `resume"),
    ),
    "neither requeued nor continued": (
        *(job_state("12", "FAILED"), {"ledger": NOT_BACK}, "preempted", "preempted; not allowed"),
    ),
    "ended early": (
        *(job_state("12", "FAILED"), {"ledger": attempt(0, reason="ended_early", action="stop", note="step 32 of 36")}),
        *("ended_early", "step 32 of 36"),
    ),
    "cancelled while it waited to come back": (
        *(job_state("12", "CANCELLED by 0"), {"ledger": PREEMPTED}),
        *("cancelled", "the job was cancelled while it waited to come back; `resume 3f9a1c07` continues"),
    ),
    "cancelled a moment ago": (
        job_state("12", "COMPLETING"),
        {"ledger": attempt(0)},
        "finishing",
        "its job is ending",
    ),
    "failed before it began": (
        *(job_state("12", "FAILED", source="sacct", nodelist="node3"), {}),
        *("failed", "ended before it began: does node3 see the run directory? (run.root=/shared/path)"),
    ),
    "failed before it began, without a word": (
        *(job_state("12", "FAILED", reason="NonZeroExitCode", nodelist="node3"), {}),
        *("failed", "ended before it began, and its script said nothing: see cluster.setup in submit.sh"),
    ),
    "failed before it began, with a code": (
        *(job_state("12", "FAILED", source="sacct", exit_code="3:0", nodelist="node3"), {}),
        *("failed", "ended before it began with exit code 3, and its script said nothing"),
    ),
    "its log could not be opened": (
        *(job_state("12", "FAILED", source="sacct", exit_code="0:53", nodelist="node3"), {}),
        *("failed", "ended before it began: does node3 see the run directory? (run.root=/shared/path)"),
    ),
    "failed while it waited": (
        *(job_state("12", "FAILED", reason="BadConstraints"), {}),
        *("failed", "ended before it had nodes: no node has what it asks for (BadConstraints)"),
    ),
    "failed while it waited, by accounting": (
        *(job_state("12", "FAILED", source="sacct", exit_code="1:0"), {}),
        *("failed", "ended before it had nodes: Slurm has no reason on record"),
    ),
    "killed with its node": (job_state("12", "NODE_FAIL"), {"ledger": attempt(0)}, "node_failure", ""),
    "its time ran out, files alone": (None, {"ledger": attempt(0, reason="time_limit", note="n")}, "timeout", "n"),
    "a reason of a later version": (None, {"ledger": attempt(0, reason="novel", note="n")}, "unknown", "n"),
    "no end, and Slurm knows nothing": (
        *(None, {"ledger": attempt(0)}, "interrupted", "the batch script was killed; `resume 3f9a1c07` continues"),
    ),
    "Slurm has forgotten it": (None, {}, "not_started", "Slurm does not know job 12 any more; `resume 3f9a1c07`"),
}


@pytest.mark.parametrize("case", STATES)
def test_state_and_note(case: str, has_run: Any) -> None:
    job, facts, state, note = STATES[case]
    found = seen(has_run(**{"job_ids": ("12",)} | facts), look() if job is None else look(job))
    assert found.state.value == state and found.note.startswith(note) and bool(found.note) is bool(note)
    assert found.is_active is (state in ("queued", "running", "finishing"))


MODULE = "slurm_script: line 16: module: command not found"
CANCELLED = attempt(0, job_id="11", reason="cancelled", action="stop", note="the job was cancelled; resume continues")
MOVED = attempt(0, job_id="11", reason="signalled", action="requeue", note="job 12 takes over")
# The newest job is 12: what is on disk, its state, when it started (seconds from now); the state, and the note.
NEWEST_JOBS: dict[str, tuple[dict[str, Any], str, float, str, str]] = {
    "its script failed": ({}, "FAILED", -2, "failed", f"ended before it began: {MODULE}"),
    "a resume failed": ({"ledger": CANCELLED}, "FAILED", -2, "failed", f"ended before it began: {MODULE}"),
    "a continuation failed": ({"ledger": MOVED}, "FAILED", -2, "failed", f"ended before it began: {MODULE}"),
    "a second start failed": ({"ledger": PREEMPTED}, "FAILED", -2, "failed", f"ended before it began: {MODULE}"),
    "an attempt was killed before it": (
        *({"ledger": attempt(0, job_id="11")}, "FAILED", -2, "failed", f"ended before it began: {MODULE}"),
    ),
    "the log is of an earlier job": ({}, "FAILED", 100, "failed", "ended before it began: does node3 see"),
    "a resume was lost with its node": ({"ledger": CANCELLED}, "NODE_FAIL", -2, "node_failure", "ended before it"),
    "a resume found nothing to do": ({"ledger": CANCELLED}, "COMPLETED", -2, "cancelled", "the job was cancelled"),
    "a resume waits": ({"ledger": CANCELLED}, "PENDING", 100, "queued", ""),
}


@pytest.mark.parametrize(
    ("before", "words"),
    [(f"/var/spool/job12/{MODULE}", f"{MODULE}; "), ("slurm_train: attempt 0: the job was cancelled", "")],
)
def test_what_a_command_of_the_setup_has_said_is_quoted(before: str, words: str, has_run: Any) -> None:
    failed = "cluster.setup: exit code 127 of: module load cuda"
    run = has_run(job_ids=("12",), logs={"batch.log": f"{before}\n{failed}\n"})
    now_s = int(time.time())
    times = {"start": str(now_s - 2), "end": str(now_s - 2)}
    found = seen(run, look(job_state("12", "FAILED", nodelist="node3", **times)))
    assert found.note == f"ended before it began: {words}{failed}"


def test_a_supervisor_that_ended_with_an_error_of_ours_was_not_killed(has_run: Any) -> None:
    log = {"batch.log": "slurm_train: attempt 0\nerror: it was moved while it was at work\nhint: move it back\n"}
    times = {"start": str(int(time.time()) - 9), "end": str(int(time.time()))}
    run = has_run(job_ids=("12",), ledger=attempt(0), logs=log)
    found = seen(run, look(job_state("12", "FAILED", nodelist="node3", **times)))
    assert (found.state.value, found.note) == ("failed", "it was moved while it was at work; hint: move it back")
    (run.logs / "batch.log").write_text("slurm_train: attempt 0 of gpt on node3\n")
    found = seen(run, look(job_state("12", "FAILED", nodelist="node3", **times)))
    assert found.note.startswith("the batch script was killed (Slurm: FAILED)")


def test_a_run_that_was_moved_while_its_job_waited_is_named(has_run: Any) -> None:
    run = has_run(job_ids=("12",))
    for planned, is_moved in ((run.path, False), (run.path.with_name("before"), True)):
        run.plan.write_text(json.dumps({"path": str(planned)}))
        found = seen(run, look(job_state("12", "FAILED", nodelist="node3", exit_code="0:53")))
        assert (str(planned) in found.note) == is_moved and ("does node3 see" in found.note) != is_moved


def test_the_error_is_quoted_before_its_hint(has_run: Any) -> None:
    run = has_run(job_ids=("12",), logs={"batch.log": "slurm_train: x\nerror: no hard links\nhint: another place\n"})
    now_s = int(time.time())
    times = {"start": str(now_s - 2), "end": str(now_s - 2)}
    found = seen(run, look(job_state("12", "FAILED", nodelist="node3", **times)))
    assert found.note == "ended before it began: no hard links; hint: another place"


@pytest.mark.parametrize(
    ("words", "has_advice"),
    [
        ("slurm_script: line 20: /env of mine/bin/python3.11: No such file or directory", True),
        ("submit.sh: line 20: exec: /env/bin/python: cannot execute: No such file or directory", True),
        # A program of the person's own.
        ("slurm_script: line 16: /opt/python/tools/prepare: No such file or directory", False),
        (MODULE, False),
    ],
)
def test_a_job_that_does_not_find_its_python_is_told_the_key(words: str, has_advice: bool, has_run: Any) -> None:
    run = has_run(job_ids=("12",), logs={"batch.log": f"{words}\n"})
    start = str(int(time.time()) - 2)
    found = seen(run, look(job_state("12", "FAILED", nodelist="node3", start=start, end=start)))
    assert words in found.note and ("cluster.python=PATH" in found.note) == has_advice


@pytest.mark.parametrize("case", NEWEST_JOBS)
def test_the_newest_job_counts_and_its_last_words_are_quoted(case: str, has_run: Any) -> None:
    facts, word, start_s, state, note = NEWEST_JOBS[case]
    logs = {"batch.log": f"slurm_train: attempt 0 of it\n\x1b[31m/var/spool/job12/{MODULE}\x1b[0m\n\n"}
    run = has_run(**{"job_ids": ("11", "12"), "logs": logs} | facts)
    now_s = int(time.time())
    times = {"start": str(now_s + start_s), "end": str(now_s + start_s)}
    found = seen(run, look(job_state("12", word, nodelist="node3", **times)))
    assert (found.state.value, found.note[: len(note)]) == (state, note)


def test_a_job_that_was_turned_away_while_the_run_trained_says_nothing_about_it(has_run: Any) -> None:
    now_s = time.time()
    end = {"reason": "failed", "action": "stop", "note": "rank 0: no", "time_unix_s": now_s}
    start = {"event": "start", "attempt": 0, "time_unix_s": now_s - 100, "job_id": "11"}
    run = has_run(job_ids=("11", "12"), ledger=(start, {"event": "end", "attempt": 0, **end}))
    times = {"start": str(int(now_s) - 50), "end": str(int(now_s) - 49)}
    assert seen(run, look(job_state("12", "FAILED", **times))).note == "rank 0: no"


@pytest.mark.parametrize(("ages_s", "state"), [((0, 20), "running"), ((0, 100), "interrupted"), ((), "interrupted")])
def test_without_slurm_the_heartbeats_decide(ages_s: tuple[int, ...], state: str, has_run: Any) -> None:
    beats = tuple(beat(rank, age_s=age_s) for rank, age_s in enumerate(ages_s))
    found = seen(has_run(job_ids=("12",), ledger=attempt(0), beats=beats), KnownJobs())
    assert (found.state.value, "no recent heartbeat" in found.note) == (state, state == "interrupted")


def test_a_living_process_here_is_running_and_a_dead_one_is_not(has_run: Any) -> None:
    here = this_process()
    dead = Holder(job_id=None, host=here.host, pid=4_194_300, started="1")
    for holder, state, note in ((here, "running", ""), (dead, "interrupted", "its process is gone; `resume {}`")):
        run = has_run(f"{state[:4]}0000", cluster=False, ledger=attempt(0, job_id=None))
        take_lock(run.lock, holder, is_alive=lambda _holder: True)
        found = seen(run, KnownJobs())
        assert (found.state.value, found.is_active) == (state, holder is here)
        assert found.note.startswith(note.format(run.run_id))


def test_a_running_attempt_says_who_slows_it_down(has_run: Any) -> None:
    run = has_run(ledger=attempt(0) + attempt(1), job_ids=("12",))
    about = {"kind": "straggler", "ranks": (3,), "hosts": ("node2",), "factor": 1.6, "lost_share": 0.3}
    finding = Slowdown(**about, sentence="rank 3 on node2 is slow", advice="leave its node out")
    times = {"begin_unix_s": 1.0, "end_unix_s": 2.0, "from_step": 1, "to_step": 9, "samples": 4}
    for number, note in ((0, ""), (1, "rank 3 on node2 is slow (leave its node out)")):
        append_window(run, PaceWindow(attempt=number, ranks=(), findings=(finding,), **times))
        assert seen(run, look(job_state("12"))).note == note


def test_a_running_run_in_numbers(has_run: Any) -> None:
    run = has_run(
        job_ids=("12",),
        ledger=(*attempt(0, reason="preempted"), *attempt(1)),
        metrics=(LINE,),
        beats=(beat(0, age_s=1), beat(3, age_s=200, host="node2"), beat(4, age_s=900, phase="end")),
    )
    job = job_state("12", "RUNNING", nodelist="node[1-4]", partition="main")
    found = seen(run, look(job), index=3, overrides={"seed": "1"}).as_json()
    assert found["heartbeat_age_s"] == pytest.approx(200, abs=20), "of the most silent rank that is at work"
    expected = {"state": "running", "is_active": True, "job_id": "12", "nodelist": "node[1-4]", "index": 3, **LINE}
    expected |= {"attempts": 2, "max_steps": 400, "time_left_s": 140.0, "heartbeat_rank": 3, "heartbeat_host": "node2"}
    assert found | expected == found


def test_a_program_that_reports_nothing_is_where_its_log_says(has_run: Any) -> None:
    run = has_run(job_ids=("12",), ledger=(*attempt(0, reason="preempted"), *attempt(1)))
    run.plan.write_text(json.dumps({"max_steps": None}))
    lines = [f"step {number}/99 loss 1\n" for number in range(1, 61)]
    before, log = run.rank_log(0, 0), run.rank_log(1, 0)
    for path, text in ((before, "".join(lines)), (log, "x" * 20_000 + "\n" + "".join(lines[:40]))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = seen(run, look(job_state("12", "RUNNING")))
    assert (found.step, found.max_steps, found.printed) == (40, 99, "40/99")
    assert found.log_line == "step 40/99 loss 1" and found.log_age_s is not None and found.log_age_s < 60
    assert "began anew" not in found.note, "the begin of its log says nothing"
    log.write_text("".join(lines[:40]))
    note = seen(run, look(job_state("12", "RUNNING"))).note
    assert note == "by its log it began anew: 1/99, and attempt 0 had come to 60/99"
    # What it reports counts more.
    run.metrics.write_text(json.dumps({"step": 7, "loss": 1.0}) + "\n")
    assert (seen(run, look(job_state("12", "RUNNING"))).step, read_files(run).log.line) == (7, "")


def test_a_waiting_run_has_its_place_and_its_expected_start(has_run: Any) -> None:
    # Behind a job without a limit no start is expected: Slurm takes it to last a year, and 20.11 says 364 days.
    far = datetime.fromtimestamp(time.time() + 364 * 86400).isoformat(timespec="seconds")
    run, near = has_run(job_ids=("12",)), "2026-01-31T09:41:24"
    for start, expected in ((near, datetime.fromisoformat(near).timestamp()), (far, None)):
        job = job_state("12", "PENDING", reason="Priority", start=start)
        found = seen(run, look(job, jobs_ahead={"12": 4})).as_json()
        assert (found["state"], found["jobs_ahead"], found["expected_start_unix_s"]) == ("queued", 4, expected)


def test_a_torn_run_directory_still_has_numbers_and_a_loss_that_is_none_is_null(has_run: Any) -> None:
    run = has_run(ledger=attempt(0), metrics=({"step": 1, "loss": float("nan")},))
    assert '"loss": null' in json.dumps(seen(run, KnownJobs()).as_json())
    for path in (run.plan, run.job, run.metrics):
        path.write_text("{")
    found = seen(run, KnownJobs())
    assert (found.job_id, found.max_steps, found.loss, found.step) == (None, None, None, 0)


def test_what_slurm_is_asked(has_run: Any) -> None:
    def wanted(**facts: dict[str, Any]) -> Wanted:
        return wanted_of([read_files(has_run(run_id * 8, **more)) for run_id, more in facts.items()])

    finished, running = {"job_ids": ("1",), "result": {}}, {"job_ids": ("2",), "ledger": attempt(0)}
    stopped = {"job_ids": ("3",), "submitted_unix_s": 1.0, "ledger": attempt(0, action="stop")}
    found = wanted(a=finished, b=running, c=stopped, d={})
    assert found == Wanted(job_ids=["2", "3"], may_wait=False, settled=["3"])
    assert wanted(e={"job_ids": ("5",)}).may_wait and wanted(f={"job_ids": ("6",), "ledger": PREEMPTED}).may_wait


def test_files_of_a_run_that_has_ended_are_read_once_until_they_change(has_run: Any) -> None:
    reader, run = Surveyor(QueueView(FakeSlurmCommands())), has_run(ledger=attempt(0, action="stop", reason="failed"))
    first = reader.read(run)
    run.metrics.write_text(json.dumps(LINE) + "\n")
    assert reader.read(run) is first
    run.attempts.write_text(run.attempts.read_text() + json.dumps(attempt(1)[0]) + "\n")
    assert reader.read(run).line == LINE


def test_a_survey_asks_slurm_once_about_all_runs(has_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = [Element(run=has_run(f"{number}aaa0000", job_ids=(str(number),))) for number in range(1, 4)]
    slurm, asked = FakeSlurmCommands([job_state("1"), job_state("2", "PENDING", reason="Priority")]), []
    queue = slurm.queue
    monkeypatch.setattr(slurm, "queue", lambda ids, **how: (asked.append([*ids]), queue(ids, **how))[1])
    survey = Surveyor(QueueView(slurm)).look(subjects)
    assert [one.state.value for one in survey.statuses] == ["running", "queued", "not_started"]
    assert asked == [["1", "2", "3"]]


def leaves_an_unread_answer(run: RunDirectory, *, name: str = "gpt-stdlib-3f9a1c07") -> Path:
    """Puts the script there that a submission leaves whose answer could not be read."""
    run.submitted.mkdir(parents=True)
    script = run.submitted / ".submission_file_0.sh"
    for path in (run.submit_script, script):
        path.write_text(f"#!/bin/bash\n#SBATCH --job-name={name}\n")
    return script


def survey_of(run: RunDirectory, slurm: FakeSlurmCommands) -> RunStatus:
    return Surveyor(QueueView(slurm)).look([Element(run=run)]).statuses[0]


@pytest.mark.parametrize("before", [{}, {"job_ids": ("7",), "ledger": attempt(0, reason="failed", action="stop")}])
def test_a_job_that_only_slurm_knows_of_is_the_runs(before: dict[str, Any], has_run: Any) -> None:
    run = has_run(**before)
    slurm = FakeSlurmCommands([job_state("7", "FAILED"), job_state("12", "PENDING", reason="Priority")])
    slurm.scripts = {"7": str(run.submit_script), "12": str(leaves_an_unread_answer(run))}
    status = survey_of(run, slurm)
    assert (status.job_id, status.state, status.is_active) == ("12", RunState.QUEUED, True)
    assert "not understood" not in status.note


def test_a_job_whose_script_a_wrapper_has_copied_is_found_by_its_name_after_an_unread_answer(has_run: Any) -> None:
    run, slurm = has_run(), FakeSlurmCommands([job_state("12"), job_state("13")])
    slurm.scripts = {"12": "/spool/copy.sh", "13": f"/elsewhere/runs/gpt-stdlib/{run.run_id}/submit.sh"}
    slurm.names = {"12": "gpt-stdlib-3f9a1c07", "13": "gpt-stdlib-3f9a1c07"}
    assert survey_of(run, slurm).job_id is None, "no submission is in doubt"
    leaves_an_unread_answer(run)
    assert survey_of(run, slurm).job_id == "12"
    assert find_active([run], slurm)[run].jobs == ("12",)  # type: ignore[arg-type]  # the fake


def test_an_element_of_an_array_that_was_not_recorded_is_found_by_the_arrays_script(has_run: Any) -> None:
    runs = [has_run("aaaa0000"), has_run("bbbb0000")]
    array = SweepDirectory(runs[0].path.parents[1] / "sweeps" / "9b1c44e0").array(0)
    write(array.path, {"submit.sh": "#SBATCH --array=0-1\n", "runs.txt": f"{runs[0].path}\n{runs[1].path}\n"})
    slurm = FakeSlurmCommands([job_state("57_0", "PENDING"), job_state("57_1", "PENDING")])
    slurm.scripts = {"57_[0-1]": f"{array.path}/submitted/.submission_file_0.sh"}
    assert survey_of(runs[1], slurm).job_id == "57_1"


def test_an_answer_that_could_not_be_read_is_named_while_no_job_is_found(has_run: Any) -> None:
    run, slurm = has_run(), FakeSlurmCommands()
    leaves_an_unread_answer(run)
    assert f"`resume {run.run_id}` submits it again" in survey_of(run, slurm).note
    take_lock(run.submission_lock, this_process(), is_alive=lambda _: True)
    assert survey_of(run, slurm).note == "it is being submitted"
    run.submission_lock.unlink()
    slurm.error = ClusterError("away")
    assert "is not known" in survey_of(run, slurm).note
    slurm.error = None
    record_job(run, "12")
    assert "not understood" not in survey_of(run, slurm).note


def test_a_job_of_another_run_with_an_id_that_was_given_out_again_is_left_out(has_run: Any) -> None:
    ended = attempt(0, reason="failed", action="stop", note="a rank failed")
    run = has_run(job_ids=("12",), submitted_unix_s=0.0, ledger=ended)
    other = has_run("b4d0e112", job_ids=("12",))
    slurm = FakeSlurmCommands([job_state("12", "RUNNING")])
    slurm.scripts = {"12": str(other.submit_script)}
    old, new = Surveyor(QueueView(slurm)).look([Element(run=run), Element(run=other)]).statuses
    assert (old.state, old.job, old.is_active) == (RunState.FAILED, None, False)
    assert (new.state, new.job_id) == (RunState.RUNNING, "12")
    slurm.scripts = {"12": str(run.submit_script)}
    assert survey_of(run, slurm).state is RunState.RUNNING, "the run itself was submitted again"


def test_a_survey_is_over_when_nothing_is_active_and_slurm_says_so(has_run: Any) -> None:
    stopped = seen(
        has_run("aaaa0000", job_ids=("1",), submitted_unix_s=1.0, ledger=attempt(0, action="stop")), KnownJobs()
    )
    waiting = seen(has_run("bbbb0000", job_ids=("2",)), KnownJobs())
    running = seen(has_run("cccc0000", job_ids=("3",)), look(job_state("3")))
    silent = KnownJobs(problem="no answer")
    # Where Slurm is silent the job of the waiting one may well wait.
    for statuses, answer, expected in (
        ((stopped,), silent, (True, True)),
        ((stopped, waiting), look(), (True, False)),
        ((stopped, waiting), silent, (False, False)),
        ((stopped, running), look(), (False, False)),
    ):
        survey = Survey(statuses, answer)
        assert (survey.is_over, survey.is_settled) == expected


def test_an_answer_from_before_the_end_is_about_the_past(has_run: Any) -> None:
    ledger = attempt(0, action="stop", reason="failed", time_unix_s=time.time() - 2)
    run = has_run(job_ids=("12",), submitted_unix_s=1.0, ledger=ledger)
    states = [seen(run, look(job_state("12"), age_s=age_s)).state.value for age_s in (4.0, 0.5)]
    assert states == ["failed", "running"], "asked before the end, and after it (somebody requeued the job)"


def test_who_acts_upon_a_status_is_refused_while_slurm_does_not_answer(has_run: Any) -> None:
    slurm, subject = FakeSlurmCommands([job_state("12")]), Element(run=has_run(job_ids=("12",)))
    assert [one.state for one in read_statuses([subject], slurm)] == [RunState.RUNNING]  # type: ignore[arg-type]  # the fake
    slurm.error = ClusterError("nobody there")
    with pytest.raises(ClusterError, match="nobody there"):
        read_statuses([subject], slurm)  # type: ignore[arg-type]  # the fake


def test_states_are_read_as_people_write_them_and_other_words_refused_with_those_that_are() -> None:
    found = read_states("running, not started,missing,Time-Limit,pending", option="--state")
    assert found == {RunState.RUNNING, RunState.NOT_STARTED, RunState.TIMEOUT, RunState.QUEUED}
    for text, message in (("runing", "there is no state 'runing'"), (",", "no state is named")):
        with pytest.raises(ConfigError, match=rf"--state {text}: {message}\nhint: .*running"):
            read_states(text, option="--state")
