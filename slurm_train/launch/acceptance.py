"""Asks Slurm whether it would take a job, before anything is written, and says why not in terms of our keys."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from slurm_train.errors import ClusterError
from slurm_train.launch.plan import RunPlan
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import Refusal, TestVerdict

if TYPE_CHECKING:
    from slurm_train.slurm.policy import Partition


def slurm_verdict(script: str, commands: SlurmCommands) -> TestVerdict:
    """Returns what `sbatch --test-only` says about a script; the file it reads is gone afterwards.

    Raises:
        ClusterError: no answer from the controller.
    """
    with NamedTemporaryFile("w", prefix="slurm_train-", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        return commands.test_only(Path(file.name))


def require_acceptable(script: str, commands: SlurmCommands, plan: RunPlan | None = None) -> None:
    """Does nothing where Slurm would take the script.

    Args:
        script: the batch script.
        commands: Slurm.
        plan: the run, to explain a refusal by what its partition has.

    Raises:
        ClusterError: it would not, with its reason and the key to change.
    """
    verdict = slurm_verdict(script, commands)
    if not verdict.is_accepted:
        hint = advice(verdict, commands, plan)
        raise ClusterError(f"Slurm would not take this job: {verdict.message}", hint=hint)
    if plan is not None and (error := too_long(plan, commands)) is not None:
        raise error


def advice(verdict: TestVerdict, commands: SlurmCommands, plan: RunPlan | None) -> str:
    """Returns which key to change so that Slurm takes what it refused, by what the partition has where that tells."""
    general = (verdict.refusal or Refusal.OTHER).value
    if plan is not None and verdict.refusal in (Refusal.RESOURCES, Refusal.PARTITION):
        return _explain(plan, commands.partitions()) or general
    return general


def too_long(plan: RunPlan, commands: SlurmCommands) -> ClusterError | None:
    """Returns what is wrong with a time limit that the partition does not allow, None for one that it does.

    Raises:
        ClusterError: no answer from the controller.
    """
    # Without EnforcePartLimits Slurm takes such a job and leaves it in the queue for ever.
    cluster = plan.config.cluster
    assert cluster is not None
    if cluster.time_limit_min is None:
        return None
    part = _partition_of(plan, commands.partitions())
    if part is not None and part.max_time_min is not None and cluster.time_limit_min > part.max_time_min:
        return ClusterError(
            f"cluster.time_limit_min={cluster.time_limit_min} is more than partition {part.name} allows "
            f"({part.max_time_min})",
            hint=f"set cluster.time_limit_min={part.max_time_min} or less: the run is requeued and continues",
        )
    return None


def _partition_of(plan: RunPlan, partitions: list[Partition]) -> Partition | None:
    cluster = plan.config.cluster
    assert cluster is not None
    wanted = (part for part in partitions if (part.name == cluster.partition if cluster.partition else part.is_default))
    return next(wanted, None)


def _explain(plan: RunPlan, partitions: list[Partition]) -> str:
    """Returns what the partition lacks, or which partitions there are; "" where sinfo does not tell."""
    cluster = plan.config.cluster
    assert cluster is not None
    part = _partition_of(plan, partitions)
    gpus = 0 if cluster.gpu_flag == "none" else max(plan.world.ranks_per_node)
    if part is None:
        return f"partitions here: {', '.join(part.name for part in partitions)}; set cluster.partition"
    if part.gpus_per_node < gpus:
        return (
            f"{gpus} GPUs per node were asked; the nodes of partition {part.name} have at most {part.gpus_per_node}: "
            "lower cluster.gpus_per_node, or name another cluster.partition"
        )
    # Of a range of nodes the fewest will do, and of uneven ones not all have the most GPUs.
    wanted, least = next(plan.world.possible()).num_nodes, min(gpus, *plan.world.ranks_per_node)
    if part.num_nodes_with(gpus=least) < wanted:
        return (
            f"{wanted} nodes with {least} GPUs were asked; partition {part.name} has "
            f"{part.num_nodes_with(gpus=least)} such nodes: lower cluster.nodes, or name another cluster.partition"
        )
    return ""
