"""What the words, and a person's own files, say to Hydra itself: `hydra.run.dir=...`, `hydra/launcher=basic`, ...

Each of them is carried out as under Hydra, translated, or refused with what to type instead; none is passed over in
silence. Ordinary words never come here, see `lean.is_enough`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from slurm_train.config.compose import TASK_NAME, Composed, explaining, open_hydra, read_whole, settled
from slurm_train.config.hydra_refusals import Setting, refuse_setting
from slurm_train.config.launchers import BASIC, launcher_error, launcher_setting_error
from slurm_train.config.lean import may_say_more
from slurm_train.config.schema import RunConfig
from slurm_train.config.words import Words, prepare_overrides, split_word
from slurm_train.errors import ConfigError

# Filled in with every composition; a person who types one is told so.
_FILLED_IN = ("runtime.", "overrides.", "job.num", "job.id", "job.name", "job.override_dirname", "job.config_name")
# What these say is carried out: where runs are found, which sweeper, what a run is called.
_CARRIED_OUT = ("mode", "run", "sweep", "output_subdir", "sweeper", "launcher", "searchpath", "job.name", "job.config")
# What these say may stand in a file that serves Hydra's own programs as well; it changes nothing about a run.
_UNUSED = {"help": "--help", "hydra_help": "--hydra-help"}
_OF_A_RUN, _OF_A_SWEEP = ("run.dir",), ("sweep.dir", "sweep.subdir")


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraSettings:
    """Hydra's own configuration, as the words and a person's own files have it."""

    hydra: Hydra
    config: DictConfig
    """The whole composition, Hydra's node included."""
    words: Words
    """The words, with what follows from Hydra's settings: several runs, the run's name."""
    given: Mapping[str, Any]
    """What was typed, or stands in a file of the person's own, e.g. {"run.dir": "out/${now:%H}"}; unresolved."""
    notes: tuple[str, ...]
    """What is left out, in words."""
    stays_here: bool
    """Whether the basic launcher was asked for by name: here, one run after the other."""

    def composed(self) -> Composed | None:
        """Returns the configuration of the one run that the words ask for; None where it is to be composed anew."""
        name_came_in = self.given.get("job.name") is not None
        return None if self.words.multirun or name_came_in else read_whole(self.words, self.config)


def read_settings(words: Words) -> HydraSettings:
    """Returns what is said to Hydra.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra, with what to type instead.
    """
    typed = _typed(words)
    _refuse_typed(typed)
    overrides = prepare_overrides(words.overrides)
    with explaining(words, overrides):
        hydra = open_hydra(words, overrides)
        config = _compose(hydra, words, overrides)
        given = _given(words, config, typed, hydra)
    is_multirun = words.multirun or config.hydra.mode == RunMode.MULTIRUN
    choices = dict(config.hydra.runtime.choices)
    if (launcher := choices.get("hydra/launcher")) != BASIC:
        raise launcher_error(str(launcher), {})
    # Hydra has filled env_set with the variables of env_copy.
    for key in sorted(given, key=lambda key: key != "job.env_copy"):
        _refuse(Setting(key, given[key], choices))
    _refuse_other_mode(typed, is_multirun=is_multirun)
    return HydraSettings(
        hydra=hydra,
        config=config,
        words=_named(replace(_without_hydra(words), multirun=is_multirun), given),
        given=given,
        notes=_notes(given),
        stays_here="launcher" in typed,
    )


def refuse_cluster(settings: HydraSettings, config: RunConfig) -> None:
    """Does nothing unless the basic launcher was asked for, and the run asks for more than that does.

    Raises:
        ConfigError: it goes through Slurm, or several at a time.
    """
    if not settings.stays_here:
        return
    if config.cluster is not None:
        raise ConfigError(
            "hydra/launcher=basic runs here, but a cluster is asked for",
            hint="drop hydra/launcher=basic to go through Slurm, or +cluster to run here",
        )
    if (config.sweep.max_parallel or 1) > 1:
        raise ConfigError(
            f"hydra/launcher=basic runs one after the other, but sweep.max_parallel={config.sweep.max_parallel}",
            hint="drop hydra/launcher=basic, or sweep.max_parallel",
        )


def _typed(words: Words) -> dict[str, str | None]:
    """Returns what the words say to Hydra: keys without "hydra.", groups without "hydra/"."""
    parts = (split_word(word) for word in words.overrides)
    return {key[6:]: value for _, key, value in parts if key.startswith(("hydra.", "hydra/"))}


