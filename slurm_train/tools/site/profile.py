"""From Slurm's answers and a person's to a site file, and its text as YAML that a person reads and edits. Pure.

`config.site.read_site` reads what `render_site` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from slurm_train.config.site import SiteFile, SitePartition, SiteQos
from slurm_train.errors import ConfigError
from slurm_train.slurm.policy import Partition, duration_s, return_in_words
from slurm_train.slurm.site import (
    SiteFacts,
    cpus_per_gpu,
    default_account,
    default_qos,
    gpu_types,
    memory_gb_per_gpu,
    preempting_qos,
    preemption_in,
    qos_names,
    shape_of,
    usable_partitions,
)

_LONGEST_DEFAULT_MIN = 1440


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
    found = _where(facts, answers)
    account = answers.get("account") or default_account(facts.associations)
    names = qos_names(facts.associations, account)
    if len(names) > 1:
        found.append(Question("qos", "Which QOS?", default_qos(facts.associations, account), names))
    longest = str(_LONGEST_DEFAULT_MIN)
    return found + [
        Question("time_limit_min", "How many minutes may one attempt take, at most? A run takes several.", longest),
        Question("network_interface", "Which network interface joins the nodes, e.g. ib0? (empty: NCCL finds it)", ""),
        Question("setup", "A shell line that every job needs, e.g. module load cuda/12.4? (empty: none)", ""),
    ]


def _where(facts: SiteFacts, answers: Mapping[str, str]) -> list[Question]:
    partitions = usable_partitions(facts)
    names = tuple(one.name for one in partitions)
    found = []
    if len(names) > 1:
        found.append(Question("partition", "Which partition do runs go to?", names[0], names))
    for one in partitions:
        types = gpu_types(one)
        if one.name == (answers.get("partition") or names[0]) and len(types) > 1:
            found.append(Question("gpu_type", f"Which GPUs of partition {one.name}?", types[0], tuple(types)))
    accounts = tuple(dict.fromkeys(one.account for one in facts.associations))
    if len(accounts) > 1:
        account = default_account(facts.associations)
        found.append(Question("account", "Which account is charged?", account, accounts))
    elif not accounts:
        found.append(Question("account", "Which account is charged? (empty: Slurm's default)", ""))
    return found


def build_profile(facts: SiteFacts, answers: Mapping[str, str]) -> SiteFile:
    """Returns the site file's content.

    Args:
        facts: what Slurm says.
        answers: to the open questions by their keys; what is missing takes its default.

    Raises:
        ConfigError: an answer that is none of the choices, or no number where one is asked; no partition to run in.
    """
    told = {one.key: one.check(answers.get(one.key, "")) for one in open_questions(facts, answers)}
    partitions = usable_partitions(facts)
    account = told.get("account", default_account(facts.associations))
    qos = told.get("qos") or default_qos(facts.associations, account)
    has_gpus = any(one.gpus_per_node for one in partitions)
    cluster: dict[str, Any] = {
        "partition": told.get("partition", partitions[0].name),
        "account": account or None,
        "qos": qos or None,
        "gpu_flag": _gpu_flag(facts) if has_gpus else "none",
        "network_interface": told["network_interface"] or None,
        "setup": [told["setup"]] if told["setup"] else None,
    }
    limit_min = _minutes(told["time_limit_min"])
    return SiteFile(
        slurm_version=facts.settings.get("SLURM_VERSION", ""),
        requeue=return_in_words(preemption_in(facts, qos, str(cluster["partition"])) if facts.settings else None),
        kill_wait_s=duration_s(facts.settings.get("KillWait", "")),
        cluster={key: value for key, value in cluster.items() if value is not None},
        partitions={one.name: _partition(facts, one, told, qos=qos, limit_min=limit_min) for one in partitions},
        qos={name: _qos(facts, name) for name in qos_names(facts.associations, account) if facts.qos_named(name)},
    )


def _minutes(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"time_limit_min={text!r} is no number of minutes", hint="e.g. 1440 for a day")
    return int(text)


def _gpu_flag(facts: SiteFacts) -> str:
    # --gpus-per-node is an option of cons_tres; other selectors know GPUs as generic resources alone.
    select = facts.settings.get("SelectType", "select/cons_tres")
    return "gpus-per-node" if select in ("select/cons_tres", "select/cray_aries") else "gres"


def _partition(
    facts: SiteFacts, partition: Partition, told: Mapping[str, str], *, qos: str, limit_min: int
) -> SitePartition:
    record, types = facts.record(partition.name), gpu_types(partition) or [""]
    gpu_type = told["gpu_type"] if told.get("gpu_type") in types else types[0]
    shape = shape_of(partition, gpu_type=gpu_type)
    own_qos = _qos_of_partition(facts, record, qos)
    cpus = cpus_per_gpu(shape, record)
    limits = [limit_min, partition.max_time_min, _qos_limit(facts, own_qos or qos)]
    settings = {
        # One type needs no naming, unless Slurm wants it named: that is tried.
        "gpu_type": gpu_type if len(types) > 1 else None,
        "cpus_per_gpu": cpus,
        "memory_gb_per_gpu": memory_gb_per_gpu(shape, record, facts.settings, cpus=cpus),
        "time_limit_min": min(limit for limit in limits if limit is not None),
        "qos": own_qos,
    }
    preemption = preemption_in(facts, own_qos or qos, partition.name)
    return SitePartition(
        num_nodes=shape.num_nodes,
        gpus_per_node=shape.gpus or None,
        max_time_min=partition.max_time_min,
        preemption=preemption.outcome,
        grace_s=preemption.grace_s if preemption.outcome in ("requeued", "cancelled") else None,
        cluster={key: value for key, value in settings.items() if value is not None},
    )


def _qos_of_partition(facts: SiteFacts, record: Mapping[str, str], qos: str) -> str | None:
    """Returns another QOS than the site's where the partition does not take that one."""
    allowed = record.get("AllowQos", "ALL").split(",")
    if not qos or "ALL" in allowed or qos in allowed:
        return None
    mine = (name for one in facts.associations for name in one.qos)
    return next((name for name in mine if name in allowed), None)


