"""An allocation that a person waits in: is it large enough, or how is one made. Pure.

The run directory is the same as for a job, and so is its script: `bash submit.sh` inside the allocation. salloc takes
the flags of sbatch that are about resources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_train.errors import ClusterError
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.resources import sbatch_components
from slurm_train.slurm.flags import check_flag_name
from slurm_train.slurm.policy import tres_gpus

# Of a batch script alone; salloc does not know them, and an allocation is not run again.
_OF_BATCH = frozenset({"output", "error", "open-mode", "requeue", "no-requeue", "export"})


def salloc_words(plan: RunPlan, more: Sequence[str] = ()) -> list[str]:
    """Returns the command that makes an allocation for a run and runs its script in it.

    Args:
        plan: the run.
        more: further flags of salloc, which win.
    """
    (asked,) = sbatch_components(plan)
    flags = {name: value for name, value in asked.items() if name not in _OF_BATCH}
    words = [f"--{check_flag_name(name)}" + ("" if value is True else f"={value}") for name, value in flags.items()]
    return ["salloc", *words, *more, "bash", str(plan.run.submit_script)]


def require_room(plan: RunPlan, job: Mapping[str, str]) -> None:
    """Does nothing where a run fits into an allocation.

    Args:
        plan: the run.
        job: `scontrol show job` of the allocation.

    Raises:
        ClusterError: it does not, with what is missing; or the allocation is over.
    """
    job_id = job.get("JobId", "?")
    if job.get("JobState") != "RUNNING":
        raise ClusterError(
            f"this shell belongs to job {job_id}, which is {job.get('JobState') or 'gone'}",
            hint="leave the shell; outside an allocation launch=interactive makes one",
        )
    missing = list(_missing(plan, job))
    if missing:
        raise ClusterError(
            f"the allocation of job {job_id} is too small for this run: {'; '.join(missing)}",
            hint=f"ask for more ({' '.join(salloc_words(plan)[:-2])}), or for a smaller run with cluster=NxG",
        )


def _missing(plan: RunPlan, job: Mapping[str, str]) -> list[str]:
    cluster = plan.config.cluster
    assert cluster is not None
    # Until 23.02 TRES is what the job has, later AllocTRES; where GPUs are not accounted for, neither tells.
    tres = job.get("AllocTRES") or job.get("TRES", "")
    # Of a range of nodes the fewest will do.
    world = next(plan.world.possible())
    ranks = world.size
    asked = [
        ("nodes", world.num_nodes, _number(job.get("NumNodes", ""))),
        ("GPUs", ranks, tres_gpus(tres) or 0) if cluster.gpu_flag != "none" and tres else None,
        ("CPUs", ranks * (cluster.cpus_per_gpu or 1), _number(job.get("NumCPUs", ""))),
    ]
    known = [one for one in asked if one is not None and one[2] is not None]
    return [f"{have} {name}, {wanted} asked" for name, wanted, have in known if have is not None and have < wanted]


def _number(text: str) -> int | None:
    # "2-4" of a job that waits; a running one has one number.
    return int(text) if text.isdigit() else None
