"""What of a run is queued or running: the one place that decides it, and the locks of those who act upon it.

A run may have several jobs at once: one that runs, another that was submitted by hand, one that takes over later. All
that are recorded are asked about, the holder of the run's lock, and this user's jobs whose script lies in the run
directory (typed by hand, or by a submitter that was killed before it had recorded the id). However many runs there
are, squeue is called twice.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_train.errors import ClusterError, RunError
from slurm_train.frozen_class import frozen
from slurm_train.rundir.files import make_private
from slurm_train.rundir.jobs import (
    Holder,
    number_of,
    process_lives,
    read_holder,
    read_job,
    release_lock,
    take_lock,
    this_process,
)
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.pins import list_pins
from slurm_train.slurm.commands import SlurmCommands, is_job_id

_SUBMITTER_WAIT_S = 30.0


@frozen
class Active:
    """What of a run is queued or running; false where nothing is."""

    jobs: tuple[str, ...] = ()
    """Ids of the jobs that are queued, running, ending or about to come back; oldest first."""
    process: Holder | None = None
    """A process without a job that holds the run; one on another machine counts as alive."""

    def __bool__(self) -> bool:
        return bool(self.jobs) or self.process is not None


def find_active(runs: Sequence[RunDirectory], commands: SlurmCommands) -> dict[RunDirectory, Active]:
    """Returns the runs of which something is queued or running; where there is no Slurm, no jobs are known.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    has_slurm = commands.is_available()
    holders = {run: read_holder(run.lock) for run in runs}
    found = _jobs_by_script(runs, commands) if has_slurm else {}
    ids = {run: _job_ids(run, holders[run], found.get(run.path, ())) for run in runs}
    asked = [job_id for run in runs for job_id in ids[run]]
    states = commands.job_states(asked, ended=False) if asked and has_slurm else {}
    active: dict[RunDirectory, Active] = {}
    for run, holder in holders.items():
        jobs = tuple(job_id for job_id in ids[run] if job_id in states and states[job_id].is_active)
        is_process = holder is not None and holder.job_id is None and process_lives(holder)
        if jobs or is_process:
            active[run] = Active(jobs=jobs, process=holder if is_process else None)
    return active


def _job_ids(run: RunDirectory, holder: Holder | None, found: Sequence[str]) -> list[str]:
    record = read_job(run)
    held = [holder.job_id] if holder is not None and holder.job_id is not None else []
    return list(dict.fromkeys([*(record.job_ids if record is not None else ()), *held, *found]))


def _jobs_by_script(runs: Sequence[RunDirectory], commands: SlurmCommands) -> dict[Path, list[str]]:
    """Returns this user's jobs whose script lies in one of the run directories, by that directory."""
    # A job may have been submitted by another spelling of the path, through a link.
    folders = {os.path.realpath(run.path): run.path for run in runs if run.submit_script.exists()}
    found: dict[Path, list[str]] = {}
    for job_id, script in commands.own_scripts().items() if folders else ():
        above = map(str, Path(os.path.realpath(script)).parents)
        for folder in folders.keys() & set(above) if is_job_id(job_id) else ():
            found.setdefault(folders[folder], []).append(job_id)
    return found


def newest_job(commands: SlurmCommands) -> int | None:
    """Returns the highest number of this user's jobs that Slurm knows now; None where it does not answer."""
    try:
        return max(map(number_of, commands.own_scripts()), default=None)
    except ClusterError:
        return None


