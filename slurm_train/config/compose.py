"""Composes configurations from words with Hydra, on the login node, once.

Ranks never compose: they read the frozen result, so that editing a YAML file changes no queued or requeued run. A
user's `--config-dir` comes before the shipped `conf/`, so its files may shadow ours; `+cluster=4x8` needs no file for
every N and G. The points of a sweep are those of Hydra's own grammar and order. What a run was frozen with is the
truth later on: `resume RUN key=value` composes nothing again but a group that is chosen anew.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Transformer
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers.oc import env as read_variable

from slurm_train.assets import asset_dir
from slurm_train.config.program import program_of
from slurm_train.config.schema import (
    ClusterSection,
    ContainerSection,
    OptimSection,
    RunConfig,
    all_keys,
    build_config,
    defaults_of,
    flat,
    to_mapping,
    unknown_key_error,
)
from slurm_train.config.secrets import is_secret_name, refuse_secrets
from slurm_train.config.site_profile import present_config_dir, settle_site
from slurm_train.config.synonyms import advise
from slurm_train.config.words import (
    Words,
    cluster_sizes,
    is_list_of_texts,
    is_one_value,
    is_plain_texts,
    prepare_overrides,
    quoted,
    split_word,
    with_quoted_items,
)
from slurm_train.config.yaml_files import FaithfulLoader
from slurm_train.errors import ConfigError

ADVICE_OF_MODEL = ("_lr_", "_global_size_", "_context_")
"""Keys of a model's file, where none are given: the peak learning rate for AdamW, the samples of a step that it is
meant for, and the tokens of a sample."""
TASK_NAME = "slurm_train"
"""What Hydra takes for the name of a job that is given none."""
# Slurm's controllers hold 10,000 jobs by default; a mistyped range asks for millions.
_MOST_POINTS = 100_000
# In this order: a site fills the cluster that was chosen.
_GROUPS = ("optim", "model", "data", "cluster", "site", "container")
# Sections of a group, whose files have what differs from these.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cluster": defaults_of(ClusterSection),
    "container": defaults_of(ContainerSection),
    "optim": defaults_of(OptimSection),
}
_FIRST_GROUPS = ("cluster", "site", "container")
# An item of a list in quotes, and one that means the same without them.
_QUOTED_ITEM = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_QUOTED_LIST = re.compile(rf"\[(?:{_QUOTED_ITEM})(?:,(?:{_QUOTED_ITEM}))*\]")
_NEEDS_NO_QUOTES = re.compile(r"'[^'\",\\\[\]{}]*'")
# Sections that only the built-in trainer reads.
_OF_TRAINER = ("batch", "callbacks", "data", "ddp", "model", "optim", "parallel")
_OWN_PLACES = ("--config-path", "--config-dir", "hydra.searchpath")


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration: the typed value and the plain mapping it was built from."""

    config: RunConfig
    mapping: dict[str, Any]
    choices: Mapping[str, str | None]
    """The chosen option of each config group, e.g. {"model": "gpt"}."""
    open_keys: Collection[str] | None = None
    """Keys of `cluster` that neither words nor files set, those of a site among them; None: it was not composed."""
    unused_keys: tuple[str, ...] = ()
    """Typed keys that only the built-in trainer reads, where a script trains that is not given their values."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What Hydra composes, before it is checked."""

    full: DictConfig
    """Hydra's own settings included."""
    choices: dict[str, str | None]
    open_keys: Collection[str]
    """Keys of `cluster` that neither words nor files set: they have the defaults of the schema."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """All words of its command line, e.g. ("+cluster=1x8", "optim.lr=0.001", "seed=3")."""
    values: Mapping[str, str]
    """What the sweep gives to it, e.g. {"optim.lr": "0.001", "seed": "3"}."""


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
        self.hydra = Hydra.create_main_hydra2(task_name=TASK_NAME, config_search_path=_search_path(words))
        # Whatever way a configuration spells it, the variable is asked for by name here.
        OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)
        OmegaConf.register_new_resolver("hydra", _read_hydra, replace=True)
        # One time for all runs of a sweep, as in Hydra: composing many of them takes seconds.
        began = datetime.now()
        OmegaConf.register_new_resolver("now", began.strftime, replace=True)
        self._bases: dict[tuple[RunMode, str], DictConfig] = {}
        self._parsed: dict[str, Override] = {}
        for source in self.hydra.config_loader.get_sources():
            if source.provider in _OWN_PLACES and not source.available():
                hint = "name a folder with your YAML files, or pkg:// and a package that Python can import"
                raise ConfigError(f"{source.provider} {source.path!r} is not there", hint=hint)

    @property
    def has_own_files(self) -> bool:
        """Whether configurations of the person's own are looked at before the shipped ones."""
        return bool(self.words.config_path or self.words.config_dir or self.words.search_path)

    def compose(self, overrides: Sequence[str], *, number: int | None = None) -> Composed:
        """Returns the configuration that words ask for.

        Args:
            overrides: as typed.
            number: the run's place in a sweep, for words that refer to ${hydra.job.num}.

        Raises:
            ConfigError: an unknown key, group or value; a missing value; a reference to a secret.
        """
        prepared = prepare_overrides(overrides)
        with self.explaining():
            merged = self.merge(prepared, number=number)
            full = merged.full
            choices = merged.choices
            plain = _plain(full, [str(key) for key in full if key != "hydra"], resolve=True)
            open_keys = settle_site(plain, choices, prepared, open_keys=merged.open_keys)
            refuse_secrets(plain)
            _drop_advice_of_model(plain)
            cluster = plain.get("cluster")
            # `cluster.env.X=1` alone creates a section of the cluster.
            if isinstance(cluster, dict) and choices.get("cluster") is None and "nodes" not in cluster:
                raise _unasked_section_error(f"cluster.{next(iter(cluster), '')}")
            _settle_launch(plain)
            config = build_config(RunConfig, plain)
            _refuse_two_lengths(config, prepared)
            reads_keys = bool(program_of(config).sections)
            unused_keys = () if reads_keys else tuple(_unused_keys(full, prepared))
            return Composed(config=config, mapping=plain, choices=choices, open_keys=open_keys, unused_keys=unused_keys)

    def merge(self, prepared: Sequence[str], *, number: int | None = None) -> Merged:
        """Returns what Hydra composes.

        Raises:
            HydraException: what Hydra itself would say.
        """
        parsed = self.parse(prepared)
        ConfigLoaderImpl.validate_sweep_overrides_legal(overrides=parsed, run_mode=RunMode.RUN, from_shell=True)
        groups, values = self.split(parsed)
        full = copy.deepcopy(self.base(groups))
        typed = {value.key_or_group for value in values}
        filled = _fill_sections(full)
        ConfigLoaderImpl._apply_overrides_to_config(values, full)
        # A word may give the whole section: cluster={nodes: 2, partition: gpu}.
        filled += _fill_sections(full)
        open_keys = [key for key in _still_default(full, filled) if f"cluster.{key}" not in typed]
        tasks = [override for override in parsed if not override.is_hydra_override()]
        shape = full.hydra.job.config.override_dirname
        full.hydra.overrides.task = [task.input_line for task in tasks]
        full.hydra.job.override_dirname = get_overrides_dirname(
            # A name that is made of the other words is no part of itself.
            [task for task in tasks if task.key_or_group != "run.name"],
            kv_sep=shape.kv_sep,
            item_sep=shape.item_sep,
            exclude_keys=shape.exclude_keys,
        )
        if number is not None:
            full.hydra.job.num = number
        # What ${hydra:runtime.cwd} and the like are read from.
        HydraConfig.instance().cfg = full  # type: ignore[assignment]  # Hydra itself puts a DictConfig there
        return Merged(full, dict(full.hydra.runtime.choices), open_keys)

    def parse(self, prepared: Sequence[str]) -> list[Override]:
        """Returns the words as Hydra reads them; one that several points of a sweep share is read once.

        Raises:
            HydraException: what Hydra itself would say.
        """
        for word in prepared:
            if word not in self._parsed:
                (self._parsed[word],) = OverridesParser.create().parse_overrides([word])
        return [self._parsed[word] for word in prepared]

    def split(self, parsed: Sequence[Override]) -> tuple[list[Override], list[Override]]:
        """Returns the words that choose groups or set Hydra itself, and those that set single values."""
        first: list[Override] = []
        values: list[Override] = []
        for override in parsed:
            # Hydra's own rule: a group may also be a key, to which a mapping can be given.
            is_group = self._is_group(override.key_or_group) and not isinstance(override.value(), dict)
            (first if is_group or override.is_hydra_override() else values).append(override)
        return first, values

    def base(self, groups: Sequence[Override], *, mode: RunMode = RunMode.RUN) -> DictConfig:
        """Returns what the first part of `split` gives, but for words with several values.

        Raises:
            HydraException: what Hydra itself would say.
        """
        single = [group for group in groups if not group.is_sweep_override()]
        # Hydra merges added groups in the order of the words; what an experiment says of the cluster is meant for the
        # one that is chosen, before or after it.
        single.sort(key=lambda override: override.key_or_group not in _FIRST_GROUPS)
        words = [str(override.input_line) for override in single]
        key = (mode, "\n".join(words))
        if key not in self._bases:
            self._store_sizes(words)
            try:
                self._bases[key] = self._load(words, mode)
            except ConfigCompositionException:
                fitting = self._with_fitting_plus(single, mode)
                if fitting == words:
                    raise
                self._bases[key] = self._load(fitting, mode)
        return self._bases[key]

    def _with_fitting_plus(self, groups: Sequence[Override], mode: RunMode) -> list[str]:
        """Returns words with + where they add a group, without where they replace one of the user's primary file.

        Hydra has to be given the right one of the two; composing without the groups shows which ones that file chooses.
        """
        plain = [group for group in groups if re.fullmatch(r"\+?\w+=.*", str(group.input_line))]
        try:
            chosen = self._load(
                [str(group.input_line) for group in groups if group not in plain], mode
            ).hydra.runtime.choices
        except ConfigCompositionException:
            return [str(group.input_line) for group in groups]
        words = []
        for override in groups:
            word = str(override.input_line)
            group = override.key_or_group
            if override in plain and group in chosen:
                word = word.lstrip("+")
            elif override in plain and group in _GROUPS:
                # The file may have a section in its place.
                word = f"+{word.lstrip('+')}"
            words.append(word)
        return words

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
    def _is_group(self) -> Callable[[str], bool]:
        """Tells whether a key is a group; looks at the folders once per key, not once per point of a sweep."""
        loader = cast(ConfigLoaderImpl, self.hydra.config_loader)
        repository: IConfigRepository = loader.repository
        if self.has_own_files:
            # With the places that `hydra.searchpath` of a primary file adds.
            repository = loader._parse_overrides_and_create_caching_repo(self.words.config_name, [])[1]
        return functools.cache(repository.group_exists)

    def _store_sizes(self, overrides: Sequence[str]) -> None:
        """Makes a configuration for each NxG that the words name and no file of the user's own gives."""
        store = ConfigStore.instance()
        repository = cast(ConfigLoaderImpl, self.hydra.config_loader).repository
        for name, nodes, gpus in cluster_sizes(overrides):
            # Hydra takes a stored node for the schema of a file of the same name, so a user's file is used alone.
            store.repo.get("cluster", {}).pop(f"{name}.yaml", None)
            if not repository.config_exists(f"cluster/{name}"):
                size = {"defaults": ["base", "_self_"], "nodes": nodes, "gpus_per_node": gpus}
                store.store(group="cluster", name=name, node=size, provider="size")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns what Hydra does not accept into errors in the user's terms; leaves no global state of Hydra's."""
        # OmegaConf derives the loader of each file from it, and has no setting for another. Only so a text in a file
        # arrives as it is written.
        common_loader = yaml.SafeLoader
        yaml.SafeLoader = FaithfulLoader  # type: ignore[misc]
        try:
            yield
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as err:
            cause: BaseException | None = err
            # A resolver of ours has raised it, and OmegaConf wrapped it.
            while cause is not None and not isinstance(cause, ConfigError):
                cause = cause.__cause__ or cause.__context__
            newest = next(reversed(self._bases.values()), OmegaConf.create())
            raise cause or _explain(err, config=newest, words=self.words.overrides) from err
        finally:
            yaml.SafeLoader = common_loader  # type: ignore[misc]
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None

    def show(self) -> None:
        """Prints the composed configuration, or facts about the composition in Hydra's own words.

        Raises:
            ConfigError: as `compose`; a package that is no part of the configuration.
        """
        words = self.words
        prepared = prepare_overrides(self.words.overrides)
        with self.explaining():
            if words.info is not None:
                self._store_sizes(prepared)
                self.hydra.show_info(words.info, config_name=words.config_name, overrides=prepared)
                return
            merged = self.merge(prepared)
            full = merged.full
            keys = [str(key) for key in full if words.cfg == "all" or (words.cfg == "hydra") == (key == "hydra")]
            plain = _plain(full, keys, resolve=words.resolve)
            settle_site(plain, merged.choices, prepared, open_keys=merged.open_keys)
            part: Any = OmegaConf.create(plain)
            if words.package not in (None, "_global_"):
                part = OmegaConf.select(part, str(words.package))
                if part is None:
                    message = f"--package {words.package} is no part of the configuration"
                    raise ConfigError(message, hint=f"the parts are {', '.join(keys)}")
                print(f"# @package {words.package}")
            print(OmegaConf.to_yaml(part) if OmegaConf.is_config(part) else f"{part}\n", end="")


def compose(words: Words) -> Composed:
    """Returns the configuration of one command line.

    Raises:
        ConfigError: as `Composer.compose`.
    """
    return Composer(words).compose(words.overrides)


def _fill_sections(full: DictConfig) -> list[str]:
    """Gives the keys of chosen groups that no file sets the defaults of the schema; returns those of the cluster."""
    filled = list[str]()
    for name, defaults in _DEFAULTS.items():
        section = full.get(name)
        if not isinstance(section, DictConfig) or (name == "cluster" and "nodes" not in section):
            continue
        given = {str(key) for key in section.keys()}  # noqa: SIM118  # without it OmegaConf leaves out "???"
        with open_dict(section):
            for key in defaults.keys() - given:
                section[key] = defaults[key]
                filled += [key] if name == "cluster" else []
    return filled


def _still_default(full: DictConfig, keys: Iterable[str]) -> list[str]:
    """Returns the keys of a cluster whose values are the defaults of the schema."""
    section = full.get("cluster")
    if not isinstance(section, DictConfig):
        return []
    values = cast(dict[str, Any], OmegaConf.to_container(section, resolve=False))
    return [key for key in keys if values.get(key) == _DEFAULTS["cluster"][key]]


def _plain(full: DictConfig, keys: Iterable[str], *, resolve: bool) -> dict[str, Any]:
    values = {}
    for key in keys:
        value = full[key]
        is_config = OmegaConf.is_config(value)
        values[key] = OmegaConf.to_container(value, resolve=resolve, throw_on_missing=resolve) if is_config else value
    return values


def _read_hydra(key: str) -> Any:
    """Returns what ${hydra:key} refers to, e.g. for "runtime.cwd"; Hydra's own resolver gives null where it is missing.

    Raises:
        ConfigError: it is filled in later.
    """
    try:
        return OmegaConf.select(cast(DictConfig, HydraConfig.get()), key, throw_on_missing=True)
    except MissingMandatoryValue as err:
        raise ConfigError(_NOT_KNOWN_YET[0].format(f"hydra:{key}"), hint=_NOT_KNOWN_YET[1]) from err


def _read_variable(name: str, *default: Any) -> Any:
    if is_secret_name(name):
        raise ConfigError(
            f"${{oc.env:{name}}} refers to a secret, which would be written into the run directory",
            hint=f"read {name} inside your own code, and let it travel by name: cluster.export=[{name}]",
        )
    return read_variable(name, *default)


def _drop_advice_of_model(mapping: dict[str, Any]) -> None:
    """Removes what only other files read of a model's: it is no argument of the model."""
    if isinstance(mapping.get("model"), dict):
        for key in ADVICE_OF_MODEL:
            mapping["model"].pop(key, None)


