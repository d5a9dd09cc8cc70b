"""Which trackers are asked for, whether they are installed, and which keys a job would lack."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_train.config.schema import MlflowSection, TrackioSection, TrackSection, WandbSection
from slurm_train.errors import ConfigError
from slurm_train.tools import trackers
from slurm_train.tools.trackers import NAMES, require_installed, unexported_keys
from slurm_train.tools.trackers.adapters import TRACKERS

WANDB = TrackSection(wandb=WandbSection(project="p"))
MLFLOW = TrackSection(mlflow=MlflowSection(experiment="e"))
ALL = TrackSection(tensorboard=True, wandb=WANDB.wandb, mlflow=MLFLOW.mlflow, trackio=TrackioSection(project="p"))


def test_a_project_switches_a_tracker_on() -> None:
    assert TrackSection(wandb=WandbSection(entity="ada", tags=["x"])).tracker_names == []
    assert WANDB.tracker_names == ["wandb"]
    assert ALL.tracker_names == list(NAMES) == list(TRACKERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda asked: None if asked == name else object())
    with pytest.raises(ConfigError, match=rf"asks for {name}, which is not installed") as caught:
        require_installed(ALL)
    assert f"pip install 'slurm-train[{name}]'" in caught.value.hint
    for other in set(NAMES) - {name}:
        require_installed(ALL, only=other)


SHELL = dict.fromkeys(
    ("WANDB_API_KEY", "WANDB_ENTITY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), "x"
)


@pytest.mark.parametrize(
    ("track", "exported", "left"),
    [
        (TrackSection(tensorboard=True), set(), []),
        (WANDB, set(), ["WANDB_API_KEY"]),
        (WANDB, {"WANDB_API_KEY"}, []),
        (TrackSection(wandb=WandbSection(project="p", mode="offline")), set(), []),
        (MLFLOW, set(), ["MLFLOW_TRACKING_PASSWORD"]),
        (TrackSection(trackio=TrackioSection(project="p", space_id="ada/x")), set(), ["HF_TOKEN"]),
    ],
)
def test_keys_that_are_not_exported_are_named(track: Any, exported: set[str], left: list[str]) -> None:
    assert unexported_keys(track, SHELL, exported) == left
