"""Which rank of an attempt failed first, and what it said: the one line of thousands that explains the others.

The ledger names it: ranks leave a mark when they fail, and srun tells of those that were killed, whose peers then fail
as well. Where nobody is named, as with a script of the user's own, the log that ended first with a traceback is taken.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import first_mark
from slurm_train.rundir.files import change_times, listed
from slurm_train.rundir.layout import RunDirectory
from slurm_train.standing.tracebacks import traceback_of, tracebacks

_TAIL_BYTES = 1 << 18
_LAST_LINES = 20
_RANK = re.compile(r"\branks? (?P<rank>\d+)[\d,-]* on (?P<host>[\w.-]+)")
# How the ledger begins where no rank left a mark and srun named none.
_NOBODY_NAMED = "the ranks ended with code"
_LOG_NAME = re.compile(r"rank_(\d+)\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How an attempt failed."""

    attempt: int
    note: str
    """What the ledger says, e.g. "rank 3 on node2: ValueError: no; the ranks are started again in this allocation"."""
    rank: int | None
    """The first to fail, None where nobody knows."""
    host: str
    log: Path | None
    """Its log, None where it has none: rank 0 of a run on this machine writes to its terminal."""
    excerpt: str
    """Its traceback, the stacks of a rank that stood still, or the last lines of its log."""
    kind: str
    """What the excerpt is: "traceback", "stacks" or "last lines"; "" where there is none."""


def find_failure(run: RunDirectory, attempt: int) -> Failure | None:
    """Returns how an attempt failed, None for one that did not, or that still runs."""
    entry = next((one for one in read_ledger(run) if one["attempt"] == attempt), {})
    if entry.get("reason") != "failed":
        return None
    note = str(entry.get("note", ""))
    rank, host, message = _culprit(run, attempt, note)
    log = run.rank_log(attempt, rank) if rank is not None else None
    log = log if log is not None and log.is_file() else None
    excerpt, kind = _excerpt(run, attempt, rank, log, message)
    return Failure(attempt=attempt, note=note, rank=rank, host=host, log=log, excerpt=excerpt, kind=kind)


def first_failed_rank(run: RunDirectory, attempt: int) -> int | None:
    """Returns the rank that failed first as far as is known now, also of an attempt that has not ended yet."""
    entry = next((one for one in read_ledger(run) if one["attempt"] == attempt), {})
    return _culprit(run, attempt, str(entry.get("note", "")))[0]


def _culprit(run: RunDirectory, attempt: int, note: str) -> tuple[int | None, str, str]:
    """Returns rank, host and last words of the first rank to fail, as far as known."""
    named, mark = _RANK.search(note), first_mark(run, attempt)
    if mark is not None and (named is None or int(named["rank"]) == mark.rank):
        return mark.rank, mark.host, mark.message
    if named is not None:
        return int(named["rank"]), named["host"], ""
    # A lost node or a killed srun takes ranks along whose tracebacks explain nothing.
    return _first_log_with_traceback(run, attempt) if _NOBODY_NAMED in note else None, "", ""


def _first_log_with_traceback(run: RunDirectory, attempt: int) -> int | None:
    times = change_times(listed(run.attempt_logs(attempt)))
    names = {path: _LOG_NAME.fullmatch(path.name) for path in times}
    logs = sorted((times[path], int(match[1]), path) for path, match in names.items() if match)
    return next((rank for _, rank, path in logs if tracebacks(_tail(path))), None)


def _excerpt(run: RunDirectory, attempt: int, rank: int | None, log: Path | None, message: str) -> tuple[str, str]:
    if rank is not None and run.stacks(attempt, rank).is_file():
        return _tail(run.stacks(attempt, rank)).rstrip(), "stacks"
    if log is None:
        return "", ""
    text = _tail(log)
    if found := traceback_of(text, message):
        return found, "traceback"
    lines = text.rstrip().splitlines()[-_LAST_LINES:]
    return "\n".join(lines), "last lines" if lines else ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
