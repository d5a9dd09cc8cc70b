"""Pins: a checkpoint that a queued or running evaluation needs stays, however old it gets.

A pin is a file in the directory of checkpoints, `pinned_<save id>_<run id of the evaluation>`. It names a save, not a
directory, since each attempt that resumes gives a new name to what it goes on from. The evaluation's job removes its
pin when it ends, `cancel` does, and whoever finds that no job of the evaluation is left.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.files import read_json, write_durable
from slurm_train.rundir.paths import RunDirectory

_PIN = re.compile(r"pinned_([0-9a-f]{8})_(\w+)")


class Pin(NamedTuple):
    """One save that is kept for one evaluation."""

    path: Path
    save_id: str
    evaluation: RunDirectory


def pin_save(root: Path, save_id: str, evaluation: RunDirectory) -> bool:
    """Keeps a save in a directory of checkpoints for an evaluation; returns whether it was not pinned for it before.

    Raises:
        OSError: the file system refuses.
    """
    try:
        write_durable(root / f"pinned_{save_id}_{evaluation.run_id}", json.dumps({"path": str(evaluation.path)}) + "\n")
    except FileExistsError:
        return False
    return True


def list_pins(root: Path) -> list[Pin]:
    """Returns the pins in a directory of checkpoints; it may be absent."""
    pins = []
    for path in sorted(root.glob("pinned_*")):
        match = _PIN.fullmatch(path.name)
        if match is not None:
            evaluation = str((read_json(path) or {}).get("path", path))
            pins.append(Pin(path, match[1], RunDirectory(Path(evaluation))))
    return pins


def pinned_saves(root: Path) -> set[str]:
    """Returns the ids of the saves that are pinned; the pins are not read."""
    return {match[1] for path in root.glob("pinned_*") if (match := _PIN.fullmatch(path.name)) is not None}


def release_pins(evaluation: RunDirectory) -> None:
    """Removes the pins of an evaluation; of any other run there are none.

    Raises:
        OSError: the file system refuses.
    """
    root = RunDirectory(evaluation.path.parent.parent).checkpoints
    for path in root.glob(f"pinned_*_{evaluation.run_id}"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
