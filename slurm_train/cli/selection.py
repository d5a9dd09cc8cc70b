"""Which runs of many are active, asked of Slurm with one command however many they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lock import process_lives, read_holder
from slurm_train.rundir.lookup import read_job
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.records import JobState


def active_runs(runs: Sequence[RunDirectory], commands: SlurmCommands) -> set[RunDirectory]:
    """Returns the runs that are queued or running, on Slurm or on this machine.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    ids = {run: record.job_id for run in runs if (record := read_job(run)) is not None}
    jobs = commands.job_states(ids.values()) if ids and commands.is_available() else {}
    return {run for run in runs if _is_queued(ids.get(run), jobs) or runs_here(run)}


def runs_here(run: RunDirectory) -> bool:
    """Returns whether a living process of this machine holds the run."""
    holder = read_holder(run)
    return holder is not None and holder.job_id is None and process_lives(holder)


def _is_queued(job_id: str | None, jobs: Mapping[str, JobState]) -> bool:
    return job_id is not None and job_id in jobs and jobs[job_id].is_active
