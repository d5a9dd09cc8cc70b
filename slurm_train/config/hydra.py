"""What is done with Hydra's own settings: `hydra.run.dir=...`, `hydra/launcher=basic`, `hydra/sweeper=optuna`, ...

Under Hydra the process that reads the words is the one that trains. Here Slurm starts the ranks on other machines,
perhaps tomorrow, and they read a frozen configuration. So each setting, typed or in a person's own file, is carried out
as under Hydra, or refused with what to type instead (`_RULES` has all of them); none is ignored in silence.

A run directory's own path is derived from what is trained, so that the same words are the same run. What is asked for
with `hydra.run.dir` and its like comes on top of it: a path that leads there, and Hydra's three files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurm_train.config.compose import TASK_NAME, Composed, Composer
from slurm_train.config.explain import launcher_error, launcher_setting_error
from slurm_train.config.frozen import is_below
from slurm_train.config.schema import RunConfig, flat
from slurm_train.config.words import Words, prepare_overrides, split_word
from slurm_train.errors import ConfigError

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_CARRIED_OUT = ("", "")
_LOGGERS = (
    "hydra.{top} sets loggers of Hydra's process; the ranks are others",
    "drop it: what a rank prints is in its log (`logs RUN`), and your code sets its own loggers; "
    "hydra/{top}=disabled is what happens anyway",
)
_FILLED_IN = ("hydra.{key} is filled in, not set", "drop it; ${{hydra.{key}}} refers to it")
# The first that a setting is below counts: message and hint of a refusal, or that it is carried out. A setting that is
# switched off (false, null, empty) is what happens anyway, and is never refused, unless it is filled in.
_RULES: Mapping[str, tuple[str, str]] = {
    "sweeper.max_batch_size": (
        "hydra.sweeper.max_batch_size={value} makes a sweep wait for batch after batch",
        "write sweep.max_parallel={value}: as many at once, with no waiting between",
    ),
    "job.chdir": (
        "hydra.job.chdir=true: the ranks start in the directory that you submit from, and relative paths mean that",
        "drop it, and write by the path that a run has: context.run.path in a task of your own",
    ),
    "job.env_set": (
        "hydra.job.env_set.{names[0]} sets a variable of Hydra's process; the ranks are others",
        "write cluster.env.{names[0]}=VALUE; on this machine: {names[0]}=VALUE in front of the command",
    ),
    "job.env_copy": (
        "hydra.job.env_copy writes variables with their values into the configuration",
        'write "cluster.export=[{listed}]": they travel by name; on this machine the ranks have them anyway',
    ),
    "verbose": (
        "hydra.verbose={value} sets loggers of Hydra's process; the ranks are others",
        "in your code: logging.basicConfig(level=logging.DEBUG), and `logs RUN` shows it; "
        "`--info` says how the configuration is composed",
    ),
    "job_logging": _LOGGERS,
    "hydra_logging": _LOGGERS,
    "callbacks": (
        "hydra.{two} would be called around the job, which Slurm starts elsewhere",
        "drop it, or leave it out with ~hydra.{two}; for the end of a sweep: --wait, then `collate`; what happened to "
        "a run is in its attempts.jsonl and events@*.jsonl",
    ),
    **dict.fromkeys(
        ("job.id", "job.num", "job.override_dirname", "job.config_name", "runtime", "overrides"), _FILLED_IN
    ),
    **dict.fromkeys(("mode", "run", "sweep", "output_subdir", "sweeper", "launcher", "searchpath"), _CARRIED_OUT),
    **dict.fromkeys(("job.name", "job.config"), _CARRIED_OUT),
    # In a file that serves Hydra's own programs as well; a note says that they are unused.
    **dict.fromkeys(("help", "hydra_help"), _CARRIED_OUT),
}
_UNUSED = {"help": "--help", "hydra_help": "--hydra-help"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraSettings:
    """Hydra's own configuration, as the words and a person's own files have it."""

    composer: Composer
    config: DictConfig
    """The whole composition, Hydra's own part included; words with several values are left out."""
    words: Words
    """The words, with what follows from Hydra's settings: several runs, the run's name."""
    given: Mapping[str, Any]
    """What was typed, or is in a file of the person's own, e.g. {"run.dir": "out/${now:%H}"}; unresolved."""
    notes: tuple[str, ...]
    """What is left out, in words."""
    stays_here: bool
    """Whether the basic launcher was asked for by name: here, one run after the other."""

    def compose(self) -> Composed:
        """Returns the configuration of the one run that the words ask for.

        Raises:
            ConfigError: an unknown key, group or value; a launcher and a cluster that do not go together.
        """
        composed = self.composer.compose(self.words.overrides)
        self.refuse_cluster(composed.config)
        return composed

    def compose_points(self, points: Sequence[Sequence[str]], *, first: int = 0) -> Iterator[Composed]:
        """Yields the configuration of each point of a sweep.

        Args:
            points: the words of each point.
            first: the number of the first of them in the sweep.

        Raises:
            ConfigError: as `Composer.compose`.
        """
        return (self.composer.compose(point, number=number) for number, point in enumerate(points, start=first))

    def refuse_cluster(self, config: RunConfig) -> None:
        """Refuses a run that goes through Slurm, or several at a time, where the basic launcher was asked for.

        Raises:
            ConfigError: as said.
        """
        if self.stays_here and config.cluster is not None:
            raise ConfigError(
                "hydra/launcher=basic runs here, but a cluster is asked for",
                hint="drop hydra/launcher=basic to go through Slurm, or +cluster to run here",
            )
        if self.stays_here and (config.sweep.max_parallel or 1) > 1:
            raise ConfigError(
                f"hydra/launcher=basic runs one after the other, but sweep.max_parallel={config.sweep.max_parallel}",
                hint="drop hydra/launcher=basic, or sweep.max_parallel",
            )

    @property
    def sweeper_needs_values(self) -> bool:
        """Whether the sweeper chooses points by what came out of earlier ones."""
        return str(self.config.hydra.sweeper.get("_target_")) != _BASIC_SWEEPER

    @property
    def sweep_words(self) -> Words:
        """The words, with those of `hydra.sweeper.params` in front; the command line wins, as it does in Hydra."""
        params = cast(dict[str, Any], OmegaConf.to_container(self.config.hydra.sweeper, resolve=True)).get("params")
        typed = {split_word(word)[1] for word in self.words.overrides}
        added = [f"{key}={value}" for key, value in (params or {}).items() if str(key).lstrip("+") not in typed]
        return replace(self.words, overrides=[*added, *self.words.overrides])

    @property
    def sweep_arguments(self) -> list[str]:
        """The words that do not speak to Hydra itself, as a sweeper wants them."""
        return prepare_overrides(_task_words(self.words.overrides))

    def fixed_keys(self) -> set[str]:
        """Returns the keys that have one value in all points."""
        parsed = OverridesParser.create().parse_overrides(self.sweep_arguments)
        return {override.key_or_group for override in parsed if not override.is_sweep_override()}

    def drive_sweeper(self, launch: Callable[[list[list[str]]], list[Any]]) -> Any:
        """Lets the sweeper choose its points and returns what it returns.

        Args:
            launch: carries out a batch of points, given by their words, and returns Hydra's JobReturn of each.
        """
        loader = self.composer.hydra.config_loader
        context = HydraContext(config_loader=loader, callbacks=Callbacks(self.config))
        with self.composer.explaining([]):
            sweeper = Plugins.instance().instantiate_sweeper(
                config=self.config, hydra_context=context, task_function=lambda _: None
            )
        # It has made a launcher for itself; some sweepers keep it in a part of theirs.
        for holder in (sweeper, *vars(sweeper).values()):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, Launcher):
                    setattr(holder, name, _Batches(launch))
        # Where a sweeper leaves a file of its own, as under Hydra.
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        return sweeper.sweep(arguments=self.sweep_arguments)


