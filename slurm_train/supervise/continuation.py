"""How a run continues after its job has ended: in the same job without some nodes, or in another job.

Slurm may refuse to requeue a job; then another job is submitted. While a job is ending, a cancelled job looks like a
preempted one. So the other job starts only after this job has ended, and then asks Slurm: if this job was cancelled,
the other job does not begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_train.config.frozen import load_config
from slurm_train.errors import ClusterError
from slurm_train.request.acceptance import has_enough_without
from slurm_train.request.batch_script import renewed_warning
from slurm_train.rundir.jobs import read_job, read_script_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import compact_nodelist
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.records import Phase, nodes_in

CONTINUES = "TRAIN_CONTINUES_JOB"
"""Variable of such a job that names the job it continues; it is set before anybody has recorded the new job."""


def submit_continuation(run: RunDirectory, job_id: str, *, exclude: Sequence[str], env: Mapping[str, str]) -> str:
    """Submits the run's script once more, to start after this job has ended, and returns the new job's id.

    Raises:
        ClusterError: sbatch refused it, or there is no script.
    """
    from slurm_train.request.submission import submit_run

    request = read_script_of(run)
    flags = [f"--dependency=afterany:{job_id}"]
    if exclude:
        flags.append(f"--exclude={','.join(exclude)}")
    # By now the run has measured how long its stop takes.
    config = load_config(run.config)
    flags += renewed_warning(config, run)
    # Which variables this job has was chosen when it was submitted; all of them are passed on.
    env = {**env, CONTINUES: job_id}
    return submit_run(run, request, config, env=env, commands=SlurmCommands(env), flags=flags, continues=job_id)


def continued_job(run: RunDirectory, job_id: str, env: Mapping[str, str]) -> str | None:
    """Returns the job that `job_id` takes over from, None where there is none.

    Args:
        run: the run.
        job_id: this job.
        env: its environment, which names that job before anybody has recorded it.
    """
    record = read_job(run)
    recorded = None if record is None else record.continues.get(job_id)
    return env.get(CONTINUES) or recorded


def is_cancelled(job_id: str, commands: SlurmCommands) -> bool:
    """Returns whether Slurm says that a job was cancelled; False for a job that Slurm no longer knows.

    Raises:
        ClusterError: Slurm does not answer.
    """
    state = commands.job_states([job_id]).get(job_id)
    return state is not None and state.phase is Phase.CANCELLED


def can_avoid(nodes: Sequence[str], job_id: str, commands: SlurmCommands, *, num_nodes: int) -> bool:
    """Returns whether a job could be requeued without some nodes: its partition has enough other nodes that work.

    Args:
        nodes: names of nodes.
        job_id: the running job.
        commands: Slurm.
        num_nodes: how many nodes the job needs.
    """
    try:
        job = commands.show_job(job_id)
        # A job that names its nodes cannot run on others.
        return not nodes_in(job, "ReqNodeList") and has_enough_without(
            [*nodes, *nodes_in(job, "ExcNodeList")],
            "",
            job.get("Partition", ""),
            commands,
            num_nodes=num_nodes,
        )
    except ClusterError:
        return False


def exclude_nodes(nodes: Sequence[str], job_id: str, commands: SlurmCommands) -> None:
    """Excludes nodes from a requeued job, in addition to those that it excludes already.

    Slurm accepts this for a waiting job only.

    Raises:
        ClusterError: Slurm refused, or does not answer.
    """
    excluded = nodes_in(commands.show_job(job_id), "ExcNodeList")
    added = [node for node in nodes if node not in excluded]
    if added:
        commands.exclude_nodes(job_id, compact_nodelist([*excluded, *added]))
