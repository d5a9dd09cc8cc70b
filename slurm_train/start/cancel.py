"""Cancels runs: ends their jobs; a run that trains on this machine is asked to save and stop.

The active runs of a sweep are ended by one scancel; other runs and other arrays are not touched. Each function returns
what it did, one line per action.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from slurm_train.errors import ClusterError, RunError
from slurm_train.rundir.jobs import Holder, ask_to_stop, is_here, named, read_job
from slurm_train.rundir.lookup import is_own, owner_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.pins import release_pins
from slurm_train.rundir.sweep import SweepDirectory, array_job_id, existing_arrays, read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import Active, find_active, newest_job, no_submitter
from slurm_train.status.run_status import read_statuses
from slurm_train.status.selection import filter_where, summary


def cancel_run(run: RunDirectory, commands: SlurmCommands) -> list[str]:
    """Ends one run: all of its jobs, and a process that trains it; returns what was done, in words.

    Raises:
        RunError: nothing of it is queued or running.
        ClusterError: Slurm refused.
    """
    actions: list[str] = []
    with no_submitter(run, commands):
        active = find_active([run], commands).get(run)
        if active is None:
            raise RunError(f"{run.name}/{run.run_id} is neither queued nor running", hint="`status` shows what is")
        _require_slurm_for(run, active)
        if active.process is not None:
            _require_owners_process(run, active.process)
            actions.append(_stop_process(run, active.process))
        cancelled = _leave_packs(run, active.jobs, commands)
        if cancelled:
            ids = ", ".join(cancelled)
            actions.append(
                f"asked {run.name}/{run.run_id} to save and stop; job {ids} goes on with its other runs; "
                f"`resume {run.run_id}` continues this one"
            )
        if active.elsewhere:
            actions.append(f"not cancelled: {named(active.elsewhere)}; {_ask_there(run, active)}")
        uncancelled = [job_id for job_id in active.jobs if job_id not in cancelled]
        # A job that ends may be submitting a job that continues the run; that one submits no further job.
        while uncancelled:
            for job_id in uncancelled:
                _require_owners_job(run, job_id, commands)
            cancelled += uncancelled
            # A job that is being submitted now finds the file and does not begin.
            with contextlib.suppress(OSError):  # an administrator may cancel what they may not write to
                ask_to_stop(run, cancelled, newest_job=newest_job(commands))
            # The newest job first, since it may wait for the end of the others.
            commands.cancel(reversed(uncancelled))
            ids = ", ".join(reversed(uncancelled))
            actions.append(f"cancelled job {ids} of {run.name}/{run.run_id}; `resume {run.run_id}` continues it")
            jobs = find_active([run], commands).get(run, Active()).jobs
            uncancelled = [job_id for job_id in jobs if job_id not in cancelled]
        # A job that never began cannot release its pins.
        with contextlib.suppress(OSError):  # an administrator may cancel what they may not write to
            release_pins(run)
    return actions


def _leave_packs(run: RunDirectory, jobs: Sequence[str], commands: SlurmCommands) -> list[str]:
    """Ends a run in those of its jobs that it shares with other runs, which go on; returns these jobs."""
    record = read_job(run)
    shared = [job_id for job_id in jobs if record is not None and job_id in record.packed]
    if not shared:
        return []
    for job_id in shared:
        _require_owners_job(run, job_id, commands)
    ask_to_stop(run, shared, newest_job=newest_job(commands), cancels=False)
    for job_id in shared:
        for step, name in commands.steps(job_id).items():
            if name.endswith(f".{run.run_id}"):
                commands.ask_step(step)
    return shared


# The owner of a run can write any job or process number into its files. If an administrator, or a user by mistake,
# cancels the run of somebody else, only jobs and processes of its owner are ended.


def _require_owners_job(run: RunDirectory, job_id: str, commands: SlurmCommands) -> None:
    if is_own(run):
        return
    # E.g. "ada(1000)"; "" on nodes without scontrol, where squeue is used.
    user = commands.show_job(job_id).get("UserId", "")
    if user and not user.endswith(f"({run.path.stat().st_uid})"):
        raise RunError(
            f"{run.path} belongs to {owner_of(run.path)} and names job {job_id}, which is of {user}",
            hint=f"`scancel {job_id}` ends that job, if it is the one that you mean",
        )


def _require_owners_process(run: RunDirectory, process: Holder) -> None:
    if is_own(run) or not is_here(process):
        return
    with contextlib.suppress(FileNotFoundError):
        if Path(f"/proc/{process.pid}").stat().st_uid != run.path.stat().st_uid:
            raise RunError(
                f"{run.path} belongs to {owner_of(run.path)} and names process {process.pid}, which is another user's",
                hint=f"`kill {process.pid}` ends that process, if it is the one that you mean",
            )


def _stop_process(run: RunDirectory, process: Holder) -> str:
    """Asks a process that trains a run to save and stop; returns what was done."""
    try:
        if is_here(process):
            os.kill(process.pid, signal.SIGTERM)
        else:
            run.stop_file.touch()
    except PermissionError as err:
        raise RunError(
            f"{run.name}/{run.run_id} is run by {process}, which belongs to another user",
            hint="ask its owner",
        ) from err
    return f"asked {run.name}/{run.run_id} to save and stop; the same command continues it"


def cancel_sweep(sweep: SweepDirectory, commands: SlurmCommands, *, where: Sequence[str] = ()) -> list[str]:
    """Ends the active runs that meet the conditions, and returns what was done.

    Without conditions, further runs of the sweep are not started on this machine either.

    Raises:
        RunError: none of them is active.
        ClusterError: Slurm refused, or does not answer.
    """
    subjects = read_table(sweep)
    active = find_active([subject.run for subject in subjects], commands)
    selected = [run.run for run in filter_where(subjects, where) if run.run in active]
    elsewhere = [run for run in selected if not active[run].is_known and active[run].elsewhere]
    if len(elsewhere) < len(selected):
        selected = [run for run in selected if run not in elsewhere]
    if not where and any(run.process is not None for run in active.values()):
        sweep.stop_file.touch()
    if not selected:
        raise RunError(
            f"no such run of sweep {sweep.sweep_id} is active: {summary(read_statuses(subjects, commands))}",
            hint="`status` shows what is",
        )
    for run in selected:
        _require_slurm_for(run, active[run])
    actions = [f"not cancelled: {named(active[run].elsewhere)}; {_ask_there(run, active[run])}" for run in elsewhere]
    spared: list[str] = []
    for run, active_run in active.items():
        if run not in selected:
            spared += active_run.jobs
    # A run whose job continues for other runs of a pack is cancelled on its own.
    in_slurm = [run for run in selected if active[run].process is None and not set(spared) & set(active[run].jobs)]
    for run in selected:
        if run not in in_slurm:
            actions += cancel_run(run, commands)
    if in_slurm:
        array_ids = {array_job_id(array) for array in existing_arrays(sweep)}
        jobs: list[str] = []
        for run in in_slurm:
            jobs += active[run].jobs
        job_ids = job_ids_of(jobs, spared=spared, own_arrays=array_ids)
        for job_id in job_ids:
            _require_owners_job(in_slurm[0], job_id, commands)
        newest = newest_job(commands)
        for run in in_slurm:
            # There may be a thousand runs. A stop request that a crash of this machine loses can be typed again.
            with contextlib.suppress(OSError):  # an administrator may cancel what they may not write to
                ask_to_stop(run, active[run].jobs, newest_job=newest, durable=False)
        commands.cancel(job_ids)
        actions.append(f"cancelled {len(in_slurm)} runs; `resume {sweep.sweep_id}` continues them")
    return actions


def _require_slurm_for(run: RunDirectory, active: Active) -> None:
    if active.unknown_jobs:
        raise ClusterError(
            f"{run.name}/{run.run_id} has the job {', '.join(active.unknown_jobs)} on record, and there is no Slurm on "
            "this machine",
            hint="type it where Slurm's commands are",
        )
    if active.elsewhere and not active.is_known:
        raise RunError(
            f"{run.name}/{run.run_id} may be queued or running as {named(active.elsewhere)}, and Slurm here does not "
            "know that cluster's jobs",
            hint=_ask_there(run, active),
        )


def _ask_there(run: RunDirectory, active: Active) -> str:
    clusters = ", ".join(dict.fromkeys(active.elsewhere.values()))
    return f"type it on a login node of {clusters}; `touch {run.stop_file}` has the run save and stop from here"


def job_ids_of(jobs: Sequence[str], *, spared: Sequence[str], own_arrays: Collection[str | None]) -> list[str]:
    """Returns the ids to cancel: the id of an array if none of its active elements is to go on, else the elements.

    One call of the controller ends a whole array; a thousand elements would be a thousand calls.

    Args:
        jobs: active jobs that are to end, e.g. "12_3".
        spared: active jobs of the sweep that are to go on.
        own_arrays: arrays with runs of this sweep only; an array of another sweep may have further runs.
    """

    def array_of(job_id: str) -> str:
        return job_id.partition("_")[0]

    ending_arrays = set(own_arrays) - {array_of(job_id) for job_id in spared}
    return list(dict.fromkeys(array_of(job_id) if array_of(job_id) in ending_arrays else job_id for job_id in jobs))
