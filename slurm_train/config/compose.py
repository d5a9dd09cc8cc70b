"""Composes a run's configuration from words with Hydra, on the login node, once.

Ranks never compose: they read the frozen result, so that editing a YAML file changes no queued or requeued run. A
user's `--config-dir` comes before the shipped `conf/`, so its files may shadow ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar, cast

import yaml
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, UnsupportedInterpolationType
from omegaconf.resolvers.oc import env as read_variable

from slurm_train.config.explain import explain, no_cluster_error, not_known_yet
from slurm_train.config.launch import settle_launch
from slurm_train.config.lean import LeanComposer, is_enough
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.config.search_path import own_folders, search_path, store_sizes
from slurm_train.config.secrets import is_secret_name, refuse_secrets
from slurm_train.config.site import require_site, settle_site, user_config_dir
from slurm_train.config.words import Words, chosen_sites, prepare_overrides
from slurm_train.errors import ConfigError

T = TypeVar("T")

TASK_NAME = "slurm_train"
"""What Hydra takes for the name of a job that is given none."""

# What Hydra composed, and the chosen option of each group.
_Full = tuple[DictConfig, dict[str, str | None]]


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration: the typed value and the plain mapping it was built from."""

    config: RunConfig
    mapping: dict[str, Any]
    choices: Mapping[str, str | None]
    """The chosen option of each config group, e.g. {"model": "gpt"}."""


def compose(words: Words, *, number: int | None = None) -> Composed:
    """Returns the configuration that the words ask for.

    Args:
        words: the command line.
        number: the run's place in a sweep, for those who refer to ${hydra.job.num}.

    Raises:
        ConfigError: an unknown key, group or value; a missing value; a reference to a secret.
    """
    overrides = prepare_overrides(words.overrides)
    with explaining(words, overrides):
        try:
            return _read(
                settled(overrides, partial(_compose, words, is_lean=is_enough(words), number=number)), overrides
            )
        except UnsupportedInterpolationType:
            # A resolver that a plugin in the user's environment registers: only Hydra's whole way loads those.
            return _read(settled(overrides, partial(_compose, words, is_lean=False, number=number)), overrides)


def read_whole(words: Words, config: DictConfig) -> Composed:
    """Returns the configuration that Hydra has composed of the words in its whole way.

    Raises:
        ConfigError: as `compose`.
    """
    overrides = prepare_overrides(words.overrides)
    with explaining(words, overrides):
        return _read(_with_choices(config), overrides)


def compose_points(words: Words, points: Sequence[Sequence[str]], *, first: int = 0) -> Iterator[Composed]:
    """Yields the configuration of each point of a sweep; what they have in common is read once.

    Args:
        words: the flags of the command line.
        points: the words of each point.
        first: the number of the first of them in the sweep.

    Raises:
        ConfigError: as `compose`.
    """
    if not is_enough(words):
        numbered = enumerate(points, start=first)
        yield from (compose(replace(words, overrides=list(point)), number=number) for number, point in numbered)
        return
    # The composer keeps what is stored now, for all points.
    store_sizes(words, sorted({word for point in points for word in prepare_overrides(point)}))
    composer = LeanComposer(search_path(words), words.config_name)
    for point in points:
        overrides = prepare_overrides(point)
        with explaining(words, overrides):
            try:
                _require_sites(words, overrides)
                composed = _read(composer.compose(overrides), overrides)
            except UnsupportedInterpolationType:
                composed = compose(replace(words, overrides=list(point)))
        yield composed


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
            if words.package not in (None, "_global_"):
                _require_part(str(words.package), words, overrides, hydra)
            hydra.show_cfg(
                config_name=words.config_name,
                overrides=overrides,
                cfg_type=words.show,
                package=words.package,
                resolve=words.resolve,
            )


def _show_with_site(words: Words, overrides: Sequence[str]) -> None:
    # Hydra would print the site file beside a cluster that has taken nothing from it.
    full, choices = settled(overrides, partial(_compose, words, is_lean=False))
    mapping = OmegaConf.to_container(full, resolve=words.resolve)
    assert isinstance(mapping, dict)
    mapping.pop("hydra", None)
    settle_site(mapping, choices, overrides)
    print(OmegaConf.to_yaml(OmegaConf.create(mapping)), end="")


def _require_part(package: str, words: Words, overrides: list[str], hydra: Hydra) -> None:
    full = hydra.compose_config(config_name=words.config_name, overrides=overrides, run_mode=RunMode.RUN)
    if OmegaConf.select(full, package) is None:
        parts = get_close_matches(package, [str(key) for key in full], n=1)
        hint = f"did you mean {parts[0]}?" if parts else "leave it out to print all of it"
        raise ConfigError(f"--package {package} names no part of the configuration", hint=hint)


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
        HydraConfig.instance().cfg = None


