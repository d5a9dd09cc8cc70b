"""Every truncation, every flipped bit and every hole of a small checkpoint is found."""

from __future__ import annotations

import pytest

from slurm_train.checkpoint import directory
from slurm_train.checkpoint.commit import commit
from slurm_train.checkpoint.directory import verify
from slurm_train.errors import CheckpointError

pytestmark = pytest.mark.faults
HOLE_BYTES = 512


def is_detected(path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return True
    return False


def num_undetected(path, variants_of) -> tuple[int, int]:
    """Puts each variant of each file in place; gives how many were tried and how many were not found."""
    tried = undetected = 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for variant in variants_of(whole):
            file.write_bytes(variant)
            tried += 1
            undetected += not is_detected(path)
        file.write_bytes(whole)
    assert not is_detected(path)
    return tried, undetected


def truncations(data):
    return (data[:length] for length in range(len(data)))


def flips(data):
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def holes(data):
    for start in range(0, len(data), HOLE_BYTES):
        part = data[start : start + HOLE_BYTES]
        yield data[:start] + bytes(len(part)) + data[start + HOLE_BYTES :]


@pytest.fixture
def small(root, kit):
    return kit.make(root, 1)


def test_every_truncation_is_found(small):
    assert num_undetected(small, truncations) == (sum(file.stat().st_size for file in small.iterdir()), 0)


def test_every_single_bit_flip_is_found(small):
    assert num_undetected(small, flips) == (8 * sum(file.stat().st_size for file in small.iterdir()), 0)


def test_every_zeroed_hole_is_found(root, kit):
    staging, manifest = kit.stage(root, kit.header(2), size=20_000)
    tried, undetected = num_undetected(commit(staging, root / "checkpoint_0000002", manifest), holes)
    assert tried > 3 * 39
    assert undetected == 0


def test_this_check_can_fail(small, monkeypatch):
    def trust(path, expected):
        """Looks at nothing."""

    monkeypatch.setattr(directory, "check_hash", trust)
    tried, undetected = num_undetected(small, holes)
    assert 0 < undetected == 3 < tried
