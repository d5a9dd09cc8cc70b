"""Every truncation, every flipped bit and every hole of a small checkpoint is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.checkpoint import directory
from tests.support.corruption import damage_everywhere, flips, holes, truncations
from tests.support.small_checkpoints import make_checkpoint

pytestmark = pytest.mark.faults


@pytest.fixture
def small(root: Path) -> Path:
    return make_checkpoint(root, 1)


def test_every_truncation_is_found(small: Path) -> None:
    assert damage_everywhere(small, truncations) == (sum(file.stat().st_size for file in small.iterdir()), 0)


def test_every_single_bit_flip_is_found(small: Path) -> None:
    assert damage_everywhere(small, flips) == (8 * sum(file.stat().st_size for file in small.iterdir()), 0)


def test_every_zeroed_hole_is_found(root: Path) -> None:
    tried, undetected = damage_everywhere(make_checkpoint(root, 2, size=20_000), holes)
    assert tried > 3 * 39
    assert undetected == 0


def test_this_check_can_fail(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trust(path, expected):
        """Looks at nothing."""

    monkeypatch.setattr(directory, "check_hash", trust)
    tried, undetected = damage_everywhere(small, holes)
    assert 0 < undetected == 3 < tried
