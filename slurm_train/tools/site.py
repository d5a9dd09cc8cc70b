"""From Slurm's answers and a person's to a site file, and its text as YAML that a person reads and edits. Pure.

`config.site_profile.read_site` reads what `render_site` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from slurm_train.config.schema import ClusterSection, all_keys, build_config
from slurm_train.config.site_profile import with_site
from slurm_train.config.site_schema import SIZE, SiteFile, SitePartition, SiteQos
from slurm_train.errors import ConfigError
from slurm_train.slurm.flags import Flags, resource_flags
from slurm_train.slurm.job_limits import limits_of
from slurm_train.slurm.job_request import directives
from slurm_train.slurm.policy import Association, NodeGroup, Partition, Preemption, duration_s, return_in_words
from slurm_train.slurm.refusals import Refusal, TestVerdict
from slurm_train.slurm.site import (
    SiteFacts,
    cpus_for_jobs,
    default_account,
    default_cpus_per_gpu,
    default_qos,
    number_or_none,
    pairs_of,
    preempting_qos,
    preemption_in,
)

_LONGEST_DEFAULT_MIN = 1440
_OPEN_TO_SITES = all_keys(ClusterSection).keys() - {*SIZE, "partition"}

Ask = Callable[[str], TestVerdict]
"""Gives Slurm's verdict on a script."""


@dataclass(frozen=True, slots=True)
class Question:
    """What only the person knows."""

    key: str
    text: str
    default: str
    choices: tuple[str, ...] = ()
    """Possible answers; empty: any text."""

    def check(self, answer: str) -> str:
        """Returns an answer, or the default for an empty one.

        Raises:
            ConfigError: it is none of the choices.
        """
        answer = answer.strip() or self.default
        if self.choices and answer and answer not in self.choices:
            raise ConfigError(f"{self.key}={answer!r} is not among them", hint=f"one of {', '.join(self.choices)}")
        return answer


def open_questions(facts: SiteFacts, answers: Mapping[str, str]) -> list[Question]:
    """Returns what has to be asked, each with the answer that is taken without asking.

    Args:
        facts: what Slurm says.
        answers: those given so far, by key; the account decides the QOS, and the partition the GPUs.
    """
    partitions = usable_partitions(facts)
    questions = []
    names = tuple(partition.name for partition in partitions)
    if len(names) > 1:
        questions.append(Question("partition", "Which partition do runs go to?", names[0], names))
    for partition in partitions:
        types = gpu_types(partition)
        if partition.name == (answers.get("partition") or names[0]) and len(types) > 1:
            questions.append(Question("gpu_type", f"Which GPUs of partition {partition.name}?", types[0], tuple(types)))
    accounts = tuple(dict.fromkeys(association.account for association in facts.associations))
    account = _account(facts, answers)
    if len(accounts) > 1:
        default = default_account(facts.associations)
        questions.append(Question("account", "Which account is charged?", default, accounts))
    elif not accounts:
        questions.append(Question("account", "Which account is charged? (empty: Slurm's default)", ""))
    qos = _qos_names(facts.associations, account)
    if len(qos) > 1:
        default = default_qos(facts, answers.get("partition") or names[0], account=account)
        questions.append(Question("qos", "Which QOS?", default, qos))
    longest = str(_LONGEST_DEFAULT_MIN)
    return [
        *questions,
        Question("time_limit_min", "How many minutes may one attempt take, at most? A run takes several.", longest),
        Question("network_interface", "Which network interface joins the nodes, e.g. ib0? (empty: NCCL finds it)", ""),
        Question("setup", "A shell line that every job needs, e.g. module load cuda/12.4? (empty: none)", ""),
    ]


def _account(facts: SiteFacts, answers: Mapping[str, str]) -> str:
    return answers.get("account") or default_account(facts.associations)


def _qos_names(associations: Sequence[Association], account: str) -> tuple[str, ...]:
    """Returns the QOS that jobs of an account may ask for, as far as accounting says."""
    return tuple(
        dict.fromkeys(
            name for association in associations if association.account == account for name in association.qos
        )
    )


