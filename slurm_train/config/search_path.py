"""Where configurations are looked for: a person's own folders and packages, the shipped ones, and sizes made up here.

Words of the command line and plugins of Hydra's add places; `+cluster=4x8` needs no file for every N and G.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore

from slurm_train.assets import asset_dir
from slurm_train.config.site import user_config_dir
from slurm_train.config.words import Words, cluster_sizes
from slurm_train.errors import ConfigError


def store_sizes(words: Words, overrides: Sequence[str]) -> None:
    """Makes a configuration for each NxG that the words name and no file of the user's own gives."""
    store = ConfigStore.instance()
    for name, nodes, gpus in cluster_sizes(overrides):
        # Hydra takes a stored node for the schema of a file of the same name, so a user's file stands alone.
        store.repo.get("cluster", {}).pop(f"{name}.yaml", None)
        if not any((folder / "cluster" / f"{name}.yaml").is_file() for folder in own_folders(words)):
            size = {"defaults": ["base", "_self_"], "nodes": nodes, "gpus_per_node": gpus}
            store.store(group="cluster", name=name, node=size, provider="size")


def own_folders(words: Words) -> list[Path]:
    """Returns the folders with configurations that the words name."""
    places = (words.config_path, words.config_dir, *words.search_path)
    return [Path(place.removeprefix("file://")) for place in places if place is not None]


def search_path(words: Words) -> ConfigSearchPathImpl:
    """Returns where configurations are looked for: a user's own folders first, then the shipped ones.

    Raises:
        ConfigError: there is no such folder or package.
    """
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for flag, place in (("--config-path", words.config_path), ("--config-dir", words.config_dir)):
        if place is not None:
            path.append("command-line", _source(flag, place))
    path.append("main", f"file://{asset_dir('conf')}")
    if (user := user_config_dir()).is_dir():
        # Behind the shipped files: what lies there can be chosen by its name, and shadows nothing unasked.
        path.append("user", f"file://{user}")
    for place in words.search_path:
        path.append("hydra.searchpath in command-line", _source("hydra.searchpath", place))
    path.append("schema", "structured://")
    return path


def _source(asked_by: str, place: str) -> str:
    """Returns a place in Hydra's spelling, e.g. "file:///home/me/conf" or "pkg://my_package.conf"."""
    schema, _, name = place.rpartition("://")
    if schema == "pkg":
        if not _is_package(name):
            raise ConfigError(f"{asked_by} {place!r} is not a package", hint="name one that Python can import")
        return place
    if schema not in ("", "file") or not Path(name).is_dir():
        raise ConfigError(f"{asked_by} {place!r} is not a directory", hint="name a folder with your YAML files")
    return f"file://{Path(name).resolve()}"


def _is_package(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
