"""Killed, refused or without power at any file-system call: a verified checkpoint is found, and the next save works."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from slurm_train.checkpoint.commit import committed_path, discard
from slurm_train.checkpoint.shards import write_file
from slurm_train.rundir.layout import list_checkpoints
from tests.support.crash_points import (
    ERRORS,
    NEW,
    SCENES,
    Scene,
    killed_everywhere,
    power_lost_everywhere,
    prepare_first,
    refused_everywhere,
)
from tests.support.small_checkpoints import make_header, stage

pytestmark = [
    pytest.mark.faults,
    # The child of the fork touches files only; it starts no thread and takes no lock.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

in_every_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)


def problems_of(trials) -> list[str]:
    done = list(trials)
    assert len(done) > 10
    return [f"{trial.what}: {trial.problem}" for trial in done if trial.problem]


@in_every_scene
def test_killed_at_any_call(scene: Scene, fast_path: Path) -> None:
    assert problems_of(killed_everywhere(scene, fast_path)) == []


@in_every_scene
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_refused_at_any_call(scene: Scene, fast_path: Path, number: int) -> None:
    assert problems_of(refused_everywhere(scene, fast_path, number)) == []


@in_every_scene
def test_power_lost_after_any_call(scene: Scene, fast_path: Path) -> None:
    assert problems_of(power_lost_everywhere(scene, fast_path)) == []


def careless_save(root: Path) -> None:
    """Replaces the only checkpoint before the new one is durable."""
    staging, manifest = stage(root, make_header(NEW))
    write_file(staging / "manifest.json", manifest.to_json().encode())
    (staging / "COMPLETE").write_text(manifest.digest())
    discard(list_checkpoints(root)[0])
    staging.rename(committed_path(staging))


CARELESS = Scene(name="careless", prepare=prepare_first, work=careless_save)


def test_this_check_can_fail(fast_path: Path) -> None:
    assert any("(rename): found step None" in one for one in problems_of(killed_everywhere(CARELESS, fast_path)))
    assert any("found step None" in one for one in problems_of(power_lost_everywhere(CARELESS, fast_path)))
