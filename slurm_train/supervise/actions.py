"""What a supervisor does when ranks have ended, and what the record of a job alone tells of its end.

`decision` chooses among the actions, `supervisor` and `requeue` carry them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_train.rundir.ledger import Action, Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """What happened and what follows from it."""

    reason: Reason
    action: Action
    note: str
    """One line for the ledger and the person."""
    exclude: tuple[str, ...] = ()
    """Nodes that the job must not get again."""
    is_over: bool = False
    """Whether the job has reached its time limit: then only the plain form of requeue starts it again."""
    delay_s: int = 0
    """Seconds that must pass before the job starts again."""
    left_out: tuple[str, ...] = ()
    """Nodes that the next attempt, in the same allocation, does not use."""


CANCELLED = Decision(Reason.CANCELLED, Action.STOP, "the job was cancelled; `resume` continues the run")


def slurm_reason(job: Mapping[str, str], restart_count: int) -> Reason | None:
    """Returns why a job ends, or ended, from its record alone; None where the record has no reason.

    Args:
        job: `scontrol show job` as a mapping.
        restart_count: restarts of the job when the attempt began.
    """
    state = job.get("JobState", "")
    if state == "CANCELLED":
        # Also a job that was being preempted when its user cancelled it.
        return Reason.CANCELLED
    if job.get("PreemptTime", "None") not in ("None", "Unknown", ""):
        return Reason.PREEMPTED
    if is_over_its_limit(job):
        return Reason.TIME_LIMIT
    if restarts_in(job) > restart_count:
        return Reason.REQUEUED
    return Reason.CANCELLED if state == "COMPLETING" else None


def is_over_its_limit(job: Mapping[str, str]) -> bool:
    """Returns whether the time limit has ended a job; such a job cannot be cancelled any more."""
    return job.get("Reason") == "TimeLimit" and job.get("JobState") != "CANCELLED"


def restarts_in(job: Mapping[str, str]) -> int:
    """Returns how often Slurm has restarted a job, 0 where its record does not say."""
    return int(job.get("Restarts", "0"))
