"""What is done with Hydra's own settings: `hydra.run.dir=...`, `hydra/launcher=basic`, `hydra/sweeper=optuna`, ...

Under Hydra the process that reads the words is the one that trains. Here Slurm starts the ranks on other machines,
perhaps tomorrow, and they read a frozen configuration. So each setting, typed or in a person's own file, is carried out
as under Hydra, or refused with what to type instead (`_RULES` has all of them); none is ignored in silence.

A run directory's own path is derived from what is trained, so that the same words are the same run. What is asked for
with `hydra.run.dir` and its like comes on top of it: a path that leads there, and Hydra's three files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurm_train.config.compose import TASK_NAME, Composed, Composer
from slurm_train.config.frozen import NOT_IDENTITY, is_below
from slurm_train.config.schema import RunConfig, flat, to_mapping
from slurm_train.config.words import Words, prepare_overrides, split_word
from slurm_train.errors import ConfigError, require_all
from slurm_train.frozen_class import frozen

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_CARRIED_OUT = ("", "")
_LOGGERS = (
    "hydra.{key} sets loggers of Hydra's process; the ranks are others",
    "drop it: what a rank prints is in its log (`logs RUN`), and your code sets its own loggers; "
    "hydra/job_logging=disabled and hydra/hydra_logging=disabled are what happens anyway",
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
        "hydra.{key} sets a variable of Hydra's process; the ranks are others",
        "write cluster.env.NAME=VALUE; on this machine: NAME=VALUE in front of the command",
    ),
    "job.env_copy": (
        "hydra.job.env_copy writes variables with their values into the configuration, got {value}",
        'write "cluster.export=[NAME,...]": they travel by name; on this machine the ranks have them anyway',
    ),
    "verbose": (
        "hydra.verbose sets loggers of Hydra's process; the ranks are others",
        "in your code: logging.basicConfig(level=logging.DEBUG), and `logs RUN` shows it; "
        "`--info` says how the configuration is composed",
    ),
    "job_logging": _LOGGERS,
    "hydra_logging": _LOGGERS,
    "callbacks": (
        "hydra.{key} would be called around the job, which Slurm starts elsewhere",
        "drop it, or leave it out with ~hydra.callbacks.NAME; for the end of a sweep: --wait, then `collate`; what "
        "happened to a run is in its attempts.jsonl and events@*.jsonl",
    ),
    **dict.fromkeys(
        ("job.id", "job.num", "job.override_dirname", "job.config_name", "runtime", "overrides"), _FILLED_IN
    ),
    **dict.fromkeys(("mode", "run", "sweep", "output_subdir", "sweeper", "launcher", "searchpath"), _CARRIED_OUT),
    **dict.fromkeys(("job.name", "job.config"), _CARRIED_OUT),
    # In a file that serves Hydra's own programs as well; a note says that they are unused.
    **dict.fromkeys(("help", "hydra_help"), _CARRIED_OUT),
}
# What hydra-optuna-sweeper calls how many points there are, how many at once, and how many of them may fail.
_NUMBERS_OF_POINTS = ("n_trials", "n_jobs", "max_failure_rate")
_UNUSED = {"help": "--help", "hydra_help": "--hydra-help"}
# What hydra-submitit-launcher and hydra-joblib-launcher call a setting, and what it is called here; "" for what this
# program decides itself.
_LAUNCHER_SETTINGS = {
    "timeout_min": "cluster.time_limit_min={}",
    "cpus_per_task": "cluster.cpus_per_gpu={}",
    "mem_gb": "cluster.memory_gb_per_node={}",
    "name": "run.name={}",
    "array_parallelism": "sweep.max_parallel={}",
    "n_jobs": "sweep.max_parallel={}",
    "srun_args": "cluster.srun.FLAG=VALUE",
    **{key: f"cluster.{key}={{}}" for key in ("partition", "account", "qos", "constraint", "exclude", "setup")},
    **dict.fromkeys(("nodes", "gpus_per_node", "tasks_per_node"), ""),
    **dict.fromkeys(("submitit_folder", "max_num_timeout", "stderr_to_stdout", "_target_"), ""),
}


@frozen
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
    """What is left out or filled in, in words."""
    stays_here: bool
    """Whether the basic launcher was asked for by name: here, one run after the other."""

    def compose(self) -> Composed:
        """Returns the configuration of the one run that the command line describes.

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
        at_once, name = config.sweep.max_parallel or 1, "hydra/launcher=basic"
        require_all(
            [
                (
                    self.stays_here and config.cluster is not None,
                    f"{name} runs here, but a cluster is asked for",
                    f"drop {name} to go through Slurm, or +cluster to run here",
                ),
                (
                    self.stays_here and at_once > 1,
                    f"{name} runs one after the other, but sweep.max_parallel={at_once}",
                    f"drop {name}, or sweep.max_parallel",
                ),
            ]
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
        parts = [split_word(word) for word in self.sweep_arguments]
        words = sorted(f"{key}={value}" for _, key, value in parts if not any(is_below(key, name) for name in carried))
        sweeper = flat(cast(dict[str, Any], OmegaConf.to_container(self.config.hydra.sweeper, resolve=True)))
        settings = {key: value for key, value in sweeper.items() if key not in _NUMBERS_OF_POINTS}
        return hashlib.sha256(json.dumps([words, settings], sort_keys=True, default=str).encode()).hexdigest()[:8]

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
        parsed = self.composer.parse(self.sweep_arguments)
        return {override.key_or_group for override in parsed if not override.is_sweep_override()}

    def drive_sweeper(self, launch: Callable[[list[list[str]]], list[Any]]) -> Any:
        """Lets the sweeper choose its points and returns what it returns.

        Args:
            launch: carries out a batch of points, given by their words, and returns Hydra's JobReturn of each.
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
    """Returns what the words and a person's own files set of Hydra itself.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra, with what to type instead.
    """
    composer = Composer(words)
    parts = (split_word(word) for word in words.overrides if _is_to_hydra(word))
    typed = {key[len("hydra.") :]: value or "" for _, key, value in parts}
    _refuse_typed(typed)
    with composer.explaining():
        config, is_multirun = _compose(composer, prepare_overrides(words.overrides))
        given = _given(composer, config, typed)
    choices = dict(config.hydra.runtime.choices)
    if choices.get("hydra/launcher") != "basic":
        raise _launcher_error(str(choices.get("hydra/launcher")), {})
    # Hydra has filled env_set with the variables of env_copy.
    for key in sorted(given, key=lambda key: key != "job.env_copy"):
        _refuse(key, given[key], choices)
    for key in ("run.dir",) if is_multirun else ("sweep.dir", "sweep.subdir"):
        if key in typed:
            what, other = ("one run", "hydra.sweep.dir=DIR") if is_multirun else ("a sweep", "hydra.run.dir=DIR")
            raise ConfigError(f"hydra.{key} is about {what}", hint=f"write {other}; a sweep is asked for with -m")
    unused = [name for name in _UNUSED if any(is_below(key, name) for key in given)]
    notes = [f"hydra.{name} is not used: {_UNUSED[name]} is this program's own" for name in unused]
    notes += _seed_sweeper(config, typed)
    overrides = list(words.overrides)
    if (name := given.get("job.name")) is not None and all(split_word(word)[1] != "run.name" for word in overrides):
        overrides.append(f"run.name={name}")
    return HydraSettings(
        composer=composer,
        config=config,
        words=replace(words, overrides=overrides, multirun=is_multirun),
        given=given,
        notes=tuple(notes),
        stays_here="launcher" in typed,
    )


def _is_to_hydra(word: str) -> bool:
    return split_word(word)[1].startswith(("hydra.", "hydra/"))


def _task_words(words: Iterable[str]) -> list[str]:
    return [word for word in words if not _is_to_hydra(word)]


def _refuse_typed(typed: Mapping[str, str]) -> None:
    """Refuses what Hydra itself would not compose, such as options of a plugin that is not installed."""
    launcher = typed.get("launcher", "basic")
    settings = {key.removeprefix("launcher."): value for key, value in typed.items() if key.startswith("launcher.")}
    if settings or launcher not in ("basic", ""):
        raise _launcher_error(launcher, settings)
    for key, value in typed.items():
        if key.startswith(("job.env_set", "job.env_copy", "callbacks.")):
            _refuse(key, yaml.safe_load(value), {})


def _launcher_error(name: str, settings: Mapping[str, str]) -> ConfigError:
    """Returns the error for a launcher of Hydra's, with the words that do the same here.

    Args:
        name: its option, e.g. "submitit_slurm".
        settings: what was given to it, e.g. {"timeout_min": "60", "additional_parameters.mail-type": "END"}.
    """
    per_node = settings.get("gpus_per_node") or settings.get("tasks_per_node", "1")
    words = [f"+cluster={settings.get('nodes', '1')}x{per_node}"] if name == "submitit_slurm" else []
    for key, value in settings.items():
        flag = f"cluster.sbatch.{key.rpartition('.')[2].replace('_', '-')}={{}}"
        words.append(_LAUNCHER_SETTINGS.get(key, flag).format(value))
    instead = f"write {' '.join(filter(None, words))} instead" if words else "drop it"
    return ConfigError(
        f"hydra/launcher={name}: the runs are launched by this program, not by a plugin",
        hint=f"{instead}; +cluster=NODESxGPUS goes through Slurm, without it the runs are trained here, "
        "sweep.max_parallel=N of them at a time",
    )


def _refuse(key: str, value: Any, choices: Mapping[str, Any]) -> None:
    """Refuses a setting unless it does here what it does under Hydra, or is what happens anyway.

    Args:
        key: without "hydra.", e.g. "job.chdir".
        value: what it is set to.
        choices: the chosen option of each of Hydra's groups, e.g. {"hydra/launcher": "basic"}.
    """
    name = next((name for name in _RULES if is_below(key, name)), None)
    if name is None:
        hint = "drop it; `--hydra-help` lists what Hydra's settings do here"
        raise ConfigError(f"hydra.{key} has no meaning here", hint=hint)
    message, hint = _RULES[name]
    is_off = (
        (not value and _RULES[name] is not _FILLED_IN)
        or (_RULES[name] is _LOGGERS and choices.get(f"hydra/{name}") in ("disabled", "none"))
        or (name == "sweeper.max_batch_size" and choices.get("hydra/sweeper") != "basic")
    )
    if message and not is_off:
        raise ConfigError(message.format(key=key, value=value), hint=hint.format(key=key, value=value))


def _compose(composer: Composer, prepared: list[str]) -> tuple[DictConfig, bool]:
    """Returns what is common to all runs, and whether it is a sweep: the flag, a setting or a file may say so."""
    parsed = composer.parse(prepared)
    groups, _ = composer.split(parsed)
    is_multirun = composer.words.multirun
    mode = RunMode.MULTIRUN if is_multirun or any(one.is_sweep_override() for one in parsed) else RunMode.RUN
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


def _given(composer: Composer, config: DictConfig, typed: Mapping[str, str]) -> dict[str, Any]:
    """Returns what was typed, and what a person's own files set to other values than Hydra and the shipped ones."""
    if not typed and not composer.has_own_files:
        return {}
    node, given = _plain(config), dict[str, Any]()
    if composer.has_own_files:
        stock = _plain(composer.hydra.config_loader.load_configuration(None, [], run_mode=RunMode.RUN))
        stock |= {"job.name": TASK_NAME}
        filled = [name for name, rule in _RULES.items() if rule is _FILLED_IN]
        given = {
            key: value
            for key, value in node.items()
            if value not in (stock.get(key), {"run.dir": ".", "output_subdir": None}.get(key, stock.get(key)))
            and not any(is_below(key, name) for name in filled)
        }
    return given | {key: value for key, value in node.items() if any(is_below(key, name) for name in typed)}


def _seed_sweeper(config: DictConfig, typed: Mapping[str, str]) -> list[str]:
    """Fills in the seed of a sweeper that has none, and returns it in words: the same words choose the same points."""
    names = [key for key, value in _plain(config).items() if is_below(key, "sweeper") and value is None]
    names = [key for key in names if key.rpartition(".")[2] == "seed" and key not in typed]
    for name in names:
        OmegaConf.update(config.hydra, name, 0)
    return [f"hydra.{name}=0 is filled in: the same words choose the same points" for name in names]


def _plain(config: DictConfig) -> dict[str, Any]:
    return flat(cast(dict[str, Any], OmegaConf.to_container(config.hydra, resolve=False)))


# Where Hydra's words want runs to be found


@frozen
class Output:
    """Additional outputs of one run."""

    path: str | None
    """A path that shall lead to it, as typed: relative to where the words were typed."""
    folder: str | None
    """The name of a folder in the run directory for `files`."""
    files: Mapping[str, str]
    """Hydra's files by name, e.g. {"overrides.yaml": "- seed=1\\n"}."""


def read_output(
    settings: HydraSettings, config: RunConfig, words: Sequence[str], *, number: int | None
) -> Output | None:
    """Returns what is asked for a run besides its directory; None where nothing is.

    Args:
        settings: what the command line sets of Hydra itself.
        config: the run's.
        words: the words of its command line.
        number: its place in the sweep, Hydra's job number; None where there is no sweep.

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
        return None
    mapping, tasks = to_mapping(config), _task_words(words)
    own = cast(dict[str, Any], OmegaConf.to_container(settings.config.hydra, resolve=False))
    shape = own["job"]["config"]["override_dirname"]
    kept = sorted(word for word in tasks if split_word(word)[1] not in shape["exclude_keys"])
    own["job"]["override_dirname"] = str(shape["item_sep"]).join(kept).replace("=", str(shape["kv_sep"]))
    own["overrides"]["task"] = tasks
    if number is not None:
        own["job"]["num"] = number
    path, files = None, {}
    if folder is not None:
        texts: dict[str, Any] = {"config.yaml": mapping, "hydra.yaml": {"hydra": own}, "overrides.yaml": tasks}
        files = {name: OmegaConf.to_yaml(OmegaConf.create(value)) for name, value in texts.items()}
    if wants_path:
        whole = OmegaConf.create({**mapping, "hydra": own})
        # One moment for all runs of a sweep: ${now:...} is not asked twice.
        OmegaConf.copy_cache(from_config=settings.config, to_config=whole)
        path = _path(whole, keys)
        OmegaConf.copy_cache(from_config=whole, to_config=settings.config)
    return Output(path=path, folder=folder, files=files)


def _path(whole: DictConfig, keys: Sequence[str]) -> str:
    HydraConfig.instance().cfg = whole  # type: ignore[assignment]  # Hydra itself puts a DictConfig there
    try:
        return "/".join(str(OmegaConf.select(whole, f"hydra.{key}", throw_on_missing=True)) for key in keys)
    except OmegaConfBaseException as err:
        raise ConfigError(
            f"hydra.{keys[0]} is not known before the run is there: {str(err).splitlines()[0]}",
            hint="${now:...}, ${hydra.job.override_dirname}, any key of the run and, in a sweep, ${hydra.job.num} are",
        ) from err
    finally:
        HydraConfig.instance().cfg = None
