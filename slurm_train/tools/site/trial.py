"""Tries a site file's values on Slurm, which alone knows what it takes: `sbatch --test-only`, nothing is submitted.

What the documentation of a cluster does not say is found by asking: whether GPUs are asked for by --gpus-per-node or by
--gres, whether their type must be named, and how much of a node's CPUs and memory jobs may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from slurm_train.config.schema import ClusterSection, build_config
from slurm_train.config.site import SiteFile, SitePartition, with_site
from slurm_train.slurm.flags import resource_flags, sbatch_line
from slurm_train.slurm.policy import Partition, Refusal, TestVerdict

Ask = Callable[[str], TestVerdict]
# Another spelling or a smaller share helps against these alone.
_ABOUT_RESOURCES = (Refusal.RESOURCES, Refusal.OPTION, Refusal.OTHER)


def trial_script(site: SiteFile, partition: str, changes: Mapping[str, Any] | None = None) -> str:
    """Returns a batch script that asks for one whole node of a partition, as a run would.

    Args:
        site: the site.
        partition: its partition.
        changes: values of `cluster.*` to try instead of the site's; None leaves one out.
    """
    settings = with_site({"partition": partition}, site, typed=())
    settings |= changes or {}
    given = {key: value for key, value in settings.items() if value is not None}
    per_node = site.partitions[partition].gpus_per_node or 1
    flags = {"nodes": "1", "ntasks-per-node": str(per_node)}
    flags |= {
        name: str(value)
        for name, value in resource_flags(build_config(ClusterSection, given), per_node=per_node).items()
    }
    return "\n".join(["#!/bin/sh", *(sbatch_line(name, value) for name, value in flags.items()), "true", ""])


def try_site(site: SiteFile, partitions: Mapping[str, Partition], ask: Ask) -> tuple[SiteFile, list[str]]:
    """Returns the site with the values that Slurm takes, and a line for each partition that it is not happy with.

    Args:
        site: the site as read from the facts.
        partitions: sinfo's, by name, for the types of their GPUs.
        ask: gives Slurm's verdict on a script.
    """
    found, problems = dict(site.partitions), []
    for name in site.partitions:
        outcome = _try_partition(site, name, partitions.get(name), ask)
        if isinstance(outcome, str):
            problems.append(f"partition {name}: {outcome}")
        else:
            found[name] = _with_settings(found[name], outcome, site.cluster)
    return _agreed(replace(site, partitions=found)), problems


def _agreed(site: SiteFile) -> SiteFile:
    """Returns the site with a GPU flag that all partitions have found for themselves as the site's own."""
    flags = {one.cluster.get("gpu_flag", site.cluster.get("gpu_flag")) for one in site.partitions.values()}
    if len(flags) != 1 or flags == {site.cluster.get("gpu_flag")}:
        return site
    partitions = {name: _without(one, "gpu_flag") for name, one in site.partitions.items()}
    return replace(site, cluster={**site.cluster, "gpu_flag": flags.pop()}, partitions=partitions)


def _without(partition: SitePartition, key: str) -> SitePartition:
    return replace(partition, cluster={name: value for name, value in partition.cluster.items() if name != key})


def _try_partition(site: SiteFile, name: str, partition: Partition | None, ask: Ask) -> dict[str, Any] | str:
    """Returns the first changes that Slurm takes, or why it takes none."""
    reason = ""
    for changes in _variants(site, name, partition):
        verdict = ask(trial_script(site, name, changes))
        if verdict.is_accepted:
            return changes
        reason = reason or f"Slurm would not take a run there: {verdict.message}"
        if verdict.refusal not in _ABOUT_RESOURCES:
            break
    return reason


def _variants(site: SiteFile, name: str, partition: Partition | None) -> Iterator[dict[str, Any]]:
    """Yields changes from none to many: other spellings first, then a smaller share of the node."""
    yield from _spellings(site, name, partition)
    own = site.partitions[name].cluster
    if memory := own.get("memory_gb_per_gpu"):
        # Memory that is kept back for the system does not show in sinfo.
        for share in (0.97, 0.9):
            yield {"memory_gb_per_gpu": int(memory * share)}
    less = {key: None for key in ("memory_gb_per_gpu", "cpus_per_gpu") if own.get(key)}
    if less:
        yield {"memory_gb_per_gpu": None}
        yield from ({**less, **spelling} for spelling in _spellings(site, name, partition))


def _spellings(site: SiteFile, name: str, partition: Partition | None) -> Iterator[dict[str, Any]]:
    yield {}
    if not site.partitions[name].gpus_per_node:
        return
    settings = {**site.cluster, **site.partitions[name].cluster}
    flag, kind = settings.get("gpu_flag"), settings.get("gpu_type")
    known = {group.gpu_type for group in partition.groups if group.gpus_per_node} - {""} if partition else set()
    types = [kind, *sorted(known - {kind})] if kind else [None, *sorted(known)]
    other = "gres" if flag == "gpus-per-node" else "gpus-per-node"
    for spelled in (flag, other):
        for one in types[:2]:
            if (spelled, one) != (flag, kind):
                yield {"gpu_flag": spelled, "gpu_type": one}


def _with_settings(partition: SitePartition, changes: Mapping[str, Any], common: Mapping[str, Any]) -> SitePartition:
    merged = {**partition.cluster, **changes}
    kept = {key: value for key, value in merged.items() if value is not None and common.get(key) != value}
    return replace(partition, cluster=kept)