def _settle_launch(mapping: dict[str, Any]) -> None:
    """Takes the cluster away from a run that is to stay here; everything else then follows from its absence."""
    if mapping.get("launch") == "local":
        mapping["cluster"] = None
    elif mapping.get("launch") == "interactive" and mapping.get("cluster") is None:
        raise ConfigError(
            "launch=interactive asks Slurm for an allocation, but the run asks for no cluster",
            hint=f"add {_SIZE}",
        )


def _refuse_two_lengths(config: RunConfig, words: Sequence[str]) -> None:
    epochs = config.train.max_epochs
    if epochs is not None and any(split_word(word)[1] == "train.max_steps" for word in words):
        raise ConfigError(
            f"train.max_steps={config.train.max_steps} was given to a run of train.max_epochs={epochs:g}",
            hint="give one of them; train.max_epochs=null lets the steps count",
        )


def _search_path(words: Words) -> ConfigSearchPathImpl:
    """Returns where configurations are looked for: a user's own folders first, then the shipped ones."""
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for provider, place in (("--config-path", words.config_path), ("--config-dir", words.config_dir)):
        if place is not None:
            path.append(provider, place)
    path.append("main", f"file://{asset_dir('conf')}")
    user = present_config_dir()
    if user is not None:
        # Behind the shipped files: what lies there can be chosen by its name, and shadows nothing unasked.
        path.append("user", f"file://{user}")
    for place in words.search_path:
        path.append("hydra.searchpath", place)
    for plugin in Plugins.instance().discover(SearchPathPlugin):
        plugin().manipulate_search_path(path)  # type: ignore[attr-defined]  # `discover` does not say of which kind
    path.append("schema", "structured://")
    return path


