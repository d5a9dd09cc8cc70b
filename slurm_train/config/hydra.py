"""Hydra's own settings: `hydra/sweeper=optuna`, `hydra.searchpath=[...]`, `hydra.run.dir=...` and the like.

Under Hydra the process that reads the command line also trains. Here Slurm starts the ranks later, on other machines,
and they read a frozen configuration. So a setting, typed or in a person's own file, works as under Hydra (`_WORKING`),
or is refused with what to type instead (`_REFUSED`), or is ignored with a message (`_IGNORED`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from slurm_train.config.compose import TASK_NAME, Composed, Composer
from slurm_train.config.frozen import NOT_IDENTITY, is_below
from slurm_train.config.schema import flat
from slurm_train.config.words import Words, prepare_overrides, split_word
from slurm_train.errors import ConfigError, StudyError

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_WORKING = ("mode", "sweeper", "searchpath", "job.name", "job.config")
_IGNORED: Mapping[str, str] = {
    # In a file that serves programs of Hydra as well.
    "help": "--help is this program's own",
    "hydra_help": "--hydra-help is this program's own",
    "launcher": "runs go to Slurm with +cluster=NxG, and are trained here without it",
}
_RUN_PATH = (
    "{name}: the path of a run follows from what it trains, so that the same words find it again",
    "write run.root=DIR to keep runs elsewhere, run.name=NAME to name them; `status` lists their paths",
)
_LOGGERS = (
    "{name} configures loggers of Hydra's process, and the ranks are other processes",
    "configure loggers in your code, e.g. logging.basicConfig(level=logging.DEBUG); `logs RUN` shows what ranks print",
)
_FILLED_IN = (
    "{name} is filled in by Hydra, and cannot be set",
    "drop it; ${{{name}}} refers to its value",
)
_REFUSED: Mapping[str, tuple[str, str]] = {
    "run": _RUN_PATH,
    "sweep": _RUN_PATH,
    "output_subdir": (
        "hydra.output_subdir: the run directory has config.yaml, and the command line in provenance.json",
        "drop it",
    ),
    "launcher": (
        "{name}={value}: this program launches the runs, not a plugin of Hydra",
        "+cluster=NODESxGPUS submits to Slurm, and cluster.* are its settings; without a cluster the runs are trained "
        "here, sweep.max_parallel=N of them at a time",
    ),
    "job.chdir": (
        "hydra.job.chdir=true: the ranks start in the directory that you submit from, and paths are relative to it",
        "drop it; a task of your own finds its run directory in context.run.path",
    ),
    # Before env_set, which Hydra fills with these variables.
    "job.env_copy": (
        "hydra.job.env_copy writes variables with their values into the configuration, got {value}",
        'write "cluster.export=[NAME,...]": they travel by name; on this machine the ranks have them anyway',
    ),
    "job.env_set": (
        "{name} sets a variable of Hydra's process, and the ranks are other processes",
        "write cluster.env.NAME=VALUE; on this machine: NAME=VALUE in front of the command",
    ),
    "verbose": _LOGGERS,
    "job_logging": _LOGGERS,
    "hydra_logging": _LOGGERS,
    "callbacks": (
        "{name} would be called around the job, which Slurm starts elsewhere",
        "drop it, or write ~hydra.callbacks.NAME; at the end of a sweep: --wait, then `collate`",
    ),
    "job.id": _FILLED_IN,
    "job.num": _FILLED_IN,
    "job.override_dirname": _FILLED_IN,
    "job.config_name": _FILLED_IN,
    "runtime": _FILLED_IN,
    "overrides": _FILLED_IN,
}
_REFUSED_GROUPS = ("launcher", "job_logging", "hydra_logging")
# What happens anyway, as text. A setting with one of these values is not refused.
_DEFAULTS = ("", "none", "null", "false", "[]", "{}", ".", "basic", "disabled")
# What hydra-optuna-sweeper calls how many points there are, how many at once, and how many of them may fail.
_NUMBERS_OF_POINTS = ("n_trials", "n_jobs", "max_failure_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraSettings:
    """Hydra's own configuration, as the words and a person's own files have it."""

    composer: Composer
    config: DictConfig
    """The whole composition, Hydra's own part included; words with several values are left out."""
    words: Words
    """The words, with what follows from Hydra's settings: several runs, the run's name."""
    notes: tuple[str, ...]
    """What is ignored or filled in, in words."""
    in_files: Mapping[str, Any]
    """What a person's own files set of Hydra, without "hydra." in the keys."""

    def compose(self) -> Composed:
        """Returns the configuration of the one run that the command line describes.

        Raises:
            ConfigError: an unknown key, group or value.
        """
        return self.composer.compose(self.words.overrides)

    def compose_points(self, points: Sequence[Sequence[str]], *, first: int = 0) -> Iterator[Composed]:
        """Yields the configuration of each point of a sweep.

        Args:
            points: the words of each point.
            first: the number of the first of them in the sweep.

        Raises:
            ConfigError: as `Composer.compose`.
        """
        seen = set[str]()
        for number, point in enumerate(points, start=first):
            composed = self.composer.compose(point, number=number)
            choices = json.dumps(composed.choices, sort_keys=True)
            if choices not in seen:
                seen.add(choices)
                self._refuse_in_chosen_files(point)
            yield composed

    def _refuse_in_chosen_files(self, point: Sequence[str]) -> None:
        """Refuses what a file that the sweep itself chooses sets of Hydra, which is read before there is a sweep."""
        with self.composer.explaining():
            groups, _ = self.composer.split(self.composer.parse(prepare_overrides(point)))
            settings = _set_in_files(self.composer, self.composer.base(groups), _typed_settings(self.words.overrides))
        _refuse(settings)
        for key, value in settings.items():
            is_read = any(is_below(key, name) for name in ("mode", *_IGNORED)) or self.in_files.get(key) == value
            if not is_read:
                raise ConfigError(
                    f"hydra.{key} is set in a file that the sweep chooses, and is read before the sweep begins",
                    hint="choose that file alone (-m +experiment=NAME), or set it in the primary file or as a word",
                )

    @property
    def sweeper_needs_values(self) -> bool:
        """Whether the sweeper chooses points by what came out of earlier ones."""
        return str(self.config.hydra.sweeper.get("_target_")) != _BASIC_SWEEPER

    @property
    def study_id(self) -> str:
        """The id of the sweep of such a sweeper: the same for each batch, and when the words are typed again.

        Where and how the points are trained does not count, nor how many there are and how many at once: more of them
        go into the same sweep.
        """
        carried = [name for name in NOT_IDENTITY if name != "run"]
        words = []
        for word in self.sweep_arguments:
            _, key, value = split_word(word)
            if not any(is_below(key, name) for name in carried):
                words.append(f"{key}={value}")
        sweeper = flat(cast(dict[str, Any], OmegaConf.to_container(self.config.hydra.sweeper, resolve=True)))
        settings = {key: value for key, value in sweeper.items() if key not in _NUMBERS_OF_POINTS}
        identity = json.dumps([sorted(words), settings], sort_keys=True, default=str)
        return hashlib.sha256(identity.encode()).hexdigest()[:8]

    @property
    def sweep_words(self) -> Words:
        """The words, with those of `hydra.sweeper.params` in front; the command line wins, as it does in Hydra."""
        params = cast(dict[str, Any], OmegaConf.to_container(self.config.hydra.sweeper, resolve=True)).get("params")
        typed = {split_word(word)[1] for word in self.words.overrides}
        added = [f"{key}={value}" for key, value in (params or {}).items() if str(key).lstrip("+") not in typed]
        return replace(self.words, overrides=[*added, *self.words.overrides])

    @property
    def sweep_arguments(self) -> list[str]:
        """The words that do not set Hydra itself, as a sweeper wants them."""
        return prepare_overrides([word for word in self.words.overrides if not _is_to_hydra(word)])

    def fixed_keys(self) -> set[str]:
        """Returns the keys that have one value in all points."""
        parsed = self.composer.parse(self.sweep_arguments)
        return {override.key_or_group for override in parsed if not override.is_sweep_override()}

    def drive_sweeper(self, launch: Callable[[list[list[str]]], list[Any]]) -> Any:
        """Lets the sweeper choose its points and returns what it returns.

        Args:
            launch: carries out a batch of points, given by their words, and returns Hydra's JobReturn of each.

        Raises:
            StudyError: what the sweeper has raised, e.g. that all points have failed.
        """
        loader = self.composer.hydra.config_loader
        context = HydraContext(config_loader=loader, callbacks=Callbacks(self.config))
        with self.composer.explaining():
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
        with _showing_log():
            try:
                return sweeper.sweep(arguments=self.sweep_arguments)
            except ValueError as err:
                raise StudyError(f"the sweeper gave up: {err}", hint="`status` shows how its runs have ended") from err


