"""The fast tier: checkpoints on the nodes' own disks, each node with the files of its own ranks.

Written with the discipline of any other: fresh directory, fsync, the manifest of all files on every node, rename,
COMPLETE. The run directory stays the truth, see `local_copy`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero, rank_in
from slurm_train.checkpoint.commit import (
    DIRECTORY_MODE,
    Fence,
    commit,
    committed_path,
    discard,
    move_to_trash,
    open_staging,
    stale_staging,
    take,
)
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.checkpoint.retention import discard_from, sweep
from slurm_train.checkpoint.save import Saved, write_rank
from slurm_train.checkpoint.tensors import write_tensors
from slurm_train.errors import CheckpointError, SlurmTrainError
from slurm_train.rundir.layout import list_checkpoints, name_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_VISIBLE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTier:
    """One node's folder of checkpoints, as one rank of that node sees it."""

    root: Path
    node: int
    """Position of the node in the job."""
    is_leader: bool
    """This rank makes, commits and removes the node's directories."""
    keep: int
    """Checkpoints that stay on the node."""
    attempt: int
    """This attempt of the run; the leader claims what earlier ones left on the node."""
    fence: Fence
    """Raises if a newer attempt has taken over."""


def open_private(base: Path, *parts: str) -> Path:
    """Makes nested folders that only this user can enter, and refuses any that somebody else has prepared.

    Raises:
        CheckpointError: the base is not there, or one of the folders is a link, another user's, or open to others.
    """
    if not base.is_dir():
        raise CheckpointError(f"checkpoint.local_dir={base} is not a folder on this node", hint="name one that is")
    path = base
    for part in parts:
        path = path / part
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=DIRECTORY_MODE)
        status = path.lstat()
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or is_open:
            raise CheckpointError(
                f"{path} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}: what lies there "
                "could be anybody's",
                hint="remove it, or name another checkpoint.local_dir",
            )
    return path


def save_local(
    tier: LocalTier,
    *,
    tensors: dict[str, Any],
    rank_state: dict[str, Any],
    header: CheckpointHeader,
    group: ProcessGroup | None,
    protect: Collection[str] = (),
) -> tuple[Saved, Manifest]:
    """Saves one checkpoint on the nodes' own disks. Collective.

    Args:
        tier: this rank's node.
        tensors: as for `save_checkpoint`.
        rank_state: this rank's own state.
        header: the facts for the manifest.
        group: a gloo group of all ranks; None for one process.
        protect: names that stay, whatever their age: they are being copied.

    Raises:
        CheckpointError: some node could not write; what was written is removed on all of them.
    """
    opened = on_every_rank(group, lambda: _open(tier, header))
    staging = tier.root / next(name for node, name in opened if name and node == tier.node)
    try:
        write_tensors(staging, tensors, group=group)
        records = on_every_rank(group, lambda: write_rank(staging, rank_state, rank=rank_in(group)))
        files = {name: record for of_rank in records for name, record in of_rank.items()}
        # Rank 0's on every node: the other ranks' headers need not be equal to the letter.
        manifest = on_rank_zero(group, lambda: Manifest.of(header, files))
        own = {name for (node, _), found in zip(opened, records, strict=True) if node == tier.node for name in found}
        results = on_every_rank(group, lambda: _commit_here(tier, staging, manifest, own, protect))
    except SlurmTrainError:
        if tier.is_leader:
            with contextlib.suppress(OSError):
                discard(staging)
        raise
    problems = tuple(problem for of_rank in results for problem in of_rank)
    return Saved(committed_path(staging), manifest.num_bytes, problems), manifest


def _open(tier: LocalTier, header: CheckpointHeader) -> tuple[int, str]:
    """Returns the node, and from its leader the name of the directory to write into."""
    if not tier.is_leader:
        return tier.node, ""
    tier.fence()
    sweep(tier.root, attempt=tier.attempt, fence=tier.fence)
    return tier.node, open_staging(tier.root, step=header.step, attempt=tier.attempt).name


def _commit_here(
    tier: LocalTier, staging: Path, manifest: Manifest, own: Collection[str], protect: Collection[str]
) -> list[str]:
    if not tier.is_leader:
        return []
    path = commit(staging, manifest, fence=tier.fence, here=own)
    return prune_local(tier, newest=path, protect=protect)


def claim_local(tier: LocalTier) -> None:
    """Makes this attempt the owner of what earlier ones left on the node; the leader, before anything is read or saved.

    Raises:
        CheckpointError: a later attempt has claimed it.
        OSError: the file system refuses.
    """
    if tier.is_leader:
        for path in stale_staging(tier.root, below=tier.attempt):
            move_to_trash(path, fence=tier.fence)
        for path in list_checkpoints(tier.root):
            take(path, attempt=tier.attempt, fence=tier.fence)


def prune_local(tier: LocalTier, *, newest: Path, protect: Collection[str] = ()) -> list[str]:
    """Removes a node's checkpoints but the one just saved and those before it; returns a line for each that resisted.

    One of the same or a later step is of a past that the run has left: it goes, too.
    """
    others = [path for path in list_checkpoints(tier.root) if path != newest and name_of(path).attempt <= tier.attempt]
    kept = [path for path in others if name_of(path).step < name_of(newest).step][: tier.keep - 1]
    problems = []
    for path in others:
        if path not in kept and path.name not in protect:
            try:
                discard(path, fence=tier.fence)
            except OSError as err:
                problems.append(f"cannot remove {path}: {err}")
    return problems


def discard_local(tier: LocalTier, *, step: int) -> None:
    """Removes a node's checkpoints of a step and later ones.

    Raises:
        OSError: the file system refuses.
    """
    discard_from(tier.root, step, attempt=tier.attempt, fence=tier.fence)