# What Hydra does not accept, in the user's terms

_SIZE = "+cluster=<nodes>x<GPUs per node>, e.g. +cluster=4x8"
_NOT_KNOWN_YET = (
    "${{{0}}} is not known when the configuration is composed",
    "refer to something else: a run's path is derived from its configuration, a job id comes later; "
    "${hydra.job.num} is known in a sweep",
)
_SEVERAL = (
    "{0} has several values, and makes a run of each only with -m (--multirun)",
    'add -m; one list or text is quoted: "key=[a,b]", "key=\'a,b\'"',
)
# What Hydra and OmegaConf say about a mistake, and what to say instead; {0} is what the pattern has found.
_SAID: Mapping[str, tuple[str, str]] = {
    r"Missing mandatory value: (hydra\.[\w.]+)": _NOT_KNOWN_YET,
    r"Missing mandatory value: .*?full_key: (\S+)": ("{0} has no value", "set {0}=..."),
    r"Ambiguous value for argument '(.*?)'\n": _SEVERAL,
    r"Sweep parameters '(.*?)' requires --multirun": _SEVERAL,
    r"Sweeping over Hydra's configuration is not supported : '(.*?)'": (
        "{0} sets something of Hydra itself, and has several values",
        "give it one",
    ),
    r"An item is already at '(.*?)'": ("{0} is there already, and + adds a key", "write {0}=VALUE, without the +"),
    r"Error merging override \+?(callbacks|optim\.groups)\b": (
        "{0} is a list of mappings, and was given something else",
        'write "{0}=[{...}]"',
    ),
    r"Environment variable '(\w+)' not found": (
        "${{oc.env:{0}}}: there is no such variable",
        "set it, or give a default: ${oc.env:NAME,default}",
    ),
    r"Unsupported interpolation type (\S+)": (
        "there is no resolver '{0}' for ${{{0}:...}}",
        "register one of your own in a module of a package hydra_plugins, beside your code or installed: "
        "every such module is imported when a configuration is composed",
    ),
    r"Could not find 'hydra/sweeper/(\w+)'": (
        "hydra/sweeper={0}: there is no such sweeper in this environment",
        "install its plugin, e.g. pip install hydra-optuna-sweeper, for the Python of this command",
    ),
    r"Key '(\w+)' not in 'BasicLauncherConf'": (
        "hydra.launcher.{0}: this program launches the runs, not a plugin of Hydra",
        f"drop it: {_SIZE} goes through Slurm, and cluster.* are its settings",
    ),
    r"Could not find 'hydra/launcher/(\w+)'": (
        "hydra/launcher={0}: this program launches the runs, not a plugin of Hydra",
        f"drop it: {_SIZE} goes through Slurm; without it the runs are trained here",
    ),
}
_NO_REFERENCE = re.compile(r"Interpolation key '(.*?)' not found")
_NO_NAME = "Config group override must be a string or a list"
_NUMBER = re.compile(r"null|[-+.\d][\w.+-]*")
# What goes with data that the default model does not take.
_MODEL_FOR = {"digits": "model=cnn; +experiment=digits chooses both"}
# What word processors and web pages make of quotes.
_CURLY = frozenset("\u2018\u2019\u201c\u201d")
_NO_OPTION = re.compile(r"Could not find '([^']+)'(?:.*?Available options in '[^']+':\s*(.*?)\s*Config search)?", re.S)
_NO_KEY = re.compile(r"Could not (?:override|delete)(?: from config)?[. ]*'?([\w./@-]+)'?|Key '([^']+)' is not in")
# What to type for an option of a group that is not there; {0} is the option.
_CHOICES = {
    "cluster": f"write {_SIZE}",
    "site": "on the cluster's login node `python -m slurm_train init {0}` writes it",
    "model": "a class of your own: model._target_={0}",
    "data": "a class of your own: data._target_={0}",
    "optim": "any other by its class: optim._target_=torch.optim.NAdam optim.lr=1e-3",
}


