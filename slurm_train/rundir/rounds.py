"""Rounds: ranks that are started again within one step, by torchrun and not by the supervisor.

Each round is an attempt of its own, with its number, its fence, its secret and its logs, so a rank of an earlier round
is a zombie like any other, whatever number it had. The first round of a step is the attempt that the supervisor has
opened for it; those after it say whose they are. Rank 0 of a round opens it, when all of its ranks have come.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_train.errors import EXIT_FAILURE, RunError
from slurm_train.rundir.attempts import AttemptStart, close_attempt, open_attempt, overtaken, read_ledger
from slurm_train.rundir.files import read_json, write_durable
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.marks import first_mark
from slurm_train.rundir.progress import last_step
from slurm_train.rundir.timing import read_account

_SAVED = "saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What rank 0 writes down when it begins a round."""

    world_size: int
    first_step: int
    """Newest step on record before it."""
    start_unix_s: float


def newest_round(run: RunDirectory, first: int) -> int:
    """Returns the attempt that the ranks of a step are at now: the one it began with, or the newest that follows it."""
    following = [attempt for attempt in existing_attempts(run) if attempt > first and _follows(run, attempt) == first]
    return max(following, default=first)


def first_round(run: RunDirectory, attempt: int) -> int:
    """Returns the attempt that the step of an attempt began with; itself, where nothing was started again."""
    follows = _follows(run, attempt)
    return attempt if follows is None else follows


def read_round(run: RunDirectory, attempt: int) -> Round | None:
    """Returns what rank 0 has written down, None before it did, and where srun starts the ranks."""
    facts = read_json(_path(run, attempt))
    return None if facts is None else Round(**facts)


def begin_round(run: RunDirectory, start: AttemptStart, *, first: int | None) -> int:
    """Opens the attempt of a round, closes the one before it, and returns its number. Rank 0 only.

    Args:
        run: the run.
        start: who begins it, and where; of an attempt that a supervisor has opened, its own facts count.
        first: the attempt that the supervisor has opened for this step; None: there is no supervisor.

    Raises:
        RunError: a newer attempt has taken the run over meanwhile.
    """
    before = last_step(run)
    facts = Round(world_size=start.world_size, first_step=before, start_unix_s=time.time())
    if first is not None:
        if _claim(run, first, facts):
            return first
        previous = newest_round(run, first)
        if (newest := max(existing_attempts(run))) > previous:
            raise overtaken(run, previous, newest)
        close_round(run, previous, action="relaunch", committed_step=start.committed_step)
        known = read_json(run.epochs / f"attempt_{first}") or {}
        start = replace(start, job_id=known.get("job_id"), restart_count=int(known.get("restart_count", 0)))
    else:
        for entry in read_ledger(run):
            if entry.get("job_id") is None:
                close_round(run, int(entry["attempt"]), action="relaunch", committed_step=start.committed_step)
    attempt = open_attempt(run, start, follows=first)
    _claim(run, attempt, facts)
    return attempt


def close_round(run: RunDirectory, attempt: int, *, action: str, committed_step: int | None = None) -> None:
    """Writes the end line of an attempt whose ranks have failed; one that has its line is left alone.

    Args:
        run: the run.
        attempt: its number.
        action: what follows.
        committed_step: step of the newest checkpoint now, as in `AttemptStart`.
    """
    entry = next((line for line in read_ledger(run) if line["attempt"] == attempt), None)
    if entry is None or "end_time_unix_s" in entry:
        return
    mark, begun = first_mark(run, attempt), read_round(run, attempt)
    first_step = 0 if begun is None else begun.first_step
    what = str(mark) if mark is not None else "a rank was killed"
    facts: dict[str, Any] = {
        "exit_code": EXIT_FAILURE if mark is None else mark.exit_code,
        "reason": "failed",
        "action": action,
        "note": f"{what}; torchrun starts the ranks again",
        "first_step": first_step,
        "last_step": last_step(run),
    }
    if committed_step is not None:
        facts["last_committed"] = committed_step
    if mark is not None:
        facts["failed_on"] = mark.host
    wall = {"start_unix_s": float(entry["time_unix_s"]), "end_unix_s": time.time()}
    close_attempt(run, attempt, facts | read_account(run, attempt, **wall, step_before=first_step))


def note_saved(run: RunDirectory, attempt: int) -> None:
    """Leaves a mark that a rank of the attempt has saved and wants to be run again: torchrun cannot be told so."""
    (run.attempt_logs(attempt) / _SAVED).touch(mode=0o600)


def was_saved(run: RunDirectory, attempt: int) -> bool:
    """Returns whether a rank has left that mark."""
    return (run.attempt_logs(attempt) / _SAVED).exists()


def lobby_secret(run: RunDirectory, *, is_first: bool, wait_s: float) -> str:
    """Returns what only those know who can read the run directory, for ranks that have no attempt yet.

    Args:
        run: the run.
        is_first: whether this is rank 0, which makes it where there is none.
        wait_s: how long this node may take to see the file that another one has made.

    Raises:
        RunError: it does not come: this machine has another run directory than rank 0.
    """
    path = run.epochs / "lobby"
    if is_first and not path.exists():
        run.epochs.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            write_durable(path, json.dumps({"secret": secrets.token_hex(16)}) + "\n")
    deadline = time.monotonic() + wait_s
    while (found := read_json(path)) is None:
        if time.monotonic() > deadline:
            raise RunError(
                f"{path} did not appear within {wait_s:g} s: rank 0 does not write to this run directory",
                hint="torchrun's machines need one run directory that all of them see",
            )
        time.sleep(0.05)
    return str(found["secret"])


def _claim(run: RunDirectory, attempt: int, facts: Round) -> bool:
    """Returns whether this attempt has no ranks yet: they are this round's then."""
    try:
        write_durable(_path(run, attempt), json.dumps(asdict(facts)) + "\n")
    except FileExistsError:
        return False
    return True


def _path(run: RunDirectory, attempt: int) -> Path:
    return run.attempt_logs(attempt) / "round.json"


def _follows(run: RunDirectory, attempt: int) -> int | None:
    follows = (read_json(run.epochs / f"attempt_{attempt}") or {}).get("follows")
    return None if follows is None else int(follows)
