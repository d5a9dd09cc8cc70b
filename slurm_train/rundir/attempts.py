"""Attempts of a run: opened once each, fenced by an exclusive file, recorded in the ledger.

`epochs/attempt_<k>` is created with O_EXCL, so two starters never share a number, and a writer that sees a higher
one than its own knows that it was overtaken.

`result.json` is renamed from a file that carries the attempt's number, after a check of the fence. A later attempt, or
whoever withdraws a result, raises the fence and then removes these files; so a rename that is carried out arbitrarily
late finds no source, and can neither replace nor fake a result.

torchrun starts failed ranks again within one step. Each such restart is an attempt of its own, with its number, its
fence, its secret and its logs, so a rank of an earlier one is a zombie like any other. The first is the attempt that
the supervisor opened for the step; those after it name that one. Rank 0 opens it when all of its ranks have come.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_train.errors import EXIT_FAILURE, RunError
from slurm_train.rundir.events import first_mark, read_changes
from slurm_train.rundir.files import (
    ask_server,
    fsync_directory,
    is_there,
    make_folder,
    read_json,
    read_record,
    rename,
    to_json,
    write_durable,
)
from slurm_train.rundir.ledger import (
    Action,
    End,
    Reason,
    Start,
    read_attempt,
    read_ledger,
    record_end,
    record_start,
    start_facts,
)
from slurm_train.rundir.lineage import first_step_of
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.timing import last_step, read_account, step_of_attempt
from slurm_train.trust import enter_folder


def open_attempt(run: RunDirectory, start: Start) -> int:
    """Opens the next attempt and returns its number, counted from 0.

    The number is taken by creating its file exclusively, so this also works when two jobs start at once.

    Args:
        run: the run.
        start: who opens it, and where; time and accepted changes are added.
    """
    make_folder(run.epochs, within=run.path)
    attempt = max(existing_attempts(run), default=-1) + 1
    while True:
        try:
            secret = json.dumps({**start_facts(start), "secret": secrets.token_hex(16)}) + "\n"
            write_durable(run.epochs / f"attempt_{attempt}", secret, is_secret=True)
            break
        except FileExistsError:
            attempt += 1
    fsync_directory(run.epochs)
    _discard_prepared_results(run, below=attempt)
    make_folder(run.attempt_logs(attempt), within=run.path)
    start = replace(start, time_unix_s=time.time())
    changes = read_changes(run)
    if changes:
        # The accepted changes that this attempt is the first to carry.
        last_carried = max((earlier.start.changes for earlier in read_ledger(run)), default=0)
        fresh = [name for change in changes if change.number > last_carried for name in change.names]
        start = replace(start, changes=changes[-1].number, accepted=tuple(fresh))
    record_start(run, attempt, start)
    return attempt


def opened_world_size(run: RunDirectory, attempt: int) -> int | None:
    """Returns how many ranks an attempt was opened for, None where that is not known."""
    start = _opened(run, attempt)
    return None if start is None else start.world_size


def attempt_secret(run: RunDirectory, attempt: int, *, wait_s: float = 0.0) -> str:
    """Returns what only the ranks of one attempt know, "" for an attempt that was not opened.

    Args:
        run: the run.
        attempt: its number.
        wait_s: how long this node may take to see the file that another one has made.
    """
    return _await_secret(run.epochs / f"attempt_{attempt}", wait_s) or ""


def rendezvous_secret(run: RunDirectory, *, is_first: bool, wait_s: float) -> str:
    """Returns what only those know who can read the run directory, for ranks of torchrun that have no attempt yet.

    Args:
        run: the run.
        is_first: whether this is rank 0, which makes it where there is none.
        wait_s: how long this node may take to see the file that another one has made.

    Raises:
        RunError: it does not come: this machine has another run directory than rank 0.
    """
    path = run.epochs / "lobby"
    if is_first and not path.exists():
        make_folder(run.epochs, within=run.path)
        with contextlib.suppress(FileExistsError):
            write_durable(path, json.dumps({"secret": secrets.token_hex(16)}) + "\n", is_secret=True)
    secret = _await_secret(path, wait_s)
    if secret is None:
        raise RunError(
            f"{path} did not appear within {wait_s:g} s: rank 0 does not write to this run directory",
            hint="torchrun's machines need one run directory that all of them see",
        )
    return secret


def _await_secret(path: Path, wait_s: float) -> str | None:
    deadline = time.monotonic() + wait_s
    pause_s = 0.05
    while (facts := read_json(path)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
        ask_server(path.parent)
    return str(facts.get("secret", ""))


def publish_result(run: RunDirectory, attempt: int, values: Mapping[str, Any]) -> None:
    """Writes result.json, the sign that the run is finished; durable when this returns.

    Raises:
        RunError: a newer attempt has taken over, or the run was changed meanwhile; the result is its business.
    """
    prepared = run.prepared_result(attempt)
    prepared.unlink(missing_ok=True)
    write_durable(prepared, to_json(values, indent=1) + "\n")
    check_fence(run, attempt)
    try:
        rename(prepared, run.result)
    except FileNotFoundError:
        check_fence(run, attempt)
        raise
    fsync_directory(run.path)


def withdraw_result(run: RunDirectory, keep: Path) -> None:
    """Moves result.json to `keep`, if there is one; no attempt up to now can write one any more.

    The caller makes the folder of `keep` durable.
    """
    attempts = existing_attempts(run)
    if attempts:
        with contextlib.suppress(FileExistsError):
            write_durable(run.epochs / f"closed_{attempts[-1]}", "")
        fsync_directory(run.epochs)
        _discard_prepared_results(run, below=attempts[-1] + 1)
    if is_there(run.result):
        rename(run.result, keep)


def _discard_prepared_results(run: RunDirectory, *, below: int) -> None:
    for path in run.path.glob(".result.attempt_*.json"):
        number = path.stem.rpartition("_")[2]
        if number.isdigit() and int(number) < below:
            path.unlink(missing_ok=True)


def has_successor(run: RunDirectory, attempt: int) -> bool:
    """Returns whether a newer attempt was opened; costs the same however many there were.

    Numbers are taken one after the other and no file of `epochs` is ever removed, so the next number tells.

    Raises:
        OSError: the file system does not answer.
    """
    ask_server(run.epochs)
    return _is_made(run.epochs / f"attempt_{attempt + 1}")


def _is_made(path: Path) -> bool:
    # Not Path.exists, which may take a stale handle for an absent file.
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


_held: dict[Path, tuple[int, os.stat_result]] = {}
"""By path, each run directory that this process works in: an open descriptor, so that its inode is not used again."""


def hold_run(run: RunDirectory) -> None:
    """Keeps a run directory open after a look at the way to it, see `check_held`; ranks do so as long as they live.

    Raises:
        RunError: another user can lead the way to it elsewhere, see `trust.enter_folder`.
        OSError: it is not there.
    """
    if run.path not in _held:
        descriptor = enter_folder(Path(os.path.abspath(run.path)))  # noqa: PTH100  # links stay: they are looked at
        _held[run.path] = descriptor, os.fstat(descriptor)


def let_go(run: RunDirectory) -> None:
    """Ends what `hold_run` began."""
    held = _held.pop(run.path, None)
    if held is not None:
        os.close(held[0])


def check_held(run: RunDirectory) -> None:
    """Checks that the path of a run still leads to the directory that this process has held, if it holds it.

    Raises:
        RunError: it was moved or removed, or another is in its place.
        OSError: the file system does not answer.
    """
    if run.path not in _held:
        return
    ask_server(run.path.parent)
    try:
        is_same = os.path.samestat(_held[run.path][1], run.path.stat())
    except (FileNotFoundError, NotADirectoryError):
        is_same = False
    if not is_same:
        raise RunError(
            f"{run.path} was moved or removed while the run was at work, so nothing more is saved",
            hint=f"move it back and `resume {run.run_id}`, or name its present place: `resume {run.run_id} --root DIR`",
        )


def check_fence(run: RunDirectory, attempt: int) -> None:
    """Checks that `attempt` is the newest of the run, and that the run was not changed or moved since.

    It looks for two names and lists nothing: ranks ask each second or two, and a run may have had 10,000 attempts.

    Raises:
        RunError: this attempt must write nothing more.
        OSError: the file system does not answer.
    """
    check_held(run)
    if has_successor(run, attempt):
        raise overtaken(run, attempt, existing_attempts(run)[-1])
    # Whoever withdraws a result closes the newest attempt.
    if _is_made(run.epochs / f"closed_{attempt}"):
        raise RunError(
            f"{run.path} was changed after attempt {attempt} began",
            hint="nothing to do: the next attempt carries on, this one ends without writing",
        )


def overtaken(run: RunDirectory, attempt: int, newest: int) -> RunError:
    """Returns the error of an attempt that must write nothing more, since a newer one exists."""
    return RunError(
        f"attempt {attempt} of {run.path} was overtaken by attempt {newest}",
        hint="nothing to do: the newer attempt carries on, this one ends without writing",
    )


# A checkpoint gets its name, its marker and a last look at the fence in one piece, or the process ends before it.
# Threads end a process on their own (a newer attempt, a failed collective); an end in between would leave a commit of
# an old attempt beside the new one (seen once in 50 trials). An RLock, since what a fence does may publish, too.
_under_way = threading.RLock()


@contextlib.contextmanager
def publishing() -> Iterator[None]:
    """Keeps `end_publishing` waiting while its body runs."""
    with _under_way:
        yield


def end_publishing(*, within_s: float) -> bool:
    """Waits for what is being published, and lets nothing be published after it; for a process that ends now.

    Args:
        within_s: a file system that does not answer must not keep the process alive for longer.

    Returns:
        Whether nothing is under way any more.
    """
    return _under_way.acquire(timeout=within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What rank 0 writes down when it begins a round."""

    world_size: int
    first_step: int
    """Furthest step on record before it."""
    start_unix_s: float