def _explain(err: Exception, *, config: DictConfig, words: Sequence[str]) -> ConfigError:
    """Returns the error to show for an exception of the composition.

    Args:
        err: the exception.
        config: the configuration as it was before the words that failed.
        words: as typed.
    """
    text = str(err)
    if isinstance(err, yaml.YAMLError):
        hint = "put a text with brackets, braces, commas, # or a colon and a blank in quotes"
        return ConfigError(" ".join(text.split()), hint=hint)
    if isinstance(err, OverrideParseException):
        reason = re.sub(r"Error parsing override '.*?'\n|\nSee https.*", "", text, flags=re.DOTALL)
        hint = (
            "quote a value with =, commas, brackets or ${a:${b}} once more inside the shell's quotes: \"key='value'\""
        )
        key = split_word(str(err.override))[1]
        if is_list_of_texts(key):
            hint = (
                "put an item that has quotes, brackets or braces in quotes of its own, inside the shell's: "
                f"\"{key}=[a,'--x={{b: [1]}}']\""
            )
        if not _CURLY.isdisjoint(str(err.override)):
            hint = "these are no quotes to the shell: type plain ones, ' or \""
        return ConfigError(f"{err.override!r} cannot be read: {' '.join(reason.split())}", hint=hint)
    if _NO_NAME in text:
        return _no_name_error(words)
    match = _NO_REFERENCE.search(text)
    if match is not None:
        return _no_reference_error(str(getattr(err, "full_key", "") or ""), match[1], words)
    for pattern, (message, hint) in _SAID.items():
        match = re.search(pattern, text, re.DOTALL)
        if match is not None:
            return ConfigError(message.format(match[1]), hint=hint.replace("{0}", match[1]))
    match = _NO_OPTION.search(text)
    if match is not None:
        group, _, option = match[1].partition("/")
        hints = [_CHOICES.get(group, "").replace("{0}", option), f"there are: {' '.join((match[2] or 'none').split())}"]
        return ConfigError(f"there is no configuration {match[1]!r}", hint="; ".join(filter(None, hints)))
    match = _NO_KEY.search(text)
    if match is not None:
        key = getattr(err, "full_key", None) or match[1] or match[2]
        if key in all_keys(RunConfig) and key.startswith(("cluster.", "container.")):
            return _unasked_section_error(key)
        if key.startswith("hydra."):
            return ConfigError(f"there is no configuration key {key!r}", hint="`--hydra-help` lists what can be set")
        typed = {name: value for _, name, value in map(split_word, words)}
        keys = flat(cast(dict[str, Any], OmegaConf.to_container(config)))
        error = unknown_key_error(key, keys, value=typed.get(key))
        is_open = key.startswith(("model.", "data.")) or (key.startswith("optim.") and not advise(key))
        return ConfigError(error.message, hint=f"{error.hint.rstrip('?')}; +{key}=... adds one") if is_open else error
    return ConfigError(" ".join(text.split("\nConfig search path")[0].split()), hint="`--cfg job` prints every key")


