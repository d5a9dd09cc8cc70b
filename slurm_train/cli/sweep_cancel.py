"""`cancel SWEEP`: ends the active runs of a sweep with one scancel; the others, and other arrays, are not touched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slurm_train.cli.cancel import cancel
from slurm_train.cli.display import note
from slurm_train.cli.liveness import jobs_of, look_at, newest_job
from slurm_train.cli.status_table import summary
from slurm_train.cli.sweep_table import chosen, read_rows
from slurm_train.errors import RunError
from slurm_train.rundir.jobs import ask_to_stop
from slurm_train.rundir.sweep import SweepDirectory, array_job_id, existing_arrays, read_table
from slurm_train.slurm.commands import SlurmCommands


def cancel_sweep(sweep: SweepDirectory, env: Mapping[str, str], *, where: Sequence[str]) -> None:
    """Ends the active runs for which the conditions hold; without any, also those that would start here later.

    Raises:
        RunError: none of them is active.
        ClusterError: Slurm refused.
    """
    elements, commands = read_table(sweep), SlurmCommands(env)
    rows = read_rows(elements, jobs_of([element.run for element in elements], commands))
    active = look_at([one.run for one in rows], commands)
    meant = [one.run for one in chosen(rows, where) if active[one.run]]
    if not where and any(one.process is not None for one in active.values()):
        sweep.stop_file.touch()
    if not meant:
        raise RunError(
            f"no such run of sweep {sweep.sweep_id} is active: {summary(rows)}", hint="`status` shows what is"
        )
    here = [run for run in meant if active[run].process is not None]
    for run in here:
        cancel(run, commands)
    in_slurm = [run for run in meant if run not in here]
    if in_slurm:
        newest = newest_job(commands)
        for run in in_slurm:
            # There may be a thousand, and a stop that a crash of this machine undoes can be typed again.
            ask_to_stop(run, active[run].jobs, newest_job=newest, durable=False)
        own = {array_job_id(array) for array in existing_arrays(sweep)}
        spared = [job_id for run, one in active.items() if run not in meant for job_id in one.jobs]
        jobs = [job_id for run in in_slurm for job_id in active[run].jobs]
        commands.cancel(job_ids_of(jobs, spared=spared, own_arrays=own))
        note(f"cancelled {len(in_slurm)} runs; `resume {sweep.sweep_id}` continues them")


def job_ids_of(jobs: Sequence[str], *, spared: Sequence[str], own_arrays: Collection[str | None]) -> list[str]:
    """Returns what to cancel: an array's own id where none of its active elements is to go on, else the elements.

    One call of the controller ends a whole array; a thousand elements would be a thousand calls.

    Args:
        jobs: active jobs that are to end, e.g. "12_3".
        spared: those of the sweep that are to go on.
        own_arrays: arrays that hold runs of this sweep only; one of another sweep may hold more.
    """
    whole = set(own_arrays) - {_array_of(job_id) for job_id in spared}
    return list(dict.fromkeys(_array_of(job_id) if _array_of(job_id) in whole else job_id for job_id in jobs))


def _array_of(job_id: str) -> str:
    return job_id.partition("_")[0]
