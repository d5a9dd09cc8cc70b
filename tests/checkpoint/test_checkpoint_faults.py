"""Killed, refused, without power, stopped for long or damaged: a verified checkpoint is found, nothing else is trusted.

The campaigns `crash-points` and `thawed-writer` disturb every call; here some calls of each scene are.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint import manifest as manifest_module
from slurm_train.checkpoint import verify as verify_module
from slurm_train.checkpoint.commit import committed_path, discard
from slurm_train.checkpoint.manifest import FileRecord, NewFile, digest_of, write_file
from slurm_train.rundir.paths import list_checkpoints
from tests.support import thawed_writers
from tests.support.corruption import damage_everywhere, flips, holes, truncations
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
from tests.support.small_checkpoints import make_checkpoint, make_header, stage
from tests.support.torch_scenes import TORCH_SCENES

pytestmark = [
    pytest.mark.faults,
    # The child of the fork touches files only; it starts no thread that outlives it and takes no lock.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SAVE, _ = TORCH_SCENES
in_every_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
in_torch_scenes = pytest.mark.parametrize("scene", TORCH_SCENES, ids=lambda scene: scene.name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child would wait for its parent's pool of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def each(few: int, *, many: int) -> pytest.MarkDecorator:
    """Disturbs every so many-th call: few of them in the quick set, many in the full one."""
    return pytest.mark.parametrize("every", [few, pytest.param(many, marks=pytest.mark.full)])


def problems_of(trials, *, least: int = 5) -> list[str]:
    done = list(trials)
    assert len(done) > least
    return [f"{trial.what}: {trial.problem}" for trial in done if trial.problem]


@each(24, many=6)
@in_every_scene
def test_killed_at_any_call(scene: Scene, every: int, fast_path: Path) -> None:
    assert problems_of(killed_everywhere(scene, fast_path, every=every), least=1) == []


@in_every_scene
def test_refused_at_any_call(scene: Scene, fast_path: Path) -> None:
    problems = []
    for first, number in enumerate(ERRORS):
        # Each call is refused, with one of the errors.
        trials = refused_everywhere(scene, fast_path, number, first=first, every=len(ERRORS))
        problems += problems_of(trials, least=1)
    assert problems == []


@in_every_scene
def test_power_lost_after_any_call(scene: Scene, fast_path: Path) -> None:
    assert problems_of(power_lost_everywhere(scene, fast_path)) == []


@each(16, many=4)
@in_torch_scenes
def test_killed_at_any_call_of_torch(scene: Scene, every: int, fast_path: Path) -> None:
    assert problems_of(killed_everywhere(scene, fast_path, every=every), least=5) == []


# torch's streams are closed once more when they are collected, and Python 3.13 reports what that raises.
closes_twice = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@each(20, many=5)
@closes_twice
@in_torch_scenes
def test_refused_at_any_call_of_torch(scene: Scene, every: int, fast_path: Path) -> None:
    assert problems_of(refused_everywhere(scene, fast_path, errno.EIO, every=every), least=2) == []


@closes_twice
def test_power_lost_after_any_call_of_a_torch_save(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems_of(power_lost_everywhere(SAVE, fast_path), least=50) == []
    # The check can fail, if nobody makes the files durable.
    seal = NewFile.seal

    def seal_without_a_sync(file: NewFile) -> FileRecord:
        with monkeypatch.context() as patch:
            patch.setattr(manifest_module.os, "fsync", lambda _: None)
            return seal(file)

    monkeypatch.setattr(NewFile, "seal", seal_without_a_sync)
    assert any("found step" in one for one in problems_of(power_lost_everywhere(SAVE, fast_path)))


def careless_save(root: Path) -> None:
    """Replaces the only checkpoint before the new one is durable."""
    staging, manifest = stage(root, make_header(NEW))
    text = manifest.to_json().encode()
    write_file(staging / "manifest.json", text)
    (staging / "COMPLETE").write_bytes(digest_of(text))
    discard(list_checkpoints(root)[0])
    staging.rename(committed_path(staging))


def test_the_check_of_kills_and_power_cuts_can_fail(fast_path: Path) -> None:
    careless = Scene(name="careless", prepare=prepare_first, work=careless_save)
    assert any("(rename): found step None" in one for one in problems_of(killed_everywhere(careless, fast_path)))
    assert any("found step None" in one for one in problems_of(power_lost_everywhere(careless, fast_path)))


@each(3, many=1)
@pytest.mark.parametrize("scene", thawed_writers.SCENES, ids=lambda scene: scene.name)
def test_a_stopped_writer_that_goes_on_removes_nothing_of_its_successor(
    scene: thawed_writers.Scene, every: int, fast_path: Path
) -> None:
    # A multiple of these; the campaign stops at each call.
    every *= {"local-save": 31, "claim": 11, "local-claim": 1}.get(scene.name, 7)
    assert problems_of(thawed_writers.thawed_everywhere(scene, fast_path, keep=1, every=every), least=1) == []


def test_no_result_is_replaced_or_faked_by_a_stopped_writer(fast_path: Path) -> None:
    assert problems_of(thawed_writers.results_everywhere(fast_path)) == []


def test_the_check_of_stopped_writers_can_fail(fast_path: Path) -> None:
    trials = thawed_writers.thawed_everywhere(thawed_writers.CARELESS, fast_path, keep=1, every=5)
    assert any("cannot be trusted" in one for one in problems_of(trials))


def test_every_truncation_flipped_bit_and_hole_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_checkpoint(root, 1)
    num_bytes = sum(file.stat().st_size for file in small.iterdir())
    assert damage_everywhere(small, truncations) == (num_bytes, 0)
    assert damage_everywhere(small, flips) == (8 * num_bytes, 0)
    tried, undetected = damage_everywhere(make_checkpoint(root, 2, size=20_000), holes)
    assert tried > 3 * 39 and undetected == 0

    def trust(path, expected):
        """Looks at nothing: the check can fail."""

    monkeypatch.setattr(verify_module, "check_hash", trust)
    assert damage_everywhere(small, holes).undetected == 3
