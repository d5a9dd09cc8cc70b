"""Small checkpoints without torch, made by the product's own commit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest, write_file
from slurm_train.rundir.paths import list_checkpoints, name_of


def make_header(step: int, **changes: Any) -> CheckpointHeader:
    """Returns a header of a run with one rank."""
    facts: dict[str, Any] = {
        "step": step,
        "samples": 8 * step,
        "epoch": 0,
        "world_size": 1,
        "mesh": {"dp_replicate": 1},
        "batch_plan": {"global_size": 8},
        "config_hash": "c0ffee",
        "data_fingerprint": "da7a",
        "torch_version": "2.6.0",
        "attempt": 1,
    }
    return CheckpointHeader(**(facts | changes))


def stage(
    root: Path, header: CheckpointHeader, *, size: int = 24, staging: Path | None = None
) -> tuple[Path, Manifest]:
    """Writes the files of a checkpoint, into a staging directory that is there already where one is given.

    Returns:
        The staging directory and the manifest.
    """
    staging = staging or Place(root=root, attempt=header.attempt).open_staging(header.step)
    names = ("rank_00000.pt", "__0_0.distcp", "__1_0.distcp")
    files = {name: write_file(staging / name, os.urandom(size)) for name in names}
    return staging, Manifest.of(header, files)


def make_checkpoint(root: Path, step: int, *, size: int = 24, **changes: Any) -> Path:
    """Makes a checkpoint that verifies and returns its directory."""
    header = make_header(step, **changes)
    return Place(root=root, attempt=header.attempt).commit(*stage(root, header, size=size))


def checkpoint_of(root: Path, step: int) -> Path:
    """Returns the newest checkpoint of a step."""
    return next(path for path in list_checkpoints(root) if name_of(path).step == step)


def steps_in(root: Path) -> list[int]:
    """Returns the steps of all checkpoints, newest first."""
    return [name_of(path).step for path in list_checkpoints(root)]
