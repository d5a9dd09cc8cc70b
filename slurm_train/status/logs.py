"""Which file has the log that a person wants to see: of a rank, or of the batch script while the rank has none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.files import change_times, read_head, read_tail, size_of
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.ledger import read_attempt
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.status.printed import began_anew

_LAST_WORDS_S = 1.0
LOG_BYTES = 16384
"""Of a log's begin or end, for the program's progress: some 150 lines, which are read in a few milliseconds."""


@dataclass(frozen=True, slots=True)
class ChosenLog:
    """A file and the attempt that it belongs to."""

    path: Path
    attempt: int


def choose_log(run: RunDirectory, *, attempt: int | None, rank: int, after: int | None = None) -> ChosenLog | None:
    """Returns the log of a rank, or of the batch script while the rank has not written any; None for neither.

    Args:
        run: the run.
        attempt: its number; None: the newest.
        rank: its number; -1: the batch script.
        after: only logs of attempts after this one; None: of any, and what a job wrote before its first.

    Raises:
        RunError: there was no such attempt.
    """
    attempts = [number for number in existing_attempts(run) if after is None or number > after]
    if attempt is not None and attempt not in attempts:
        numbers = ", ".join(map(str, attempts)) or "none yet"
        raise RunError(f"{run.path} has no attempt {attempt}", hint=f"attempts: {numbers}")
    if after is not None and not attempts:
        return None
    number = attempt if attempt is not None else max(attempts, default=0)
    batch_log = run.logs / "batch.log"
    if attempt is None and after is None and attempts and _wrote_after(run, number):
        return ChosenLog(batch_log, number + 1)
    candidates = [run.rank_log(number, rank)] if rank >= 0 else []
    candidates.append(run.attempt_logs(number) / "batch.log")
    # Lines of the batch script that are older than this attempt belong to earlier ones.
    begun = read_attempt(run, number)
    begin_unix_s = 0.0 if begun is None else begun.start.time_unix_s
    if after is None and change_times([batch_log]).get(batch_log, 0.0) >= begin_unix_s:
        candidates.append(batch_log)
    for path in candidates:
        if size_of(path):
            return ChosenLog(path, number)
    return None


def _wrote_after(run: RunDirectory, attempt: int) -> bool:
    """Returns whether a job that was submitted after an attempt has written to the batch log since that ended."""
    record = read_job(run)
    last = read_attempt(run, attempt)
    if record is None or last is None or last.end is None or last.start.job_id in (None, record.job_id):
        return False
    log = run.logs / "batch.log"
    # The supervisor of the attempt has a few last words. The newer job may have ended before its id was recorded.
    return change_times([log]).get(log, 0.0) > last.end.time_unix_s + _LAST_WORDS_S


def new_begin(run: RunDirectory, attempt: int, before: int) -> str:
    """Returns where a program has begun anew by its log, "" where it goes on, or where the logs do not say it.

    E.g. "1/300, and attempt 0 had come to 120/300".

    Args:
        run: the run.
        attempt: number of the attempt.
        before: that of the one before.
    """
    log = run.rank_log(before, 0)
    found = began_anew(
        read_head(run.rank_log(attempt, 0), LOG_BYTES),
        begin_before=read_head(log, LOG_BYTES),
        end_before=read_tail(log, LOG_BYTES),
        num_bytes_before=size_of(log),
    )
    if found is None:
        return ""
    begin, furthest = found
    return f"{begin.words}, and attempt {before} had come to {furthest.words}"


def is_closed(run: RunDirectory, attempt: int) -> bool:
    """Returns whether the ledger says how an attempt ended."""
    found = read_attempt(run, attempt)
    return found is not None and found.end is not None