def build_profile(facts: SiteFacts, answers: Mapping[str, str]) -> SiteFile:
    """Returns the site file's content.

    Args:
        facts: what Slurm says.
        answers: to the open questions by their keys; what is missing takes its default.

    Raises:
        ConfigError: an answer that is none of the choices, or no number where one is asked; no partition to run in.
    """
    given = {question.key: question.check(answers.get(question.key, "")) for question in open_questions(facts, answers)}
    limit = given["time_limit_min"]
    if not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"time_limit_min={limit!r} is no number of minutes", hint="e.g. 1440 for a day")
    partitions = usable_partitions(facts)
    account = _account(facts, given)
    partition = given.get("partition", partitions[0].name)
    qos = given.get("qos") or default_qos(facts, partition, account=account)
    # --gpus-per-node is an option of cons_tres; other selectors know GPUs as generic resources alone.
    select = facts.settings.get("SelectType", "select/cons_tres")
    gpu_flag = "gpus-per-node" if select in ("select/cons_tres", "select/cray_aries") else "gres"
    return SiteFile(
        slurm_version=facts.settings.get("SLURM_VERSION", ""),
        requeue=return_in_words(preemption_in(facts, qos, partition) if facts.settings else None),
        kill_wait_s=duration_s(facts.settings.get("KillWait", "")),
        cluster=_known(
            partition=partition,
            account=account,
            qos=qos,
            gpu_flag=gpu_flag if any(partition.gpus_per_node for partition in partitions) else "none",
            network_interface=given["network_interface"],
            setup=[given["setup"]] if given["setup"] else None,
        ),
        partitions={
            partition.name: _partition(
                facts, partition, given.get("gpu_type"), qos=qos, account=account, limit_min=int(limit)
            )
            for partition in partitions
        },
        qos={name: _qos(facts, name) for name in _qos_names(facts.associations, account) if facts.qos_named(name)},
    )


def _known(**values: Any) -> dict[str, Any]:
    """Returns the values that are known; whole numbers without a fraction."""
    entries = {key: value for key, value in values.items() if value not in (None, "", [], {})}
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in entries.items()
    }


def _partition(
    facts: SiteFacts, partition: Partition, gpu_type: str | None, *, qos: str, account: str, limit_min: int
) -> SitePartition:
    record = facts.record(partition.name)
    types = gpu_types(partition) or [""]
    gpu_type = gpu_type if gpu_type in types else types[0]
    shape = shape_of(partition, gpu_type=gpu_type or "")
    # Another QOS or account than the site's where the partition does not take that one.
    place = admission(facts, partition.name, qos=qos, account=account)
    own_qos, own_account = place if place is not None else (qos, account)
    limits = limits_of(facts, partition.name, qos=own_qos, account=own_account)
    longest_min = None if limits.time_min is None else limits.time_min.value
    cpus = cpus_per_gpu(shape, record)
    preemption = preemption_in(facts, own_qos, partition.name)
    return SitePartition(
        num_nodes=shape.num_nodes,
        gpus_per_node=shape.gpus_per_node or None,
        max_time_min=longest_min,
        preemption=preemption.outcome,
        grace_s=_grace_s(preemption),
        cluster=_known(
            # One type needs no naming, unless Slurm wants it named: that is tried.
            gpu_type=gpu_type if len(types) > 1 else None,
            cpus_per_gpu=cpus,
            memory_gb_per_gpu=memory_gb_per_gpu(shape, record, facts.settings, cpus=cpus),
            time_limit_min=limit_min if longest_min is None else min(limit_min, longest_min),
            qos=own_qos if own_qos != qos else None,
            account=own_account if own_account != account else None,
        ),
    )


def _grace_s(preemption: Preemption) -> float | None:
    return preemption.grace_s if preemption.outcome in ("requeued", "cancelled") else None


