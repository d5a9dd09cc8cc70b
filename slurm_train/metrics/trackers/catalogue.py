"""Which trackers there are, which of them a configuration asks for, and what each needs to be installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from slurm_train.config.schema import TrackSection
from slurm_train.config.secrets import is_secret_name
from slurm_train.errors import ConfigError
from slurm_train.metrics.trackers.tracker import OpenTracker

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
_KEYS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb.project",
    "mlflow": "mlflow.experiment",
    "trackio": "trackio.project",
}


def asked_trackers(track: TrackSection) -> list[str]:
    """Returns the names of the trackers that a configuration asks for."""
    asked = {
        "tensorboard": track.tensorboard,
        "wandb": track.wandb.project is not None,
        "mlflow": track.mlflow.experiment is not None,
        "trackio": track.trackio.project is not None,
    }
    return [name for name in NAMES if asked[name]]


def require_installed(track: TrackSection) -> None:
    """Does nothing where the packages of all trackers that are asked for are installed here.

    Raises:
        ConfigError: one is not.
    """
    for name in asked_trackers(track):
        if find_spec(name) is None:
            raise not_installed(name)


def not_installed(name: str) -> ConfigError:
    """Returns the error for a tracker whose package is not installed."""
    off = "false" if name == "tensorboard" else "null"
    return ConfigError(
        f"track.{_KEYS[name]} asks for {name}, which is not installed",
        hint=f"pip install 'slurm-train[{name}]', or set track.{_KEYS[name]}={off}",
    )


def opener(name: str, track: TrackSection, env: Mapping[str, str]) -> OpenTracker:
    """Returns what starts a tracker; its package is imported by the call.

    Args:
        name: one of `NAMES`.
        track: its settings.
        env: the environment.
    """
    if name == "tensorboard":
        from slurm_train.metrics.trackers.tensorboard import open_tensorboard

        return open_tensorboard
    if name == "wandb":
        from slurm_train.metrics.trackers.wandb import open_wandb

        return lambda run: open_wandb(run, track.wandb, env=env, timeout_s=track.timeout_s)
    if name == "mlflow":
        from slurm_train.metrics.trackers.mlflow import open_mlflow

        return lambda run: open_mlflow(run, track.mlflow, env=env)
    from slurm_train.metrics.trackers.trackio import open_trackio

    return lambda run: open_trackio(run, track.trackio)


def keys_left_behind(track: TrackSection, env: Mapping[str, str], exported: set[str]) -> list[str]:
    """Returns the variables with a tracker's key that are set here and do not travel into the job.

    Args:
        track: the settings.
        env: environment of the submitting shell.
        exported: names of the variables that the job gets.
    """
    wants = {
        "WANDB_": track.wandb.project is not None and track.wandb.mode != "offline",
        "MLFLOW_": track.mlflow.experiment is not None,
        # A local trackio needs no key.
        "HF_": track.trackio.project is not None and track.trackio.space_id is not None,
    }
    prefixes = tuple(prefix for prefix, is_wanted in wants.items() if is_wanted)
    return sorted(name for name in env if name.startswith(prefixes) and is_secret_name(name) and name not in exported)


def has_key_file(env: Mapping[str, str], host: str) -> bool:
    """Returns whether ~/.netrc (or NETRC) has an entry for a host; only its name is looked at."""
    path = Path(env.get("NETRC") or Path(env.get("HOME", "/"), ".netrc"))
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return any(word == "machine" and name == host for word, name in pairwise(words))