def holder_lives(holder: Holder, commands: SlurmCommands) -> bool:
    """Returns whether a holder lives; one that cannot be asked about (no Slurm here, another host) counts as alive.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    if holder.job_id is None:
        return process_lives(holder)
    if not commands.is_available():
        return True
    state = commands.job_states([holder.job_id], ended=False).get(holder.job_id)
    return state is not None and state.is_active


def live_holder(run: RunDirectory, commands: SlurmCommands) -> Holder | None:
    """Returns the process or job that runs a run at this moment, None where there is none; one that waits has none."""
    holder = read_holder(run.lock)
    return holder if holder is not None and holder_lives(holder, commands) else None


def refuse_active(run: RunDirectory, commands: SlurmCommands, *, inside: str | None = None) -> None:
    """Refuses a run of which something is queued or running, on Slurm or on this machine.

    Args:
        run: the run.
        commands: Slurm.
        inside: the job whose allocation this is typed in; that the run was run there before is not refused.

    Raises:
        RunError: as said, with what to type.
    """
    active = find_active([run], commands).get(run, Active())
    if jobs := [job_id for job_id in active.jobs if job_id != inside]:
        raise RunError(
            f"{run.name}/{run.run_id} is active already: Slurm job {', '.join(jobs)}, {run.path}",
            hint=f"`status {run.run_id}` and `logs -f {run.run_id}` watch it, `cancel {run.run_id}` ends it; "
            "run.name=NAME or seed=N starts another",
        )
    holder = read_holder(run.lock)
    if inside is not None and holder is not None and holder.job_id == inside and process_lives(holder):
        raise RunError(
            f"{run.path} is being run in this allocation by {holder.pid} on {holder.host}", hint="wait for it"
        )
    if active.process is not None:
        raise RunError(
            f"{run.path} is being run by {active.process}",
            hint=f"wait for it, or `cancel {run.run_id}`; if you know that it is gone, remove {run.lock}",
        )


def clear_dead_pins(run: RunDirectory, commands: SlurmCommands) -> None:
    """Lets go of the checkpoints that were kept for evaluations which are finished, or of which no job is left.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    pins = list_pins(run.checkpoints)
    active = find_active([pin.evaluation for pin in pins], commands) if pins else {}
    for pin in pins:
        submitter = read_holder(pin.evaluation.submission_lock)
        is_submitted_now = submitter is not None and holder_lives(submitter, commands)
        if pin.evaluation.result.exists() or not (pin.evaluation in active or is_submitted_now):
            pin.path.unlink(missing_ok=True)


@contextlib.contextmanager
def submitting(run: RunDirectory, commands: SlurmCommands, *, inside: str | None = None) -> Iterator[None]:
    """Holds a run for one submitter at a time; nothing of it is active when the body begins.

    The body is everything from that check until the new job is recorded. Makes the directory; where the body refuses
    the run, what was made is removed again if it is empty.

    Args:
        run: the run.
        commands: Slurm.
        inside: see `refuse_active`.

    Raises:
        RunError: another submitter holds it, or the run is active.
        ClusterError: Slurm does not answer.
    """
    with _locked(run.submission_lock, commands, wait_s=_SUBMITTER_WAIT_S):
        refuse_active(run, commands, inside=inside)
        yield


@contextlib.contextmanager
def writing(run: RunDirectory, commands: SlurmCommands, *, inside: str | None = None) -> Iterator[None]:
    """Takes the run's training lock while files that its ranks read (configuration, plan, code) are rewritten.

    A job that starts meanwhile waits until this is over. `inside` as for `refuse_active`.

    Raises:
        RunError: it is being run.
    """
    with _locked(run.lock, commands, inside=inside):
        yield


@contextlib.contextmanager
def no_submitter(run: RunDirectory, commands: SlurmCommands) -> Iterator[None]:
    """Waits for a submitter to record its job and keeps others out; one that hangs is not waited for."""
    with contextlib.ExitStack() as held:
        # An administrator may cancel what they may not write to.
        with contextlib.suppress(RunError, OSError):
            held.enter_context(_locked(run.submission_lock, commands, wait_s=_SUBMITTER_WAIT_S))
        yield


@contextlib.contextmanager
def _locked(lock: Path, commands: SlurmCommands, *, wait_s: float = 0.0, inside: str | None = None) -> Iterator[None]:
    """Holds one of a run's two locks; a process that holds it is waited for so long."""

    def is_alive(other: Holder) -> bool:
        return process_lives(other) if other.job_id == inside else holder_lives(other, commands)

    holder, run = this_process(), lock.parent
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    for tries_left in reversed(range(10)):
        try:
            make_private(run)
            take_lock(lock, holder, is_alive=is_alive, wait_s=wait_s)
            break
        except OSError as err:
            if isinstance(err, FileNotFoundError) and tries_left:
                # Another one was refused and has removed the empty directory.
                continue
            hint = "name another place with run.root=DIR"
            raise RunError(f"{run} cannot be made: {err.strerror or err}", hint=hint) from err
    try:
        yield
    finally:
        release_lock(lock, holder)
        # Where the body was refused they are empty.
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
