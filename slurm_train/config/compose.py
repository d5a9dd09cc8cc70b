"""Composes configurations from words with Hydra, on the login node, once.

Ranks never compose: they read the frozen result, so that editing a YAML file changes no queued or requeued run. A
user's `--config-dir` comes before the shipped `conf/`, so its files may shadow ours; `+cluster=4x8` needs no file for
every N and G. The points of a sweep are those of Hydra's own grammar and order. What a run was frozen with is the
truth later on: `resume RUN key=value` composes nothing again but a group that is chosen anew.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, Transformer
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers.oc import env as read_variable

from slurm_train.assets import asset_dir
from slurm_train.config.explain import explain, no_cluster_error, not_known_yet
from slurm_train.config.schema import RunConfig, build_config, flat, to_mapping, unknown_key_error
from slurm_train.config.secrets import is_secret_name, refuse_secrets
from slurm_train.config.site import require_site, settle_site, user_config_dir
from slurm_train.config.words import Words, chosen_sites, cluster_sizes, is_one_value, prepare_overrides, split_word
from slurm_train.errors import ConfigError

TASK_NAME = "slurm_train"
"""What Hydra takes for the name of a job that is given none."""
# Slurm's controllers hold 10,000 jobs by default; a slip of the pen asks for millions.
_MOST_POINTS = 100_000
# In this order: a site fills the cluster that was chosen.
_GROUPS = ("model", "data", "cluster", "site", "container")


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration: the typed value and the plain mapping it was built from."""

    config: RunConfig
    mapping: dict[str, Any]
    choices: Mapping[str, str | None]
    """The chosen option of each config group, e.g. {"model": "gpt"}."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """All words of its command line, e.g. ("+cluster=1x8", "optim.lr=0.001", "seed=3")."""
    values: Mapping[str, str]
    """What the sweep gives to it, e.g. {"optim.lr": "0.001", "seed": "3"}."""


class _Base(NamedTuple):
    """What the chosen groups give, before single values are set."""

    whole: DictConfig
    """With Hydra's own settings."""
    run: DictConfig
    """Without them."""
    refers: bool
    """Whether something in `run` refers to them."""