class _Batches(Launcher):
    def __init__(self, launch: Callable[[list[list[str]]], list[Any]]) -> None:
        self._launch = launch

    def setup(self, **_: Any) -> None:
        """Needs nothing."""

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:  # noqa: ARG002  # Hydra's signature
        """Carries out a batch."""
        return self._launch([[str(word) for word in words] for words in job_overrides])


def read_settings(words: Words) -> HydraSettings:
    """Returns what the words and a person's own files say to Hydra itself.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra, with what to type instead.
    """
    composer = Composer(words)
    parts = (split_word(word) for word in words.overrides if _is_to_hydra(word))
    typed = {key[len("hydra.") :]: value for _, key, value in parts}
    _refuse_typed(typed)
    prepared = prepare_overrides(words.overrides)
    with composer.explaining(prepared):
        config, is_multirun = _compose(composer, prepared)
        given = _given(composer, config, typed)
    choices = dict(config.hydra.runtime.choices)
    if (launcher := choices.get("hydra/launcher")) != "basic":
        raise launcher_error(str(launcher), {})
    # Hydra has filled env_set with the variables of env_copy.
    for key in sorted(given, key=lambda key: key != "job.env_copy"):
        _refuse(key, given[key], choices)
    for key in ("run.dir",) if is_multirun else ("sweep.dir", "sweep.subdir"):
        if key in typed:
            whose, hint = "a sweep", "add -m for a sweep, or write hydra.run.dir=DIR"
            if is_multirun:
                whose, hint = "one run", "write hydra.sweep.dir=DIR, and hydra.sweep.subdir=NAME for each run below it"
            raise ConfigError(f"hydra.{key} is about {whose}", hint=hint)
    unused = [name for name in _UNUSED if any(is_below(key, name) for key in given)]
    overrides = list(words.overrides)
    if (name := given.get("job.name")) is not None and all(split_word(word)[1] != "run.name" for word in overrides):
        overrides.append(f"run.name={name}")
    return HydraSettings(
        composer=composer,
        config=config,
        words=replace(words, overrides=overrides, multirun=is_multirun),
        given=given,
        notes=tuple(f"hydra.{name} is not used: {_UNUSED[name]} is this program's own" for name in unused),
        stays_here="launcher" in typed,
    )


