"""A site's profile, the file that `init` writes: what a cluster is like, and its values of `cluster.*`.

`site=NAME` finds `site/NAME.yaml` in --config-dir or in the user's own folder. A run on a cluster that names none takes
the only file in the user's folder, or `default.yaml` (a link to one of several); `site=none` takes none. Its values
fill what the command line and other files leave at the default, so that what is typed wins. The result is frozen with
the run: no later edit of the file changes a run that exists.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.config.schema import ClusterSection, build_config
from slurm_train.config.site_schema import GROUP, SIZE, SiteFile, SitePartition
from slurm_train.config.words import split_word
from slurm_train.config.yaml_files import read_yaml
from slurm_train.errors import ConfigError

_MEMORY = ("memory_gb_per_node", "memory_gb_per_gpu")


def user_config_dir() -> Path:
    """Returns the folder of a person's own configurations."""
    return Path("~/.config/slurm_train").expanduser()


def present_config_dir() -> Path | None:
    """Returns that folder; None where there is none, or where the home may not be entered (`Path.is_dir` raises)."""
    folder = user_config_dir()
    return folder if os.path.isdir(folder) else None  # noqa: PTH112


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
    settings = {f"partitions.{key}.": partition.cluster for key, partition in site.partitions.items()} | {
        "": site.cluster
    }
    for label, values in settings.items():
        if not values.keys().isdisjoint(SIZE):
            raise ConfigError(f"{where}{label}cluster gives a size, which is typed for each run", hint="+cluster=4x8")
        build_config(ClusterSection, values, path=f"{where}{label}cluster.")
    return site


def with_site(cluster: Mapping[str, Any], site: SiteFile, *, open_keys: Collection[str]) -> dict[str, Any]:
    """Returns the cluster's settings with the site's where nothing else sets them.

    Args:
        cluster: the composed settings.
        site: the site.
        open_keys: the keys that neither words nor files set, e.g. {"partition"}.
    """
    # Either of the two decides the memory.
    is_memory_open = set(_MEMORY) <= set(open_keys)

    def is_open(key: str) -> bool:
        return is_memory_open if key in _MEMORY else key in open_keys

    chosen = site.cluster.get("partition") if is_open("partition") else cluster.get("partition")
    partition = _of_partitions(site, str(chosen))
    general = site.cluster
    if not partition.keys().isdisjoint(_MEMORY):
        general = {key: value for key, value in general.items() if key not in _MEMORY}
    result = dict(cluster)
    for key, value in {**general, **partition}.items():
        if isinstance(value, Mapping):
            result[key] = {**general.get(key, {}), **value, **cluster.get(key, {})}
        elif is_open(key):
            result[key] = value
    if chosen is not None:
        result["partition"] = chosen
    return result


def _of_partitions(site: SiteFile, partition: str) -> dict[str, Any]:
    """Returns the values of a partition; of several, "gpu,long", in one of which a job will start, what suits all.

    That is a value that all of them have, and of different numbers the smallest.
    """
    names = [name.strip() for name in partition.split(",")]
    sections = [site.partitions.get(name, SitePartition()).cluster for name in names]
    suited: dict[str, Any] = {}
    for key, value in sections[0].items():
        values = [section.get(key) for section in sections]
        if all(item == value for item in values):
            suited[key] = value
        elif all(isinstance(value, int) for value in values):
            suited[key] = min(value for value in values if isinstance(value, int))
    return suited


def settle_site(
    mapping: dict[Any, Any], choices: Mapping[str, str | None], overrides: Sequence[str], *, open_keys: Collection[str]
) -> Collection[str]:
    """Puts a site's values into the cluster's, and the site's name where its file stood; returns what is open still.

    Args:
        mapping: a composed configuration.
        choices: the chosen option of each group.
        overrides: what was typed.
        open_keys: the keys of `cluster` that neither words nor files set.

    Raises:
        ConfigError: as `read_site`.
    """
    content = mapping.get(GROUP)
    name = choices.get(GROUP)
    if content is None and name is None and isinstance(mapping.get("cluster"), Mapping):
        content, name = _default_site()
    if content is None:
        return open_keys
    if name is None or not isinstance(content, Mapping):
        hint = f"on the cluster's login node `python -m slurm_train init {content}` writes it; site=NAME chooses it"
        raise ConfigError(f"there is no site {content!r}", hint=hint)
    site = read_site(content, name=name)
    mapping[GROUP] = name
    # Without a cluster the run trains here, and the site's values apply to nothing.
    if not isinstance(mapping.get("cluster"), Mapping):
        return open_keys
    before = mapping["cluster"]
    mapping["cluster"] = with_site(before, site, open_keys=open_keys)
    typed = {split_word(word)[1] for word in overrides}
    if site.refuses_requeue and not typed & {"requeue", "requeue.enabled"}:
        mapping["requeue"] = {**(mapping.get("requeue") or {}), "enabled": False}
    return [key for key in open_keys if mapping["cluster"].get(key) == before.get(key)]


def _default_site() -> tuple[Any, str | None]:
    """Returns the content and the name of the site file that is used unless another is named; (None, None) for none."""
    folder = present_config_dir()
    files = [] if folder is None else list((folder / GROUP).glob("*.yaml"))
    chosen = [file for file in files if file.stem == "default"] or files
    if len(chosen) != 1:
        return None, None
    return read_yaml(chosen[0]) or {}, chosen[0].resolve().stem
