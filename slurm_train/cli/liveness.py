"""Whether the holder of a run's lock still lives: a process is looked up here, a job is asked of Slurm."""

from __future__ import annotations

from slurm_train.rundir.lock import Holder, process_lives
from slurm_train.slurm.commands import SlurmCommands


def holder_lives(holder: Holder, commands: SlurmCommands) -> bool:
    """Returns whether a holder lives; one that cannot be asked about (no Slurm here, another host) counts as alive.

    Raises:
        ClusterError: Slurm is here and does not answer.
    """
    if holder.job_id is None:
        return process_lives(holder)
    return is_active(holder.job_id, commands) if commands.is_available() else True


def is_active(job_id: str, commands: SlurmCommands) -> bool:
    """Returns whether Slurm has the job queued, running, or giving its nodes back."""
    state = commands.job_states([job_id]).get(job_id)
    return state is not None and state.is_active