def newest_round(run: RunDirectory, first: int) -> int:
    """Returns the attempt that the ranks of a step are at now: the one it began with, or the newest that follows it."""
    newest = first
    attempt = first
    while has_successor(run, attempt):
        attempt += 1
        if _follows(run, attempt) == first:
            newest = attempt
    return newest


def first_round(run: RunDirectory, attempt: int) -> int:
    """Returns the attempt that the step of an attempt began with; itself, where nothing was started again."""
    follows = _follows(run, attempt)
    return attempt if follows is None else follows


def read_round(run: RunDirectory, attempt: int) -> Round | None:
    """Returns what rank 0 has written down, None before it did, and where srun starts the ranks."""
    return read_record(_round_path(run, attempt), Round)


def begin_round(run: RunDirectory, start: Start, *, first: int | None) -> int:
    """Opens the attempt of a round, closes the one before it, and returns its number. Rank 0 only.

    Args:
        run: the run.
        start: who begins it, and where; of an attempt that a supervisor has opened, its own facts count.
        first: the attempt that the supervisor has opened for this step; None: there is no supervisor.

    Raises:
        RunError: a newer attempt has taken the run over meanwhile.
    """
    begun = Round(world_size=start.world_size, first_step=last_step(run), start_unix_s=time.time())
    if first is not None:
        if _claim(run, first, begun):
            return first
        previous = newest_round(run, first)
        newest = max(existing_attempts(run))
        if newest > previous:
            raise overtaken(run, previous, newest)
        _close_round(run, previous, start.first_committed)
        opened = _opened(run, first) or Start()
        start = replace(start, job_id=opened.job_id, restart_count=opened.restart_count)
    else:
        for earlier in read_ledger(run):
            if earlier.start.job_id is None:
                _close_round(run, earlier.number, start.first_committed)
    attempt = open_attempt(run, replace(start, follows=first))
    _claim(run, attempt, begun)
    return attempt


