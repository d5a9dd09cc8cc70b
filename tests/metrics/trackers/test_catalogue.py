"""Which trackers are asked for, whether they are installed, and which keys a job would lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import MlflowSection, TrackioSection, TrackSection, WandbSection
from slurm_train.errors import ConfigError
from slurm_train.metrics.trackers import catalogue
from slurm_train.metrics.trackers.catalogue import (
    NAMES,
    asked_trackers,
    has_key_file,
    keys_left_behind,
    require_installed,
)

WANDB = TrackSection(wandb=WandbSection(project="p"))
ALL = TrackSection(
    tensorboard=True,
    wandb=WandbSection(project="p"),
    mlflow=MlflowSection(experiment="e"),
    trackio=TrackioSection(project="p"),
)


def test_a_project_switches_a_tracker_on() -> None:
    assert asked_trackers(TrackSection()) == []
    assert asked_trackers(TrackSection(wandb=WandbSection(entity="ada", tags=["x"]))) == []
    assert asked_trackers(WANDB) == ["wandb"]
    assert asked_trackers(ALL) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_installed_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_spec", lambda asked: None if asked == name else object())
    with pytest.raises(ConfigError, match=rf"asks for {name}, which is not installed") as caught:
        require_installed(ALL)
    assert caught.value.hint.startswith(f"pip install 'slurm-train[{name}]', or set track.{name}")


def test_those_that_are_installed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_spec", lambda _name: object())
    require_installed(ALL)


SHELL = {
    "WANDB_API_KEY": "x",
    "WANDB_ENTITY": "ada",
    "MLFLOW_TRACKING_PASSWORD": "x",
    "HF_TOKEN": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
}


@pytest.mark.parametrize(
    ("track", "exported", "left"),
    [
        (TrackSection(tensorboard=True), set(), []),
        (WANDB, set(), ["WANDB_API_KEY"]),
        (WANDB, {"WANDB_API_KEY"}, []),
        (TrackSection(wandb=WandbSection(project="p", mode="offline")), set(), []),
        (TrackSection(mlflow=MlflowSection(experiment="e")), set(), ["MLFLOW_TRACKING_PASSWORD"]),
        (TrackSection(trackio=TrackioSection(project="p")), set(), []),
        (TrackSection(trackio=TrackioSection(project="p", space_id="ada/x")), set(), ["HF_TOKEN"]),
    ],
)
def test_keys_that_do_not_travel_are_named(track: Any, exported: set[str], left: list[str]) -> None:
    assert keys_left_behind(track, SHELL, exported) == left


def test_a_key_file_is_looked_at_by_host(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    assert not has_key_file(env, "api.wandb.ai")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert has_key_file(env, "api.wandb.ai") and not has_key_file(env, "wandb.example.org")
    (tmp_path / "other").write_text("")
    assert not has_key_file({**env, "NETRC": str(tmp_path / "other")}, "api.wandb.ai")
