"""Which runs of many are active, asked of Slurm with one command however many they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lock import process_lives, read_holder
from slurm_train.rundir.lookup import JobRecord, read_job
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.records import JobState


def active_runs(runs: Sequence[RunDirectory], commands: SlurmCommands) -> set[RunDirectory]:
    """Returns the runs that are queued or running, on Slurm or on this machine.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    jobs = jobs_of(runs, commands)
    records = ((run, read_job(run)) for run in runs)
    return {run for run, record in records if _is_queued(record, jobs) or runs_here(run)}


def jobs_of(runs: Sequence[RunDirectory], commands: SlurmCommands) -> dict[str, JobState]:
    """Returns what Slurm says about the newest jobs of runs, by job id; nothing where there is no Slurm.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    ids = [record.job_id for run in runs if (record := read_job(run)) is not None]
    return commands.job_states(ids) if ids and commands.is_available() else {}


def runs_here(run: RunDirectory) -> bool:
    """Returns whether a living process of this machine holds the run."""
    holder = read_holder(run)
    return holder is not None and holder.job_id is None and process_lives(holder)


def _is_queued(record: JobRecord | None, jobs: Mapping[str, JobState]) -> bool:
    return record is not None and record.job_id in jobs and jobs[record.job_id].is_active