def _no_name_error(words: Sequence[str]) -> ConfigError:
    """Returns the error for a group that was given a number or null, e.g. `optim=5`."""
    typed = [(key, value or "") for _, key, value in map(split_word, words)]
    groups = [(key, value) for key, value in typed if (asset_dir("conf") / key).is_dir() and _NUMBER.fullmatch(value)]
    group, value = groups[0] if groups else ("GROUP", "VALUE")
    options = sorted(file.stem for file in (asset_dir("conf") / group).glob("*.yaml"))
    hint = f"write {_SIZE}" if group == "cluster" else f"there are: {', '.join(options)}"
    return ConfigError(
        f"{group}={value}: a group is chosen by the name of an option, not by a number or null",
        hint=f"{hint}; ~{group} leaves the group out",
    )


def _no_reference_error(key: str, reference: str, words: Sequence[str]) -> ConfigError:
    """Returns the error for a value that refers to a key which is not there, e.g. a model of text with images.

    Args:
        key: the key of the value, e.g. "model.context"; "" where it is not known.
        reference: what it refers to, e.g. "data.context".
        words: as typed.
    """
    hint = "`--cfg job` prints every key"
    if not key:
        return ConfigError(f"${{{reference}}} refers to no key", hint=hint)
    if key.startswith("model.") and reference.startswith("data."):
        typed = {name: value or "" for _, name, value in map(split_word, words)}
        model = _MODEL_FOR.get(typed.get("data", ""), "model=NAME or model._target_=CLASS")
        hint = f"choose a model that fits these data ({model}), or set {key}=VALUE"
    if reference == "SLURM_TRAIN_RUN_DIR":
        hint = "without braces, and in single quotes, it is the directory of the run: '--out=$SLURM_TRAIN_RUN_DIR'"
    return ConfigError(f"{key} is ${{{reference}}}, and there is no {reference}", hint=hint)


