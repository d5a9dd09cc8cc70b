"""From what Slurm says to a site file: which partitions, which account, what a GPU's share of a node is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_train.config.site import SiteFile, SitePartition, SiteQos
from slurm_train.errors import ConfigError
from slurm_train.site.facts import SiteFacts
from slurm_train.site.preempting import preempting_qos, preemption_in, requeue_in_words
from slurm_train.site.questions import open_questions
from slurm_train.site.selection import default_account, default_qos, qos_names, usable_partitions
from slurm_train.site.shape import cpus_per_gpu, gpu_types, memory_gb_per_gpu, shape_of
from slurm_train.slurm.partitions import Partition
from slurm_train.slurm.preemption import duration_s


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
        requeue=requeue_in_words(facts, qos, str(cluster["partition"])),
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
