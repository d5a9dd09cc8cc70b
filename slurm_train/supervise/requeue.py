"""Carries out what was decided about a job: it is requeued, another one continues the run, or it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.rundir.files import NO_SUCH_CALL
from slurm_train.rundir.ledger import NOT_REQUEUED, Action, Attempt, End, Reason, Start, read_ledger, record_end
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.actions import CANCELLED, Decision, slurm_reason
from slurm_train.supervise.best_effort import BestEffort, say
from slurm_train.supervise.decision import MOST_FAILED_STARTS, delayed_requeue, starts_without_progress
from slurm_train.supervise.job import Job
from slurm_train.supervise.notify import Notifier

# Errors that do not pass by themselves, besides those of calls that a file system does not have.
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)


def carry_out(
    run: RunDirectory,
    job: Job,
    decision: Decision,
    exit_code: int = EXIT_FAILURE,
    *,
    notify: Notifier | None = None,
) -> int:
    """Returns the exit code of the batch script, after the job was requeued where that was decided.

    Args:
        run: the run, which this process no longer holds.
        job: the job.
        decision: what follows, other than ranks that are started again in this job.
        exit_code: of the ranks.
        notify: sends messages to the person; None: no messages are sent.
    """
    if decision.action is Action.REQUEUE and not job.requeue(decision):
        return _submit_successor(run, job, decision, notify)
    if decision.action is Action.FINISH:
        return EXIT_DONE
    if decision.action in (Action.REQUEUE, Action.LEAVE):
        job.wait_for_requeue(decision)
        return EXIT_REQUEUE
    return exit_code or EXIT_FAILURE


def requeue_after_error(run: RunDirectory, job: Job, error: OSError) -> int:
    """Requeues a job that could not start its ranks, or lacked a file that it needs; returns the exit code.

    A full disk or a stale file handle may pass, so the job is requeued with a growing delay, ten times in a row.

    Raises:
        OSError: the error itself, where it does not pass by itself.
    """
    if isinstance(error, _LASTING) or error.errno in NO_SUCH_CALL or job.job_id is None:
        raise error
    ledger = BestEffort()("the ledger", lambda: read_ledger(run), None)
    # Without a ledger the number of tries is not known; the job tries again at long intervals.
    tries = MOST_FAILED_STARTS // 2
    if ledger is not None:
        tries = starts_without_progress(ledger, job_id=job.job_id, restart_count=job.restart_count)
    problem = f"the run could not be started: {error}"
    if tries > MOST_FAILED_STARTS:
        say(f"{problem}; that was start {tries} in a row, so the job ends; `resume` continues the run")
        return EXIT_FAILURE
    decision = delayed_requeue(problem, tries)
    say(decision.note)
    return carry_out(run, job, decision)


def is_cancelled(job: Job, record: Mapping[str, str] | None) -> bool:
    """Returns whether somebody cancelled this job, which is ending, perhaps in the grace time of a preemption.

    In the grace time the job's own record looks the same either way, but accounting has the cancellation at once
    (22.05: "CANCELLED" while still COMPLETING; a requeued job has more Restarts by then). Accounting is asked only
    where it matters.

    Args:
        job: the job.
        record: its record, None where Slurm does not answer.
    """
    if record is None or job.job_id is None:
        return False
    if slurm_reason(record, job.restart_count) is Reason.CANCELLED:
        return True
    is_ending = record.get("JobState") in ("COMPLETING", "CANCELLED")
    if not is_ending or int(record.get("Restarts", "0")) > job.restart_count:
        return False
    return nth_end(job.past_ends(job.job_id), job.restart_count) == "CANCELLED"


def nth_end(states: Sequence[str], index: int) -> str:
    """Returns how the start of a job with this number ended, "" where that is not known."""
    return states[index] if index < len(states) else ""


def _submit_successor(run: RunDirectory, job: Job, decision: Decision, notify: Notifier | None) -> int:
    """Has another job continue the run, since Slurm does not requeue this one, and records what came of it."""
    if is_cancelled(job, job.show()):
        # The job was cancelled after the decision, so the requeue did nothing, and no other job is wanted.
        _record_outcome(run, job, CANCELLED.note, reason=CANCELLED.reason, action=CANCELLED.action)
        return EXIT_FAILURE
    new_id = BestEffort()("another job", lambda: job.resubmit(decision), "", asks_slurm=True)
    if new_id:
        note = f"{decision.reason}; this job cannot be requeued; job {new_id} takes over when it has ended"
        _record_outcome(run, job, note)
        return EXIT_REQUEUE
    refusals = "; ".join(job.refusals) or "Slurm did not confirm the requeue"
    note = f"{decision.reason}; {refusals}; `resume` continues the run"
    attempt = _record_outcome(run, job, note, outcome=NOT_REQUEUED)
    if notify is not None:
        notify("failed", note=note, job_id=job.job_id, attempt=attempt, once=f"attempt {attempt}")
    return EXIT_FAILURE


def _record_outcome(run: RunDirectory, job: Job, note: str, **facts: Any) -> int:
    """Adds what became of the decision to the attempt of this start, if it has opened one; returns its number."""
    best_effort = BestEffort()
    ledger = best_effort("the ledger", lambda: read_ledger(run), list[Attempt]())
    newest = ledger[-1] if ledger else Attempt(0, Start())
    say(f"attempt {newest.number}: {note}")
    if ledger and newest.start.job_start == job.job_start:
        end = replace(newest.end or End(time_unix_s=time.time()), note=note, **facts)
        best_effort("the ledger", lambda: record_end(run, newest.number, end), None)
    return newest.number
