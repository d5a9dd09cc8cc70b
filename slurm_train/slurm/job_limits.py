"""What one job may ask Slurm for, with the owner of each limit, and why a job that Slurm takes would never start. Pure.

sbatch takes a job that breaks most of these limits, and Slurm leaves it in the queue for ever. Who sets a limit, in
Slurm's order (https://slurm.schedmd.com/resource_limits.html): the QOS of the partition, the QOS of the job (before it
with the flag OverPartQOS), the association of user and account. The first one that sets a limit decides, not the
smallest. The partition itself limits time and nodes as well, unless flags of the job's QOS lift that.

What Slurm does not show (PrivateData, an accounting that does not answer) is not known; it is no "unlimited".
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_train.config.words import minutes
from slurm_train.errors import ConfigError
from slurm_train.slurm.flags import Flags
from slurm_train.slurm.policy import (
    LINEAGE_SINCE,
    Amounts,
    Association,
    Qos,
    Scope,
    asked_gpus,
    is_since,
    parse_gpus,
    time_limit_min,
)
from slurm_train.slurm.site import SiteFacts, default_account, default_qos, number_or_none

# Every word of AccountingStorageEnforce with which slurmctld compares jobs with limits of accounting.
_ENFORCES_LIMITS = frozenset({"limits", "safe", "all"})
_ALL_JOBS: Mapping[Scope, str] = {
    "job": "",
    "user": " for all jobs of a user together",
    "account": " for all jobs of an account together",
    "group": " for all its jobs together",
}
"""Whose use a limit counts, and how that is said."""
_RESOURCES = {"node": "nodes", "cpu": "CPUs", "gres/gpu": "GPUs", "mem": "MB of memory"}
_KEYS = {
    "node": "cluster.nodes",
    "cpu": "cluster.nodes or cluster.cpus_per_gpu",
    "gres/gpu": "cluster.nodes or cluster.gpus_per_node",
    "mem": "cluster.nodes or cluster.memory_gb_per_gpu",
}


@dataclass(frozen=True, slots=True)
class Owner:
    """Who sets a limit."""

    name: str
    """E.g. "partition gpu", "QOS part_gpu of partition gpu", "account lab"."""
    key: str
    """What a person names to be under another one."""

    def __str__(self) -> str:
        return self.name


def owner_partition(partition: str) -> Owner:
    """Returns a partition as the owner of its own limits."""
    return Owner(f"partition {partition}", "cluster.partition")


@dataclass(frozen=True, slots=True)
class Limit:
    """A number that a job may not exceed, or not fall short of."""

    value: int
    owner: Owner
    of: Scope = "job"
    """Whose use it counts: "job", or all jobs of a "user", of an "account", or of the "group" of the owner's."""
    is_of_largest: bool = False
    """Whether it holds for the most that a job asks for: so a partition counts a range of nodes."""

    @property
    def elsewhere(self) -> str:
        """Where another limit holds."""
        return f"name another {self.owner.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What one job of a QOS and an account may ask for in a partition."""

    partition: str
    state: str = "UP"
    """Slurm's word: only in a partition that is UP do jobs start."""
    default_time_min: int | None = None
    """Time limit of a job that asks for none; None if that is the longest."""
    time_min: Limit | None = None
    """Longest time limit in minutes; None if unlimited or not known."""
    most: Mapping[str, Sequence[Limit]] = field(default_factory=dict)
    """The most of a trackable resource, e.g. of "node"; "job" and "submit" are running jobs, and those in the queue."""
    least: Mapping[str, Sequence[Limit]] = field(default_factory=dict)
    barred: str = ""
    """Why the partition starts no jobs of this QOS or account; "" if it does, or it is not known."""
    may_be_barred: bool = False
    """Whether that is not known: the account is not named, and one above it, which is not shown, may be."""

    @property
    def lone_job(self) -> str:
        """Says that no second job fits beside a run, as the one that would continue it does; "" if one does."""
        limit = min(self.most.get("submit", ()), key=lambda limit: limit.value, default=None)
        if limit is None or limit.value != 1:
            return ""
        whose = f" of {'an' if limit.of == 'account' else 'a'} {limit.of}" if limit.of in ("user", "account") else ""
        return (
            f"{limit.owner} lets one job{whose} into the queue: where a requeue is refused, no other job can take over"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job asks for, as far as limits count it."""

    partitions: tuple[str, ...] = ()
    """Slurm starts the job in any of them; empty for the default."""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    time_min: int | None = None
    """None: as much as the partition gives."""
    has_shorter_time: bool = False
    """Whether it takes less time where it must (--time-min)."""
    is_put_off: bool = False
    """Whether it is to start later (--begin)."""
    least: Amounts = field(default_factory=dict)
    """The least that it takes of each trackable resource; what is not known is left out."""
    most: Amounts = field(default_factory=dict)
    """The most that it takes, of those that limits name which a job may not fall short of."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a job would never start in a partition."""

    what: str
    todo: str
    time_min: int = 0
    """The longest time limit, where that is the obstacle."""


# What Slurm's limits are.


def limits_unknown(facts: SiteFacts) -> str:
    """Returns why limits of accounting are not known, "" where they are, or where Slurm enforces none."""
    if facts.settings and not _enforces_limits(facts):
        return ""
    subject, why = next(iter(facts.unanswered.items()), ("", ""))
    # What the command was is of no use here.
    answer = re.sub(r"^`[^`]*` (?:ended with exit code \d+: )?", "", why)
    return f"{subject}: {answer}" if subject else ""


def limits_of(facts: SiteFacts, partition: str, *, qos: str = "", account: str = "") -> JobLimits:
    """Returns what one job may ask for in a partition.

    Args:
        facts: what Slurm has said.
        partition: its name.
        qos: the job's; "" for the one that it gets.
        account: the job's; "" for the one that it is charged to.
    """
    record = facts.record(partition)
    account = account or default_account(facts.associations)
    qos = qos or default_qos(facts, partition, account=account)
    job_qos = facts.qos_named(qos.lower())
    flags = () if job_qos is None else job_qos.flags
    # The owner that comes first in Slurm's order keeps its limit.
    most: dict[tuple[str, str], Limit] = {}
    least: dict[str, Limit] = {}
    for owner, amounts_by_scope, least_amounts in _owners(
        facts, record, partition, qos=qos, job_qos=job_qos, account=account
    ):
        for scope, amounts in amounts_by_scope.items():
            for name, value in amounts.items():
                most.setdefault((name, scope), Limit(value, owner, scope))
        for name, value in least_amounts.items():
            least.setdefault(name, Limit(value, owner))
    at_most: dict[str, list[Limit]] = {}
    for (name, _), limit in most.items():
        at_most.setdefault(name, []).append(limit)
    at_least = {name: [limit] for name, limit in least.items()}
    # The partition's own limits hold beside those of accounting.
    owner = owner_partition(partition)
    own: dict[str, int | None] = {
        "time": time_limit_min(record.get("MaxTime", "")),
        "node": number_or_none(record.get("MaxNodes")),
    }
    for name, number in own.items():
        if number is not None and _LIFTED_BY[name] not in flags:
            at_most.setdefault(name, []).append(Limit(number, owner, is_of_largest=True))
    min_nodes = number_or_none(record.get("MinNodes"))
    if min_nodes and "PartitionMinNodes" not in flags:
        at_least.setdefault("node", []).append(Limit(min_nodes, owner))
    barred, is_certain = _barred(facts, record, partition, qos=qos, account=account)
    return JobLimits(
        partition=partition,
        state=record.get("State", "UP"),
        default_time_min=time_limit_min(record.get("DefaultTime", "")),
        time_min=min(at_most.pop("time", ()), key=lambda limit: limit.value, default=None),
        most=at_most,
        least=at_least,
        barred=barred if is_certain else "",
        may_be_barred=not is_certain,
    )


_LIFTED_BY = {"time": "PartitionTimeLimit", "node": "PartitionMaxNodes"}
"""Flags of a job's QOS that lift a limit of the partition."""


def _owners(
    facts: SiteFacts, record: Mapping[str, str], partition: str, *, qos: str, job_qos: Qos | None, account: str
) -> Iterator[tuple[Owner, Mapping[Scope, Amounts], Amounts]]:
    """Yields who limits a job in accounting, in Slurm's order, the most by scope, and the least."""
    if not _enforces_limits(facts):
        return
    qos_in_order = _qos_in_order(facts, record, partition, job_qos)
    # With this flag Slurm multiplies a job's time by a factor before it compares.
    has_factor_of_time = job_qos is not None and "UsageFactorSafe" in job_qos.flags
    for found, owner in qos_in_order:
        time_min = None if has_factor_of_time else found.max_time_min
        yield owner, _with_time(found.most, time_min), found.least
    association = _association(facts, partition, account)
    # A QOS that is not known may have limits that come before the association's.
    if association is None or (qos and job_qos is None):
        return
    most = association.most
    if any(found.has_limit_factor for found, _ in qos_in_order):
        of_jobs = ("job", "submit")
        most = {scope: {name: amounts[name] for name in of_jobs if name in amounts} for scope, amounts in most.items()}
    time_min = None if has_factor_of_time else association.max_time_min
    owner = Owner(f"account {association.account}", "cluster.account or cluster.qos")
    yield owner, _with_time(most, time_min), {}


def _with_time(most: Mapping[Scope, Amounts], time_min: int | None) -> Mapping[Scope, Amounts]:
    return most if time_min is None else {**most, "job": {**most.get("job", {}), "time": time_min}}


def _enforces_limits(facts: SiteFacts) -> bool:
    words = facts.settings.get("AccountingStorageEnforce", "").lower().replace(" ", "").split(",")
    return not _ENFORCES_LIMITS.isdisjoint(words)


def _qos_in_order(
    facts: SiteFacts, record: Mapping[str, str], partition: str, job_qos: Qos | None
) -> list[tuple[Qos, Owner]]:
    """Returns the QOS of a partition and of a job, the one that decides first, each as an owner."""
    name = record.get("QoS", "N/A")
    partition_qos = None if name == "N/A" else facts.qos_named(name.lower())
    of_partition = []
    if partition_qos is not None:
        of_partition = [(partition_qos, Owner(f"QOS {name} of partition {partition}", "cluster.partition"))]
    of_job = []
    if job_qos is not None and job_qos != partition_qos:
        of_job = [(job_qos, Owner(f"QOS {job_qos.name}", "cluster.qos"))]
    if job_qos is not None and "OverPartQOS" in job_qos.flags:
        return of_job + of_partition
    return of_partition + of_job


def _association(facts: SiteFacts, partition: str, account: str) -> Association | None:
    candidates = [
        association
        for association in facts.associations
        if association.account == account.lower() and association.partition in (partition, "")
    ]
    return max(candidates, key=lambda association: bool(association.partition), default=None)


def _barred(facts: SiteFacts, record: Mapping[str, str], partition: str, *, qos: str, account: str) -> tuple[str, bool]:
    """Returns why a partition starts no jobs of a QOS or an account, "" if it does, and whether that is certain."""
    lineage, is_whole = _lineage(facts, account.lower())
    asked = (("QOS", "Qos", qos, {qos.lower()}, True), ("account", "Accounts", account, lineage, is_whole))
    for kind, key, value, names, is_known in asked:
        allowed = _names(record.get(f"Allow{key}", "ALL"))
        denied = _names(record.get(f"Deny{key}", ""))
        if value and "all" not in allowed and not names & allowed:
            listed = ", ".join(sorted(allowed))
            return f"partition {partition} is for {kind} {listed} alone, and not for {value}", is_known
        if value and names & denied:
            return f"partition {partition} is not for {kind} {value}", True
    return "", True


def _lineage(facts: SiteFacts, account: str) -> tuple[set[str], bool]:
    """Returns an account with those above it, and whether these are all that Slurm counts."""
    if facts.settings and not is_since(facts.settings, LINEAGE_SINCE):
        return {account}, True
    lineage = {account}
    while account in facts.parents and facts.parents[account] not in lineage:
        account = facts.parents[account]
        lineage.add(account)
    return lineage, "root" in lineage


def _names(text: str) -> set[str]:
    return {name for name in text.lower().split(",") if name not in ("", "(null)")}


# What a job asks for.


def demand_of(flags: Flags) -> Demand:
    """Returns what a job asks for.

    Args:
        flags: of sbatch by their long names, e.g. {"nodes": "2", "gpus-per-node": "a100:4"}.
    """
    directives = {name: str(value) for name, value in flags.items()}
    fewest, _, largest = directives.get("nodes", "1").partition("-")
    nodes = [int(fewest), int(largest or fewest)] if f"{fewest}{largest}".isdigit() else []
    least = _amounts(directives, nodes[0]) if nodes else {}
    most = _amounts(directives, nodes[1]) if nodes else {}
    return Demand(
        partitions=tuple(name.strip() for name in directives.get("partition", "").split(",") if name.strip()),
        account=directives.get("account", ""),
        qos=directives.get("qos", ""),
        reservation=directives.get("reservation", ""),
        time_min=_minutes(directives.get("time", "")),
        has_shorter_time="time-min" in directives,
        is_put_off="begin" in directives,
        least=least | {"job": 1, "submit": 1},
        # More CPUs and memory than were asked may be given.
        most={name: amount for name, amount in most.items() if name == "node" or name.startswith("gres/")},
    )


def _amounts(directives: Mapping[str, str], nodes: int) -> dict[str, int]:
    """Returns what a script asks for if it gets a number of nodes."""
    per_node = number_or_none(directives.get("ntasks-per-node"))
    tasks = nodes * per_node if per_node else number_or_none(directives.get("ntasks"))
    cpus = number_or_none(directives.get("cpus-per-task", "1"))
    amounts = {"node": nodes}
    if tasks and cpus:
        amounts["cpu"] = max(nodes, tasks * cpus)
    memory = re.fullmatch(r"([1-9]\d*)G", directives.get("mem", ""))
    if memory:
        amounts["mem"] = int(memory[1]) * 1024 * nodes
    return amounts | _gpus(directives, nodes=nodes, tasks=tasks)


def _gpus(directives: Mapping[str, str], *, nodes: int, tasks: int | None) -> dict[str, int]:
    factors = {"gres": nodes, "gpus-per-node": nodes, "gpus-per-task": tasks, "gpus": 1}
    for name, factor in factors.items():
        if name not in directives:
            continue
        read = parse_gpus if name == "gres" else asked_gpus
        number, gpu_type = read(directives[name])
        if number and factor:
            typed = {f"gres/gpu:{gpu_type}": number * factor} if gpu_type else {}
            return {"gres/gpu": number * factor, **typed}
    # "--tres-per-task" and others may ask for GPUs as well.
    is_known = not any("gpu" in name or "tres" in name for name in directives)
    return {"gres/gpu": 0} if is_known else {}


def _minutes(text: str) -> int | None:
    """Returns a limit as sbatch reads it, in minutes; None for none and for an unlimited one."""
    with contextlib.suppress(ConfigError):
        return minutes(text)
    return None


# Whether it can start.


def obstacles(facts: SiteFacts, demand: Demand) -> list[Obstacle]:
    """Returns why a job would never start, one for each of its partitions; empty if it may start in one of them."""
    found = []
    for limits in limits_in_partitions(facts, demand):
        obstacle = next(_obstacles_in(limits, demand), None)
        if obstacle is None:
            return []
        found.append(obstacle)
    return found


def partitions_that_are_down(facts: SiteFacts, demand: Demand) -> dict[str, str]:
    """Returns the partitions of a job and their states if none of them starts jobs now; empty if one does."""
    states = {limits.partition: limits.state for limits in limits_in_partitions(facts, demand)}
    return {} if "UP" in states.values() else states


def longest_limit_min(facts: SiteFacts, demand: Demand) -> int | None:
    """Returns the time limit that a job gets, the longest that one of its partitions gives it; None if unlimited."""
    if demand.time_min is not None:
        return demand.time_min
    given = [
        limits.default_time_min or (limits.time_min.value if limits.time_min else None)
        for limits in limits_in_partitions(facts, demand)
    ]
    return None if None in given else max((limit for limit in given if limit is not None), default=None)


def limits_in_partitions(facts: SiteFacts, demand: Demand) -> list[JobLimits]:
    """Returns the limits in each of a job's partitions, by each of its QOS; Slurm leaves out what is no partition."""
    # A reservation may bring a partition of its own.
    usual = [partition.name for partition in facts.partitions if partition.is_default and not demand.reservation]
    names = [name for name in demand.partitions or usual if facts.record(name)]
    # 24.11 and newer take several QOS: "short,long".
    every_qos = [name.strip() for name in demand.qos.split(",")]
    return [limits_of(facts, name, qos=qos, account=demand.account) for name in names for qos in every_qos]


def _obstacles_in(limits: JobLimits, demand: Demand) -> Iterator[Obstacle]:
    if limits.barred:
        yield Obstacle(limits.barred, "name another cluster.qos, cluster.account or cluster.partition")
    yield from _time_obstacle(limits, demand)
    for name, found in limits.most.items():
        for limit in found:
            asked = (demand.most if limit.is_of_largest else demand.least).get(name)
            if asked is not None and asked > limit.value:
                yield _too_many(name, asked, limit)
    for name, found in limits.least.items():
        for limit in found:
            asked = demand.most.get(name)
            if asked is not None and asked < limit.value:
                resource = _RESOURCES.get(name, name)
                what = f"{asked} {resource} are fewer than {limit.owner} wants of a job ({limit.value})"
                todo = (
                    f"raise {_KEYS.get(name, 'the request')} to {limit.value} {resource} or more, or {limit.elsewhere}"
                )
                yield Obstacle(what, todo)


def _time_obstacle(limits: JobLimits, demand: Demand) -> Iterator[Obstacle]:
    limit = limits.time_min
    asked_min = demand.time_min if demand.time_min is not None else limits.default_time_min
    if limit is None or asked_min is None or asked_min <= limit.value or demand.has_shorter_time:
        return
    what = f"cluster.time_limit_min={asked_min} is more than {limit.owner} allows ({limit.value})"
    if demand.time_min is None:
        what = (
            f"a job that names no time limit gets {asked_min} min in partition {limits.partition}, more than "
            f"{limit.owner} allows ({limit.value})"
        )
    todo = f"set cluster.time_limit_min={limit.value} or less: the run is requeued and continues"
    yield Obstacle(what, todo, limit.value)


def _too_many(name: str, asked: int, limit: Limit) -> Obstacle:
    if name in ("job", "submit"):
        what = f"{limit.owner} lets no job {'run' if name == 'job' else 'into the queue'} (its limit is {limit.value})"
        return Obstacle(what, limit.elsewhere)
    resource = _RESOURCES.get(name, name)
    what = f"{asked} {resource} are more than {limit.owner} allows{_ALL_JOBS[limit.of]} ({limit.value})"
    key = _KEYS.get(name, _KEYS["gres/gpu"] if name.startswith("gres/gpu:") else "the request")
    return Obstacle(what, f"lower {key} to {limit.value} {resource} at most, or {limit.elsewhere}")
