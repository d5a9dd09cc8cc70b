"""What Slurm says about a cluster: one question each, and what follows for a user. Only gathering talks to Slurm.

What follows: the account and QOS of a run that names none, who may preempt it, and what becomes of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slurm_train.errors import ClusterError
from slurm_train.slurm.allocation import NodeListError, parse_nodelist
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.policy import (
    LINEAGE_SINCE,
    Association,
    NodeGroup,
    Partition,
    Preemption,
    Qos,
    is_since,
    read_preemption,
)

T = TypeVar("T")
_OTHERS = frozenset({"-m", "--multirun", "-c", "--cfg", "-i", "--info", "launch=local", "cluster=null"})
"""Words of command lines that are not about one job."""
_NAMES_CLUSTER = re.compile(r"\+{0,2}cluster[.=]")


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
    parents: Mapping[str, str] = field(default_factory=dict)
    """The account above each account; asked for where a partition is for some accounts."""
    qos: Sequence[Qos] = ()
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Why there is no answer, by what was asked for: "settings", "partitions", "accounts" or "QOS"."""

    @property
    def problems(self) -> list[str]:
        """What was not answered and why, a line each."""
        return [f"{subject}: {why}" for subject, why in self.unanswered.items()]

    def record(self, partition: str) -> Mapping[str, str]:
        """Returns scontrol's fields of a partition, none where it did not answer."""
        return next((record for record in self.records if record["PartitionName"] == partition), {})

    def qos_named(self, name: str) -> Qos | None:
        """Returns a QOS, None where accounting does not know it."""
        return next((qos for qos in self.qos if qos.name == name), None)


def login_name() -> str:
    """Returns the name of the user who types, as accounting knows it; the uid where it has no entry in passwd."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _begin(question: Callable[[], T]) -> Callable[[], T]:
    """Begins to ask something, and returns what waits for the answer; a process that ends need not wait for it."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as err:
            answer.set_exception(err)

    try:
        threading.Thread(target=ask, daemon=True).start()
    except RuntimeError:
        # No more threads here (`ulimit -u`).
        ask()
    return answer.result


class Site:
    """Slurm's answers about a cluster: each question is asked once, and waited for where its answer is needed.

    Accounting takes 0.4 s to answer (22.05), nearly all of it waiting: four round trips of 0.09 s. Whoever will need
    its answers begins to ask early.

    Args:
        commands: Slurm.
        user: whose accounts.
    """

    def __init__(self, commands: SlurmCommands, *, user: str | None = None) -> None:
        name = user or login_name()
        self._commands = commands
        self._questions: Mapping[str, Callable[[], Any]] = {
            "accounts": lambda: commands.associations(name),
            "QOS": commands.all_qos,
            "settings": lambda: commands.settings,
            "partitions": commands.show_partitions,
            "nodes": commands.partitions,
            "reservations": commands.show_reservations,
        }
        self._answers: dict[str, Callable[[], Any]] = {}

    def begin(self, *subjects: str) -> None:
        """Begins to ask what has not been asked yet; all questions where no subject is named."""
        for subject in subjects or self._questions:
            if subject not in self._answers:
                self._answers[subject] = _begin(self._questions[subject])

    def reservations(self) -> Sequence[Mapping[str, str]]:
        """Returns the fields of every reservation that this user can see."""
        self.begin("reservations")
        answer: Sequence[Mapping[str, str]] = self._answers["reservations"]()
        return answer

    def node_facts(self) -> SiteFacts:
        """Returns what the controller says of partitions and their nodes; accounting is not asked.

        Raises:
            ClusterError: sinfo does not answer, so that nothing is known.
        """
        return self._gather("settings", "partitions")

    def facts(self) -> SiteFacts:
        """Returns all that Slurm's commands say; one that is missing or refuses is named.

        Raises:
            ClusterError: as for `node_facts`.
        """
        facts = self._gather("settings", "partitions", "accounts", "QOS")
        # The database writes names in lower case, scontrol as they were configured.
        cluster = facts.settings.get("ClusterName", "").lower()
        parents: dict[str, str] = {}
        if (
            "accounts" not in facts.unanswered
            and any(map(_names_accounts, facts.records))
            and is_since(facts.settings, LINEAGE_SINCE)
        ):
            # Many sites show users their own accounts alone.
            with contextlib.suppress(ClusterError):
                parents = self._commands.account_parents(cluster)
        of_this_cluster = [record for record in facts.associations if record.cluster.lower() == cluster]
        return replace(facts, associations=of_this_cluster or facts.associations, parents=parents)

    def _gather(self, *subjects: str) -> SiteFacts:
        self.begin("nodes", *subjects)
        unanswered: dict[str, str] = {}
        answers: dict[str, Any] = {}
        for subject in subjects:
            try:
                answers[subject] = self._answers[subject]()
            except ClusterError as err:
                unanswered[subject] = err.message
        return SiteFacts(
            settings=answers.get("settings", {}),
            partitions=self._answers["nodes"](),
            records=answers.get("partitions", []),
            associations=answers.get("accounts", []),
            qos=answers.get("QOS", []),
            unanswered=unanswered,
        )


@functools.lru_cache(maxsize=1)
def site_of(commands: SlurmCommands) -> Site:
    """Returns the site that a person's command asks about, which is over soon; others make a `Site` for each look."""
    return Site(commands)


