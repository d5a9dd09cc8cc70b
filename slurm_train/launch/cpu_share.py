"""How many CPUs each rank asks for where `cluster.cpus_per_gpu=auto`: its GPU's equal part of the node.

Slurm's own default is one CPU for each task at most sites: the main thread, NCCL's proxy, the threads that read and
the compiler share it. What the site gives by itself (DefCpuPerGPU) and what a person has typed about CPUs stay as they
are, and where Slurm does not answer nothing is asked for. Only `NodeShares` talks to Slurm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from slurm_train.config.schema import ClusterSection
from slurm_train.errors import ClusterError
from slurm_train.launch.placement import World
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import NodeGroup, Partition, chosen_partitions
from slurm_train.slurm.site import SiteFacts, cpus_for_jobs, default_cpus_per_gpu

# Whoever types one of these about CPUs has counted them; --mem-per-cpu would give each rank the memory of all of them.
_ABOUT_CPUS = frozenset(
    {
        *("core-spec", "cores-per-socket", "cpus-per-gpu", "extra-node-info", "hint", "mem-per-cpu", "mincpus"),
        *("ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "sockets-per-node", "thread-spec"),
        "threads-per-core",
    }
)

_NOT_KNOWN = "as Slurm gives them: it does not say what its nodes have"


@dataclass(frozen=True, slots=True)
class CpuShare:
    """What `auto` means for a run."""

    number: int | None = None
    """CPUs to ask for, for each rank; None: what Slurm gives."""
    why: str = ""
    """The reason in words; "" where there is nothing to say."""


LEFT_TO_SLURM = CpuShare()


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of some nodes."""

    cpus: int
    why: str


class NodeShares:
    """Slurm's answers about nodes, each asked for once, and a rank's part of them.

    Args:
        commands: Slurm.
        in_allocation: an allocation is there already, whose CPUs are what they are.
    """

    def __init__(self, commands: SlurmCommands, *, in_allocation: bool = False) -> None:
        self._commands = commands
        self._in_allocation = in_allocation

    @cached_property
    def _facts(self) -> SiteFacts:
        """What Slurm says; the partitions' own settings are no reason to fail.

        Raises:
            ClusterError: sinfo does not answer.
        """
        partitions = self._commands.partitions()
        try:
            records = self._commands.show_partitions()
            settings = self._commands.show_config()
        except ClusterError as err:
            return SiteFacts(partitions=partitions, problems=[err.message])
        return SiteFacts(partitions=partitions, records=records, settings=settings)

    @cached_property
    def _threads_per_core(self) -> dict[str, int]:
        return self._commands.threads_per_core()

    def share_of(
        self,
        cluster: ClusterSection,
        world: World,
        *,
        is_interactive: bool,
        runs_per_node: int = 1,
        runs_per_gpu: int = 1,
    ) -> CpuShare:
        """Returns how many CPUs each rank of a run asks for.

        Args:
            cluster: its request; `cpus_per_gpu` is "auto".
            world: its ranks.
            is_interactive: whether it uses the allocation that it is typed in, if there is one.
            runs_per_node: how many runs share its job.
            runs_per_gpu: how many of these share a GPU.
        """
        for key, flags in (("cluster.sbatch", cluster.sbatch), ("cluster.srun", cluster.srun)):
            about = [name for name in flags if name.replace("_", "-") in _ABOUT_CPUS]
            if about:
                return CpuShare(None, f"as {key}.{about[0]} says")
        if cluster.gpu_flag == "none" or (is_interactive and self._in_allocation) or not self._commands.is_available():
            return LEFT_TO_SLURM
        try:
            return self._share_of(cluster, world, runs_per_node=runs_per_node, runs_per_gpu=runs_per_gpu)
        except ClusterError:
            return CpuShare(None, _NOT_KNOWN)

    def _share_of(self, cluster: ClusterSection, world: World, *, runs_per_node: int, runs_per_gpu: int) -> CpuShare:
        asked = cluster.partition or str(cluster.sbatch.get("partition", ""))
        partitions = chosen_partitions(asked, self._facts.partitions)
        if self._facts.problems or not partitions:
            return CpuShare(None, _NOT_KNOWN)
        parts = list[_Part]()
        for partition in partitions:
            given = default_cpus_per_gpu(self._facts.record(partition.name), self._facts.settings)
            if given is not None:
                why = f"{given} per GPU by the site's DefCpuPerGPU, partition {partition.name}"
                # One task of torchrun has the CPUs of all its ranks, which Slurm would not give it by itself.
                ranks_cpus = max(1, given // runs_per_gpu)
                return CpuShare(ranks_cpus if cluster.launcher == "torchrun" else None, why)
            for component in world.groups:
                num_gpus = math.ceil(component.ranks_per_node * runs_per_node / runs_per_gpu)
                parts += self._parts(cluster, partition, num_gpus=num_gpus, ranks_per_gpu=runs_per_gpu)
        if not parts:
            num_gpus = math.ceil(max(world.ranks_per_node) * runs_per_node / runs_per_gpu)
            return CpuShare(None, f"as Slurm gives them: no node has {num_gpus} GPUs")
        least = min(parts, key=lambda part: part.cpus)
        return CpuShare(least.cpus, least.why)

    def _parts(
        self, cluster: ClusterSection, partition: Partition, *, num_gpus: int, ranks_per_gpu: int
    ) -> list[_Part]:
        """Returns a rank's part of each kind of node of a partition that has GPUs enough for a component."""
        record = self._facts.record(partition.name)
        is_whole = (
            cluster.sbatch.get("exclusive") in (True, "")
            or record.get("OverSubscribe") == "EXCLUSIVE"
            or self._facts.settings.get("SelectType") == "select/linear"
        )
        groups = [group for group in partition.groups if group.gpus_per_node >= num_gpus and group.cpus_per_node]
        typed = [group for group in groups if group.gpu_type == cluster.gpu_type]
        return [
            self._part(
                partition,
                group,
                cpus_for_jobs(group, record),
                ranks_per_gpu * (num_gpus if is_whole else group.gpus_per_node),
            )
            for group in typed or groups
        ]

    def _part(self, partition: Partition, group: NodeGroup, cpus: int, num_parts: int) -> _Part:
        share = max(1, cpus // num_parts)
        # A core's threads are given out together: an odd number of them would take one core more than there is.
        threads = self._threads_per_core.get(partition.name, 1)
        if share > threads:
            share -= share % threads
        of = "rank" if num_parts != group.gpus_per_node else "GPU"
        node = f"a node with {cpus} CPUs and {group.gpus_per_node} GPUs"
        return _Part(share, f"{share} per rank: a {of}'s part of {node}, partition {partition.name}")