def _refuse_typed(typed: Mapping[str, str | None]) -> None:
    """Refuses what Hydra itself would stumble over, or refuse for reasons of its own."""
    for key, value in typed.items():
        if _is_below(key, ("job.env_set", "job.env_copy", "callbacks")) and value not in (None, "null", "{}", "[]"):
            refuse_setting(Setting(key, value, {}))
    # A plugin that is not installed has no options to choose from.
    given = {key.removeprefix("launcher."): value or "" for key, value in typed.items() if key.startswith("launcher.")}
    if (name := typed.get("launcher", BASIC)) not in (BASIC, None):
        raise launcher_error(str(name), given)
    for key, value in given.items():
        raise launcher_setting_error(key, value)


def _compose(hydra: Hydra, words: Words, overrides: list[str]) -> DictConfig:
    """Composes for one run, or for a sweep where the words or files ask for one."""

    def composing(mode: RunMode, *, validate: bool = True) -> DictConfig:
        compose = partial(_compose_for, hydra, words.config_name, mode=mode, validate=validate)
        return settled(overrides, compose)

    if words.multirun:
        return composing(RunMode.MULTIRUN)
    try:
        config = composing(RunMode.RUN)
    except ConfigCompositionException:
        # Several values are no mistake where hydra.mode says that it is a sweep.
        if composing(RunMode.MULTIRUN, validate=False).hydra.mode != RunMode.MULTIRUN:
            raise
        return composing(RunMode.MULTIRUN)
    return composing(RunMode.MULTIRUN) if config.hydra.mode == RunMode.MULTIRUN else config


def _compose_for(
    hydra: Hydra, config_name: str | None, overrides: list[str], *, mode: RunMode, validate: bool = True
) -> DictConfig:
    try:
        return hydra.compose_config(
            config_name=config_name,
            overrides=overrides,
            run_mode=mode,
            from_shell=True,
            with_log_configuration=False,
            validate_sweep_overrides=validate,
        )
    except KeyError as err:
        # Hydra copies the variables of hydra.job.env_copy before anybody can look at the list.
        raise ConfigError(f"hydra.job.env_copy names {err}, which is not set", hint=f"cluster.export=[{err}]") from err


def _given(words: Words, config: DictConfig, typed: Mapping[str, str | None], hydra: Hydra) -> dict[str, Any]:
    """Returns what differs from Hydra's own defaults and from the shipped ones, and what was typed."""
    node = _leaves(config.hydra)
    given: dict[str, Any] = {}
    if may_say_more(words):
        stock = _leaves(_compose_for(hydra, None, [], mode=RunMode.RUN).hydra)
        shipped = {"run.dir": ".", "output_subdir": None}
        given = {
            key: value
            for key, value in node.items()
            if not key.startswith(_FILLED_IN) and value != stock.get(key) and (key, value) not in shipped.items()
        }
        if config.hydra.job.name != TASK_NAME:
            given["job.name"] = config.hydra.job.name
    return given | {name: value for name, value in node.items() if _is_below(name, typed)}


def _leaves(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plain, dict)
    return dict(_flat(plain, ""))


def _flat(mapping: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_below(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _refuse(setting: Setting) -> None:
    if refuse_setting(setting) or _is_below(setting.key, (*_CARRIED_OUT, *_UNUSED)):
        return
    raise ConfigError(
        f"hydra.{setting.key} has no meaning here", hint="drop it; `--hydra-help` lists what Hydra's settings do here"
    )


def _notes(given: Mapping[str, Any]) -> tuple[str, ...]:
    unused = [name for name in _UNUSED if any(_is_below(key, (name,)) for key in given)]
    return tuple(f"hydra.{name} is not used: {_UNUSED[name]} is this program's own" for name in unused)


def _refuse_other_mode(typed: Mapping[str, str | None], *, is_multirun: bool) -> None:
    for key in _OF_A_RUN if is_multirun else _OF_A_SWEEP:
        if key in typed:
            whose, hint = (
                ("one run", "write hydra.sweep.dir=DIR, and hydra.sweep.subdir=NAME for each run below it")
                if is_multirun
                else ("a sweep", "add -m for a sweep, or write hydra.run.dir=DIR")
            )
            raise ConfigError(f"hydra.{key} is about {whose}", hint=hint)


def _named(words: Words, given: Mapping[str, Any]) -> Words:
    """Gives Hydra's job name to the run, where the words give none."""
    name = given.get("job.name")
    if name is None or any(split_word(word)[1] == "run.name" for word in words.overrides):
        return words
    return replace(words, overrides=[*words.overrides, f"run.name={name}"])


def _without_hydra(words: Words) -> Words:
    """Returns the words without those to Hydra, where nothing else may refer to what they say."""
    rest = [word for word in words.overrides if not is_to_hydra(word)]
    is_referred_to = any("${hydra" in word for word in rest)
    return words if is_referred_to or may_say_more(words) else replace(words, overrides=rest)


def is_to_hydra(word: str) -> bool:
    """Returns whether a word speaks to Hydra itself, e.g. "hydra.run.dir=out" or "hydra/launcher=basic"."""
    return split_word(word)[1].startswith(("hydra.", "hydra/"))
