"""A site's profile, the file that `init` writes: what a cluster is like, and its values of `cluster.*`.

`site=NAME` finds `site/NAME.yaml` in --config-dir or in the user's own folder. A run on a cluster that names none takes
the only file in the user's folder, or `default.yaml` (a link to one of several); `site=none` takes none. Its values
fill what the command line and other files leave at the default, so that what is typed wins. The result is frozen with
the run: no later edit of the file changes a run that exists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml

from slurm_train.config.schema import ClusterSection, build_config, to_mapping
from slurm_train.config.words import split_word
from slurm_train.errors import ConfigError
from slurm_train.frozen_class import frozen

GROUP = "site"
# The size is the run's own affair.
_NOT_A_SITES = ("nodes", "gpus_per_node")


@frozen
class SitePartition:
    """A partition: what its nodes have, and what a run in it is asked for with."""

    num_nodes: int | None = None
    gpus_per_node: int | None = None
    max_time_min: int | None = None
    """Longest time limit; None if unlimited."""
    preemption: str | None = None
    """What becomes of a preempted job: never, requeued, cancelled or suspended."""
    grace_s: float | None = None
    """From the first TERM of a preemption to the last."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Values of `cluster.*`."""


@frozen
class SiteQos:
    """A QOS that a run may ask for."""

    preempted_by: list[str] = field(default_factory=list)
    """QOS whose jobs may take its nodes."""
    preemption: str | None = None
    grace_s: float | None = None
    max_time_min: int | None = None


@frozen
class SiteFile:
    """A site file, read."""

    slurm_version: str = ""
    requeue: str = ""
    """How a run comes back here, in words."""
    refuses_requeue: bool = False
    """Whether a submit filter refuses --requeue: runs here have requeue.enabled=false."""
    kill_wait_s: float | None = None
    """From the last TERM to KILL."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Values of `cluster.*` for every partition."""
    partitions: dict[str, SitePartition] = field(default_factory=dict)
    qos: dict[str, SiteQos] = field(default_factory=dict)


def user_config_dir() -> Path:
    """Returns the folder of a person's own configurations."""
    return Path("~/.config/slurm_train").expanduser()


def read_site(mapping: Mapping[str, Any], *, name: str) -> SiteFile:
    """Returns what a site file holds.

    Args:
        mapping: the file's content.
        name: the site, for messages.

    Raises:
        ConfigError: a key that a site file does not have, or a value that does not fit.
    """
    where = f"{GROUP} {name}: "
    # A section with nothing below it is null in YAML.
    site = build_config(SiteFile, {key: value for key, value in mapping.items() if value is not None}, path=where)
    settings = {f"partitions.{key}.": one.cluster for key, one in site.partitions.items()} | {"": site.cluster}
    for label, values in settings.items():
        if not values.keys().isdisjoint(_NOT_A_SITES):
            raise ConfigError(f"{where}{label}cluster gives a size, which is typed for each run", hint="+cluster=4x8")
        build_config(ClusterSection, values, path=f"{where}{label}cluster.")
    return site


def with_site(cluster: Mapping[str, Any], site: SiteFile, *, typed: Collection[str]) -> dict[str, Any]:
    """Returns the cluster's settings with the site's where they are left at the default.

    Args:
        cluster: the composed settings.
        site: the site.
        typed: keys of the command line, e.g. {"cluster.partition"}: what was typed stays, also where it is a default.
    """
    defaults = to_mapping(ClusterSection())

    def is_free(key: str) -> bool:
        return f"cluster.{key}" not in typed and cluster.get(key, defaults[key]) == defaults[key]

    chosen = site.cluster.get("partition") if is_free("partition") else cluster.get("partition")
    partition = site.partitions.get(str(chosen), SitePartition())
    result = dict(cluster)
    for key, value in {**site.cluster, **partition.cluster}.items():
        if isinstance(value, Mapping):
            result[key] = {**value, **cluster.get(key, {})}
        elif is_free(key) and not (key == "memory_gb_per_gpu" and not is_free("memory_gb_per_node")):
            result[key] = value
    if chosen is not None:
        result["partition"] = chosen
    return result


def settle_site(mapping: dict[Any, Any], choices: Mapping[str, str | None], overrides: Sequence[str]) -> None:
    """Puts a site's values into the cluster's, and the site's name where its file stood.

    Args:
        mapping: a composed configuration.
        choices: the chosen option of each group.
        overrides: what was typed.

    Raises:
        ConfigError: as `read_site`.
    """
    found, name = mapping.get(GROUP), choices.get(GROUP)
    if found is None and name is None and isinstance(mapping.get("cluster"), Mapping):
        found, name = _default_site()
    if found is None:
        return
    if name is None or not isinstance(found, Mapping):
        hint = f"on the cluster's login node `python -m slurm_train init {found}` writes it; site=NAME chooses it"
        raise ConfigError(f"there is no site {found!r}", hint=hint)
    site = read_site(found, name=name)
    mapping[GROUP] = name
    # Without a cluster the run trains here, and the site's values apply to nothing.
    if isinstance(mapping.get("cluster"), Mapping):
        typed = {split_word(word)[1] for word in overrides}
        mapping["cluster"] = with_site(mapping["cluster"], site, typed=typed)
        if site.refuses_requeue and not typed & {"requeue", "requeue.enabled"}:
            mapping["requeue"] = {**(mapping.get("requeue") or {}), "enabled": False}


def _default_site() -> tuple[Any, str | None]:
    """Returns the content and the name of the site file that is used unless another is named; (None, None) for none."""
    files = list((user_config_dir() / GROUP).glob("*.yaml"))
    chosen = [file for file in files if file.stem == "default"] or files
    if len(chosen) != 1:
        return None, None
    return yaml.safe_load(chosen[0].read_text(encoding="utf-8")) or {}, chosen[0].resolve().stem