def _unasked_section_error(key: str) -> ConfigError:
    section = key.partition(".")[0]
    hint = f"add {_SIZE}" if section == "cluster" else "add container=apptainer, or container=pyxis"
    return ConfigError(f"{key} was set, but the run asks for no {section}", hint=hint)


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
        sign, key, value = split_word(word)
        if value is None or is_one_value(key, value):
            continue
        try:
            (override,) = parser.parse_overrides([f"{sign}{key}={with_quoted_items(key, value)}"])
        except HydraException as err:
            raise ConfigError(
                f"{word!r} cannot be read in a sweep: {' '.join(str(err).splitlines()[0].split())}",
                hint="a text with commas, brackets or blanks is quoted twice there: \"key='a,b'\"",
            ) from err
        if override.is_sweep_override():
            if key in keys:
                raise ConfigError(f"{key} is swept by two words", hint="put all its values into one")
            keys.add(key)
            choices[word] = _values(override)
    count = math.prod(map(len, choices.values()))
    if count > _MOST_POINTS:
        raise ConfigError(f"{count:,} runs in one sweep", hint=f"at most {_MOST_POINTS:,} are taken")
    points = []
    for row in itertools.product(*choices.values()):
        chosen = dict(zip(choices, row, strict=True))
        values = {key: unquoted(value or "") for _, key, value in map(split_word, row)}
        points.append(Point(tuple(chosen.get(word, word) for word in words.overrides), values))
    return points


