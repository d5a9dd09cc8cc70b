"""Composes a run's configuration from words with Hydra, on the login node, once.

Ranks never compose: they read the frozen result, so that editing a YAML file changes no queued or requeued run. A
user's `--config-dir` comes before the shipped `conf/`, so its files may shadow ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers.oc import env as read_variable

from slurm_train.assets import asset_dir
from slurm_train.config.explain import explain, no_cluster_error
from slurm_train.config.lean import LeanComposer, is_enough
from slurm_train.config.schema import RunConfig
from slurm_train.config.secrets import is_secret_name, refuse_secrets
from slurm_train.config.site import GROUP, read_site, require_site, user_config_dir, with_site
from slurm_train.config.structure import build_config
from slurm_train.config.words import Words, chosen_sites, cluster_sizes, prepare_overrides, split_word
from slurm_train.errors import ConfigError

# What Hydra composed, and the chosen option of each group.
_Full = tuple[DictConfig, dict[str, str | None]]


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration: the typed value and the plain mapping it was built from."""

    config: RunConfig
    mapping: dict[str, Any]
    choices: Mapping[str, str | None]
    """The chosen option of each config group, e.g. {"model": "gpt"}."""


def compose(words: Words) -> Composed:
    """Returns the configuration that the words ask for.

    Raises:
        ConfigError: an unknown key, group or value; a missing value; a reference to a secret.
    """
    overrides = prepare_overrides(words.overrides)
    with explaining(words, overrides):
        return _read(_compose_settled(words, overrides), overrides)


def compose_points(words: Words, points: Sequence[Sequence[str]]) -> Iterator[Composed]:
    """Yields the configuration of each point of a sweep; what they have in common is read once.

    Args:
        words: the flags of the command line.
        points: the words of each point.

    Raises:
        ConfigError: as `compose`.
    """
    if not is_enough(words):
        yield from (compose(replace(words, overrides=list(point))) for point in points)
        return
    # The composer keeps what is stored now, for all points.
    _store_sizes(words, sorted({word for point in points for word in prepare_overrides(point)}))
    composer = LeanComposer(search_path(words.config_dir), words.config_name)
    for point in points:
        overrides = prepare_overrides(point)
        with explaining(words, overrides):
            _require_sites(words, overrides)
            yield _read(composer.compose(overrides), overrides)


def show(words: Words) -> None:
    """Prints a composed configuration, or facts about the composition, in Hydra's own words.

    Raises:
        ConfigError: as `compose`.
    """
    overrides = prepare_overrides(words.overrides)
    with explaining(words, overrides):
        hydra = open_hydra(words, overrides)
        if words.info is not None:
            hydra.show_info(words.info, config_name=words.config_name, overrides=overrides)
        elif chosen_sites(overrides) and words.show == "job" and words.package is None:
            _show_with_site(words, overrides)
        else:
            assert words.show is not None
            hydra.show_cfg(
                config_name=words.config_name,
                overrides=overrides,
                cfg_type=words.show,
                package=words.package,
                resolve=words.resolve,
            )


def _show_with_site(words: Words, overrides: Sequence[str]) -> None:
    # Hydra would print the site file beside a cluster that has taken nothing from it.
    full, choices = _compose_settled(words, overrides)
    with open_dict(full):
        full.pop("hydra", None)
    mapping = OmegaConf.to_container(full, resolve=words.resolve)
    assert isinstance(mapping, dict)
    _settle_site(mapping, choices, overrides)
    print(OmegaConf.to_yaml(OmegaConf.create(mapping)), end="")


@contextmanager
def explaining(words: Words, overrides: Sequence[str]) -> Iterator[None]:
    """Says in the user's terms what Hydra would not accept; leaves no global state of Hydra's behind."""
    # Whatever way a configuration spells it, the variable is asked for by name here.
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as err:
        raise _own_error(err) or explain(err, composed_keys=lambda: _composed_keys(words, overrides)) from err
    finally:
        GlobalHydra.instance().clear()


def _composed_keys(words: Words, overrides: Sequence[str]) -> list[str]:
    """Returns the keys that there are with the chosen groups alone; none where those fail, too."""
    groups = [word for word in overrides if "." not in word.partition("=")[0]]
    try:
        full, _ = _compose(words, groups)
    except (HydraException, OmegaConfBaseException):
        return []
    plain = OmegaConf.to_container(full, resolve=False)
    assert isinstance(plain, dict)
    return [key for key in _flat_keys(plain) if not key.startswith("hydra")]


