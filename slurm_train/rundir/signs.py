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
    read_record,
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
    launcher: str = ""
    """What has started ranks of its own below this rank, e.g. "torchrun", "srun"; "" for nothing."""
    inner_rank: int = 0
    """The lowest RANK of these."""
    inner_size: int = 0
    """Their WORLD_SIZE, 0 where it is not known."""

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
    apart: str = ""
    """The ranks do not train one model, or each has started ranks of its own."""


def note_remarks(run: RunDirectory, attempt: int, remarks: Remarks) -> None:
    """Writes what `status` is to say of an attempt.

    Raises:
        OSError: the file system refuses.
    """
    write_record(run.remarks(attempt), remarks)


def read_remarks(run: RunDirectory, attempt: int) -> list[str]:
    """Returns what is to be said of an attempt, a sentence each."""
    values: Mapping[str, Any] = read_json(run.remarks(attempt)) or {}
    return [str(values[name]) for name in ("silence", "idle_gpus", "apart") if values.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What rank 0 of a script has of torch.distributed."""

    size: int
    """Number of ranks in its process group; 0 where it has opened none."""
    remark: str
    """What is to be said of it, "" for nothing."""


def note_group(run: RunDirectory, attempt: int, group: Group) -> None:
    """Writes what rank 0 of a script has of torch.distributed.

    Raises:
        OSError: the file system refuses.
    """
    make_folder(run.group(attempt).parent, within=run.path)
    write_record(run.group(attempt), group)


def read_group(run: RunDirectory, attempt: int) -> Group | None:
    """Returns what rank 0 of a script has of torch.distributed, None where it has said nothing of it."""
    return read_record(run.group(attempt), Group)
