"""Cancels runs: ends their jobs; a run that trains on this machine is asked to save and stop.

Of a sweep it ends the active runs with one scancel; the other runs, and other arrays, are not touched. Each function
returns what it did, one line per act.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.jobs import Holder, ask_to_stop, read_job
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
    done: list[str] = []
    with no_submitter(run, commands):
        active = find_active([run], commands).get(run)
        if active is None:
            raise RunError(f"{run.name}/{run.run_id} is neither queued nor running", hint="`status` shows what is")
        if active.process is not None:
            _require_owners_process(run, active.process)
            done.append(_stop_process(run, active.process.host, active.process.pid))
        cancelled = _leave_packs(run, active.jobs, commands)
        if cancelled:
            ids = ", ".join(cancelled)
            done.append(
                f"asked {run.name}/{run.run_id} to save and stop; job {ids} goes on with its other runs; "
                f"`resume {run.run_id}` continues this one"
            )
        new = [job_id for job_id in active.jobs if job_id not in cancelled]
        # A job that ends may be submitting the one that takes over; that one submits none.
        while new:
            for job_id in new:
                _require_owners_job(run, job_id, commands)
            cancelled += new
            # What is on its way by now finds the file and does not begin.
            with contextlib.suppress(OSError):  # an administrator may cancel what they may not write to
                ask_to_stop(run, cancelled, newest_job=newest_job(commands))
            # The newest first: it may be waiting for the others' end.
            commands.cancel(reversed(new))
            ids = ", ".join(reversed(new))
            done.append(f"cancelled job {ids} of {run.name}/{run.run_id}; `resume {run.run_id}` continues it")
            jobs = find_active([run], commands).get(run, Active()).jobs
            new = [job_id for job_id in jobs if job_id not in cancelled]
        # A job that never began cannot do it.
        with contextlib.suppress(OSError):  # an administrator may cancel what they may not write to
            release_pins(run)
    return done


def _leave_packs(run: RunDirectory, jobs: Sequence[str], commands: SlurmCommands) -> list[str]:
    """Ends a run in those of its jobs that it shares with other runs, which go on; returns these jobs."""
    record = read_job(run)
    shared = [job_id for job_id in jobs if record is not None and job_id in record.packed]
    if not shared:
        return []
    for job_id in shared:
        _require_owners_job(run, job_id, commands)
    ask_to_stop(run, shared, newest_job=newest_job(commands))
    for job_id in shared:
        for step, name in commands.steps(job_id).items():
            if name.endswith(f".{run.run_id}"):
                commands.ask_step(step)
    return shared


# Whoever owns a run may write any number into its files. An administrator who cancels it, or somebody who takes it for
# a run of their own, ends nothing by it but what is that owner's.


def _require_owners_job(run: RunDirectory, job_id: str, commands: SlurmCommands) -> None:
    if is_own(run):
        return
    # E.g. "ada(1000)"; squeue, where a node has no scontrol, does not say.
    user = commands.show_job(job_id).get("UserId", "")
    if user and not user.endswith(f"({run.path.stat().st_uid})"):
        raise RunError(
            f"{run.path} belongs to {owner_of(run.path)} and names job {job_id}, which is of {user}",
            hint=f"`scancel {job_id}` ends that job, if it is the one that you mean",
        )


def _require_owners_process(run: RunDirectory, process: Holder) -> None:
    if is_own(run) or process.host != socket.gethostname():
        return
    with contextlib.suppress(FileNotFoundError):
        if Path(f"/proc/{process.pid}").stat().st_uid != run.path.stat().st_uid:
            raise RunError(
                f"{run.path} belongs to {owner_of(run.path)} and names process {process.pid}, which is another user's",
                hint=f"`kill {process.pid}` ends that process, if it is the one that you mean",
            )


def _stop_process(run: RunDirectory, host: str, pid: int) -> str:
    """Asks a process that trains a run to save and stop; returns what was done."""
    try:
        if host == socket.gethostname():
            os.kill(pid, signal.SIGTERM)
        else:
            run.stop_file.touch()
    except PermissionError as err:
        raise RunError(
            f"{run.name}/{run.run_id} is run by process {pid} on {host}, which belongs to another user",
            hint="ask its owner",
        ) from err
    return f"asked {run.name}/{run.run_id} to save and stop; the same command continues it"


def cancel_sweep(sweep: SweepDirectory, commands: SlurmCommands, *, where: Sequence[str] = ()) -> list[str]:
    """Ends the active runs for which the conditions hold, and returns what was done.

    Without conditions, runs that would start on this machine later are not started.

    Raises:
        RunError: none of them is active.
        ClusterError: Slurm refused, or does not answer.
    """
    subjects = read_table(sweep)
    active = find_active([subject.run for subject in subjects], commands)
    meant = [run.run for run in filter_where(subjects, where) if run.run in active]
    if not where and any(run.process is not None for run in active.values()):
        sweep.stop_file.touch()
    if not meant:
        raise RunError(
            f"no such run of sweep {sweep.sweep_id} is active: {summary(read_statuses(subjects, commands))}",
            hint="`status` shows what is",
        )
    done: list[str] = []
    spared = [job_id for run, active_run in active.items() if run not in meant for job_id in active_run.jobs]
    # Of a pack that others go on in, each run is ended by itself.
    in_slurm = [run for run in meant if active[run].process is None and not set(spared) & set(active[run].jobs)]
    for run in meant:
        if run not in in_slurm:
            done += cancel_run(run, commands)
    if in_slurm:
        array_ids = {array_job_id(array) for array in existing_arrays(sweep)}
        jobs = [job_id for run in in_slurm for job_id in active[run].jobs]
        job_ids = job_ids_of(jobs, spared=spared, own_arrays=array_ids)
        for job_id in job_ids:
            _require_owners_job(in_slurm[0], job_id, commands)
        newest = newest_job(commands)
        for run in in_slurm:
            # There may be a thousand, and a stop that a crash of this machine undoes can be typed again.
            with contextlib.suppress(OSError):  # an administrator may cancel what they may not write to
                ask_to_stop(run, active[run].jobs, newest_job=newest, durable=False)
        commands.cancel(job_ids)
        done.append(f"cancelled {len(in_slurm)} runs; `resume {sweep.sweep_id}` continues them")
    return done


def job_ids_of(jobs: Sequence[str], *, spared: Sequence[str], own_arrays: Collection[str | None]) -> list[str]:
    """Returns what to cancel: an array's own id where none of its active elements is to go on, else the elements.

    One call of the controller ends a whole array; a thousand elements would be a thousand calls.

    Args:
        jobs: active jobs that are to end, e.g. "12_3".
        spared: those of the sweep that are to go on.
        own_arrays: arrays that hold runs of this sweep only; one of another sweep may hold more.
    """

    def array_of(job_id: str) -> str:
        return job_id.partition("_")[0]

    whole = set(own_arrays) - {array_of(job_id) for job_id in spared}
    return list(dict.fromkeys(array_of(job_id) if array_of(job_id) in whole else job_id for job_id in jobs))
