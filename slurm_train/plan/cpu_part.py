"""How many CPUs each rank asks for where `cluster.cpus_per_gpu=auto`: its GPU's equal part of the node.

Slurm's own default is one CPU per task at most sites, which the main thread, NCCL's proxy, the reading threads and the
compiler would share. The site's own default (DefCpuPerGPU) and settings of the person about CPUs are not changed. If
Slurm does not answer, no number of CPUs is requested. Only `NodeCpus` calls Slurm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_train.config.schema import ClusterSection
from slurm_train.errors import ClusterError
from slurm_train.plan.placement import World
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import NodeGroup, Partition, chosen_partitions
from slurm_train.slurm.site import SiteFacts, cpus_for_jobs, default_cpus_per_gpu, site_of

# A person who sets one of these has decided about CPUs; with --mem-per-cpu more CPUs would also request more memory.
_ABOUT_CPUS = frozenset(
    {
        *("core-spec", "cores-per-socket", "cpus-per-gpu", "extra-node-info", "hint", "mem-per-cpu", "mincpus"),
        *("ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "sockets-per-node", "thread-spec"),
        "threads-per-core",
    }
)

_NOT_KNOWN = "as Slurm gives them: it does not say what its nodes have"


@dataclass(frozen=True, slots=True)
class CpuPart:
    """The number of CPUs that `auto` stands for in a run."""

    number: int | None = None
    """CPUs to request for each rank; None: Slurm's default."""
    reason: str = ""
    """The reason in words; "" where none is needed."""


LEFT_TO_SLURM = CpuPart()


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of some nodes."""

    cpus: int
    reason: str


class NodeCpus:
    """A rank's part of the nodes that Slurm knows; Slurm is asked once.

    Args:
        commands: Slurm.
        in_allocation: whether the run uses an existing allocation, whose CPUs cannot be changed.
    """

    def __init__(self, commands: SlurmCommands, *, in_allocation: bool = False) -> None:
        self._commands = commands
        self._in_allocation = in_allocation

    def part_of(
        self,
        cluster: ClusterSection,
        world: World,
        *,
        is_interactive: bool,
        runs_per_node: int = 1,
        runs_per_gpu: int = 1,
    ) -> CpuPart:
        """Returns how many CPUs to request for each rank of a run.

        Args:
            cluster: its request; `cpus_per_gpu` is "auto".
            world: its ranks.
            is_interactive: whether it uses the allocation that it is typed in, if there is one.
            runs_per_node: how many runs share its job.
            runs_per_gpu: how many of these share a GPU.
        """
        for key, flags in (("cluster.sbatch", cluster.sbatch), ("cluster.srun", cluster.srun)):
            cpu_flags = [name for name in flags if name.replace("_", "-") in _ABOUT_CPUS]
            if cpu_flags:
                return CpuPart(None, f"as {key}.{cpu_flags[0]} says")
        if cluster.gpu_flag == "none" or (is_interactive and self._in_allocation) or not self._commands.is_available():
            return LEFT_TO_SLURM
        try:
            return self._part_of(cluster, world, runs_per_node=runs_per_node, runs_per_gpu=runs_per_gpu)
        except ClusterError:
            return CpuPart(None, _NOT_KNOWN)

    def _part_of(self, cluster: ClusterSection, world: World, *, runs_per_node: int, runs_per_gpu: int) -> CpuPart:
        requested = cluster.partition or str(cluster.sbatch.get("partition", ""))
        facts = site_of(self._commands).node_facts()
        partitions = chosen_partitions(requested, facts.partitions)
        if facts.unanswered or not partitions:
            return CpuPart(None, _NOT_KNOWN)
        parts = list[_Part]()
        for partition in partitions:
            site_default = default_cpus_per_gpu(facts.record(partition.name), facts.settings)
            if site_default is not None:
                reason = f"{site_default} per GPU by the site's DefCpuPerGPU, partition {partition.name}"
                # One task of torchrun needs the CPUs of all its ranks, which it does not get by default.
                ranks_cpus = max(1, site_default // runs_per_gpu)
                return CpuPart(ranks_cpus if cluster.launcher == "torchrun" else None, reason)
            for component in world.groups:
                num_gpus = math.ceil(component.ranks_per_node * runs_per_node / runs_per_gpu)
                parts += _parts(cluster, partition, facts, num_gpus=num_gpus, ranks_per_gpu=runs_per_gpu)
        if not parts:
            num_gpus = math.ceil(max(world.ranks_per_node) * runs_per_node / runs_per_gpu)
            return CpuPart(None, f"as Slurm gives them: no node has {num_gpus} GPUs")
        least = min(parts, key=lambda part: part.cpus)
        return CpuPart(least.cpus, least.reason)


def _parts(
    cluster: ClusterSection, partition: Partition, facts: SiteFacts, *, num_gpus: int, ranks_per_gpu: int
) -> list[_Part]:
    """Returns a rank's part of each kind of node of a partition that has enough GPUs for a component."""
    record = facts.record(partition.name)
    is_whole = (
        cluster.sbatch.get("exclusive") in (True, "")
        or record.get("OverSubscribe") == "EXCLUSIVE"
        or facts.settings.get("SelectType") == "select/linear"
    )
    groups = [group for group in partition.groups if group.gpus_per_node >= num_gpus and group.cpus_per_node]
    typed = [group for group in groups if group.gpu_type == cluster.gpu_type]
    return [
        _part(
            partition,
            group,
            cpus_for_jobs(group, record),
            ranks_per_gpu * (num_gpus if is_whole else group.gpus_per_node),
        )
        for group in typed or groups
    ]


def _part(partition: Partition, group: NodeGroup, cpus: int, num_parts: int) -> _Part:
    share = max(1, cpus // num_parts)
    # The threads of a core are allocated together: an odd number of CPUs would need one core more than there is.
    if share > group.threads_per_core:
        share -= share % group.threads_per_core
    owner = "rank" if num_parts != group.gpus_per_node else "GPU"
    node = f"a node with {cpus} CPUs and {group.gpus_per_node} GPUs"
    return _Part(share, f"{share} per rank: a {owner}'s part of {node}, partition {partition.name}")