def _is_to_hydra(word: str) -> bool:
    return split_word(word)[1].startswith(("hydra.", "hydra/"))


def _task_words(words: Iterable[str]) -> list[str]:
    return [word for word in words if not _is_to_hydra(word)]


def _refuse_typed(typed: Mapping[str, str | None]) -> None:
    """Refuses what Hydra itself would stumble over, or refuse for reasons of its own."""
    for key, value in typed.items():
        if any(is_below(key, name) for name in ("job.env_set", "job.env_copy", "callbacks")):
            _refuse(key, yaml.safe_load(value or "null"), {})
    # A plugin that is not installed has no options to choose from.
    given = {key.removeprefix("launcher."): value or "" for key, value in typed.items() if key.startswith("launcher.")}
    if (name := typed.get("launcher", "basic")) not in ("basic", None):
        raise launcher_error(str(name), given)
    for key, value in given.items():
        raise launcher_setting_error(key, value)


def _refuse(key: str, value: Any, choices: Mapping[str, Any]) -> None:
    """Refuses a setting unless it does here what it does under Hydra, or is what happens anyway.

    Args:
        key: without "hydra.", e.g. "job.chdir".
        value: what it is set to.
        choices: the chosen option of each of Hydra's groups, e.g. {"hydra/launcher": "basic"}.
    """
    rule = next((name for name in _RULES if is_below(key, name)), None)
    if rule is None:
        hint = "drop it; `--hydra-help` lists what Hydra's settings do here"
        raise ConfigError(f"hydra.{key} has no meaning here", hint=hint)
    is_off = not value and _RULES[rule] is not _FILLED_IN
    is_off = is_off or (_RULES[rule] is _LOGGERS and choices.get(f"hydra/{rule}") in ("disabled", "none"))
    is_off = is_off or (rule == "sweeper.max_batch_size" and choices.get("hydra/sweeper") != "basic")
    message, hint = _RULES[rule]
    if is_off or not message:
        return
    parts = key.split(".")
    names = list(value) if isinstance(value, Mapping) else [parts[-1]]
    texts = {
        "key": key,
        "top": parts[0],
        "two": ".".join(parts[:2]),
        "value": str(value).lower() if isinstance(value, bool) else value,
        "names": names,
        "listed": ",".join(map(str, value)) if isinstance(value, list) else value,
    }
    raise ConfigError(message.format(**texts), hint=hint.format(**texts))


def _compose(composer: Composer, prepared: list[str]) -> tuple[DictConfig, bool]:
    """Returns what is common to all runs, and whether it is a sweep: the flag, a setting or a file may say so."""
    parsed = OverridesParser.create().parse_overrides(prepared)
    groups, _ = composer.split(parsed)
    is_multirun = composer.words.multirun
    mode = RunMode.MULTIRUN if is_multirun or any(one.is_sweep_override() for one in parsed) else RunMode.RUN
    try:
        config = composer.base(groups, mode=mode).whole
    except ConfigCompositionException:
        # Hydra refuses a group without an option, which the points of a sweep may choose.
        config = composer.base(groups, mode=RunMode.MULTIRUN).whole
        if config.hydra.mode != RunMode.MULTIRUN:
            raise
    is_multirun = is_multirun or config.hydra.mode == RunMode.MULTIRUN
    mode = RunMode.MULTIRUN if is_multirun else RunMode.RUN
    ConfigLoaderImpl.validate_sweep_overrides_legal(overrides=parsed, run_mode=mode, from_shell=True)
    return config, is_multirun