@contextmanager
def _showing_log() -> Iterator[None]:
    """Prints to stderr what a sweeper has to say, the best point in the end; Hydra's own logging is not set up here."""
    log = logging.getLogger("hydra_plugins")
    handler = logging.StreamHandler(sys.stderr)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Batches(Launcher):
    def __init__(self, launch: Callable[[list[list[str]]], list[Any]]) -> None:
        self._launch = launch

    def setup(self, **_: Any) -> None:
        """Needs nothing."""

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:  # noqa: ARG002  # Hydra's signature
        """Carries out a batch."""
        return self._launch([[str(word) for word in words] for words in job_overrides])


def read_settings(words: Words) -> HydraSettings:
    """Returns what the words and a person's own files set of Hydra itself.

    Raises:
        ConfigError: a setting that cannot work here as it does under Hydra, with what to type instead.
    """
    composer = Composer(words)
    typed = _typed_settings(words.overrides)
    # Before Hydra composes: it does not know options of plugins that are not installed.
    _refuse(typed)
    with composer.explaining():
        config, is_multirun = _compose(composer, prepare_overrides(words.overrides))
        file_settings = _set_in_files(composer, config, typed)
    _refuse(file_settings)
    _refuse_batches(config)
    _refuse_several_objectives(config)
    notes = []
    for name, reason in _IGNORED.items():
        if any(is_below(key, name) for key in (*typed, *file_settings)):
            notes.append(f"hydra.{name} is not used: {reason}")
    notes += _seed_sweeper(config, typed)
    overrides = list(words.overrides)
    job_name = _plain(config)["job.name"]
    if job_name != TASK_NAME and all(split_word(word)[1] != "run.name" for word in overrides):
        overrides.append(f"run.name={job_name}")
    return HydraSettings(
        composer=composer,
        config=config,
        words=replace(words, overrides=overrides, multirun=is_multirun),
        notes=tuple(notes),
        in_files=file_settings,
    )