def _qos(facts: SiteFacts, name: str) -> SiteQos:
    qos = facts.qos_named(name)
    assert qos is not None
    if facts.settings.get("PreemptType") == "preempt/partition_prio":
        # Partitions decide there, whatever the QOS.
        return SiteQos(max_time_min=qos.max_time_min)
    preemption = preemption_in(facts, name, "")
    return SiteQos(
        preempted_by=preempting_qos(facts, name),
        preemption=preemption.outcome,
        grace_s=_grace_s(preemption),
        max_time_min=qos.max_time_min,
    )


# Partitions, and a node's share for each GPU.


def usable_partitions(facts: SiteFacts) -> list[Partition]:
    """Returns the partitions that a run may go to, those with GPUs if there are any; the best choice first.

    Raises:
        ConfigError: there is none.
    """
    is_open = [
        partition
        for partition in facts.partitions
        if partition.state == "up"
        and partition.groups
        and facts.record(partition.name).get("RootOnly") != "YES"
        and admission(facts, partition.name) is not None
    ]
    if not is_open:
        raise ConfigError("sinfo shows no partition that is up and open to you", hint="run `sinfo` by hand")
    with_gpus = [partition for partition in is_open if partition.gpus_per_node]

    def rank(partition: Partition) -> tuple[bool, bool, int, str]:
        # A run that comes back from preemptions is still quicker where there are none.
        is_preempted = preemption_in(facts, "", partition.name).outcome != "never"
        num_gpus = sum(group.num_nodes * group.gpus_per_node for group in partition.groups)
        return not partition.is_default, is_preempted, -num_gpus, partition.name

    return sorted(with_gpus or is_open, key=rank)


def admission(facts: SiteFacts, partition: str, *, qos: str = "", account: str = "") -> tuple[str, str] | None:
    """Returns a QOS and an account whose jobs a partition starts, those given if it does; None if there are none.

    Args:
        facts: what Slurm says.
        partition: its name.
        qos: "" for the one that a job gets.
        account: "" for the one that a job is charged to.
    """
    of_account = {association.account: association.qos for association in facts.associations}
    accounts = dict.fromkeys([account, *of_account])
    choices = [(qos, account), *((name, other) for other in accounts for name in ("", *of_account.get(other, ())))]
    for choice in choices:
        limits = limits_of(facts, partition, qos=choice[0], account=choice[1])
        if not limits.barred and not limits.may_be_barred:
            return choice
    return None


def gpu_types(partition: Partition) -> list[str]:
    """Returns the types of GPU in a partition, the one with most GPUs first; [""] where the site names none."""
    totals: dict[str, int] = {}
    for group in partition.groups:
        if group.gpus_per_node:
            totals[group.gpu_type] = totals.get(group.gpu_type, 0) + group.num_nodes * group.gpus_per_node
    return sorted(totals, key=lambda name: (-totals[name], name))


def shape_of(partition: Partition, *, gpu_type: str) -> NodeGroup:
    """Returns what the nodes with this type of GPU have in common; of a partition without GPUs, what all have.

    Nodes of one partition may have different numbers of GPUs. The number that most GPUs come in counts, and the least
    CPUs and memory that are there for so many.
    """
    groups = [group for group in partition.groups if group.gpus_per_node and group.gpu_type == gpu_type]
    groups = groups or list(partition.groups)
    totals: dict[int, int] = {}
    for group in groups:
        totals[group.gpus_per_node] = totals.get(group.gpus_per_node, 0) + group.num_nodes * group.gpus_per_node
    gpus = max(totals, key=lambda per_node: (totals[per_node], -per_node))
    alike = [group for group in groups if group.gpus_per_node == gpus]
    return replace(
        alike[0],
        num_nodes=sum(group.num_nodes for group in alike),
        cpus_per_node=min(group.cpus_per_node for group in alike),
        memory_per_node_mb=min(group.memory_per_node_mb for group in alike),
    )


