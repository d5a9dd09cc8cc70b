"""Tries a site file's values on Slurm, which alone knows what it takes: `sbatch --test-only`, nothing is submitted.

What the documentation of a cluster does not say is found by asking: whether GPUs are asked for by --gpus-per-node or by
--gres, whether their type must be named, and how much of a node's CPUs and memory jobs may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from slurm_train.config.schema import ClusterSection, build_config
from slurm_train.config.site_profile import SiteFile, with_site
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
    flags = resource_flags(build_config(ClusterSection, given), per_node=per_node)
    flags = {"nodes": "1", "ntasks-per-node": str(per_node), **flags}
    return "\n".join(["#!/bin/sh", *(sbatch_line(name, str(value)) for name, value in flags.items()), "true", ""])


def try_site(site: SiteFile, partitions: Mapping[str, Partition], ask: Ask) -> tuple[SiteFile, list[str]]:
    """Returns the site with the values that Slurm takes, and a line for each partition where it takes none.

    Args:
        site: the site as read from the facts.
        partitions: sinfo's, by name, for the types of their GPUs.
        ask: gives Slurm's verdict on a script.
    """
    found, problems, own_flag = dict(site.partitions), [], site.cluster.get("gpu_flag")
    for name, partition in site.partitions.items():
        changes, reason = _first_accepted(site, name, partitions.get(name), ask)
        if changes is None:
            problems.append(f"partition {name}: Slurm would not take a run there: {reason}")
            continue
        merged = {**partition.cluster, **changes}
        kept = {key: value for key, value in merged.items() if value is not None and site.cluster.get(key) != value}
        found[name] = replace(partition, cluster=kept)
    flags = {one.cluster.get("gpu_flag", own_flag) for one in found.values()}
    if len(flags) == 1 and flags != {own_flag}:
        # What each partition has found for itself is the site's own.
        for name, one in found.items():
            found[name] = replace(one, cluster={key: one.cluster[key] for key in one.cluster if key != "gpu_flag"})
        site = replace(site, cluster={**site.cluster, "gpu_flag": flags.pop()})
    return replace(site, partitions=found), problems


def _first_accepted(
    site: SiteFile, name: str, partition: Partition | None, ask: Ask
) -> tuple[dict[str, Any] | None, str]:
    """Returns the first changes that Slurm takes, or None and why it does not take the values as they are."""
    reason = ""
    for changes in _variants(site, name, partition):
        verdict = ask(trial_script(site, name, changes))
        if verdict.is_accepted:
            return changes, ""
        reason = reason or verdict.message
        if verdict.refusal not in _ABOUT_RESOURCES:
            break
    return None, reason


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
