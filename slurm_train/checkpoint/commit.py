"""Every change of a checkpoint directory's name: open, commit, claim, discard. Rank 0 (or a node's leader). No torch.

A process may be stopped in any file-system call (a frozen node, a stuck file server) and carry it out after any length
of time, beside its successor. Nothing here depends on when that is, because names have one owner:

- A name carries the attempt that owns it and the random id of one save. An attempt acts on names of its own number, or
  of lower ones that nobody has claimed, never of higher ones; no name is used for a second save.
- A directory is changed in two ways only: staging -> checkpoint (everything in it durable, COMPLETE included) and
  anything -> trash. Each is one rename within the directory of checkpoints. Nothing is written to or removed from a
  directory that has a checkpoint's name.
- A new attempt first moves the staging directories of earlier attempts to the trash, then claims what it trusts: it
  verifies a checkpoint and renames it to its own number. A late rename of an earlier attempt then finds no source.

So a late call either came before the claim, and the new attempt sees its effect, or fails. The fence (is there a newer
attempt?) is checked before each rename; it ends an overtaken process early, safety does not depend on it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from slurm_train.checkpoint.directory import (
    STAGING_SUFFIX,
    TRASH_PREFIX,
    Search,
    check_sizes,
    newest_verified,
    verify,
)
from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest, digest_of
from slurm_train.checkpoint.shards import check_size, write_file
from slurm_train.errors import CheckpointError
from slurm_train.rundir.attempts import publishing
from slurm_train.rundir.files import fsync_directory
from slurm_train.rundir.layout import CheckpointName, list_checkpoints, name_of, parse_name

DIRECTORY_MODE = 0o700

Fence = Callable[[], None]
"""Raises if a newer attempt has taken over."""


def no_fence() -> None:
    """Never raises: for callers whose attempt cannot be overtaken."""


def own_saved(root: Path, *, step: int, attempt: int) -> Path | None:
    """Returns this attempt's checkpoint of a step if it verifies, and makes its name durable.

    Raises:
        CheckpointError: it is there and cannot be read just now, so it is unknown whether it is whole.
    """
    for path in list_checkpoints(root):
        if name_of(path)[:2] == (step, attempt):
            try:
                verify(path)
            except CheckpointError as err:
                if _is_unreadable(err):
                    raise
                continue
            fsync_directory(root)
            return path
    return None


def open_staging(root: Path, *, step: int, attempt: int) -> Path:
    """Makes the directory to write into, always a fresh one.

    Two saves into one directory would mix: torch keeps the older metadata while shards change.
    """
    if not root.exists():
        root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        fsync_directory(root.parent)
    staging = root / f"{CheckpointName(step, attempt, secrets.token_hex(4))}{STAGING_SUFFIX}"
    staging.mkdir(mode=DIRECTORY_MODE)
    return staging


def committed_path(staging: Path) -> Path:
    """Returns the name that a staging directory gets when it is committed."""
    return staging.with_name(staging.name.removesuffix(STAGING_SUFFIX))


def commit(staging: Path, manifest: Manifest, *, fence: Fence = no_fence, here: Collection[str] | None = None) -> Path:
    """Turns a staging directory, whose files are durable, into a checkpoint and returns its path.

    Args:
        staging: where all ranks have written.
        manifest: what was written.
        fence: checked right before the rename.
        here: the files that lie here, where other nodes have the rest; None: all of them.

    Raises:
        CheckpointError: a file is missing or has another size than its rank said.
        OSError: the file system refuses.
    """
    final = committed_path(staging)
    assert name_of(final).step == manifest.step, f"{final.name} is not of step {manifest.step}"
    for name, record in manifest.files.items():
        if here is None or name in here:
            check_size(staging / name, record)
    text = manifest.to_json().encode()
    write_file(staging / MANIFEST_FILE, text)
    write_file(staging / COMPLETE_FILE, digest_of(text).encode())
    fsync_directory(staging)
    with publishing():
        fence()
        _rename(staging, final)
        fsync_directory(final.parent)
    return final


def claim(root: Path, *, attempt: int, fence: Fence = no_fence) -> Search:
    """Makes an attempt the owner of what it goes on from, and returns the newest checkpoint that verifies.

    Older ones are claimed by marker and sizes. Those that do not hold keep their name: they count for nothing and are
    left for a person. To be called before anything is loaded or saved.

    Raises:
        CheckpointError: a later attempt has claimed it.
        OSError: the file system refuses.
    """
    # First: without its staging directory an earlier attempt cannot commit any more.
    for path in stale_staging(root, below=attempt):
        move_to_trash(path, fence=fence)
    while (search := newest_verified(root)).found is not None:
        path, manifest = search.found
        own = take(path, attempt=attempt, fence=fence)
        if own is not None:
            for older in list_checkpoints(root):
                if name_of(older) < name_of(own):
                    with contextlib.suppress(OSError, CheckpointError):  # unclaimed, it only does not count
                        check_sizes(older)
                        take(older, attempt=attempt, fence=fence)
            fsync_directory(root)
            return Search((own, manifest), search.passed_over)
    return search


def take(path: Path, *, attempt: int, fence: Fence = no_fence) -> Path | None:
    """Renames a checkpoint to an attempt's number; returns its new path, None where its owner has just moved it.

    Raises:
        CheckpointError: it belongs to a later attempt.
    """
    name = name_of(path)
    if name.attempt > attempt:
        raise CheckpointError(
            f"{path} belongs to attempt {name.attempt}, so attempt {attempt} cannot go on from it",
            hint="nothing to do: the later attempt carries on",
        )
    own = path.with_name(str(name._replace(attempt=attempt)))
    return own if own == path or _moved(path, own, fence) else None


def stale_staging(root: Path, *, below: int) -> list[Path]:
    """Returns the staging directories of attempts below a number."""
    paths = sorted(root.iterdir()) if root.is_dir() else []
    return [path for path in paths if _is_stale_staging(path.name, below)]


def move_to_trash(path: Path, *, fence: Fence = no_fence) -> Path | None:
    """Takes a directory's name away for good; returns the name it has now, None where it was not there."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(4)}")
    return trash if _moved(path, trash, fence) else None