def _typed_settings(words: Sequence[str]) -> dict[str, str]:
    """Returns what words set of Hydra itself, e.g. {"job.chdir": "true"}; "sweeper.sampler" for a group below one."""
    parts = [split_word(word) for word in words if _is_to_hydra(word)]
    return {key[len("hydra.") :].replace("/", "."): value or "" for _, key, value in parts}


def _is_to_hydra(word: str) -> bool:
    return split_word(word)[1].startswith(("hydra.", "hydra/"))


def _refuse(settings: Mapping[str, Any]) -> None:
    """Refuses settings that do not work here, in the order of the table.

    Args:
        settings: keys without "hydra.", e.g. {"job.chdir": "true"}.
    """
    for name, (message, hint) in _REFUSED.items():
        for key, value in settings.items():
            if is_below(key, name) and str(value).lower() not in _DEFAULTS:
                typed_name = f"hydra/{key}" if key in _REFUSED_GROUPS else f"hydra.{key}"
                texts = {"name": typed_name, "value": value}
                raise ConfigError(message.format(**texts), hint=hint.format(**texts))
    for key in settings:
        if not any(is_below(key, name) for name in (*_WORKING, *_IGNORED, *_REFUSED)):
            hint = "drop it; `--hydra-help` lists what Hydra's settings do here"
            raise ConfigError(f"hydra.{key} has no meaning here", hint=hint)