def _flat_keys(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in mapping.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat_keys(value, f"{prefix}{key}.")


def _compose_settled(words: Words, overrides: Sequence[str]) -> _Full:
    """Composes; a group that the user's own primary file chooses already is replaced, not added a second time."""
    try:
        return _compose(words, overrides)
    except ConfigCompositionException as err:
        chosen = re.search(r"Multiple values for (\w+)\.", str(err))
        if chosen is None:
            raise
        plus = f"+{chosen.group(1)}="
        return _compose(words, [word[1:] if word.startswith(plus) else word for word in overrides])


def _require_sites(words: Words, overrides: Sequence[str]) -> None:
    own = [] if words.config_dir is None else [Path(words.config_dir)]
    for name in chosen_sites(overrides):
        require_site(name, [*own, user_config_dir()])


def _compose(words: Words, overrides: Sequence[str]) -> _Full:
    _require_sites(words, overrides)
    if is_enough(words):
        _store_sizes(words, overrides)
        return LeanComposer(search_path(words.config_dir), words.config_name).compose(overrides)
    full = open_hydra(words, overrides).compose_config(
        config_name=words.config_name,
        overrides=list(overrides),
        run_mode=RunMode.RUN,
        from_shell=True,
        with_log_configuration=False,
    )
    return full, dict(full.hydra.runtime.choices)


def open_hydra(words: Words, overrides: Sequence[str]) -> Hydra:
    """Returns Hydra itself, with its plugins, looking where `search_path` says."""
    GlobalHydra.instance().clear()
    Plugins.instance()
    _store_sizes(words, overrides)
    return Hydra.create_main_hydra2(task_name="slurm_train", config_search_path=search_path(words.config_dir))


def _store_sizes(words: Words, overrides: Sequence[str]) -> None:
    """Makes a configuration for each NxG that the words name and no file of the user's own gives."""
    store = ConfigStore.instance()
    for name, nodes, gpus in cluster_sizes(overrides):
        # Hydra takes a stored node for the schema of a file of the same name, so a user's file stands alone.
        store.repo.get("cluster", {}).pop(f"{name}.yaml", None)
        if words.config_dir is None or not (Path(words.config_dir) / "cluster" / f"{name}.yaml").is_file():
            size = {"defaults": ["base", "_self_"], "nodes": nodes, "gpus_per_node": gpus}
            store.store(group="cluster", name=name, node=size, provider="size")


def search_path(config_dir: str | None) -> ConfigSearchPathImpl:
    """Returns where configurations are looked for: a user's own folder first, then the shipped ones.

    Raises:
        ConfigError: there is no such folder.
    """
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(
                f"--config-dir {config_dir!r} is not a directory", hint="name a folder with your YAML files"
            )
        path.append("command-line", f"file://{Path(config_dir).resolve()}")
    path.append("main", f"file://{asset_dir('conf')}")
    if (user := user_config_dir()).is_dir():
        # Behind the shipped files: what lies there can be chosen by its name, and shadows nothing unasked.
        path.append("user", f"file://{user}")
    path.append("schema", "structured://")
    return path


def _read(composed: _Full, overrides: Sequence[str]) -> Composed:
    full, choices = composed
    OmegaConf.set_readonly(full, False)
    with open_dict(full):
        full.pop("hydra", None)
    mapping = OmegaConf.to_container(full, resolve=True, throw_on_missing=True)
    assert isinstance(mapping, dict)
    plain = {str(key): value for key, value in mapping.items()}
    _settle_site(plain, choices, overrides)
    refuse_secrets(plain)
    _require_chosen_cluster(plain.get("cluster"), choices)
    return Composed(config=build_config(RunConfig, plain), mapping=plain, choices=choices)


def _settle_site(mapping: dict[Any, Any], choices: Mapping[str, str | None], overrides: Sequence[str]) -> None:
    """Puts the site's values into the cluster's, and the site's name where its file stood."""
    found = mapping.get(GROUP)
    if found is None:
        return
    name = choices.get(GROUP)
    if name is None or not isinstance(found, Mapping):
        raise ConfigError(
            f"site: {found!r} is not a chosen site", hint="write site=NAME, or `- site: NAME` in defaults"
        )
    site = read_site(found, name=name)
    mapping[GROUP] = name
    # Without a cluster the run trains here, and the site has nothing to say.
    if isinstance(mapping.get("cluster"), Mapping):
        mapping["cluster"] = with_site(mapping["cluster"], site, typed={split_word(word)[1] for word in overrides})


def _require_chosen_cluster(cluster: Any, choices: Mapping[str, str | None]) -> None:
    # `cluster.env.X=1` makes the mapping spring up where no cluster was asked for.
    if isinstance(cluster, dict) and choices.get("cluster") is None and "nodes" not in cluster:
        raise no_cluster_error(f"cluster.{next(iter(cluster), '')}")


def _own_error(err: BaseException | None) -> ConfigError | None:
    """Returns our own error that OmegaConf has wrapped, where a resolver of ours raised it."""
    while err is not None and not isinstance(err, ConfigError):
        err = err.__cause__ or err.__context__
    return err


def _read_variable(name: str, *default: Any) -> Any:
    if is_secret_name(name):
        raise ConfigError(
            f"${{oc.env:{name}}} refers to a secret, which would be written into the run directory",
            hint=f"read {name} inside your own code, and let it travel by name: cluster.export=[{name}]",
        )
    return read_variable(name, *default)
