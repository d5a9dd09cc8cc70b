"""One writer per run directory: who holds it now, and whether that holder still lives.

The lock is a file created exclusively, naming a Slurm job or a local process. A holder that is gone is overtaken; who
can tell is the caller's business (a process by its start time, a job by asking Slurm), passed in as a function.

A run has two of them. `lock.json`: who runs it, or writes its configuration and code. `submission.json`: who submits
or cancels it; jobs do not look at that one, so a submitter that was killed holds no job up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.files import read_json, write_durable
from slurm_train.rundir.layout import RunDirectory

_GUARD_WAIT_S = 10.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a run directory: a Slurm job, or a process on a host."""

    job_id: str | None
    host: str
    pid: int
    started: str
    """The process's start in kernel ticks: a recycled pid has another one."""

    def __str__(self) -> str:
        return f"Slurm job {self.job_id}" if self.job_id else f"process {self.pid} on {self.host}"


def this_process(*, job_id: str | None = None) -> Holder:
    """Returns the calling process as a holder."""
    return Holder(job_id=job_id, host=socket.gethostname(), pid=os.getpid(), started=_start_ticks(os.getpid()))


def process_lives(holder: Holder) -> bool:
    """Returns whether a holder on this host still runs; on another host it cannot be told and counts as alive."""
    if holder.host != socket.gethostname():
        return True
    return _start_ticks(holder.pid) == holder.started != ""


def take_lock(
    run: RunDirectory,
    holder: Holder,
    *,
    is_alive: Callable[[Holder], bool],
    wait_s: float = 0.0,
    submits: bool = False,
) -> None:
    """Takes the run for `holder`; a holder that no longer lives, or the same job's earlier attempt, is overtaken.

    Args:
        run: the run.
        holder: who takes it.
        is_alive: whether another holder still lives.
        wait_s: seconds to wait for a process, which may be writing for a moment only; a job is not waited for.
        submits: take the lock of submitters.

    Raises:
        RunError: somebody else who is alive holds it.
    """
    path, doing = (run.submission_lock, "submitted") if submits else (run.lock, "run")
    deadline_s, tries = time.monotonic() + wait_s, 0
    while tries < 10:
        if _create(path, holder):
            return
        current = read_holder(run, submits=submits)
        same_job = current is not None and current.job_id is not None and current.job_id == holder.job_id
        if current is not None and not same_job and is_alive(current):
            if current.job_id is None and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
                continue
            raise RunError(
                f"{run.path} is being {doing} by {current}",
                hint="watch it with `python -m slurm_train status`, or end it with `cancel` first; "
                f"if you know that it is gone, remove {path}",
            )
        _remove_if(path, current)
        tries += 1
    raise RunError(f"{path} could not be taken: another starter is quicker each time", hint="try again")


def release_lock(run: RunDirectory, holder: Holder, *, submits: bool = False) -> None:
    """Gives the run back, if `holder` still has it."""
    # Not by an unlink after a look: a process that was stopped between the two would remove its successor's.
    if read_holder(run, submits=submits) == holder:
        _take_away(run.submission_lock if submits else run.lock, holder)


def clear_dead(run: RunDirectory, *, is_alive: Callable[[Holder], bool]) -> None:
    """Removes the lock of a holder that no longer lives; called where that can still be told, before a job starts."""
    current = read_holder(run)
    if current is not None and not is_alive(current):
        _remove_if(run.lock, current)


def read_holder(run: RunDirectory, *, submits: bool = False) -> Holder | None:
    """Returns who holds the run, or its lock of submitters; or None."""
    return _parse(run.submission_lock if submits else run.lock)


def _create(path: Path, holder: Holder) -> bool:
    # link() is atomic where O_EXCL over old NFS is not, and the file appears with its content in it.
    temporary = path.with_name(f".{path.name}.{holder.host}.{holder.pid}")
    temporary.unlink(missing_ok=True)
    write_durable(temporary, json.dumps(asdict(holder)) + "\n")
    try:
        return _link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Makes a second name of a file; returns False where the target is another file."""
    try:
        os.link(source, target)
    except FileExistsError:
        # On NFS a repeated request may say so of a link that the first one has made.
        with contextlib.suppress(FileNotFoundError):
            return source.samefile(target)
        return False
    return True


def _remove_if(path: Path, stale: Holder | None) -> None:
    # Only one starter at a time may remove, so what it has read is still what it removes.
    with _removing(path):
        # One that is not there is not to be removed either: a newcomer may be making his at this moment.
        if path.exists() and _parse(path) == stale:
            _take_away(path, stale)


def _take_away(path: Path, expected: Holder | None) -> None:
    """Removes a lock; one that is another's by now is put back."""
    aside = path.with_name(f".{path.stem}.stale.{socket.gethostname()}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _parse(aside) != expected:
            _link(aside, path)
        aside.unlink()


@contextlib.contextmanager
def _removing(path: Path) -> Iterator[None]:
    descriptor = os.open(path.with_name(f".{path.stem}.guard"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        # A process that was stopped in here is not waited for without end; nor is a file system without locks.
        deadline_s = time.monotonic() + _GUARD_WAIT_S
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_S)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _parse(path: Path) -> Holder | None:
    value = read_json(path)
    try:
        return Holder(**value) if value else None
    except TypeError:
        return None


def _start_ticks(pid: int) -> str:
    try:
        # Field 22 of proc(5) stat; the command name before it may hold spaces, so count after the last ")".
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
