"""State and reason of a run: what its files and Slurm say, weighed against each other. Values in, words out.

A result counts whatever Slurm says; an active job counts more than the ledger; the ledger knows better than accounting
why an attempt ended. Where nobody else can tell, a fresh heartbeat does.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_train.slurm.nodelist import parse_nodelist
from slurm_train.slurm.reasons import explain_reason
from slurm_train.slurm.records import JobState, Phase
from slurm_train.standing.files import RunFiles
from slurm_train.standing.states import RunState, state_of_phase, state_of_reason

SILENT_AFTER_S = 60.0
"""A heartbeat is written twice a second; a network file system may keep it back for half a minute."""

_CAME_BACK = {
    "preempted": "was preempted",
    "time_limit": "its time limit came",
    "node_failure": "a node was lost",
    "failed": "failed",
    "requeued": "was requeued",
    "file_system": "could not be started: the file system refused",
}
_HALTED = {"SUSPENDED": "Slurm has suspended the job", "STOPPED": "the job's processes are stopped"}


def judge(files: RunFiles, job: JobState | None, *, now_unix_s: float, slurm_answers: bool = True) -> RunState:
    """Returns the state of a run.

    Args:
        files: what its files say.
        job: what Slurm says about its newest job; None where it does not know it, or was not asked.
        now_unix_s: the time.
        slurm_answers: whether Slurm was asked and answered at all.
    """
    if files.is_finished:
        return RunState.FINISHED
    if job is not None and (job.is_active or not files.ledger):
        return state_of_phase(job.phase)
    if files.lives_here:
        return RunState.RUNNING
    if files.ledger and not files.is_open:
        last = files.ledger[-1]
        return RunState.CANCELLED if is_cancelled_since(job, last) else state_of_reason(str(last.get("reason", "")))
    if job is not None:
        return state_of_phase(job.phase)
    if not slurm_answers and is_beating(files, now_unix_s=now_unix_s):
        return RunState.RUNNING
    return RunState.INTERRUPTED if files.ledger else RunState.NOT_STARTED


def is_beating(files: RunFiles, *, now_unix_s: float) -> bool:
    """Returns whether every rank at work has written its heartbeat lately."""
    beat = files.weakest_beat
    return beat is not None and abs(now_unix_s - beat.written_unix_s) < SILENT_AFTER_S


def explain(files: RunFiles, job: JobState | None, state: RunState, *, slurm_answers: bool = True) -> str:
    """Returns why a run waits, is slow, or has ended, in words; "" where there is nothing to say."""
    if state is RunState.QUEUED and job is not None:
        waits = "its nodes are made ready" if job.word == "CONFIGURING" else explain_reason(job.reason)
        return "; ".join(filter(None, [_why_again(files), waits]))
    if state is RunState.RUNNING:
        return (_HALTED.get(job.word, "") if job is not None else "") or files.slow_because
    if state is RunState.FINISHED:
        return ""
    if not files.ledger:
        return _explain_without_attempt(files, job, state, slurm_answers=slurm_answers)
    last = files.ledger[-1]
    if is_cancelled_since(job, last):
        return f"the job was cancelled while it waited to come back; `resume {files.run.run_id}` continues"
    if files.is_open:
        return _explain_without_end(files, job, slurm_answers=slurm_answers)
    return str(last.get("note", ""))


def _why_again(files: RunFiles) -> str:
    """Returns why a run waits that has run before, "" for one that somebody has submitted again."""
    last = files.ledger[-1] if files.ledger else {}
    return _CAME_BACK.get(str(last.get("reason")), "") if last.get("action") in ("requeue", "leave") else ""


def is_cancelled_since(job: JobState | None, entry: Mapping[str, object]) -> bool:
    """Whether a job that was to come back after an attempt was cancelled before it could; nobody was there to note."""
    return job is not None and job.phase is Phase.CANCELLED and entry.get("action") in ("requeue", "leave")


def never_began(job: JobState) -> str:
    """Returns why a job may have failed before its first line of output: Slurm could not open the log there."""
    host = parse_nodelist(job.nodelist)[0] if job.nodelist else "its first node"
    return f"ended before it began: does {host} see the run directory? (run.root=/shared/path)"


def _explain_without_attempt(files: RunFiles, job: JobState | None, state: RunState, *, slurm_answers: bool) -> str:
    if state is RunState.FAILED and job is not None:
        return never_began(job)
    if state is RunState.NOT_STARTED and files.record is not None:
        job_id = files.record.job_id
        gone = f"Slurm does not know job {job_id} any more; `resume {files.run.run_id}` submits it again"
        return gone if slurm_answers else f"job {job_id} was submitted"
    return ""


def _explain_without_end(files: RunFiles, job: JobState | None, *, slurm_answers: bool) -> str:
    """Returns what is known of a run whose supervisor did not live to write how it ended."""
    if job is not None and job.phase in (Phase.PREEMPTED, Phase.NODE_FAIL):
        return ""
    if files.record is None:
        return f"what ran it is gone; `resume {files.run.run_id}` continues"
    if job is None and not slurm_answers:
        return "no sign of life from its ranks, and Slurm is not there to ask"
    slurm_says = f" (Slurm: {job.word})" if job is not None else ""
    return f"the batch script was killed{slurm_says}; `resume {files.run.run_id}` continues"
