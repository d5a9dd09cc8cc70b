"""Signs of life of a program that makes no marks: what a small process beside each rank has seen, on the shared disk.

A user's script or function says nothing of its progress. So a watcher beside each rank looks at it from outside and
overwrites the rank's part of its node's file, as heartbeats do. The supervisor reads these files; nothing here judges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_train.rundir.files import (
    make_folder,
    open_file,
    read_json,
    read_parts,
    write_part,
    write_record,
)
from slurm_train.rundir.paths import RunDirectory

_FLUSH_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What the watcher of one rank has seen."""

    rank: int
    host: str
    pid: int
    """Of the rank."""
    step_id: str = ""
    """Slurm's id of the step, e.g. "123.0"; "" without Slurm."""
    looks: int = 0
    """Counts the writings: while it does not change, nothing is known of the rank."""
    signs: int = 0
    """Counts the stretches of time in which there was a sign of life."""
    newest: str = ""
    """What the newest sign was: "log", "files", "children", "processor", "gpu", "collectives"."""
    state: str = "R"
    """The kernel's letter for the process, e.g. "T" for stopped; "" once it has ended."""
    waits: str = ""
    """The exchange that its stack or its flight record shows it in, e.g. "barrier"; "" for none, or not known."""
    gpu_idle_s: float | None = None
    """How long its GPU has done nothing; None where there is none that can be asked."""
    written_unix_s: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process is gone."""
        return self.state == ""


class SignsFile:
    """One rank's part of its node's file.

    Args:
        run: the run.
        attempt: number of the attempt.
        rank: the rank.
        local_rank: its position on the node.
    """

    def __init__(self, run: RunDirectory, attempt: int, *, rank: int, local_rank: int) -> None:
        path = run.signs(attempt, rank - local_rank)
        make_folder(path.parent, within=run.path)
        self._file = open_file(path, os.O_WRONLY | os.O_CREAT)
        self._part = local_rank
        self._flushed_s = time.monotonic()

    def write(self, signs: Signs) -> None:
        """Overwrites the record; a reader sees the old or the new one.

        Raises:
            OSError: the file system refuses.
        """
        write_part(self._file, self._part, {**asdict(signs), "written_unix_s": time.time()})
        # A network file system keeps a file that stays open to itself for half a minute.
        if time.monotonic() - self._flushed_s > _FLUSH_EVERY_S:
            self._flushed_s = time.monotonic()
            os.fdatasync(self._file)


def read_signs(run: RunDirectory, attempt: int) -> dict[int, Signs]:
    """Returns the newest signs of every rank that has some, by rank; what cannot be read now is left out."""
    signs = {record.rank: record for record in read_parts(run.attempt_logs(attempt), "signs", Signs)}
    return dict(sorted(signs.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """What the supervisor has to say about an attempt that runs on; "" for nothing."""

    silence: str = ""
    """No rank shows a sign of life, but nothing proves that they hang."""
    idle_gpus: str = ""
    """GPUs that do nothing."""


def note_remarks(run: RunDirectory, attempt: int, remarks: Remarks) -> None:
    """Writes what `status` is to say of an attempt.

    Raises:
        OSError: the file system refuses.
    """
    write_record(run.remarks(attempt), remarks)


def read_remarks(run: RunDirectory, attempt: int) -> list[str]:
    """Returns what is to be said of an attempt, a sentence each."""
    values: Mapping[str, Any] = read_json(run.remarks(attempt)) or {}
    return [str(values[name]) for name in ("silence", "idle_gpus") if values.get(name)]
