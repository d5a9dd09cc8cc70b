"""What goes into a run: its words, and what it needs from the machine they are typed on, its data and its own code."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.cli.terminal import note
from slurm_train.config.schema import OptimSection, RunConfig, TrackSection
from slurm_train.data.shards import require_readable
from slurm_train.errors import ConfigError
from slurm_train.launch.placement import CAUSAL_LM
from slurm_train.launch.plan import RunPlan
from slurm_train.models.pretrained_names import num_token_ids, require_source

if TYPE_CHECKING:
    from slurm_train.config.hydra import HydraSettings
    from slurm_train.config.words import Words


def read_settings_of(flags: Words) -> HydraSettings:
    """Returns what the words and the person's own files set of Hydra itself; prints which of it is unused.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra.
    """
    from slurm_train.config.hydra import read_settings

    settings = read_settings(flags)
    for text in settings.notes:
        note(text)
    return settings


def refuse_missing_inputs(plan: RunPlan, *, cwd: Path) -> None:
    """Refuses data that cannot be read, a `_target_` that does not exist and missing packages, as far as it can tell.

    Raises:
        DataError: prepared text is asked for, and there is none.
        ConfigError: a `_target_` names a module or a name that does not exist, or a tracker is not installed.
    """
    config = plan.config
    # Another interpreter may have what this one lacks.
    if config.track != TrackSection() and (config.cluster is None or config.cluster.python is None):
        from slurm_train.tools.trackers import require_installed

        require_installed(config.track)
    if config.trains and (config.model or {}).get("_target_") == CAUSAL_LM:
        _require_causal_lm(config, cwd=cwd)
    if config.trains:
        require_readable(config.data or {}, vocab_size=num_token_ids(config.model or {}, cwd=cwd), cwd=cwd)
        weights = config.train.init_from
        if weights is not None and not (cwd / Path(weights).expanduser()).exists():
            raise ConfigError(
                f"train.init_from={weights} is not there",
                hint="name a directory with config.json and model.safetensors, or one safetensors file",
            )
    from slurm_train.config.target import require_target

    # A rank's Python starts in this directory, or in the snapshot of it.
    search = [str(cwd), *sys.path]
    own: dict[str, dict[str, Any] | None]
    own = {"task": config.task} if config.task else {"model": config.model, "data": config.data}
    own |= {f"callbacks[{number}]": mapping for number, mapping in enumerate(config.callbacks)}
    # Where ranks have a Python of their own, torch may be in that one alone.
    if config.trains and importlib.util.find_spec("torch") is not None:
        own |= _calls_of(config.optim)
    for key, mapping in own.items() if config.script is None else ():
        require_target(key, mapping, search=search)
    if config.callbacks:
        _check_callbacks(config)


def _check_callbacks(config: RunConfig) -> None:
    """Makes the callbacks that come with this package, which finds wrong values of theirs."""
    from slurm_train.train.callbacks import Monitor, build_callbacks

    if not config.trains:
        raise ConfigError(
            "callbacks are called by the built-in trainer, not by a task or a script", hint="leave callbacks out"
        )
    shipped = [one for one in config.callbacks if str(one.get("_target_", "slurm_train.")).startswith("slurm_train.")]
    compares = any(isinstance(callback, Monitor) for callback in build_callbacks(shipped).values())
    if compares and not (config.train.evaluate and config.train.eval_every_steps):
        raise ConfigError(
            "a callback compares evaluations, and the run makes none on its way",
            hint="set train.eval_every_steps=100, and leave train.evaluate at true",
        )


def _calls_of(optim: OptimSection) -> dict[str, dict[str, Any] | None]:
    """Returns by key what an optimizer's classes and a schedule of the user's own will be called with."""
    given: dict[str, Any] = {"_target_": optim._target_, "_args_": [None]}
    calls: dict[str, dict[str, Any] | None] = {}
    # The default with keywords that every torch knows need not be looked up.
    if optim.keywords or optim._target_ != OptimSection()._target_:
        calls["optim"] = {**given, "lr": optim.lr, **optim.keywords}
    for index, rule in enumerate(optim.rules()):
        own = {} if rule._target_ is None else {"_target_": rule._target_}
        calls[f"optim.groups[{index}]"] = {**given, **own, **rule.keywords}
    if isinstance(optim.schedule, dict):
        passed = {"_args_": [0], "warmup_samples": 0, "total_samples": 0}
        calls["optim.schedule"] = {"_target_": None, **optim.schedule, **passed}
    return calls


def _require_causal_lm(config: RunConfig, *, cwd: Path) -> None:
    model = config.model or {}
    require_source(model_type=model.get("model_type"), path=model.get("path"), cwd=cwd)
    has_other_python = config.cluster is not None and config.cluster.python is not None
    if not has_other_python and importlib.util.find_spec("transformers") is None:
        raise ConfigError("model=hf needs transformers, which is not installed", hint="pip install 'slurm-train[hf]'")


def warn_unexported_keys(config: RunConfig, env: Mapping[str, str]) -> None:
    """Prints which keys of trackers are set in this shell and do not travel into the job."""
    if config.cluster is None or config.track == TrackSection():
        return
    from slurm_train.slurm.job_variables import exported
    from slurm_train.tools.trackers import unexported_keys

    names = unexported_keys(config.track, env, exported(env, config.cluster.export))
    if names:
        note(f"{', '.join(names)} stays in this shell; the job gets it with cluster.export=[{','.join(names)}]")
