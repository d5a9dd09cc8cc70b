"""Which of Hydra's sweepers the words choose: the basic one, whose points are known, or one that needs values.

Only words that speak to Hydra, or a user's own files, can choose another one; everything else never comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from slurm_train.config.compose import explaining
from slurm_train.config.hydra_settings import HydraSettings, is_to_hydra
from slurm_train.config.words import Words, prepare_overrides, split_word

_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweeperChoice:
    """Hydra's own configuration for a sweep."""

    settings: HydraSettings
    words: Words
    """The words, with those of `hydra.sweeper.params` in front."""

    @property
    def needs_values(self) -> bool:
        """Whether points are chosen by what came out of earlier ones."""
        return str(self.settings.config.hydra.sweeper.get("_target_")) != _BASIC

    @property
    def arguments(self) -> list[str]:
        """The words that do not speak to Hydra, as it wants them."""
        return prepare_overrides([word for word in self.settings.words.overrides if not is_to_hydra(word)])

    def fixed_keys(self) -> set[str]:
        """Returns the keys that have one value in all points."""
        parsed = OverridesParser.create().parse_overrides(self.arguments)
        return {override.key_or_group for override in parsed if not override.is_sweep_override()}


def read_sweeper(settings: HydraSettings) -> SweeperChoice:
    """Returns the sweeper that the words and a user's own files choose."""
    return SweeperChoice(settings=settings, words=_with_params(settings.words, settings.config))


def _with_params(words: Words, config: DictConfig) -> Words:
    params = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    given = params.get("params") if isinstance(params, dict) else None
    typed = {split_word(word)[1] for word in words.overrides}
    # The command line wins, as it does in Hydra.
    added = [f"{key}={value}" for key, value in (given or {}).items() if str(key).lstrip("+") not in typed]
    return replace(words, overrides=[*added, *words.overrides])


def drive(choice: SweeperChoice, launch: Callable[[list[list[str]]], list[Any]]) -> Any:
    """Lets the sweeper choose its points and returns what it returns.

    Args:
        choice: the sweeper.
        launch: carries out a batch of points, given by their words, and returns Hydra's JobReturn of each.
    """
    config = choice.settings.config
    context = HydraContext(config_loader=choice.settings.hydra.config_loader, callbacks=Callbacks(config))
    with explaining(choice.words, []):
        sweeper = Plugins.instance().instantiate_sweeper(
            config=config, hydra_context=context, task_function=lambda _: None
        )
    _put_launcher(sweeper, _Batches(launch))
    # Where a sweeper leaves a file of its own, as under Hydra.
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    return sweeper.sweep(arguments=choice.arguments)


class _Batches(Launcher):
    def __init__(self, launch: Callable[[list[list[str]]], list[Any]]) -> None:
        self._launch = launch

    def setup(self, **_: Any) -> None:
        """Needs nothing."""

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:  # noqa: ARG002  # Hydra's signature
        """Carries out a batch."""
        return self._launch([[str(word) for word in words] for words in job_overrides])


def _put_launcher(sweeper: Sweeper, launcher: Launcher) -> None:
    """Replaces the launcher that the sweeper has made for itself; some keep it in a part of theirs."""
    for holder in (sweeper, *vars(sweeper).values()):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if isinstance(value, Launcher):
                setattr(holder, name, launcher)
