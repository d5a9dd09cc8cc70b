"""What Slurm says about a cluster: one question each, and what follows for a user. Only gathering talks to Slurm.

What follows: which partitions, accounts and QOS are open, who may preempt a run there and what becomes of it, and what
a node has for each of its GPUs.
"""

from __future__ import annotations

import math
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_train.errors import ClusterError, ConfigError
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.nodelist import NodeListError, parse_nodelist
from slurm_train.slurm.policy import Association, NodeGroup, Partition, Preemption, Qos, read_preemption

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """The answers; empty where there was none."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """`scontrol show config`."""
    partitions: Sequence[Partition] = ()
    """`sinfo`."""
    records: Sequence[Mapping[str, str]] = ()
    """`scontrol show partition`."""
    associations: Sequence[Association] = ()
    """The user's, of this cluster."""
    qos: Sequence[Qos] = ()
    problems: Sequence[str] = ()
    """What did not answer, one line each."""

    def record(self, partition: str) -> Mapping[str, str]:
        """Returns scontrol's fields of a partition, none where it did not say."""
        return next((one for one in self.records if one["PartitionName"] == partition), {})

    def qos_named(self, name: str) -> Qos | None:
        """Returns a QOS, None where accounting does not know it."""
        return next((one for one in self.qos if one.name == name), None)


def login_name() -> str:
    """Returns the name of the user who types, as accounting knows it; the uid where it has no entry in passwd."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def gather_facts(commands: SlurmCommands, *, user: str) -> SiteFacts:
    """Returns what Slurm's commands say; a command that is missing or refuses is one of the problems.

    Raises:
        ClusterError: sinfo does not answer, so that nothing is known.
    """
    problems: list[str] = []

    def ask(what: str, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except ClusterError as err:
            problems.append(f"{what}: {err.message}")
            return None

    settings = ask("settings", commands.show_config) or {}
    partitions = commands.partitions()
    records = ask("partitions", commands.show_partitions) or []
    associations = ask("accounts", lambda: commands.associations(user)) or []
    return SiteFacts(
        settings=settings,
        partitions=partitions,
        records=records,
        associations=_of_cluster(associations, settings.get("ClusterName", "")),
        qos=ask("QOS", commands.all_qos) or [],
        problems=problems,
    )


def _of_cluster(associations: Sequence[Association], cluster: str) -> list[Association]:
    # The database writes names in lower case, scontrol as they were configured.
    mine = [one for one in associations if one.cluster.lower() == cluster.lower()]
    return mine or list(associations)


def preemption_in(facts: SiteFacts, qos: str, partition: str) -> Preemption:
    """Returns what a preemption does to a job of a QOS and a partition; nothing where nobody could preempt it."""
    record, found = facts.record(partition), facts.qos_named(qos)
    columns = {} if found is None else {"GraceTime": f"{found.grace_s:.0f}", "PreemptMode": found.preempt_mode}
    preemption = read_preemption(facts.settings, qos=columns, partition=record)
    nobody = Preemption(by="nobody", mode="OFF", grace_s=0.0, kill_wait_s=preemption.kill_wait_s)
    if preemption.by == "qos" and found is not None and not preempting_qos(facts, qos):
        return nobody
    return nobody if preemption.by == "partition" and record and not _higher_partitions(facts, record) else preemption


def preempting_qos(facts: SiteFacts, name: str) -> list[str]:
    """Returns the QOS whose jobs may take the nodes of another one."""
    return [one.name for one in facts.qos if name in one.preempts]


def _higher_partitions(facts: SiteFacts, record: Mapping[str, str]) -> list[str]:
    """Returns the partitions that share nodes with one and come before it."""
    tier, nodes = int(record.get("PriorityTier", "1")), _nodes(record)
    higher = (one for one in facts.records if int(one.get("PriorityTier", "1")) > tier)
    return [one["PartitionName"] for one in higher if nodes & _nodes(one)]


def _nodes(record: Mapping[str, str]) -> set[str]:
    text = record.get("Nodes", "")
    try:
        return set() if text in ("", "(null)") else set(parse_nodelist(text))
    except NodeListError:
        return set()


def usable_partitions(facts: SiteFacts) -> list[Partition]:
    """Returns the partitions that a run may go to, those with GPUs if there are any; the best choice first.

    Raises:
        ConfigError: there is none.
    """
    accounts = {one.account for one in facts.associations}
    is_open = [one for one in facts.partitions if one.state == "up" and one.groups and _admits(facts, one, accounts)]
    if not is_open:
        raise ConfigError("sinfo shows no partition that is up and open to you", hint="run `sinfo` by hand")
    with_gpus = [one for one in is_open if one.gpus_per_node]

    def rank(one: Partition) -> tuple[bool, bool, int, str]:
        # A run that comes back from preemptions is still quicker where there are none.
        is_preempted = preemption_in(facts, "", one.name).outcome != "never"
        return not one.is_default, is_preempted, -_num_gpus(one), one.name

    return sorted(with_gpus or is_open, key=rank)


def _admits(facts: SiteFacts, partition: Partition, accounts: set[str]) -> bool:
    record = facts.record(partition.name)
    allowed, denied = (set(record.get(key, "ALL").split(",")) for key in ("AllowAccounts", "DenyAccounts"))
    if record.get("RootOnly") == "YES" or (accounts and "ALL" not in allowed and not accounts & allowed):
        return False
    return not ("DenyAccounts" in record and accounts and accounts <= denied)


def _num_gpus(partition: Partition) -> int:
    return sum(group.num_nodes * group.gpus_per_node for group in partition.groups)


def default_account(associations: Sequence[Association]) -> str:
    """Returns the account that Slurm charges where none is named; "" where nobody says."""
    return next((one.account for one in sorted(associations, key=lambda one: not one.is_default)), "")


def qos_names(associations: Sequence[Association], account: str) -> tuple[str, ...]:
    """Returns the QOS that jobs of an account may ask for, as far as accounting says."""
    names = (name for one in associations if one.account == account for name in one.qos)
    return tuple(dict.fromkeys(names))


def default_qos(associations: Sequence[Association], account: str) -> str:
    """Returns the QOS that a job of an account gets where it asks for none; "" where nobody says."""
    defaults = (one.default_qos for one in associations if one.account == account and one.default_qos)
    return next(defaults, "")


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
    return min(limit for limit in limits if limit) // shape.gpus // 1024 or None


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
