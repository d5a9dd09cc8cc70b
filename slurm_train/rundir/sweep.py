"""The sweep directory: which runs a sweep has, what each was given, and which element of which job array it is.

`<root>/sweeps/<id>/` lies beside the runs, which stay where they would be if they were typed one by one:

    sweep.jsonl        one line per run: index, run, overrides, job ("12_3"); replaced as a whole, never half written
    sweep.json         the words, when
    code/<n>/          the code of the n-th submission, shared by its runs
    arrays/<n>/        one job array: submit.sh, request.json, runs.txt (line i + 1 is element i), job.json, logs/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.files import change_times, listed, read_json, read_lines, to_records, write_atomic
from slurm_train.rundir.paths import Below, Placed, RunDirectory
from slurm_train.rundir.places import all_places, place_of
from slurm_train.slurm.job_request import JobRequest
from slurm_train.trust import is_own_folder, owner_id, read_text, trusted_owners

# In the root of the runs while sweeps are submitted: for each of them a file that is locked, with the runs that it has.
_SUBMITTING = ".submitting_sweeps"
_MUTEX = "lock"
_SWEEPS = "sweeps"
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One run, and what its sweep gave to it where it was named by its sweep."""

    run: RunDirectory
    index: int | None = None
    """Its number in the sweep."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """What the sweep gave to it, e.g. {"optim.lr": "0.001"}."""
    job: str | None = None
    """Its newest job when the table was written, e.g. "12_3"; None on this machine."""


@dataclass(frozen=True, slots=True)
class ArrayDirectory:
    """Paths of one job array."""

    path: Path
    script = Below("submit.sh")
    """The sbatch script; works by hand."""
    request = Below("request.json")
    """What the script asks for."""
    runs = Below("runs.txt")
    """One run directory per line, in the order of the elements; an element may have several."""
    job = Below("job.json")
    """The array's job id; missing while, or if, sbatch did not give one."""
    cluster = Below("cluster.txt")
    """The name of the cluster to which it was submitted, written before it is."""
    unread = Below("unread_answer.txt")
    """What sbatch said, where it is not known whether Slurm has the array."""
    logs = Below("logs")
    """What an element prints before it has found its run; empty otherwise."""

    @property
    def number(self) -> int:
        """Counted from 0 over all submissions of the sweep."""
        return int(self.path.name)


@dataclass(frozen=True, slots=True)
class SweepDirectory(Placed):
    """Paths below `<root>/sweeps/<id>/`; the disk is not looked at."""

    table = Below("sweep.jsonl")
    """One line per run."""
    facts = Below("sweep.json")
    """The words that asked for it."""
    code = Below("code")
    """Snapshots of the source, one per submission."""
    arrays = Below("arrays")
    """Job arrays."""
    report = Below("report.html")
    """The page that `report` writes."""
    stop_file = Below("STOP")
    """Asks a sweep on this machine to start no further run."""

    @property
    def sweep_id(self) -> str:
        """Short hash of its runs, e.g. "9b1c44e0"."""
        return self.path.name

    def array(self, number: int) -> ArrayDirectory:
        """Returns one of its job arrays."""
        return ArrayDirectory(self.arrays / f"{number:03d}")


def existing_arrays(sweep: SweepDirectory) -> list[ArrayDirectory]:
    """Returns the arrays on disk, oldest first."""
    arrays = [ArrayDirectory(path) for path in listed(sweep.arrays) if re.fullmatch(r"\d{3,}", path.name)]
    return sorted(arrays, key=lambda array: array.number)


def array_job_id(array: ArrayDirectory) -> str | None:
    """Returns the job id of an array, None where none is on record."""
    job_id = (read_json(array.job) or {}).get("job_id")
    return None if job_id is None else str(job_id)


def read_runs(array: ArrayDirectory) -> list[RunDirectory]:
    """Returns the runs of an array in the order of its elements."""
    # The root may be spelled in another way here than where the array was submitted, or have been moved.
    root = array.path.parents[3]
    paths = map(Path, read_text(array.runs).splitlines())
    return [RunDirectory(root / path.parent.name / path.name) for path in paths]


