"""From the settings of a cluster to the flags that ask Slurm for GPUs, CPUs, memory and a place in the queue. Pure."""

from __future__ import annotations

from slurm_train.config.schema import ClusterSection

Flags = dict[str, str | bool]


def resource_flags(cluster: ClusterSection, *, per_node: int) -> Flags:
    """Returns sbatch flags by their long names without dashes, e.g. {"gpus-per-node": "8", "partition": "gpu"}.

    Args:
        cluster: what is asked for.
        per_node: ranks, and so GPUs, of each node.
    """
    memory = _memory_gb(cluster, per_node)
    values = {
        **_gpu_flags(cluster, per_node),
        "cpus-per-task": cluster.cpus_per_gpu,
        # --mem=0 means all memory of the node; a unit would be wrong there.
        "mem": None if memory is None else f"{memory}G" if memory else "0",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time_limit_min,
        "nodelist": cluster.nodelist,
        "exclude": cluster.exclude,
        "constraint": cluster.constraint,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _gpu_flags(cluster: ClusterSection, per_node: int) -> dict[str, str]:
    if cluster.gpu_flag == "none":
        return {}
    wanted = f"{cluster.gpu_type}:{per_node}" if cluster.gpu_type else str(per_node)
    return {"gres": f"gpu:{wanted}"} if cluster.gpu_flag == "gres" else {"gpus-per-node": wanted}


def _memory_gb(cluster: ClusterSection, per_node: int) -> int | None:
    if cluster.memory_gb_per_node is not None or cluster.memory_gb_per_gpu is None:
        return cluster.memory_gb_per_node
    return cluster.memory_gb_per_gpu * per_node