def discard(path: Path, *, fence: Fence = no_fence) -> bool:
    """Takes a directory's name away for good and then removes its content; returns whether it was there.

    Raises:
        OSError: the file system refuses; what is left has no checkpoint's name.
    """
    trash = move_to_trash(path, fence=fence)
    if trash is not None:
        # Durable before its content goes: a name that comes back after a power cut is that of a whole checkpoint.
        fsync_directory(path.parent)
        empty_trash(trash)
    return trash is not None


def empty_trash(trash: Path) -> None:
    """Removes a directory from the trash; another process may be at it as well."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(trash)


def _is_stale_staging(name: str, below: int) -> bool:
    found = parse_name(name.removesuffix(STAGING_SUFFIX)) if name.endswith(STAGING_SUFFIX) else None
    return found is not None and found.attempt < below


def _is_unreadable(err: BaseException | None) -> bool:
    """Says whether an error goes back to the file system's refusal to read, not to what was read."""
    while err is not None:
        if isinstance(err, OSError) and not isinstance(err, FileNotFoundError):
            return True
        err = err.__cause__
    return False


def _moved(source: Path, target: Path, fence: Fence) -> bool:
    """Renames and returns True, or returns False where the source is not there any more."""
    fence()
    try:
        _rename(source, target)
    except FileNotFoundError:
        return False
    return True


def _rename(source: Path, target: Path) -> None:
    """Renames; on NFS a repeated request may report "no such file" for a rename that was carried out."""
    try:
        source.rename(target)
    except FileNotFoundError:
        if source.exists() or not target.exists():
            raise
