"""From which checkpoint a script is to resume by its own words, and whether it has opened one.

Rank 0 writes the record before the script starts, so that all ranks get the same words; the first rank whose script
opens one of the checkpoints leaves a mark.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from slurm_train.rundir.files import ask_server, create_empty, is_there, read_record, write_record
from slurm_train.rundir.paths import RunDirectory

BEGAN_ANEW = "began_anew"
"""The event of a script that was to go on and did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnResume:
    """What the ranks of an attempt were given."""

    words: list[str]
    """Behind those of the script; [] where no checkpoint was there."""
    checkpoint: str = ""
    """The newest one, "" for none."""
    checkpoints: list[str]
    """All that were there; a script may choose another one."""


def record_own_resume(run: RunDirectory, attempt: int, resume: OwnResume) -> None:
    """Writes the record. Rank 0 only."""
    write_record(run.own_resume(attempt), resume, durable=True)


def read_own_resume(run: RunDirectory, attempt: int, *, wait_s: float = 0.0) -> OwnResume | None:
    """Returns the record, None where there is none.

    Args:
        run: the run.
        attempt: number of the attempt.
        wait_s: how long this node may take to see what another one has written.
    """
    deadline_s = time.monotonic() + wait_s
    path = run.own_resume(attempt)
    while (resume := read_record(path, OwnResume)) is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
        ask_server(path.parent)
    return resume


def mark_taken(run: RunDirectory, attempt: int) -> None:
    """Leaves the mark that the script has opened a checkpoint; a full disk costs no run."""
    with contextlib.suppress(OSError):
        create_empty(run.own_resume_taken(attempt))


def was_taken(run: RunDirectory, attempt: int) -> bool:
    """Returns whether the script has opened a checkpoint, as far as Python was asked to open it."""
    return is_there(run.own_resume_taken(attempt))
