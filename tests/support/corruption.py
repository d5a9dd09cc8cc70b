"""Every truncation, every flipped bit and every zeroed hole of a small checkpoint, and whether it is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint.verify import verify
from slurm_train.errors import CheckpointError

HOLE_BYTES = 512

Variants = Callable[[bytes], Iterator[bytes]]


class Tried(NamedTuple):
    """How many damages were tried, and how many of them were not found."""

    tried: int
    undetected: int


def is_detected(path: Path) -> bool:
    """Returns whether a checkpoint is refused."""
    try:
        verify(path)
    except CheckpointError:
        return True
    return False


def damage_everywhere(path: Path, variants_of: Variants) -> Tried:
    """Puts each variant of each file of a checkpoint in place."""
    tried = undetected = 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for variant in variants_of(whole):
            file.write_bytes(variant)
            tried += 1
            undetected += not is_detected(path)
        file.write_bytes(whole)
    assert not is_detected(path), f"{path} did not verify without damage"
    return Tried(tried, undetected)


def truncations(data: bytes) -> Iterator[bytes]:
    """Yields every shorter file."""
    return (data[:length] for length in range(len(data)))


def flips(data: bytes) -> Iterator[bytes]:
    """Yields the file with each bit flipped."""
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def holes(data: bytes) -> Iterator[bytes]:
    """Yields the file with each block of 512 bytes zeroed."""
    for start in range(0, len(data), HOLE_BYTES):
        part = data[start : start + HOLE_BYTES]
        yield data[:start] + bytes(len(part)) + data[start + HOLE_BYTES :]
