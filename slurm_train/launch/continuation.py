"""Another job for the same run, where Slurm will not run this one again; and how a run comes back at a site.

A cancelled job cannot be told from a preempted one while both are ending. So the other job waits for this one's end,
and asks then: if this one was cancelled, it does not begin.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_train.config.frozen import load_config
from slurm_train.errors import ClusterError
from slurm_train.launch.resources import renewed_warning
from slurm_train.rundir.jobs import read_job, record_job
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import Preemption, return_in_words
from slurm_train.slurm.records import Phase

CONTINUES = "TRAIN_CONTINUES_JOB"
"""Variable by which such a job is known from its first moment on, whoever submits one meanwhile."""


def submit_continuation(run: RunDirectory, job_id: str, *, exclude: str, env: Mapping[str, str]) -> str:
    """Submits the run's script once more, to start after this job has ended, and returns the new job's id.

    Raises:
        ClusterError: sbatch refused it, or there is no script.
    """
    from slurm_train.launch.submission import submit_script

    if not run.submit_script.is_file():
        raise ClusterError(f"{run.submit_script} is missing", hint="type the run's first command again")
    flags = [f"--dependency=afterany:{job_id}", *([f"--exclude={exclude}"] if exclude else [])]
    # Meanwhile the run has measured what its stop takes.
    flags += renewed_warning(load_config(run.config), run)
    script = run.submit_script.read_text(encoding="utf-8")
    # What travelled into this job was chosen when it was submitted, and travels on.
    env = {**env, CONTINUES: job_id}
    new_id = submit_script(script, folder=run.logs / "submitted", env=env, flags=flags, export=tuple(env))
    record_job(run, new_id, continues=job_id)
    return new_id


def continued_job(run: RunDirectory, job_id: str, env: Mapping[str, str]) -> str | None:
    """Returns the job that `job_id` takes over from, None where it stands for itself.

    Args:
        run: the run.
        job_id: this job.
        env: its environment, which says so before anybody has recorded it.
    """
    record = read_job(run)
    recorded = record.continues.get(job_id) if record is not None else None
    return env.get(CONTINUES) or recorded


def is_cancelled(job_id: str, commands: SlurmCommands) -> bool:
    """Returns whether Slurm says that a job was cancelled; one that it does not know any more was not.

    Raises:
        ClusterError: nobody answers.
    """
    state = commands.job_states([job_id]).get(job_id)
    return state is not None and state.phase is Phase.CANCELLED


def how_it_returns(preemption: Preemption | None, *, requeue_enabled: bool) -> str:
    """Returns in one line how a run comes back at a site.

    Args:
        preemption: what a preemption does there; None where that is not known.
        requeue_enabled: the run's `requeue.enabled`.
    """
    if not requeue_enabled:
        return "not by itself (requeue.enabled=false); `resume` continues it"
    return return_in_words(preemption)
