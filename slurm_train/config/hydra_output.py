"""Where Hydra's words want runs to be found: `hydra.run.dir`, `hydra.sweep.dir` with `hydra.sweep.subdir`, `.hydra/`.

A run directory's own path is derived from what is trained, so that the same words are the same run. What is asked for
here comes on top of it: a path that leads there, and Hydra's three files about the composition.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurm_train.config.compose import read_hydra
from slurm_train.config.hydra_settings import HydraSettings, is_to_hydra
from slurm_train.config.words import split_word
from slurm_train.errors import ConfigError


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
        ConfigError: a path that cannot be told before the run is there, or a folder that is the run's own.
    """
    is_sweep = settings.words.multirun
    keys = ("sweep.dir", "sweep.subdir") if is_sweep else ("run.dir",)
    folder = settings.given.get("output_subdir")
    _require_free_name(folder)
    if folder is None and not any(key in settings.given for key in keys):
        return []
    wants_path = any(key in settings.given for key in keys)
    return [
        Output(
            path=_path(whole, keys) if wants_path else None,
            folder=folder,
            files={} if folder is None else _files(run, whole),
        )
        for run, whole in zip(runs, _wholes(settings, runs), strict=True)
    ]


def _require_free_name(folder: str | None) -> None:
    if folder is not None and ("/" in folder or not folder.startswith(".") or folder in (".", "..")):
        raise ConfigError(
            f"hydra.output_subdir={folder}: the run directory has names of its own",
            hint="give it a name that begins with a dot, e.g. hydra.output_subdir=.hydra",
        )


def _wholes(settings: HydraSettings, runs: Sequence[AskedRun]) -> Iterator[DictConfig]:
    """Yields each run's configuration together with Hydra's, as Hydra's own words refer to it."""
    node = OmegaConf.to_container(settings.config.hydra, resolve=False)
    assert isinstance(node, dict)
    before = settings.config
    for run in runs:
        own = copy.deepcopy(node)
        own["job"]["override_dirname"] = _override_dirname(_task_words(run), own["job"]["config"]["override_dirname"])
        own["overrides"]["task"] = _task_words(run)
        if run.number is not None:
            own["job"]["num"] = run.number
        whole = OmegaConf.create({**run.mapping, "hydra": own})
        # One moment for all runs of a sweep: ${now:...} is not asked twice.
        OmegaConf.copy_cache(from_config=before, to_config=whole)
        yield whole
        before = whole


def _task_words(run: AskedRun) -> list[str]:
    return [word for word in run.words if not is_to_hydra(word)]


def _override_dirname(words: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Returns Hydra's name for a set of words, e.g. "optim.lr=0.1,seed=2"."""
    kept = sorted(word for word in words if split_word(word)[1] not in settings["exclude_keys"])
    return str(settings["item_sep"]).join(kept).replace("=", str(settings["kv_sep"]))


def _path(whole: DictConfig, keys: Sequence[str]) -> str:
    HydraConfig.instance().cfg = whole  # type: ignore[assignment]  # Hydra itself puts a DictConfig there
    OmegaConf.register_new_resolver("hydra", read_hydra, replace=True)
    try:
        return "/".join(str(OmegaConf.select(whole, f"hydra.{key}", throw_on_missing=True)) for key in keys)
    except OmegaConfBaseException as err:
        asked = ", ".join(f"hydra.{key}" for key in keys)
        raise ConfigError(
            f"{asked} cannot be told before the run is there: {str(err).splitlines()[0]}",
            hint="${now:...}, ${hydra.job.override_dirname}, any key of the run and, in a sweep, ${hydra.job.num} can",
        ) from err
    finally:
        HydraConfig.instance().cfg = None


def _files(run: AskedRun, whole: DictConfig) -> dict[str, str]:
    return {
        "config.yaml": OmegaConf.to_yaml(OmegaConf.create(dict(run.mapping))),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": OmegaConf.to_container(whole.hydra)})),
        "overrides.yaml": OmegaConf.to_yaml(OmegaConf.create(_task_words(run))),
    }
