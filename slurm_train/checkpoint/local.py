"""The fast tier: checkpoints on the nodes' own disks, each node with the files of its own ranks.

Written with the discipline of any other: fresh directory, fsync, the manifest of all files on every node, rename,
COMPLETE. The run directory stays the truth, see `local_copy`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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
    """Returns a folder below one of this user's own in `base`, made where it is missing; a node's leader calls it.

    The user's folder is `slurm_train-<uid>`. Where somebody else has made something of that name, it gets a random
    suffix, so nobody can keep a user out by making names first; it is found again by its owner and mode.

    Raises:
        CheckpointError: the base is not there, anybody may exchange what lies in it, or a folder in the user's own is
            not private.
    """
    _require_keeps_names(base)
    own = _own_folders(base)
    path = next((folder for folder in own if (folder / parts[0]).is_dir()), own[0] if own else None)
    path = path or _make_own(base)
    for part in parts:
        path = path / part
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=DIRECTORY_MODE)
        if not _is_private(path):
            status = path.lstat()
            raise CheckpointError(
                f"{path} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}; it must be a folder "
                "that only you can enter",
                hint="remove it, or name another checkpoint.local_dir",
            )
    return path


def _require_keeps_names(base: Path) -> None:
    if not base.is_dir():
        raise CheckpointError(f"checkpoint.local_dir={base} is not a folder on this node", hint="name one that is")
    resolved = base.resolve()
    for folder in (resolved, *resolved.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CheckpointError(
                f"checkpoint.local_dir={base}: {folder} has mode {stat.filemode(mode)}, so anybody may put a folder in "
                "the place of yours",
                hint="name a folder that only you can write, e.g. $SLURM_TMPDIR, or one with the sticky bit, e.g. /tmp",
            )


def _own_folders(base: Path) -> list[Path]:
    """Returns this user's private folders in `base`, the one without a suffix first."""
    name = _own_name()
    found = [path for path in base.iterdir() if path.name == name or path.name.startswith(f"{name}.")]
    return sorted(path for path in found if _is_private(path))


def _make_own(base: Path) -> Path:
    for name in (_own_name(), *(f"{_own_name()}.{secrets.token_hex(8)}" for _ in range(9))):
        with contextlib.suppress(FileExistsError):
            (base / name).mkdir(mode=DIRECTORY_MODE)
            return base / name
    raise CheckpointError(f"no folder can be made in checkpoint.local_dir={base}", hint="name another folder")


def _own_name() -> str:
    return f"slurm_train-{os.geteuid()}"


def _is_private(path: Path) -> bool:
    """Returns whether a path is a folder, no link, that this user owns and nobody else may enter."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


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