def _refuse_batches(config: DictConfig) -> None:
    """Refuses to let the basic sweeper wait for batch after batch; other sweepers use the number themselves."""
    sweeper = config.hydra.sweeper
    if sweeper.get("_target_") == _BASIC_SWEEPER and sweeper.get("max_batch_size"):
        raise ConfigError(
            f"hydra.sweeper.max_batch_size={sweeper.max_batch_size} makes a sweep wait for batch after batch",
            hint=f"write sweep.max_parallel={sweeper.max_batch_size}: as many at once, with no waiting between",
        )


def _refuse_several_objectives(config: DictConfig) -> None:
    """Refuses a study of several values: a run gives one."""
    directions = config.hydra.sweeper.get("direction")
    if isinstance(directions, Sequence) and not isinstance(directions, str) and len(directions) > 1:
        raise ConfigError(
            f"hydra.sweeper.direction={OmegaConf.to_container(directions)} asks for several values of a run",
            hint="a run gives the one that sweep.objective names: give one direction",
        )


def _compose(composer: Composer, prepared: list[str]) -> tuple[DictConfig, bool]:
    """Returns what is common to all runs, and whether it is a sweep: the flag, a setting or a file may say so."""
    parsed = composer.parse(prepared)
    groups, _ = composer.split(parsed)
    is_multirun = composer.words.multirun
    mode = RunMode.MULTIRUN if is_multirun or any(override.is_sweep_override() for override in parsed) else RunMode.RUN
    try:
        config = composer.base(groups, mode=mode)
    except ConfigCompositionException:
        # Hydra refuses a group without an option, which the points of a sweep may choose.
        config = composer.base(groups, mode=RunMode.MULTIRUN)
        if config.hydra.mode != RunMode.MULTIRUN:
            raise
    is_multirun = is_multirun or config.hydra.mode == RunMode.MULTIRUN
    mode = RunMode.MULTIRUN if is_multirun else RunMode.RUN
    ConfigLoaderImpl.validate_sweep_overrides_legal(overrides=parsed, run_mode=mode, from_shell=True)
    return config, is_multirun


def _set_in_files(composer: Composer, config: DictConfig, typed: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a person's own files set of Hydra, e.g. {"run.dir": "out/${now:%H}"}; unresolved."""
    if not composer.has_own_files:
        return {}
    stock = _plain(composer.hydra.config_loader.load_configuration(None, [], run_mode=RunMode.RUN))
    filled_in = [name for name, rule in _REFUSED.items() if rule is _FILLED_IN]
    settings = {}
    for key, value in _plain(config).items():
        is_typed = any(is_below(key, name) for name in typed)
        is_filled_in = any(is_below(key, name) for name in filled_in)
        if value != stock.get(key) and not is_typed and not is_filled_in:
            settings[key] = value
    return settings


def _seed_sweeper(config: DictConfig, typed: Mapping[str, str]) -> list[str]:
    """Fills in the seed of a sweeper that has none, and returns it in words: the same words choose the same points."""
    names = [key for key, value in _plain(config).items() if is_below(key, "sweeper") and value is None]
    names = [key for key in names if key.rpartition(".")[2] == "seed" and key not in typed]
    for name in names:
        OmegaConf.update(config.hydra, name, 0)
    return [f"hydra.{name}=0 is filled in: the same words choose the same points" for name in names]


def _plain(config: DictConfig) -> dict[str, Any]:
    return flat(cast(dict[str, Any], OmegaConf.to_container(config.hydra, resolve=False)))
