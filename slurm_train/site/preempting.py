"""Who may take the nodes of a run at a site, and what becomes of it then. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_train.site.facts import SiteFacts
from slurm_train.slurm.nodelist import NodeListError, parse_nodelist
from slurm_train.slurm.preemption import Preemption, read_preemption, return_in_words


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


def requeue_in_words(facts: SiteFacts, qos: str, partition: str) -> str:
    """Returns how a run of a QOS and a partition comes back, in one line."""
    return return_in_words(preemption_in(facts, qos, partition) if facts.settings else None)