def unquoted(value: str) -> str:
    """Returns a value without the quotes of Hydra's spelling, e.g. "[train.py,--lr=1]" for "['train.py','--lr=1']"."""
    if _QUOTED_LIST.fullmatch(value):
        return re.sub(
            _QUOTED_ITEM, lambda item: item[0][1:-1] if _NEEDS_NO_QUOTES.fullmatch(item[0]) else item[0], value
        )
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def _values(override: Override) -> list[str]:
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: an interval names no points",
            hint="use range(start,stop,step) or choice(a,b,c), or a sweeper that chooses points: hydra/sweeper=...",
        )
    key = override.get_key_element()
    typed = split_word(str(override.input_line))[2] or ""
    if is_plain_texts(override.key_or_group, typed):
        # Hydra would make 1000.0 of 1e3.
        return [f"{key}={quoted(value.strip())}" for value in typed.split(",")]
    values = [f"{key}={value}" for value in override.sweep_iterator(transformer=spelled)]
    if not values:
        raise ConfigError(f"{override.input_line} gives no value: the sweep is empty", hint="widen it, or drop it")
    return values


def spelled(value: Any) -> str:
    """Returns a value in Hydra's spelling; a text that needs escapes is quoted, which means the same everywhere."""
    escaped = Transformer.str(value)
    return quoted(value) if isinstance(value, str) and escaped != value else str(escaped)