def _close_round(run: RunDirectory, attempt: int, committed_step: int | None) -> None:
    """Writes the end line of an attempt whose ranks have failed; one that has its line is left alone."""
    opened = read_attempt(run, attempt)
    if opened is None or opened.end is not None:
        return
    mark = first_mark(run, attempt)
    begun = read_round(run, attempt)
    step_before = 0 if begun is None else begun.first_step
    first_step = first_step_of(run, attempt, default=step_before)
    start_unix_s = opened.start.time_unix_s
    end_unix_s = time.time()
    end = End(
        time_unix_s=end_unix_s,
        exit_code=EXIT_FAILURE if mark is None else mark.exit_code,
        reason=Reason.FAILED,
        action=Action.RELAUNCH,
        note=f"{'a rank was killed' if mark is None else mark.cause}; torchrun starts the ranks again",
        cause=None if mark is None else mark.cause,
        first_step=first_step,
        last_step=step_of_attempt(run, attempt, default=first_step),
        step_before=step_before,
        last_committed=committed_step,
        failed_on=() if mark is None else (mark.host,),
        seconds=read_account(run, attempt, start_unix_s=start_unix_s, end_unix_s=end_unix_s, step_before=step_before),
    )
    record_end(run, attempt, end)


def note_saved(run: RunDirectory, attempt: int) -> None:
    """Leaves a mark that a rank of the attempt has saved and must be started again, for which torchrun has no code."""
    (run.attempt_logs(attempt) / "saved").touch(mode=0o600)


def was_saved(run: RunDirectory, attempt: int) -> bool:
    """Returns whether a rank has left that mark."""
    return (run.attempt_logs(attempt) / "saved").exists()


def _claim(run: RunDirectory, attempt: int, facts: Round) -> bool:
    """Returns whether this attempt has no ranks yet: they are this round's then."""
    try:
        write_durable(_round_path(run, attempt), json.dumps(asdict(facts)) + "\n")
    except FileExistsError:
        return False
    return True


def _round_path(run: RunDirectory, attempt: int) -> Path:
    return run.attempt_logs(attempt) / "round.json"


def _follows(run: RunDirectory, attempt: int) -> int | None:
    start = _opened(run, attempt)
    return None if start is None else start.follows


def _opened(run: RunDirectory, attempt: int) -> Start | None:
    """Returns the start of an attempt by its file in `epochs`, None where there is none."""
    return read_record(run.epochs / f"attempt_{attempt}", Start)