def _composed_keys(words: Words, overrides: Sequence[str]) -> list[str]:
    """Returns the keys that there are with the chosen groups alone; none where those fail, too."""
    groups = [word for word in overrides if "." not in word.partition("=")[0]]
    try:
        full, _ = _compose(words, groups, is_lean=is_enough(words))
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


def settled(overrides: Sequence[str], composing: Callable[[list[str]], T]) -> T:
    """Composes; a group that the user's own primary file chooses already is replaced, not added a second time."""
    try:
        return composing(list(overrides))
    except ConfigCompositionException as err:
        chosen = re.search(r"Multiple values for (\w+)\.", str(err))
        if chosen is None:
            raise
        plus = f"+{chosen.group(1)}="
        return composing([word[1:] if word.startswith(plus) else word for word in overrides])


def _require_sites(words: Words, overrides: Sequence[str]) -> None:
    folders = own_folders(words)
    # What a package holds, Hydra finds.
    if not any("pkg:" in str(folder) for folder in folders):
        for name in chosen_sites(overrides):
            require_site(name, [*folders, user_config_dir()])


def _compose(words: Words, overrides: Sequence[str], *, is_lean: bool, number: int | None = None) -> _Full:
    _require_sites(words, overrides)
    if is_lean:
        store_sizes(words, overrides)
        return LeanComposer(search_path(words), words.config_name).compose(overrides)
    full = open_hydra(words, overrides).compose_config(
        config_name=words.config_name,
        overrides=list(overrides),
        run_mode=RunMode.RUN,
        from_shell=True,
        with_log_configuration=False,
    )
    if number is not None:
        full.hydra.job.num = number
    return _with_choices(full)


def _with_choices(full: DictConfig) -> _Full:
    # What ${hydra:runtime.cwd} and the like are read from.
    HydraConfig.instance().set_config(full)
    OmegaConf.register_new_resolver("hydra", read_hydra, replace=True)
    return full, dict(full.hydra.runtime.choices)


def open_hydra(words: Words, overrides: Sequence[str]) -> Hydra:
    """Returns Hydra itself, with its plugins, looking where `search_path` says."""
    GlobalHydra.instance().clear()
    plugins = Plugins.instance().discover(SearchPathPlugin)
    store_sizes(words, overrides)
    path = search_path(words)
    schema = path.get_path().pop()
    for plugin in plugins:
        plugin().manipulate_search_path(path)  # type: ignore[attr-defined]  # `discover` does not say of which kind
    path.get_path().append(schema)
    return Hydra.create_main_hydra2(task_name=TASK_NAME, config_search_path=path)


def _read(composed: _Full, overrides: Sequence[str]) -> Composed:
    full, choices = composed
    plain = {str(key): _resolved(full[key]) for key in full if key != "hydra"}
    settle_site(plain, choices, overrides)
    refuse_secrets(plain)
    _require_chosen_cluster(plain.get("cluster"), choices)
    settle_launch(plain)
    return Composed(config=build_config(RunConfig, plain), mapping=plain, choices=choices)


def _resolved(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def _require_chosen_cluster(cluster: Any, choices: Mapping[str, str | None]) -> None:
    # `cluster.env.X=1` makes the mapping spring up where no cluster was asked for.
    if isinstance(cluster, dict) and choices.get("cluster") is None and "nodes" not in cluster:
        raise no_cluster_error(f"cluster.{next(iter(cluster), '')}")


def _own_error(err: BaseException | None) -> ConfigError | None:
    """Returns our own error that OmegaConf has wrapped, where a resolver of ours raised it."""
    while err is not None and not isinstance(err, ConfigError):
        err = err.__cause__ or err.__context__
    return err


def read_hydra(key: str) -> Any:
    """Returns what ${hydra:key} refers to, e.g. for "runtime.cwd"; Hydra's own resolver gives null where it is missing.

    Raises:
        ConfigError: it is filled in later.
    """
    try:
        return OmegaConf.select(cast(DictConfig, HydraConfig.get()), key, throw_on_missing=True)
    except MissingMandatoryValue as err:
        raise not_known_yet(f"hydra:{key}") from err


def _read_variable(name: str, *default: Any) -> Any:
    if is_secret_name(name):
        raise ConfigError(
            f"${{oc.env:{name}}} refers to a secret, which would be written into the run directory",
            hint=f"read {name} inside your own code, and let it travel by name: cluster.export=[{name}]",
        )
    return read_variable(name, *default)
