"""Hydra's launchers, and what their settings are called here.

A launcher hands runs to Slurm, or to processes of this machine. That is what this program does itself, so a launcher
of Hydra's is refused, and its settings are translated as far as they have a name here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurm_train.errors import ConfigError

BASIC = "basic"
# What hydra-submitit-launcher and hydra-joblib-launcher call it, and what it is called here.
_SETTINGS = {
    "timeout_min": "cluster.time_limit_min",
    "cpus_per_task": "cluster.cpus_per_gpu",
    "mem_gb": "cluster.memory_gb_per_node",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "setup": "cluster.setup",
    "name": "run.name",
    "array_parallelism": "sweep.max_parallel",
    "n_jobs": "sweep.max_parallel",
}
_SIZE = ("nodes", "gpus_per_node", "tasks_per_node", "gres")
# Where its files go, and how often it starts a job again, is no question here.
_NEEDLESS = ("submitit_folder", "max_num_timeout", "stderr_to_stdout", "_target_")


def launcher_error(name: str, settings: Mapping[str, str]) -> ConfigError:
    """Returns the error for a launcher of Hydra's, with the words that do the same here.

    Args:
        name: its option, e.g. "submitit_slurm".
        settings: what was given to it, e.g. {"timeout_min": "60", "additional_parameters.mail-type": "END"}.
    """
    hint = _TRANSLATIONS.get(name, _any_launcher)(settings)
    return ConfigError(f"hydra/launcher={name}: the runs are launched by this program, not by a plugin", hint=hint)


def launcher_setting_error(key: str, value: str) -> ConfigError:
    """Returns the error for a setting of a launcher where none was chosen.

    Args:
        key: its name without "hydra.launcher.".
        value: what it was set to.
    """
    return ConfigError(f"hydra.launcher.{key}: no launcher of Hydra's is used", hint=f"write {_one_word(key, value)}")


def _on_slurm(settings: Mapping[str, str]) -> str:
    size = f"+cluster={settings.get('nodes', '1')}x{_ranks_per_node(settings)}"
    rest = [_one_word(key, value) for key, value in settings.items() if key not in (*_SIZE, *_NEEDLESS)]
    return f"write {' '.join([size, *rest])} instead (+cluster=<nodes>x<GPUs per node>)"


def _ranks_per_node(settings: Mapping[str, str]) -> str:
    # --gres=gpu:a100:8
    of_gres = settings.get("gres", "").rpartition(":")[2]
    return settings.get("gpus_per_node") or of_gres or settings.get("tasks_per_node") or "1"


def _here(settings: Mapping[str, str]) -> str:
    several = settings.get("n_jobs", "N")
    return f"drop it: without +cluster the runs are trained here; sweep.max_parallel={several} trains several at a time"


def _any_launcher(_settings: Mapping[str, str]) -> str:
    return "drop it: +cluster=<nodes>x<GPUs per node> goes through Slurm, e.g. +cluster=4x8; without it, here"


_TRANSLATIONS: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    "submitit_slurm": _on_slurm,
    "submitit_local": _here,
    "joblib": _here,
}


def _one_word(key: str, value: str) -> str:
    if key in _SETTINGS:
        return f"{_SETTINGS[key]}={value}"
    if key in _SIZE:
        return "+cluster=<nodes>x<GPUs per node>"
    if key == "srun_args":
        return "cluster.srun.<flag>=<value>"
    return f"cluster.sbatch.{key.removeprefix('additional_parameters.').replace('_', '-')}={value}"
