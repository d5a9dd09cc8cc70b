"""Marks that failing ranks leave: who, where, which exit code, in which words.

srun keeps one exit code for all ranks, and it is that of the last one to be killed; the first mark names the cause.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from slurm_train.config.secrets import redact
from slurm_train.rundir.files import append_shared, read_shared
from slurm_train.rundir.layout import RunDirectory

_LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMark:
    """How one rank ended."""

    rank: int
    host: str
    exit_code: int
    message: str
    """The exception's last line, e.g. "ValueError: no such layer"."""
    time_unix_s: float = field(default=0.0, compare=False)
    """When it was left."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"


def leave_mark(run: RunDirectory, attempt: int, mark: FailureMark) -> None:
    """Adds a rank's mark to its attempt; a run directory that is gone is no second failure."""
    line = {**asdict(mark), "message": redact(mark.message)[:_LONGEST_MESSAGE], "time_unix_s": time.time()}
    if run.attempt_logs(attempt).is_dir():
        append_shared(run.attempt_logs(attempt) / "failures.jsonl", line)


def first_mark(run: RunDirectory, attempt: int) -> FailureMark | None:
    """Returns the earliest mark of an attempt, None where no rank left one."""
    lines = read_shared(run.attempt_logs(attempt) / "failures.jsonl")
    if not lines:
        return None
    line = min(lines, key=lambda line: float(line["time_unix_s"]))
    return FailureMark(
        rank=line["rank"],
        host=line["host"],
        exit_code=line["exit_code"],
        message=line["message"],
        time_unix_s=line["time_unix_s"],
    )