def _given(composer: Composer, config: DictConfig, typed: Mapping[str, str | None]) -> dict[str, Any]:
    """Returns what differs from Hydra's own defaults and from the shipped ones, and what was typed."""
    words = composer.words
    has_own_files = bool(words.config_path or words.config_dir or words.search_path)
    if not typed and not has_own_files:
        return {}
    node = _plain(config)
    given: dict[str, Any] = {}
    if has_own_files:
        stock = _plain(composer.hydra.config_loader.load_configuration(None, [], run_mode=RunMode.RUN))
        shipped = {"run.dir": ".", "output_subdir": None}
        given = {
            key: value
            for key, value in node.items()
            if not any(is_below(key, name) for name, rule in _RULES.items() if rule is _FILLED_IN or name == "job.name")
            and value != stock.get(key)
            and (key, value) not in shipped.items()
        }
        if node["job.name"] != TASK_NAME:
            given["job.name"] = node["job.name"]
    return given | {key: value for key, value in node.items() if any(is_below(key, name) for name in typed)}


def _plain(config: DictConfig) -> dict[str, Any]:
    return flat(cast(dict[str, Any], OmegaConf.to_container(config.hydra, resolve=False)))


# Where Hydra's words want runs to be found


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRun:
    """One run, as far as Hydra's words may refer to it."""

    number: int | None
    """Its place in the sweep, Hydra's job number; None where there is no sweep."""
    words: Sequence[str]
    """The words of its command line."""
    mapping: Mapping[str, Any]
    """Its configuration, resolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one run shall have besides its own directory."""

    path: str | None
    """A path that shall lead to it, as typed: relative to where the words were typed."""
    folder: str | None
    """The name of a folder in the run directory for `files`."""
    files: Mapping[str, str]
    """Hydra's files by name, e.g. {"overrides.yaml": "- seed=1\\n"}."""


def read_outputs(settings: HydraSettings, runs: Sequence[AskedRun]) -> list[Output]:
    """Returns what is asked for each run; empty where nothing is.

    Raises:
        ConfigError: a path that is not known before the run is there, or a folder that is the run's own.
    """
    keys = ("sweep.dir", "sweep.subdir") if settings.words.multirun else ("run.dir",)
    wants_path = any(key in settings.given for key in keys)
    folder = settings.given.get("output_subdir")
    if folder is not None and ("/" in folder or not folder.startswith(".") or folder in (".", "..")):
        raise ConfigError(
            f"hydra.output_subdir={folder}: the run directory has names of its own",
            hint="give it a name that begins with a dot, e.g. hydra.output_subdir=.hydra",
        )
    if folder is None and not wants_path:
        return []
    node = cast(dict[str, Any], OmegaConf.to_container(settings.config.hydra, resolve=False))
    before, outputs = settings.config, []
    for run in runs:
        own, tasks, shape = copy.deepcopy(node), _task_words(run.words), node["job"]["config"]["override_dirname"]
        kept = sorted(word for word in tasks if split_word(word)[1] not in shape["exclude_keys"])
        own["job"]["override_dirname"] = str(shape["item_sep"]).join(kept).replace("=", str(shape["kv_sep"]))
        own["overrides"]["task"] = tasks
        if run.number is not None:
            own["job"]["num"] = run.number
        whole = OmegaConf.create({**run.mapping, "hydra": own})
        # One moment for all runs of a sweep: ${now:...} is not asked twice.
        OmegaConf.copy_cache(from_config=before, to_config=whole)
        before = whole
        texts: dict[str, Any] = {
            "config.yaml": dict(run.mapping),
            "hydra.yaml": {"hydra": own},
            "overrides.yaml": tasks,
        }
        files = {name: OmegaConf.to_yaml(OmegaConf.create(value)) for name, value in texts.items()}
        path = _path(whole, keys) if wants_path else None
        outputs.append(Output(path=path, folder=folder, files={} if folder is None else files))
    return outputs


def _path(whole: DictConfig, keys: Sequence[str]) -> str:
    HydraConfig.instance().cfg = whole  # type: ignore[assignment]  # Hydra itself puts a DictConfig there
    try:
        return "/".join(str(OmegaConf.select(whole, f"hydra.{key}", throw_on_missing=True)) for key in keys)
    except OmegaConfBaseException as err:
        asked = ", ".join(f"hydra.{key}" for key in keys)
        raise ConfigError(
            f"{asked} is not known before the run is there: {str(err).splitlines()[0]}",
            hint="${now:...}, ${hydra.job.override_dirname}, any key of the run and, in a sweep, ${hydra.job.num} are",
        ) from err
    finally:
        HydraConfig.instance().cfg = None