def ask_early(words: Sequence[str], env: Mapping[str, str]) -> SlurmCommands:
    """Returns Slurm's commands for a command line; where it is about a job, Slurm is asked already.

    Args:
        words: the command line. A sweep asks by commands of its own, and a configuration that is printed needs none.
        env: environment for the commands.
    """
    commands = SlurmCommands(env)
    names_cluster = any(_NAMES_CLUSTER.match(word) for word in words)
    if names_cluster and _OTHERS.isdisjoint(words) and commands.is_available():
        site_of(commands).begin()
    return commands


def _names_accounts(record: Mapping[str, str]) -> bool:
    """Returns whether a partition is for some accounts alone, or not for some."""
    return "DenyAccounts" in record or record.get("AllowAccounts", "ALL") != "ALL"


def preemption_in(facts: SiteFacts, qos: str, partition: str) -> Preemption:
    """Returns what a preemption does to a job of a QOS and a partition; nothing if no job can preempt it."""
    record = facts.record(partition)
    named_qos = facts.qos_named(qos)
    preemption = read_preemption(facts.settings, qos=named_qos, partition=record)
    is_safe_qos = preemption.by == "qos" and named_qos is not None and not preempting_qos(facts, qos)
    is_safe_partition = preemption.by == "partition" and bool(record) and not _higher_partitions(facts, record)
    if is_safe_qos or is_safe_partition:
        return Preemption(by="nobody", mode="OFF", grace_s=0.0, kill_wait_s=preemption.kill_wait_s)
    return preemption


def preempting_qos(facts: SiteFacts, name: str) -> list[str]:
    """Returns the QOS whose jobs may take the nodes of another one."""
    return [qos.name for qos in facts.qos if name in qos.preempts]


def _higher_partitions(facts: SiteFacts, record: Mapping[str, str]) -> list[str]:
    """Returns the partitions that share nodes with one and come before it."""
    tier = int(record.get("PriorityTier", "1"))
    nodes = _nodes(record)
    higher = (record for record in facts.records if int(record.get("PriorityTier", "1")) > tier)
    return [record["PartitionName"] for record in higher if nodes & _nodes(record)]


def _nodes(record: Mapping[str, str]) -> set[str]:
    text = record.get("Nodes", "")
    try:
        return set() if text in ("", "(null)") else set(parse_nodelist(text))
    except NodeListError:
        return set()


def default_account(associations: Sequence[Association]) -> str:
    """Returns the account that Slurm charges where none is named; "" where it is not known."""
    for association in associations:
        if association.is_default:
            return association.account
    return associations[0].account if associations else ""


def default_qos(facts: SiteFacts, partition: str, *, account: str | None = None) -> str:
    """Returns the QOS that a job gets where it asks for none; "" where it is not known.

    As slurmctld chooses it: what the association names, the only one that it has, else "normal". An association for
    the partition itself comes before that for all partitions.

    Args:
        facts: what Slurm has said.
        partition: the partition that the job goes to.
        account: the account that it is charged to; None or "" for the one that is charged where none is named.
    """
    account = account or default_account(facts.associations)
    own_associations = [
        association
        for association in facts.associations
        if association.account == account and association.partition in (partition, "")
    ]
    association = max(own_associations, key=lambda record: bool(record.partition), default=None)
    if association is not None and (association.default_qos or len(association.qos) == 1):
        return association.default_qos or association.qos[0]
    may_be_normal = association is None or not association.qos or "normal" in association.qos
    return "normal" if may_be_normal and facts.qos_named("normal") is not None else ""


def default_cpus_per_gpu(record: Mapping[str, str], settings: Mapping[str, str]) -> int | None:
    """Returns the CPUs that the site gives with each GPU by itself (DefCpuPerGPU); None where it gives none.

    Args:
        record: scontrol's fields of the partition, which win.
        settings: `scontrol show config`.
    """
    partition_default = number_or_none(pairs_of(record, "JobDefaults").get("DefCpuPerGPU"))
    return partition_default or number_or_none(pairs_of(settings, "JobDefaults").get("DefCpuPerGPU"))


def cpus_for_jobs(node: NodeGroup, record: Mapping[str, str]) -> int:
    """Returns how many CPUs of a node jobs of a partition may have.

    Where some CPUs are kept for the system, those that are left: their mean, rounded down. In a partition of different
    nodes the mean says nothing about the smallest, unless CPUs are kept back at all.

    Args:
        node: the node, whose CPUs are known.
        record: scontrol's fields of the partition; empty where they are not known.
    """
    counts = pairs_of(record, "TRES")
    cpus = number_or_none(counts.get("cpu"))
    nodes = number_or_none(counts.get("node"))
    total = number_or_none(record.get("TotalCPUs"))
    mean_for_jobs = cpus // nodes if cpus and nodes and total and cpus < total else None
    limits = [node.cpus_per_node, number_or_none(record.get("MaxCPUsPerNode")), mean_for_jobs]
    return min(limit for limit in limits if limit)


def pairs_of(record: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns a field like "cpu=184,node=4" as a mapping."""
    pairs = (item.partition("=") for item in record.get(name, "").split(","))
    return {key: value for key, sign, value in pairs if sign}


def number_or_none(text: str | None) -> int | None:
    """Returns a whole number as Slurm writes it; None for words like "UNLIMITED"."""
    return int(text) if text and text.isdigit() else None
