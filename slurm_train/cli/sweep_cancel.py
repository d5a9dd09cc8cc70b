"""`cancel SWEEP`: ends the active runs of a sweep with one scancel; the others, and other arrays, are not touched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slurm_train.cli.cancel import cancel
from slurm_train.cli.display import note
from slurm_train.cli.selection import jobs_of, runs_here
from slurm_train.cli.status_table import summary
from slurm_train.cli.sweep_table import chosen, read_rows
from slurm_train.errors import RunError
from slurm_train.rundir.sweep import SweepDirectory, array_job_id, existing_arrays, read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.standing.facts import Standing


def cancel_sweep(sweep: SweepDirectory, env: Mapping[str, str], *, where: Sequence[str]) -> None:
    """Ends the active runs for which the conditions hold; without any, also those that would start here later.

    Raises:
        RunError: none of them is active.
        ClusterError: Slurm refused.
    """
    elements, commands = read_table(sweep), SlurmCommands(env)
    rows = read_rows(elements, jobs_of([element.run for element in elements], commands))
    meant = [one for one in chosen(rows, where) if one.is_active]
    if not where and any(runs_here(one.run) for one in rows):
        sweep.stop_file.touch()
    if not meant:
        raise RunError(
            f"no such run of sweep {sweep.sweep_id} is active: {summary(rows)}", hint="`status` shows what is"
        )
    commands = SlurmCommands(env)
    here = [one for one in meant if runs_here(one.run)]
    for one in here:
        cancel(one.run, commands)
    in_slurm = [one for one in meant if one not in here]
    if in_slurm:
        own = {array_job_id(array) for array in existing_arrays(sweep)}
        commands.cancel(job_ids_of(in_slurm, spared=[one for one in rows if one not in meant], own_arrays=own))
        note(f"cancelled {len(in_slurm)} runs; `resume {sweep.sweep_id}` continues them")


def job_ids_of(
    meant: Sequence[Standing], *, spared: Sequence[Standing], own_arrays: Collection[str | None]
) -> list[str]:
    """Returns what to cancel: an array's own id where none of its active elements is to go on, else the elements.

    One call of the controller ends a whole array; a thousand elements would be a thousand calls.

    Args:
        meant: active runs.
        spared: the other runs of the sweep.
        own_arrays: arrays that hold runs of this sweep only; one of another sweep may hold more.
    """
    partly = {_array_of(one) for one in spared if one.is_active}
    whole = set(own_arrays) - partly
    return list(dict.fromkeys(_array_of(one) if _array_of(one) in whole else str(one.job_id) for one in meant))


def _array_of(one: Standing) -> str:
    return str(one.job_id).partition("_")[0]
