"""Which log is shown: of one rank in one attempt, or of the batch script while the rank has not written any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.files import size_of
from slurm_train.rundir.layout import RunDirectory, existing_attempts


@dataclass(frozen=True, slots=True)
class ChosenLog:
    """A file and the attempt that it belongs to."""

    path: Path
    attempt: int


def choose_log(run: RunDirectory, *, attempt: int | None, rank: int) -> ChosenLog | None:
    """Returns the log to show, None where there is none yet.

    Args:
        run: the run.
        attempt: its number; None: the newest.
        rank: its number; -1: the batch script.

    Raises:
        RunError: there was no such attempt.
    """
    attempts = existing_attempts(run)
    if attempt is not None and attempt not in attempts:
        known = ", ".join(map(str, attempts)) or "none yet"
        raise RunError(f"{run.path} has no attempt {attempt}", hint=f"attempts: {known}")
    number = attempt if attempt is not None else max(attempts, default=0)
    batch_logs = [run.attempt_logs(number) / "batch.log", run.logs / "batch.log"]
    wanted = batch_logs if rank < 0 else [run.rank_log(number, rank), *batch_logs]
    found = next((path for path in wanted if size_of(path)), None)
    return ChosenLog(found, number) if found is not None else None
