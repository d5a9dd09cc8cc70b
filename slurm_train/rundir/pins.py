"""Pins: a checkpoint that a queued or running evaluation needs stays, however old it gets.

A pin is a file in the directory of checkpoints, `pinned_<save id>_<run id of the evaluation>`. It names a save, not a
directory, since each attempt that resumes gives a new name to what it goes on from. The evaluation's job removes its
pin when it ends, `cancel` does, and whoever finds that no job of the evaluation is left.

An evaluation that follows a run has a lease besides, `following_<run id of the evaluation>`: of the checkpoints that it
has not scored yet, the newest few stay, also while it waits in the queue or comes back from a preemption. A lease ends
at the time that is written in it, unless the follower renews it between two scores: a follower that died without a word
keeps one save at most, its pin, until somebody finds that no job of it is left. The times are hours, so clocks need not
agree.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.files import listed, read_json, read_record, write_durable, write_record
from slurm_train.rundir.paths import CheckpointName, RunDirectory
from slurm_train.rundir.scores import Score, follower_of, read_scores

_PIN = re.compile(r"pinned_([0-9a-f]{8})_(\w+)")
_LEASE = re.compile(r"following_(\w+)")
LEASE_S = 24 * 3600.0
"""How long a lease holds without its follower: as long as a job may wait in a queue."""


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
    for path in sorted(listed(root)):
        match = _PIN.fullmatch(path.name)
        if match is not None:
            evaluation = str((read_json(path) or {}).get("path", path))
            pins.append(Pin(path, match[1], RunDirectory(Path(evaluation))))
    return pins


def pinned_saves(root: Path) -> set[str]:
    """Returns the ids of the saves that are pinned; the pins are not read."""
    matches = [_PIN.fullmatch(path.name) for path in listed(root)]
    return {match[1] for match in matches if match is not None}


def release_pin(root: Path, save_id: str, evaluation: RunDirectory) -> None:
    """Lets go of one save of an evaluation.

    Raises:
        OSError: the file system refuses.
    """
    (root / f"pinned_{save_id}_{evaluation.run_id}").unlink(missing_ok=True)


def release_pins(evaluation: RunDirectory) -> None:
    """Removes the pins and the lease of an evaluation; of any other run there are none.

    Raises:
        OSError: the file system refuses.
    """
    root = evaluation.evaluated.checkpoints
    for path in root.glob(f"pinned_*_{evaluation.run_id}"):
        path.unlink(missing_ok=True)
    # The lease last: a pin without one would count for ever.
    lease_path(root, evaluation.run_id).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One follower's claim on the checkpoints that it has not scored."""

    follower_id: str
    most: int
    """So many of them stay at most, the newest."""
    until_unix_s: float

    def has_ended(self) -> bool:
        """Returns whether the follower has not renewed it in time."""
        return time.time() > self.until_unix_s


def lease_path(root: Path, follower_id: str) -> Path:
    """Returns the file of a follower's lease in a directory of checkpoints."""
    return root / f"following_{follower_id}"


def read_leases(root: Path) -> list[Lease]:
    """Returns the leases in a directory of checkpoints, ended ones included; it may be absent."""
    leases = []
    for path in sorted(listed(root)):
        match = _LEASE.fullmatch(path.name)
        lease = None if match is None else read_record(path, Lease)
        if match is not None and lease is not None and lease.follower_id == match[1]:
            leases.append(lease)
    return leases


def renew_lease(root: Path, follower: RunDirectory, *, most: int) -> None:
    """Takes or renews the lease of a follower.

    Raises:
        OSError: the file system refuses.
    """
    until_unix_s = time.time() + LEASE_S
    lease = Lease(follower_id=follower.run_id, most=most, until_unix_s=until_unix_s)
    write_record(lease_path(root, follower.run_id), lease)


def awaited_saves(root: Path, saves: Iterable[CheckpointName]) -> set[str]:
    """Returns the ids of the saves that some follower is still to score and may claim.

    Args:
        root: the directory of checkpoints of a run.
        saves: what is in it.
    """
    awaited: set[str] = set()
    leases = [lease for lease in read_leases(root) if not lease.has_ended()]
    newest_first = sorted(saves, reverse=True) if leases else []
    for lease in leases:
        scored: Mapping[str, Score] = {}
        # Where it cannot be read just now, more than is needed stays until the next save.
        with contextlib.suppress(OSError):
            scored = read_scores(follower_of(root.parent, lease.follower_id))
        waiting = [save.save_id for save in newest_first if save.save_id not in scored]
        awaited.update(waiting[: lease.most])
    return awaited