# Words on top of a frozen configuration


def apply_words(config: RunConfig, words: Sequence[str], *, config_dir: str | None = None) -> RunConfig:
    """Returns a frozen configuration with the words' settings in it.

    `cluster=2x8` gives another size to the cluster that the run had; `model=`, `data=`, `optim=` and a cluster of
    another name replace theirs. `site=NAME` moves the run to another cluster: of the old one only the size stays.

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
        settings = [word for word in words if word.startswith(f"{group}.")]
        composed = compose(Words(overrides=[*added, *settings], config_dir=config_dir))
        chosen: dict[str, Any] = to_mapping(getattr(composed.config, group))
        return chosen

    # A group first: settings of its parts are meant for what was chosen.
    for override in sorted(
        overrides, key=lambda override: (*_GROUPS, override.key_or_group).index(override.key_or_group)
    ):
        key = override.key_or_group
        value = override.value()
        cluster = mapping["cluster"]
        if override.is_sweep_override():
            raise ConfigError(f"{key} has several values; a run that exists has one", hint=f"give one: {key}=VALUE")
        if key not in _GROUPS:
            _set(mapping, override)
        elif key not in ("optim", "model", "data") and value in (None, "null"):
            mapping[key] = None
        elif key == "site":
            mapping["site"] = value if cluster is not None else None
            if cluster is not None:
                size = (f"cluster.{name}={cluster[name]}" for name in ("nodes", "gpus_per_node"))
                mapping["cluster"] = choose("cluster", "cluster=1x1", *size, f"site={value}")
        elif key == "cluster":
            sizes = cluster_sizes([f"cluster={value}"])
            if cluster is not None and sizes:
                _, cluster["nodes"], cluster["gpus_per_node"] = sizes[0]
            else:
                mapping["cluster"] = choose("cluster", f"cluster={value}")
        else:
            mapping[key] = choose(key, f"{key}={value}")
    _settle_launch(mapping)
    changed = build_config(RunConfig, mapping)
    _refuse_two_lengths(changed, words)
    return changed


def _set(mapping: dict[str, Any], override: Override) -> None:
    key = override.key_or_group
    *parents, last = key.split(".")
    holder: Any = mapping
    for parent in parents:
        if key.startswith("optim.schedule.") and isinstance(holder.get(parent), str):
            holder[parent] = {}
        holder = holder.get(parent)
        if holder is None:
            hint = f"choose one first, e.g. {'cluster=<nodes>x<GPUs>' if parent == 'cluster' else f'{parent}=NAME'}"
            raise ConfigError(f"{key} was set, but the run has no {parent}", hint=hint)
    if override.is_delete():
        holder.pop(last, None)
    elif last in holder or override.is_add() or override.is_force_add() or _takes_keywords(parents, holder):
        holder[last] = override.value()
    else:
        raise unknown_key_error(key, [".".join([*parents, name]) for name in holder])


def _takes_keywords(parents: Sequence[str], holder: Mapping[str, Any]) -> bool:
    """Returns whether a mapping has the keywords of somebody's own class or function, as where it was first typed."""
    target = str(holder.get("_target_") or "slurm_train.")
    return parents in (["model"], ["data"], ["task"]) and not target.startswith("slurm_train.")


def _unused_keys(full: DictConfig, prepared: Sequence[str]) -> list[str]:
    """Returns the typed keys of the built-in trainer that no other value refers to, as "${optim.lr}" does.

    Args:
        full: the configuration, whose references are not resolved.
        prepared: the words.
    """
    text = str(OmegaConf.to_container(full, resolve=False))
    keys = [split_word(word)[1] for word in prepared]
    sections = {key: key.partition(".")[0] for key in keys}
    return [key for key in keys if sections[key] in _OF_TRAINER and f"${{{sections[key]}" not in text]