class Composer:
    """Composes the configurations of one command line.

    What a choice of groups gives is composed once by Hydra; words that set single values are merged into a copy. So a
    sweep of a thousand points reads its files once.

    Args:
        words: the command line; its flags say where configurations are looked for.

    Raises:
        ConfigError: there is no such folder or package.
    """

    def __init__(self, words: Words) -> None:
        self.words = words
        GlobalHydra.instance().clear()
        path = search_path(words)
        schema = path.get_path().pop()
        for plugin in Plugins.instance().discover(SearchPathPlugin):
            plugin().manipulate_search_path(path)  # type: ignore[attr-defined]  # `discover` does not say of which kind
        path.get_path().append(schema)
        self.hydra = Hydra.create_main_hydra2(task_name=TASK_NAME, config_search_path=path)
        # Whatever way a configuration spells it, the variable is asked for by name here.
        OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)
        OmegaConf.register_new_resolver("hydra", read_hydra, replace=True)
        self._bases: dict[tuple[RunMode, str], _Base] = {}

    def compose(self, overrides: Sequence[str], *, number: int | None = None) -> Composed:
        """Returns the configuration that words ask for.

        Args:
            overrides: as typed.
            number: the run's place in a sweep, for words that refer to ${hydra.job.num}.

        Raises:
            ConfigError: an unknown key, group or value; a missing value; a reference to a secret.
        """
        prepared = prepare_overrides(overrides)
        with self.explaining(prepared):
            full, choices = self.merge(prepared, number=number)
            plain = {str(key): _resolved(full[key]) for key in full if key != "hydra"}
            settle_site(plain, choices, prepared)
            refuse_secrets(plain)
            cluster = plain.get("cluster")
            # `cluster.env.X=1` makes the mapping spring up where no cluster was asked for.
            if isinstance(cluster, dict) and choices.get("cluster") is None and "nodes" not in cluster:
                raise no_cluster_error(f"cluster.{next(iter(cluster), '')}")
            _settle_launch(plain)
            return Composed(config=build_config(RunConfig, plain), mapping=plain, choices=choices)

    def merge(self, prepared: Sequence[str], *, number: int | None = None) -> tuple[DictConfig, dict[str, str | None]]:
        """Returns what Hydra composes, its own settings included where something refers to them; and the choices.

        Raises:
            HydraException: what Hydra itself would say.
        """
        self._require_sites(prepared)
        parsed = OverridesParser.create().parse_overrides(list(prepared))
        ConfigLoaderImpl.validate_sweep_overrides_legal(overrides=parsed, run_mode=RunMode.RUN, from_shell=True)
        groups, values = self.split(parsed)
        base = self.base(groups)
        refers = base.refers or any("${hydra" in str(override.input_line) for override in values)
        full = copy.deepcopy(base.whole if refers else base.run)
        ConfigLoaderImpl._apply_overrides_to_config(values, full)
        if refers:
            tasks = [override for override in parsed if not override.is_hydra_override()]
            shape = full.hydra.job.config.override_dirname
            full.hydra.overrides.task = [override.input_line for override in tasks]
            full.hydra.job.override_dirname = get_overrides_dirname(
                tasks, kv_sep=shape.kv_sep, item_sep=shape.item_sep, exclude_keys=shape.exclude_keys
            )
            if number is not None:
                full.hydra.job.num = number
            # What ${hydra:runtime.cwd} and the like are read from.
            HydraConfig.instance().set_config(full)
        return full, dict(base.whole.hydra.runtime.choices)

    def split(self, parsed: Sequence[Override]) -> tuple[list[Override], list[Override]]:
        """Returns the words that choose groups or speak to Hydra itself, and those that set single values."""
        first: list[Override] = []
        values: list[Override] = []
        for one in parsed:
            # Hydra's own rule: a group may also be a key, to which a mapping can be given.
            is_group = self._repository.group_exists(one.key_or_group) and not isinstance(one.value(), dict)
            (first if is_group or one.is_hydra_override() else values).append(one)
        return first, values

    def base(self, groups: Sequence[Override], *, mode: RunMode = RunMode.RUN) -> _Base:
        """Returns what the first part of `split` gives, but for words with several values.

        Raises:
            HydraException: what Hydra itself would say.
        """
        words = [str(one.input_line) for one in groups if not one.is_sweep_override()]
        key = (mode, "\n".join(words))
        if key not in self._bases:
            _store_sizes(self.words, words)
            try:
                whole = self._load(words, mode)
            except ConfigCompositionException as err:
                # A group that the user's own primary file chooses already is replaced, not added a second time.
                chosen = re.search(r"Multiple values for (\w+)\.", str(err))
                if chosen is None:
                    raise
                plus = f"+{chosen[1]}="
                whole = self._load([word[word.startswith(plus) :] for word in words], mode)
            run = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
            # From here on a key that does not exist is an error.
            OmegaConf.set_struct(run, True)
            refers = "${hydra" in str(OmegaConf.to_container(run, resolve=False))
            self._bases[key] = _Base(whole, run, refers)
        return self._bases[key]

    def _load(self, words: list[str], mode: RunMode) -> DictConfig:
        try:
            return self.hydra.config_loader.load_configuration(
                self.words.config_name, words, run_mode=mode, validate_sweep_overrides=False
            )
        except KeyError as err:
            # Hydra copies the variables of hydra.job.env_copy before anybody can look at the list.
            hint = f"cluster.export=[{err}]"
            raise ConfigError(f"hydra.job.env_copy names {err}, which is not set", hint=hint) from err

    @functools.cached_property
    def _repository(self) -> IConfigRepository:
        loader = cast(ConfigLoaderImpl, self.hydra.config_loader)
        if not _own_folders(self.words):
            return loader.repository
        # With the places that `hydra.searchpath` of a primary file adds.
        return loader._parse_overrides_and_create_caching_repo(self.words.config_name, [])[1]

    def _require_sites(self, prepared: Sequence[str]) -> None:
        folders = _own_folders(self.words)
        # What a package holds, Hydra finds.
        if not any("pkg:" in str(folder) for folder in folders):
            for name in chosen_sites(prepared):
                require_site(name, [*folders, user_config_dir()])

    @contextmanager
    def explaining(self, prepared: Sequence[str]) -> Iterator[None]:
        """Turns what Hydra does not accept into errors in the user's terms; leaves no global state of Hydra's."""
        try:
            yield
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as err:
            own: BaseException | None = err
            # A resolver of ours has raised it, and OmegaConf wrapped it.
            while own is not None and not isinstance(own, ConfigError):
                own = own.__cause__ or own.__context__
            raise own or explain(err, composed_keys=lambda: self._composed_keys(prepared)) from err
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None

    def _composed_keys(self, prepared: Sequence[str]) -> list[str]:
        """Returns the keys that there are with the chosen groups alone; none where those fail, too."""
        try:
            full, _ = self.merge([word for word in prepared if "." not in word.partition("=")[0]])
        except (HydraException, OmegaConfBaseException):
            return []
        leaves = flat(cast(dict[str, Any], OmegaConf.to_container(full, resolve=False)))
        keys = (key[:end] for key in leaves for end in (*(m.start() for m in re.finditer(r"\.", key)), len(key)))
        return [key for key in dict.fromkeys(keys) if not key.startswith("hydra")]

    def show(self) -> None:
        """Prints the composed configuration, or facts about the composition, in Hydra's own words.

        Raises:
            ConfigError: as `compose`.
        """
        words, prepared = self.words, prepare_overrides(self.words.overrides)
        with self.explaining(prepared):
            _store_sizes(words, prepared)
            if words.info is not None:
                self.hydra.show_info(words.info, config_name=words.config_name, overrides=prepared)
                return
            if chosen_sites(prepared) and words.show == "job" and words.package is None:
                # Hydra would print the site file beside a cluster that has taken nothing from it.
                full, choices = self.merge(prepared)
                mapping = cast(dict[Any, Any], OmegaConf.to_container(full, resolve=words.resolve))
                mapping.pop("hydra", None)
                settle_site(mapping, choices, prepared)
                print(OmegaConf.to_yaml(OmegaConf.create(mapping)), end="")
                return
            assert words.show is not None
            if words.package not in (None, "_global_"):
                full, _ = self.merge(prepared)
                if OmegaConf.select(full, str(words.package)) is None:
                    parts = get_close_matches(str(words.package), [str(key) for key in full], n=1)
                    hint = f"did you mean {parts[0]}?" if parts else "leave it out to print all of it"
                    raise ConfigError(f"--package {words.package} names no part of the configuration", hint=hint)
            self.hydra.show_cfg(
                config_name=words.config_name,
                overrides=prepared,
                cfg_type=words.show,
                package=words.package,
                resolve=words.resolve,
            )


