"""Attempts that nobody closed: their supervisor was lost with its node, or killed. The next attempt closes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_train.requeue.decision import slurm_reason
from slurm_train.rundir.attempts import AttemptStart, close_attempt, read_ledger
from slurm_train.rundir.files import change_times, listed
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import read_account

_REASONS = {
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time_limit",
    "REQUEUED": "requeued",
    "CANCELLED": "cancelled",
}


def close_lost(
    run: RunDirectory, now: AttemptStart, *, past_ends: Callable[[str], Sequence[str]], last_step: int
) -> None:
    """Writes the end line of every attempt that has none.

    Args:
        run: the run; its lock is held, so no attempt of it is under way.
        now: the attempt that is about to begin; what is committed now was committed in an earlier one.
        past_ends: how the earlier starts of a job ended in Slurm's words, oldest first; empty where nobody knows.
        last_step: the newest step on record.
    """
    for entry in read_ledger(run):
        if "end_time_unix_s" in entry:
            continue
        job_id = entry.get("job_id")
        reason, note = lost_because(entry, now, past_ends(str(job_id)) if job_id else ())
        facts: dict[str, Any] = {"reason": reason, "action": "lost", "note": note, "last_step": last_step}
        if now.committed_step is not None:
            facts["last_committed"] = now.committed_step
        # What it did again of an earlier attempt's steps is not known any more.
        start_unix_s, end_unix_s = float(entry.get("time_unix_s", 0.0)), _last_sign_of_life(run, entry)
        seconds = read_account(
            run, int(entry["attempt"]), start_unix_s=start_unix_s, end_unix_s=end_unix_s, step_before=0
        )
        close_attempt(run, int(entry["attempt"]), {**facts, **seconds, "time_unix_s": end_unix_s})


def lost_because(entry: Mapping[str, Any], now: AttemptStart, ends: Sequence[str]) -> tuple[str, str]:
    """Returns reason and note for an attempt that its supervisor could not close.

    Args:
        entry: its line of the ledger.
        now: the attempt that is about to begin.
        ends: how the starts of its job ended, oldest first.
    """
    index = int(entry.get("restart_count") or 0)
    word = ends[index] if index < len(ends) else ""
    if word in _REASONS:
        return _REASONS[word], f"ended without a word; Slurm calls it {word}"
    same_job = entry.get("job_id") is not None and entry.get("job_id") == now.job_id
    if same_job and now.restart_count > index:
        # A supervisor that is alive closes its attempt whatever happens to the job.
        return "node_failure", "ended without a word and was restarted by Slurm: its first node was lost"
    said = f"; Slurm calls it {word}" if word else ""
    return "lost", f"the batch script was killed{said}"


def why_restarted(start: AttemptStart, ends: Sequence[str]) -> str:
    """Returns "preempted" or "node_failure" for a start that Slurm ended itself, "" where accounting does not say yet.

    After a preemption without grace the job's own record says no more than that it was restarted.
    """
    word = ends[start.restart_count] if start.restart_count < len(ends) else ""
    return _REASONS[word] if word in ("PREEMPTED", "NODE_FAIL") else ""


def was_cancelled(start: AttemptStart, job: Mapping[str, str], ends: Callable[[], Sequence[str]]) -> bool:
    """Returns whether somebody cancelled a job that is ending, be it in the grace time of a preemption.

    There the job's own record looks alike; accounting says it at once (22.05: "CANCELLED" while still COMPLETING, and
    a job that is requeued has more Restarts by then).

    Args:
        start: the job's start that is ending.
        job: `scontrol show job`.
        ends: how the starts of the job ended, oldest first; asked only where it matters.
    """
    if slurm_reason(job, start.restart_count) == "cancelled":
        return True
    is_ending = job.get("JobState") in ("COMPLETING", "CANCELLED")
    if not is_ending or int(job.get("Restarts", "0")) > start.restart_count:
        return False
    words = ends()
    return start.restart_count < len(words) and words[start.restart_count] == "CANCELLED"


def _last_sign_of_life(run: RunDirectory, entry: Mapping[str, Any]) -> float:
    times = [float(entry.get("time_unix_s", 0.0))]
    # When a file was last touched is not worth a run.
    with contextlib.suppress(OSError):
        times += change_times(listed(run.attempt_logs(int(entry["attempt"])))).values()
    return max(times)