def _qos_limit(facts: SiteFacts, name: str) -> int | None:
    found = facts.qos_named(name)
    return found.max_time_min if found is not None else None


def _qos(facts: SiteFacts, name: str) -> SiteQos:
    found = facts.qos_named(name)
    assert found is not None
    if facts.settings.get("PreemptType") == "preempt/partition_prio":
        # Partitions decide there, and a QOS has nothing to say about it.
        return SiteQos(max_time_min=found.max_time_min)
    preemption = preemption_in(facts, name, "")
    return SiteQos(
        preempted_by=preempting_qos(facts, name),
        preemption=preemption.outcome,
        grace_s=preemption.grace_s if preemption.outcome in ("requeued", "cancelled") else None,
        max_time_min=found.max_time_min,
    )


_HEAD = """\
# Site "{name}", as `python -m slurm_train init` found it. Yours to edit; chosen by `site={name}`.
# What is typed wins over this file, and this file over the defaults. A run keeps what it took from here.
"""
_REMARKS = {
    "cluster": "# Values of cluster.* for runs in any partition: every key but the size.",
    "partitions": "# The partitions; `cluster` are values for runs that go there, and win over those above.",
    "qos": "# The QOS that you may ask for with cluster.qos.",
    "problems": "# Not known, since Slurm did not say:",
}


def render_site(site: SiteFile, *, name: str, problems: list[str]) -> str:
    """Returns the text of a site file.

    Args:
        site: its content.
        name: how it is chosen.
        problems: what could not be found out, as remarks.
    """
    lines = [*_HEAD.format(name=name).splitlines(), ""]
    lines += [f"slurm_version: {_scalar(site.slurm_version)}"] if site.slurm_version else []
    lines += [f"requeue: {_scalar(site.requeue)}"] if site.requeue else []
    lines += [f"kill_wait_s: {_scalar(site.kill_wait_s)}"] if site.kill_wait_s is not None else []
    lines += _section("cluster", list(_mapping(site.cluster, indent=2)))
    lines += _section(
        "partitions", [line for key, one in site.partitions.items() for line in _partition_lines(key, one)]
    )
    lines += _section("qos", [line for key, one in site.qos.items() for line in _qos_lines(key, one)])
    if problems:
        lines += ["", _REMARKS["problems"], *(f"#   {' '.join(problem.split())}" for problem in problems)]
    return "\n".join(lines) + "\n"


def _section(key: str, lines: list[str]) -> list[str]:
    return ["", _REMARKS[key], f"{key}:", *lines] if lines else []


def _partition_lines(name: str, partition: SitePartition) -> Iterator[str]:
    yield f"  {_scalar(name)}:"
    facts = {
        "num_nodes": partition.num_nodes,
        "gpus_per_node": partition.gpus_per_node,
        "max_time_min": partition.max_time_min,
        "preemption": partition.preemption,
        "grace_s": partition.grace_s,
    }
    yield from _mapping({key: value for key, value in facts.items() if value is not None}, indent=4)
    if partition.cluster:
        yield "    cluster:"
        yield from _mapping(partition.cluster, indent=6)


def _qos_lines(name: str, qos: SiteQos) -> Iterator[str]:
    facts = {
        "preempted_by": qos.preempted_by or None,
        "preemption": qos.preemption,
        "grace_s": qos.grace_s,
        "max_time_min": qos.max_time_min,
    }
    known = {key: value for key, value in facts.items() if value is not None}
    yield f"  {_scalar(name)}:" if known else f"  {_scalar(name)}: {{}}"
    yield from _mapping(known, indent=4)


def _mapping(values: Mapping[str, Any], *, indent: int) -> Iterator[str]:
    for key, value in values.items():
        yield f"{' ' * indent}{_scalar(key)}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """Returns a value in one line of YAML."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return str(yaml.safe_dump(value, allow_unicode=True, width=10**6)).removesuffix("\n").removesuffix("\n...")