def cpus_per_gpu(shape: NodeGroup, record: Mapping[str, str]) -> int | None:
    """Returns the CPUs of a GPU's share of its node; what the site gives by default, if it says so.

    Args:
        shape: the node.
        record: scontrol's fields of the partition; empty where they are not known.
    """
    default = default_cpus_per_gpu(record, {})
    if default or not shape.gpus_per_node or not shape.cpus_per_node:
        return default
    return max(1, cpus_for_jobs(shape, record) // shape.gpus_per_node)


def memory_gb_per_gpu(
    shape: NodeGroup, record: Mapping[str, str], settings: Mapping[str, str], *, cpus: int | None
) -> int | None:
    """Returns the GiB of a GPU's share of its node; None where the site gives memory itself, or does not count it.

    Args:
        shape: the node.
        record: scontrol's fields of the partition.
        settings: `scontrol show config`.
        cpus: CPUs of each GPU's share.
    """
    counts_memory = "MEMORY" in settings.get("SelectTypeParameters", "").upper()
    if not counts_memory or not shape.gpus_per_node or "DefMemPerGPU" in pairs_of(record, "JobDefaults"):
        return None
    per_cpu_mb = number_or_none(record.get("MaxMemPerCPU"))
    # Beyond MaxMemPerCPU Slurm raises the CPUs of a task, and the node has no more of them.
    by_cpus_mb = per_cpu_mb * cpus * shape.gpus_per_node if per_cpu_mb and cpus else None
    limits = [shape.memory_per_node_mb, number_or_none(record.get("MaxMemPerNode")), by_cpus_mb]
    return min(limit for limit in limits if limit) // shape.gpus_per_node // 1024 or None


# The trial.


def trial_script(site: SiteFile, partition: str, changes: Mapping[str, Any] | None = None, *, nodes: int = 1) -> str:
    """Returns a batch script that asks for whole nodes of a partition and to be requeued, as a run would.

    Args:
        site: the site.
        partition: its partition.
        changes: values of `cluster.*` to try instead of the site's; None leaves one out.
        nodes: as many as a job must have there.
    """
    settings = with_site({"partition": partition}, site, open_keys=_OPEN_TO_SITES)
    settings |= changes or {}
    given = {key: value for key, value in settings.items() if value is not None}
    per_node = site.partitions[partition].gpus_per_node or 1
    cpus = given.get("cpus_per_gpu")
    flags = resource_flags(build_config(ClusterSection, given), per_node=per_node, cpus_per_task=cpus)
    returns: Flags = {} if site.refuses_requeue else {"requeue": True}
    flags = {"nodes": str(nodes), "ntasks-per-node": str(per_node), **flags, **returns}
    return f"#!/bin/sh\n{directives([flags])}\ntrue\n"


def try_site(site: SiteFile, partitions: Mapping[str, Partition], ask: Ask) -> tuple[SiteFile, list[str]]:
    """Returns the site with the values that Slurm takes, and a line for each partition where it takes none.

    Args:
        site: the site as read from the facts.
        partitions: sinfo's, by name, for the types of their GPUs.
        ask: gives Slurm's verdict on a script.
    """
    accepted = dict(site.partitions)
    problems = []
    own_flag = site.cluster.get("gpu_flag")
    for name, partition in site.partitions.items():
        changes = None
        reason = ""
        nodes = 1 if partitions.get(name) is None else partitions[name].min_nodes
        for variant in _variants(site, name, partitions.get(name)):
            verdict = ask(trial_script(site, name, variant, nodes=nodes))
            if verdict.refusal is Refusal.REQUEUE and not site.refuses_requeue:
                site = replace(site, refuses_requeue=True, requeue="refused here: a run comes back by `resume` alone")
                verdict = ask(trial_script(site, name, variant, nodes=nodes))
            if verdict.is_accepted:
                changes = variant
                break
            # The values as they are come first: their refusal is the one to tell.
            reason = reason or verdict.message
            if verdict.refusal is None or not verdict.refusal.is_about_resources:
                break
        if changes is None:
            problems.append(f"partition {name}: Slurm would not take a run there: {reason}")
            continue
        merged = {**partition.cluster, **changes}
        kept = {key: value for key, value in merged.items() if value is not None and site.cluster.get(key) != value}
        accepted[name] = replace(partition, cluster=kept)
    flags = {partition.cluster.get("gpu_flag", own_flag) for partition in accepted.values()}
    if len(flags) == 1 and flags != {own_flag}:
        # What each partition has found for itself is the site's own.
        for name, partition in accepted.items():
            accepted[name] = replace(
                partition, cluster={key: partition.cluster[key] for key in partition.cluster if key != "gpu_flag"}
            )
        site = replace(site, cluster={**site.cluster, "gpu_flag": flags.pop()})
    return replace(site, partitions=accepted), problems


def _variants(site: SiteFile, name: str, partition: Partition | None) -> Iterator[dict[str, Any]]:
    """Yields changes from none to many: other spellings first, then a smaller share of the node."""
    yield from _spellings(site, name, partition)
    settings = site.partitions[name].cluster
    memory = settings.get("memory_gb_per_gpu")
    if memory:
        # Memory that is kept back for the system does not show in sinfo.
        for share in (0.97, 0.9):
            yield {"memory_gb_per_gpu": int(memory * share)}
    less = {key: None for key in ("memory_gb_per_gpu", "cpus_per_gpu") if settings.get(key)}
    if less:
        yield {"memory_gb_per_gpu": None}
        yield from ({**less, **spelling} for spelling in _spellings(site, name, partition))


def _spellings(site: SiteFile, name: str, partition: Partition | None) -> Iterator[dict[str, Any]]:
    yield {}
    if not site.partitions[name].gpus_per_node:
        return
    settings = {**site.cluster, **site.partitions[name].cluster}
    flag = settings.get("gpu_flag")
    kind = settings.get("gpu_type")
    node_types = {group.gpu_type for group in partition.groups if group.gpus_per_node} - {""} if partition else set()
    types = [kind, *sorted(node_types - {kind})] if kind else [None, *sorted(node_types)]
    other = "gres" if flag == "gpus-per-node" else "gpus-per-node"
    for spelled in (flag, other, "gpus-per-task"):
        for type in types[:2]:
            if (spelled, type) != (flag, kind):
                yield {"gpu_flag": spelled, "gpu_type": type}


# The file.

_HEAD = """\
# Site "{name}", as `python -m slurm_train init` found it. Yours to edit; chosen by `site={name}`.
# What is typed wins over this file, and this file over the defaults. A run keeps what it took from here.

"""
_REMARKS = {
    "cluster": "# Values of cluster.* for runs in any partition: every key but the size.",
    "partitions": "# The partitions; `cluster` are values for runs that go there, and win over those above.",
    "qos": "# The QOS that you may ask for with cluster.qos.",
}


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line."""


_Dumper.add_representer(
    list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)
)


def render_site(site: SiteFile, *, name: str, problems: list[str]) -> str:
    """Returns the text of a site file.

    Args:
        site: its content.
        name: how it is chosen.
        problems: what could not be found out, as remarks.
    """

    def dump(values: Mapping[str, Any]) -> str:
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6) if values else ""

    head = _known(
        slurm_version=site.slurm_version,
        requeue=site.requeue,
        refuses_requeue=site.refuses_requeue or None,
        kill_wait_s=site.kill_wait_s,
    )
    sections = {
        "cluster": site.cluster,
        "partitions": {key: _known(**asdict(partition)) for key, partition in site.partitions.items()},
        "qos": {key: _known(**asdict(qos)) for key, qos in site.qos.items()},
    }
    parts = [_HEAD.format(name=name) + dump(head)]
    parts += [f"{_REMARKS[key]}\n{dump({key: values})}" for key, values in sections.items() if values]
    if problems:
        lines = "".join(f"#   {' '.join(problem.split())}\n" for problem in problems)
        parts.append(f"# Not known, since Slurm did not say:\n{lines}")
    return "\n".join(parts)
