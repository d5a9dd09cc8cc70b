"""Settings of Hydra's own that cannot do here what they do under Hydra: why, and what to type instead.

Under Hydra the process that reads the words is the one that trains. Here Slurm starts the ranks on other machines,
perhaps tomorrow, and they read a frozen configuration: what happens around a job cannot be hooked into from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slurm_train.errors import ConfigError


class Setting(NamedTuple):
    """One setting of Hydra's own."""

    key: str
    """Without "hydra.", e.g. "job.chdir"."""
    value: Any
    choices: Mapping[str, Any]
    """The chosen option of each of Hydra's groups, e.g. {"hydra/launcher": "basic"}."""


def refuse_setting(setting: Setting) -> bool:
    """Returns whether the setting is known here and means the same, or is what happens anyway.

    Raises:
        ConfigError: it would not do what it does under Hydra.
    """
    name = next((name for name in _REFUSALS if setting.key == name or setting.key.startswith(f"{name}.")), None)
    if name is None:
        return False
    if (error := _REFUSALS[name](setting)) is not None:
        raise error
    return True


def _verbose(setting: Setting) -> ConfigError | None:
    if setting.value in (False, None):
        return None
    return ConfigError(
        f"hydra.verbose={str(setting.value).lower()} sets loggers of Hydra's process; the ranks are others",
        hint="in your code: logging.basicConfig(level=logging.DEBUG), and `logs RUN` shows it; "
        "`--info` says how the configuration is composed",
    )


def _logging(setting: Setting) -> ConfigError | None:
    group = setting.key.split(".")[0]
    if setting.choices.get(f"hydra/{group}") in ("disabled", "none"):
        return None
    return ConfigError(
        f"hydra.{group} sets loggers of Hydra's process; the ranks are others",
        hint="drop it: what a rank prints is in its log (`logs RUN`), and your code sets its own loggers; "
        f"hydra/{group}=disabled is what happens anyway",
    )


def _callbacks(setting: Setting) -> ConfigError | None:
    if not setting.value:
        return None
    return ConfigError(
        f"hydra.{'.'.join(setting.key.split('.')[:2])} would be called around the job, which Slurm starts elsewhere",
        hint=f"drop it, or leave it out with ~hydra.{'.'.join(setting.key.split('.')[:2])}; for the end of a sweep: "
        "--wait, then `collate`; what happened to a run is in its attempts.jsonl and events@*.jsonl",
    )


def _chdir(setting: Setting) -> ConfigError | None:
    if not setting.value:
        return None
    return ConfigError(
        "hydra.job.chdir=true: the ranks start in the directory that you submit from, and relative paths mean that",
        hint="drop it, and write by the path that a run has: context.run.path in a task of your own",
    )


def _env_set(setting: Setting) -> ConfigError | None:
    names = list(setting.value) if isinstance(setting.value, Mapping) else [setting.key.rpartition(".")[2]]
    if not names:
        return None
    return ConfigError(
        f"hydra.job.env_set.{names[0]} sets a variable of Hydra's process; the ranks are others",
        hint=f"write cluster.env.{names[0]}=VALUE; on this machine: {names[0]}=VALUE in front of the command",
    )


def _env_copy(setting: Setting) -> ConfigError | None:
    if not setting.value:
        return None
    is_list = isinstance(setting.value, list)
    names = ",".join(map(str, setting.value)) if is_list else str(setting.value).strip("[]")
    return ConfigError(
        "hydra.job.env_copy writes variables with their values into the configuration",
        hint=f'write "cluster.export=[{names}]": they travel by name; on this machine the ranks have them anyway',
    )


def _batches(setting: Setting) -> ConfigError | None:
    if setting.value is None or setting.choices.get("hydra/sweeper") != "basic":
        return None
    return ConfigError(
        f"hydra.sweeper.max_batch_size={setting.value} makes a sweep wait for batch after batch",
        hint=f"write sweep.max_parallel={setting.value}: as many at once, with no waiting between",
    )


def _filled_in(setting: Setting) -> ConfigError | None:
    return ConfigError(
        f"hydra.{setting.key} is filled in, not set", hint=f"drop it; ${{hydra.{setting.key}}} refers to it"
    )


_REFUSALS: Mapping[str, Callable[[Setting], ConfigError | None]] = {
    "verbose": _verbose,
    "job_logging": _logging,
    "hydra_logging": _logging,
    "callbacks": _callbacks,
    "sweeper.max_batch_size": _batches,
    "job.chdir": _chdir,
    "job.env_set": _env_set,
    "job.env_copy": _env_copy,
    "job.id": _filled_in,
    "job.num": _filled_in,
    "job.override_dirname": _filled_in,
    "job.config_name": _filled_in,
    "runtime": _filled_in,
    "overrides": _filled_in,
}