def write_table(sweep: SweepDirectory, elements: Iterable[Element]) -> None:
    """Replaces the table."""
    lines = [
        {**asdict(element), "run": str(element.run.path.relative_to(sweep.place)), "overrides": dict(element.overrides)}
        for element in elements
    ]
    write_atomic(sweep.table, "".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of the table; the fields are those of an element."""

    run: str
    """Below the root of the runs, e.g. "gpt/3f9a1c07"."""
    index: int | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    job: str | None = None


def read_table(sweep: SweepDirectory) -> list[Element]:
    """Returns the runs of a sweep by index; empty where there is no table.

    The table of another user counts for runs of that user.
    """
    lines = to_records(_Line, read_lines(sweep.table))
    elements = []
    for line in lines:
        run = RunDirectory(sweep.place / line.run)
        elements.append(Element(run=run, index=line.index, overrides=line.overrides, job=line.job))
    if is_own_folder(sweep.path):
        return elements
    owner = owner_id(sweep.path)
    return [element for element in elements if owner_id(element.run.path) == owner]


def record_array(elements: Iterable[Element], array: ArrayDirectory, job_id: str) -> list[Element]:
    """Returns the elements with the jobs that an array has given to those that are in it."""
    jobs = element_jobs(array, job_id)
    return [replace(element, job=jobs.get(element.run, element.job)) for element in elements]


def element_jobs(array: ArrayDirectory, job_id: str) -> dict[RunDirectory, str]:
    """Returns the job of each run of an array: "12_3", or "12" where its script is that of a plain job."""
    runs = read_runs(array)
    request = JobRequest.read(array.script)
    if len(runs) <= request.pack and "array" not in request.flags:
        return dict.fromkeys(runs, job_id)
    return {run: f"{job_id}_{position // request.pack}" for position, run in enumerate(runs)}


@contextlib.contextmanager
def submitting(sweep: SweepDirectory) -> Iterator[None]:
    """Holds the sweep for one submitter at a time; makes its directory.

    Raises:
        RunError: another one is at it, or the directory cannot be made.
    """
    try:
        sweep.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(sweep.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as err:
        hint = "name another place with run.root=DIR"
        raise RunError(f"{sweep.path} cannot be made: {err.strerror or err}", hint=hint) from err
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"sweep {sweep.sweep_id} is being submitted or run by another command here",
                hint=f"wait for it; `status {sweep.sweep_id}` shows how far it is",
            ) from None
        except OSError:
            # A file system without locks: two submitters at once are unlikely, a sweep that cannot start is worse.
            pass
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def choosing_runs(
    sweep: SweepDirectory, runs: Iterable[RunDirectory], *, wait_s: float, say: Callable[[str], None]
) -> Iterator[None]:
    """Keeps other commands from submitting runs of a sweep while those that are missing are chosen and submitted.

    Another sweep may have some of them. A command that submits one run holds that run, and waits for the sweeps that
    have it (`wait_for_sweeps`).

    Args:
        sweep: the sweep; its root is made if it is not there, and removed again if nothing comes into it.
        runs: its runs.
        wait_s: seconds to wait for another command.
        say: prints a line for the person who waits.

    Raises:
        RunError: another command is at it for longer.
    """
    folder = sweep.place / _SUBMITTING
    names = {_name_in_root(run) for run in runs}
    made = [parent for parent in folder.parents if not parent.exists()]
    deadline_s = time.monotonic() + wait_s
    has_said = False
    announced = None
    try:
        # Another user's folder, whose runs are others, or a root that cannot be made, of which the caller says more.
        with contextlib.suppress(OSError):
            while (announced := _announce(folder, names)) is None:
                if time.monotonic() > deadline_s:
                    raise RunError(
                        f"another command has been submitting runs of this sweep for more than {wait_s:g} s",
                        hint=f"wait for it; `status {sweep.sweep_id}` shows how far it is",
                    )
                if not has_said:
                    say("another command is submitting some of these runs: waiting for it")
                    has_said = True
                time.sleep(_LOOK_S)
        yield
    finally:
        if announced is not None:
            descriptor, path = announced
            _withdraw(path)
            os.close(descriptor)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def wait_for_sweeps(run: RunDirectory, *, wait_s: float) -> None:
    """Returns when no command of this user chooses or submits runs of a sweep that has this one.

    Raises:
        RunError: one does so for longer than `wait_s`.
    """
    folder = run.place / _SUBMITTING
    if not is_own_folder(folder):
        return
    deadline_s = time.monotonic() + wait_s
    while any(_is_submitting(path, {_name_in_root(run)}) for path in listed(folder)):
        if time.monotonic() > deadline_s:
            raise RunError(
                f"another command has been submitting a sweep with {run.name}/{run.run_id} for more than {wait_s:g} s",
                hint=f"wait for it; `status {run.run_id}` shows the run",
            )
        time.sleep(_LOOK_S)


def _name_in_root(run: RunDirectory) -> str:
    return f"{run.name}/{run.run_id}"


def _announce(folder: Path, names: Collection[str]) -> tuple[int, Path] | None:
    """Writes down which runs a command submits; None if another one submits some of them.

    Returns:
        The descriptor and path of the file, which is locked as long as the command lives.

    Raises:
        OSError: the folder belongs to another user, or cannot be made.
    """
    with _exclusively(folder):
        if any(_is_submitting(path, names) for path in listed(folder)):
            return None
        descriptor, name = tempfile.mkstemp(dir=folder)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.writelines(f"{run}\n" for run in sorted(names))
        os.fsync(descriptor)
        return descriptor, Path(name)


def _withdraw(path: Path) -> None:
    folder = path.parent
    with contextlib.suppress(OSError):
        with _exclusively(folder):
            path.unlink()
            for other in listed(folder):
                if other.name != _MUTEX and not _is_locked(other):
                    # Of a command that was killed.
                    other.unlink()
            if [path.name for path in listed(folder)] == [_MUTEX]:
                # Whoever waits for it finds that it is gone, and makes a new one.
                (folder / _MUTEX).unlink()
        folder.rmdir()


def _is_submitting(path: Path, names: Collection[str]) -> bool:
    """Returns whether a living command submits one of the runs, by the file that it has written."""
    if path.name == _MUTEX or not _is_locked(path):
        return False
    try:
        submitted = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    # Nothing is in it yet: which runs they are is not known.
    return not submitted or not set(submitted).isdisjoint(names)


def _is_locked(path: Path) -> bool:
    """Returns whether the process that has locked a file lives; False as well where files have no locks."""
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Holds a folder for a moment; makes it.

    Raises:
        OSError: it belongs to another user, or cannot be made.
    """
    path = folder / _MUTEX
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if owner_id(folder) not in {None, *trusted_owners()}:
            raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue
        try:
            # A file system without locks: two submitters at once are unlikely, a sweep that cannot start is worse.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_named(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sweep_place(root: Path, sweep_id: str) -> SweepDirectory:
    """Returns where a sweep of this user is or will be."""
    return SweepDirectory(place_of(root, _SWEEPS, sweep_id) / _SWEEPS / sweep_id)


def sweep_folders(root: Path) -> list[Path]:
    """Returns the folders of all sweeps in a root, those of other users among them."""
    folders: list[Path] = []
    for place in all_places(root):
        folders += listed(place / _SWEEPS)
    return folders


def list_sweeps(root: Path) -> list[SweepDirectory]:
    """Returns all sweeps below a root that this user may read, newest first."""
    tables = (sweep / "sweep.jsonl" for sweep in sweep_folders(root))
    times = change_times(table for table in tables if os.access(table, os.R_OK))
    return [SweepDirectory(path.parent) for path in sorted(times, key=lambda path: times[path], reverse=True)]


def sweep_of(run: RunDirectory) -> SweepDirectory | None:
    """Returns the sweep that a run belongs to, the oldest of several; None for a run that was typed by itself."""
    sweeps = reversed(list_sweeps(run.place))
    return next((sweep for sweep in sweeps if any(element.run == run for element in read_table(sweep))), None)


def sweeps_named(root: Path, name: str) -> list[SweepDirectory]:
    """Returns the sweeps that have runs of this name, newest first."""
    return [sweep for sweep in list_sweeps(root) if any(element.run.name == name for element in read_table(sweep))]
