"""What a node of a partition has for each of its GPUs: CPUs and memory that Slurm would give. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_train.slurm.partitions import NodeGroup, Partition

_MB_PER_GB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """The smallest node of those that a run may get."""

    num_nodes: int
    gpus: int
    """0: a node without GPUs."""
    cpus: int
    memory_mb: int


def gpu_types(partition: Partition) -> list[str]:
    """Returns the types of GPU in a partition, the one with most GPUs first; [""] where the site names none."""
    totals: dict[str, int] = {}
    for group in partition.groups:
        if group.gpus_per_node:
            totals[group.gpu_type] = totals.get(group.gpu_type, 0) + group.num_nodes * group.gpus_per_node
    return sorted(totals, key=lambda name: (-totals[name], name))


def shape_of(partition: Partition, *, gpu_type: str) -> NodeShape:
    """Returns what the nodes with this type of GPU have in common; of a partition without GPUs, what all have.

    Nodes of one partition may have different numbers of GPUs. The number that most GPUs come in counts, and the least
    CPUs and memory that are there for so many.
    """
    groups = [group for group in partition.groups if group.gpus_per_node and group.gpu_type == gpu_type]
    groups = groups or list(partition.groups)
    if not groups:
        return NodeShape(num_nodes=0, gpus=0, cpus=0, memory_mb=0)
    gpus = max(groups, key=lambda group: (_gpus_in(groups, group.gpus_per_node), -group.gpus_per_node)).gpus_per_node
    alike = [group for group in groups if group.gpus_per_node == gpus]
    return NodeShape(
        num_nodes=sum(group.num_nodes for group in alike),
        gpus=gpus,
        cpus=min(group.cpus_per_node for group in alike),
        memory_mb=min(group.memory_per_node_mb for group in alike),
    )


def _gpus_in(groups: list[NodeGroup], per_node: int) -> int:
    return sum(group.num_nodes * group.gpus_per_node for group in groups if group.gpus_per_node == per_node)


def cpus_per_gpu(shape: NodeShape, record: Mapping[str, str]) -> int | None:
    """Returns the CPUs of a GPU's share of its node; what the site gives by default, if it says so.

    Args:
        shape: the node.
        record: scontrol's fields of the partition; empty where they are not known.
    """
    own = _number(_job_defaults(record).get("DefCpuPerGPU", ""))
    if own or not shape.gpus or not shape.cpus:
        return own
    limits = [shape.cpus, _number(record.get("MaxCPUsPerNode", "")), _free_cpus(record)]
    return max(1, min(limit for limit in limits if limit) // shape.gpus)


def memory_gb_per_gpu(
    shape: NodeShape, record: Mapping[str, str], settings: Mapping[str, str], *, cpus: int | None
) -> int | None:
    """Returns the GiB of a GPU's share of its node; None where the site gives memory itself, or does not count it.

    Args:
        shape: the node.
        record: scontrol's fields of the partition.
        settings: `scontrol show config`.
        cpus: CPUs of each GPU's share.
    """
    counts_memory = "MEMORY" in settings.get("SelectTypeParameters", "").upper()
    if not counts_memory or not shape.gpus or "DefMemPerGPU" in _job_defaults(record):
        return None
    per_cpu_mb = _number(record.get("MaxMemPerCPU", ""))
    # Beyond MaxMemPerCPU Slurm raises the CPUs of a task, and the node has no more of them.
    by_cpus_mb = per_cpu_mb * cpus * shape.gpus if per_cpu_mb and cpus else None
    limits = [shape.memory_mb, _number(record.get("MaxMemPerNode", "")), by_cpus_mb]
    return min(limit for limit in limits if limit) // shape.gpus // _MB_PER_GB or None


def _job_defaults(record: Mapping[str, str]) -> dict[str, str]:
    pairs = (item.partition("=") for item in record.get("JobDefaults", "").split(","))
    return {name: value for name, sign, value in pairs if sign}


def _free_cpus(record: Mapping[str, str]) -> int | None:
    """Returns the CPUs of a node that jobs may have, where some are kept for the system: their mean, rounded down."""
    counts = dict(item.partition("=")[::2] for item in record.get("TRES", "").split(","))
    cpus, nodes = _number(counts.get("cpu", "")), _number(counts.get("node", ""))
    total = _number(record.get("TotalCPUs", ""))
    # In a partition of different nodes the mean says nothing about the smallest, unless CPUs are kept back at all.
    return math.floor(cpus / nodes) if cpus and nodes and total and cpus < total else None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
