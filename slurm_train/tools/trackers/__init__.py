"""Trackers send the lines of metrics.jsonl, each in a process of its own, so none can disturb the training.

This module has what the login node and the supervisor need: whether the packages of the trackers are installed, which
keys a job would lack, and the object that runs the trackers. Nothing else is imported where no tracker is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from slurm_train.config.schema import TrackSection
from slurm_train.config.secrets import is_secret_name
from slurm_train.errors import ConfigError
from slurm_train.rundir.paths import RunDirectory

# The key below `track` that switches each tracker on; a tracker is named after its package.
_SWITCHES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb.project",
    "mlflow": "mlflow.experiment",
    "trackio": "trackio.project",
}
NAMES = tuple(_SWITCHES)


class NoTrackers(nullcontext[None]):
    """The trackers of a run that has none."""

    def finish_soon(self) -> None:
        """Does nothing."""


def build_trackers(
    run: RunDirectory, track: TrackSection, *, env: Mapping[str, str], say: Callable[[str], None]
) -> Any:
    """Returns the context manager that runs the trackers of a run while its body supervises the ranks (`follow`).

    Args:
        run: the run.
        track: which trackers, and how long they may take.
        env: environment of their processes.
        say: prints a line for the person.
    """
    names = track.tracker_names
    if not names:
        return NoTrackers()
    follow = import_module("slurm_train.tools.trackers.follow")
    return follow.Trackers(run, names, track=track, env=env, say=say)


def require_installed(track: TrackSection, *, only: str | None = None) -> None:
    """Checks that the packages of all trackers that are asked for, or of only one, can be imported by this Python.

    Raises:
        ConfigError: a package is missing.
    """
    for name in track.tracker_names:
        if only in (None, name) and find_spec(name) is None:
            key = _SWITCHES[name]
            off = "false" if name == "tensorboard" else "null"
            raise ConfigError(
                f"track.{key} asks for {name}, which is not installed",
                hint=f"pip install 'slurm-train[{name}]', or set track.{key}={off}",
            )


def unexported_keys(track: TrackSection, env: Mapping[str, str], exported: set[str]) -> list[str]:
    """Returns the variables with a tracker's key that are set here and do not travel into the job.

    Args:
        track: the settings.
        env: environment of the submitting shell.
        exported: names of the variables that the job gets.
    """
    uses_key = {
        "WANDB_": track.wandb.project is not None and track.wandb.mode != "offline",
        "MLFLOW_": track.mlflow.experiment is not None,
        # A local trackio needs no key.
        "HF_": track.trackio.project is not None and track.trackio.space_id is not None,
    }
    prefixes = tuple(prefix for prefix, is_used in uses_key.items() if is_used)
    return sorted(name for name in env if name.startswith(prefixes) and is_secret_name(name) and name not in exported)
