"""Attempts of a run: opened once each, fenced by an exclusive file, told in a ledger.

`epochs/attempt_<k>` is created with O_EXCL, so two starters never share a number, and a writer that sees a higher
one than its own knows that it was overtaken. `attempts.jsonl` has a start line and an end line per attempt.

`result.json` is renamed from a file that carries the attempt's number, after a check of the fence. A later attempt, or
whoever withdraws a result, raises the fence and then removes these files; so a rename that is carried out arbitrarily
late finds no source, and can neither replace nor fake a result.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.errors import RunError
from slurm_train.rundir.changes import ledger_facts, read_changes
from slurm_train.rundir.files import append_line, fsync_directory, read_json, read_lines, write_durable
from slurm_train.rundir.layout import RunDirectory, existing_attempts, numbered_epochs
from slurm_train.rundir.private import make_private


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """Who opens an attempt, and where."""

    job_id: str | None
    """Slurm job id, array-safe ("12_3"), or None for a local run."""
    restart_count: int
    """How often Slurm restarted this job."""
    nodes: tuple[str, ...]
    """Hosts of the allocation."""
    world_size: int
    """Ranks."""
    committed_step: int | None = None
    """Step of the newest checkpoint, -1 if there is none; None where nobody knows, as with a user's own code."""


def open_attempt(run: RunDirectory, start: AttemptStart, *, follows: int | None = None) -> int:
    """Opens the next attempt and returns its number, counted from 0.

    The number is taken by creating its file exclusively, so this also works when two jobs start at once.

    Args:
        run: the run.
        start: who opens it, and where.
        follows: the attempt in whose step the ranks were started again, see `rounds`.
    """
    run.epochs.mkdir(mode=0o700, exist_ok=True)
    facts: dict[str, Any] = {
        "job_id": start.job_id,
        "restart_count": start.restart_count,
        "nodes": list(start.nodes),
    }
    if follows is not None:
        facts["follows"] = follows
    attempt = max(existing_attempts(run), default=-1) + 1
    while True:
        try:
            secret = {"secret": secrets.token_hex(16)}
            write_durable(run.epochs / f"attempt_{attempt}", json.dumps({**facts, **secret}) + "\n")
            break
        except FileExistsError:
            attempt += 1
    fsync_directory(run.epochs)
    _discard_prepared_results(run, below=attempt)
    make_private(run.attempt_logs(attempt))
    line = {"event": "start", "attempt": attempt, "time_unix_s": time.time(), **facts, "world_size": start.world_size}
    if start.committed_step is not None:
        line["first_committed"] = start.committed_step
    line |= ledger_facts(read_changes(run), read_ledger(run))
    append_line(run.attempts, line, durable=True)
    return attempt


def attempt_secret(run: RunDirectory, attempt: int, *, wait_s: float = 0.0) -> str:
    """Returns what only the ranks of one attempt know, "" for an attempt that nobody has opened.

    Args:
        run: the run.
        attempt: its number.
        wait_s: how long this node may take to see the file that another one has made.
    """
    deadline = time.monotonic() + wait_s
    while True:
        facts = read_json(run.epochs / f"attempt_{attempt}")
        if facts is not None or time.monotonic() > deadline:
            return str((facts or {}).get("secret", ""))
        time.sleep(0.1)


def close_attempt(run: RunDirectory, attempt: int, facts: Mapping[str, Any]) -> None:
    """Writes the end line of an attempt.

    Args:
        run: the run.
        attempt: its number.
        facts: reason, exit code, first and last step, as far as known; `time_unix_s` where it did not end just now.
    """
    line = {"event": "end", "attempt": attempt, "time_unix_s": time.time(), **facts}
    append_line(run.attempts, line, durable=True)


def publish_result(run: RunDirectory, attempt: int, values: Mapping[str, Any]) -> None:
    """Writes result.json, which says that the run is finished; durable when this returns.

    Raises:
        RunError: a newer attempt has taken over, or the run was changed meanwhile; the result is its business.
    """
    prepared = run.prepared_result(attempt)
    prepared.unlink(missing_ok=True)
    write_durable(prepared, json.dumps(values, indent=1) + "\n")
    check_fence(run, attempt)
    try:
        prepared.rename(run.result)
    except FileNotFoundError:
        check_fence(run, attempt)
        # On NFS a repeated request may report "no such file" for a rename that was carried out.
        if (read_json(run.result) or {}).get("attempt") != attempt:
            raise
    fsync_directory(run.path)


def withdraw_result(run: RunDirectory, keep: Path) -> None:
    """Moves result.json to `keep`, if there is one; no attempt up to now can write one any more.

    The caller makes the folder of `keep` durable.
    """
    if attempts := existing_attempts(run):
        with contextlib.suppress(FileExistsError):
            write_durable(run.epochs / f"closed_{attempts[-1]}", "")
        fsync_directory(run.epochs)
        _discard_prepared_results(run, below=attempts[-1] + 1)
    if run.result.exists():
        run.result.rename(keep)


def _discard_prepared_results(run: RunDirectory, *, below: int) -> None:
    for path in run.path.glob(".result.attempt_*.json"):
        number = path.stem.rpartition("_")[2]
        if number.isdigit() and int(number) < below:
            path.unlink(missing_ok=True)


def check_fence(run: RunDirectory, attempt: int) -> None:
    """Does nothing while `attempt` is the newest of the run, and the run was not changed since.

    Raises:
        RunError: this attempt must write nothing more.
    """
    if attempt <= max(numbered_epochs(run, "closed"), default=-1):
        raise RunError(
            f"{run.path} was changed after attempt {attempt} began",
            hint="nothing to do: the next attempt carries on, this one ends without writing",
        )
    newest = max(existing_attempts(run), default=attempt)
    if newest > attempt:
        raise overtaken(run, attempt, newest)


def overtaken(run: RunDirectory, attempt: int, newest: int) -> RunError:
    """Returns the error of an attempt that must write nothing more, since a newer one exists."""
    return RunError(
        f"attempt {attempt} of {run.path} was overtaken by attempt {newest}",
        hint="nothing to do: the newer attempt carries on, this one ends without writing",
    )


def read_ledger(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns one mapping per attempt, start and end facts merged; "end_time_unix_s" is absent while it runs."""
    merged: dict[int, dict[str, Any]] = {}
    for line in read_lines(run.attempts):
        entry = merged.setdefault(int(line["attempt"]), {"attempt": int(line["attempt"])})
        prefix = "end_" if line.get("event") == "end" else ""
        entry |= {(f"{prefix}{key}" if key == "time_unix_s" else key): value for key, value in line.items()}
    return [merged[number] for number in sorted(merged)]
