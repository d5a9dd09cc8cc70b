"""The crash points of a real save and a real resume, where torch writes and reads the tensors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slurm_train.checkpoint import save as save_module
from slurm_train.checkpoint.shards import read_record
from tests.support.crash_points import Scene, killed_everywhere, power_lost_everywhere, refused_everywhere
from tests.support.torch_scenes import TORCH_SCENES

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

SAVE, RESUME = TORCH_SCENES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child would wait for its parent's pool of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problems_of(trials) -> list[str]:
    done = list(trials)
    assert len(done) > 50
    return [f"{trial.what}: {trial.problem}" for trial in done if trial.problem]


@pytest.mark.parametrize("scene", TORCH_SCENES, ids=lambda scene: scene.name)
def test_killed_at_every_fifth_call(scene: Scene, fast_path: Path) -> None:
    """The campaign `crash-points` kills at all of them."""
    assert problems_of(killed_everywhere(scene, fast_path, every=5)) == []


@pytest.mark.parametrize("scene", TORCH_SCENES, ids=lambda scene: scene.name)
def test_refused_at_any_call(scene: Scene, fast_path: Path) -> None:
    assert problems_of(refused_everywhere(scene, fast_path, errno.EIO)) == []


def test_power_lost_after_any_call_of_a_save(fast_path: Path) -> None:
    assert problems_of(power_lost_everywhere(SAVE, fast_path)) == []


def test_a_save_that_trusts_torch_to_make_its_files_durable_is_found(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "seal_file", read_record)
    assert any("found step" in one for one in problems_of(power_lost_everywhere(SAVE, fast_path)))