def compose(words: Words, *, number: int | None = None) -> Composed:
    """Returns the configuration of one command line.

    Raises:
        ConfigError: as `Composer.compose`.
    """
    return Composer(words).compose(words.overrides, number=number)


def compose_points(words: Words, points: Sequence[Sequence[str]], *, first: int = 0) -> Iterator[Composed]:
    """Yields the configuration of each point of a sweep.

    Args:
        words: the flags of the command line.
        points: the words of each point.
        first: the number of the first of them in the sweep.

    Raises:
        ConfigError: as `Composer.compose`.
    """
    composer = Composer(words)
    return (composer.compose(point, number=number) for number, point in enumerate(points, start=first))


def _resolved(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


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


def _settle_launch(mapping: dict[str, Any]) -> None:
    """Takes the cluster away from a run that is to stay here; everything else then follows from its absence."""
    if mapping.get("launch") == "local":
        mapping["cluster"] = None
    elif mapping.get("launch") == "interactive" and mapping.get("cluster") is None:
        raise ConfigError(
            "launch=interactive asks Slurm for an allocation, but the run asks for no cluster",
            hint="add +cluster=<nodes>x<GPUs per node>, e.g. +cluster=1x2",
        )


# Where configurations are looked for


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
        try:
            is_there = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            is_there = False
        if not is_there:
            raise ConfigError(f"{asked_by} {place!r} is not a package", hint="name one that Python can import")
        return place
    if schema not in ("", "file") or not Path(name).is_dir():
        raise ConfigError(f"{asked_by} {place!r} is not a directory", hint="name a folder with your YAML files")
    return f"file://{Path(name).resolve()}"


def _own_folders(words: Words) -> list[Path]:
    places = (words.config_path, words.config_dir, *words.search_path)
    return [Path(place.removeprefix("file://")) for place in places if place is not None]


def _store_sizes(words: Words, overrides: Sequence[str]) -> None:
    """Makes a configuration for each NxG that the words name and no file of the user's own gives."""
    store = ConfigStore.instance()
    for name, nodes, gpus in cluster_sizes(overrides):
        # Hydra takes a stored node for the schema of a file of the same name, so a user's file is used alone.
        store.repo.get("cluster", {}).pop(f"{name}.yaml", None)
        if not any((folder / "cluster" / f"{name}.yaml").is_file() for folder in _own_folders(words)):
            size = {"defaults": ["base", "_self_"], "nodes": nodes, "gpus_per_node": gpus}
            store.store(group="cluster", name=name, node=size, provider="size")


# The points of a sweep


def read_points(words: Words) -> list[Point]:
    """Returns the points of a sweep in Hydra's order, the last word varying fastest; one where no word has several.

    A word whose comma belongs to a text for Slurm (cluster.exclude=node1,node2) gives one value, as it does without
    `--multirun`; choice(...) sweeps it.

    Raises:
        ConfigError: a word that Hydra cannot read, has no values or a continuum of them, or is given twice.
    """
    parser = OverridesParser.create(config_loader=Composer(words).hydra.config_loader)
    choices: dict[str, list[str]] = {}
    keys = set()
    for word in words.overrides:
        _, key, value = split_word(word)
        if value is None or is_one_value(key, value):
            continue
        try:
            (override,) = parser.parse_overrides([word])
        except HydraException as err:
            raise ConfigError(
                f"{word!r} cannot be read in a sweep: {' '.join(str(err).splitlines()[0].split())}",
                hint="a text with commas, brackets or blanks is quoted twice there: \"key='a,b'\"",
            ) from err
        if override.is_sweep_override():
            if override.key_or_group in keys:
                raise ConfigError(f"{override.key_or_group} is swept by two words", hint="put all its values into one")
            keys.add(override.key_or_group)
            choices[word] = _values(override)
    count = math.prod(map(len, choices.values()))
    if count > _MOST_POINTS:
        counts = " x ".join(str(len(values)) for values in choices.values())
        raise ConfigError(f"{counts} = {count:,} runs in one sweep", hint=f"at most {_MOST_POINTS:,} are taken")
    points = []
    for row in itertools.product(*choices.values()):
        chosen = dict(zip(choices, row, strict=True))
        split = (split_word(word) for word in row)
        values = {key: unquoted(value or "") for _, key, value in split}
        points.append(Point(tuple(chosen.get(word, word) for word in words.overrides), values))
    return points


def unquoted(value: str) -> str:
    """Returns a value without the quotes of Hydra's spelling."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def _values(override: Override) -> list[str]:
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: an interval names no points",
            hint="use range(start,stop,step) or choice(a,b,c), or a sweeper that chooses points: hydra/sweeper=...",
        )
    values = [f"{override.get_key_element()}={value}" for value in override.sweep_iterator(transformer=_spelled)]
    if not values:
        raise ConfigError(f"{override.input_line} gives no value: the sweep is empty", hint="widen it, or drop it")
    return values


def _spelled(value: Any) -> str:
    """Returns a value in Hydra's spelling; a text that needs escapes is quoted, which means the same everywhere."""
    escaped = Transformer.str(value)
    is_escaped = isinstance(value, str) and escaped != value
    return QuotedString(value, Quote.single).with_quotes() if is_escaped else str(escaped)


# Words on top of a frozen configuration


def apply_words(config: RunConfig, words: Sequence[str], *, config_dir: str | None = None) -> RunConfig:
    """Returns a frozen configuration with the words' settings in it.

    `cluster=2x8` gives another size to the cluster that the run had; `model=`, `data=` and a cluster of another name
    replace theirs. `site=NAME` moves the run to another cluster: of the old one only the size stays.

    Args:
        config: a frozen configuration.
        words: settings, e.g. ["optim.lr=1e-4", "cluster=2x8"].
        config_dir: the person's own YAML files.

    Raises:
        ConfigError: an unknown key or value, or a word that makes no sense for a run that exists.
    """
    if not words:
        return config
    try:
        overrides = OverridesParser.create().parse_overrides(prepare_overrides(words))
    except HydraException as err:
        raise ConfigError(" ".join(str(err).split()), hint="settings are written key=value") from err
    mapping: dict[str, Any] = to_mapping(config)

    def choose(group: str, *added: str) -> dict[str, Any]:
        # With its own settings: an image has no default, and a typed partition decides what a site gives.
        own = [word for word in words if word.startswith(f"{group}.")]
        composed = compose(Words(overrides=[*added, *own], config_dir=config_dir))
        chosen: dict[str, Any] = to_mapping(getattr(composed.config, group))
        return chosen

    # A group first: settings of its parts are meant for what was chosen.
    for override in sorted(overrides, key=lambda one: (*_GROUPS, one.key_or_group).index(one.key_or_group)):
        key, value, cluster = override.key_or_group, override.value(), mapping["cluster"]
        if override.is_sweep_override():
            raise ConfigError(f"{key} has several values; a run that exists has one", hint=f"give one: {key}=VALUE")
        if key not in _GROUPS:
            _set(mapping, override)
        elif key not in ("model", "data") and value in (None, "null"):
            mapping[key] = None
        elif key == "site":
            mapping["site"] = value if cluster is not None else None
            if cluster is not None:
                # A range of nodes belongs to its launcher.
                names = ("nodes", "gpus_per_node", *(("launcher",) if isinstance(cluster["nodes"], str) else ()))
                size = (f"cluster.{name}={cluster[name]}" for name in names)
                mapping["cluster"] = choose("cluster", "cluster=1x1", *size, f"site={value}")
        elif key == "cluster" and cluster is not None and (sizes := cluster_sizes([f"cluster={value}"])):
            _, cluster["nodes"], cluster["gpus_per_node"] = sizes[0]
        else:
            mapping[key] = choose(key, f"{key}={value}")
    _settle_launch(mapping)
    return build_config(RunConfig, mapping)


def _set(mapping: dict[str, Any], override: Override) -> None:
    key = override.key_or_group
    *parents, last = key.split(".")
    holder: Any = mapping
    for index, parent in enumerate(parents):
        if holder.get(parent) is None:
            raise ConfigError(
                f"{key} was set, but the run has no {'.'.join(parents[: index + 1])}",
                hint="give it a size first: cluster=<nodes>x<GPUs per node>"
                if parents[0] == "cluster"
                else f"choose one first: {parents[0]}=NAME, or {parents[0]}._target_=my_package.name",
            )
        holder = holder[parent]
    if override.is_delete():
        holder.pop(last, None)
        return
    if last not in holder and not override.is_add() and not override.is_force_add():
        prefix = "".join(f"{parent}." for parent in parents)
        raise unknown_key_error(key, [f"{prefix}{name}" for name in holder])
    holder[last] = override.value()
