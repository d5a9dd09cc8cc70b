"""Rank 0's part of a save: a staging directory becomes a checkpoint that readers trust, or leaves no trace.

The rename gives the directory its name, COMPLETE makes it trusted, and each step is durable before the next. Killed at
any point, the earlier checkpoint is untouched and the new one is either whole or without a marker. No torch here.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from slurm_train.checkpoint.directory import TRASH_PREFIX, checkpoint_name, staging_name, verify
from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE, CheckpointHeader, Manifest, digest_of
from slurm_train.checkpoint.shards import check_size, write_file
from slurm_train.errors import CheckpointError
from slurm_train.rundir.files import fsync_directory, write_atomic
from slurm_train.rundir.publishing import publishing

DIRECTORY_MODE = 0o700
_NUM_STAGING_NAMES = 100


def is_saved(final: Path) -> bool:
    """Says whether a checkpoint of that name is there and verifies.

    Raises:
        CheckpointError: it is there and cannot be read just now, so nobody knows whether it is whole.
    """
    if not final.exists():
        return False
    try:
        verify(final)
    except CheckpointError as err:
        if _is_unreadable(err):
            raise
        return False
    return True


def open_staging(root: Path, header: CheckpointHeader) -> Path:
    """Makes the directory to write into, always a fresh one.

    Two saves into one directory would mix: torch keeps the older metadata while shards change.
    """
    if not root.exists():
        root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        fsync_directory(root.parent)
    name = staging_name(header.step, job=header.job, attempt=header.attempt)
    for number in range(_NUM_STAGING_NAMES):
        staging = root / (f"{name}.{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            staging.mkdir(mode=DIRECTORY_MODE)
            return staging
    raise CheckpointError(f"{root / name} and {_NUM_STAGING_NAMES - 1} names like it exist", hint="remove them")


def commit(
    staging: Path,
    final: Path,
    manifest: Manifest,
    *,
    fence: Callable[[], None] | None = None,
    here: Collection[str] | None = None,
) -> Path:
    """Turns a staging directory, whose files are durable, into the checkpoint `final`.

    A verified checkpoint under that name counts as saved already; the staging directory is then removed. One that does
    not verify gives way.

    Args:
        staging: where all ranks have written.
        final: the name to give it, in the same directory.
        manifest: what was written.
        fence: raises if a newer attempt has taken over; called right before the rename, before COMPLETE and after it.
        here: the files that lie here, where other nodes have the rest; None: all of them.

    Raises:
        CheckpointError: a file is missing or has another size than its rank said.
        OSError: the file system refuses; the staging directory is still there.
    """
    if is_saved(final):
        discard(staging)
        return final
    assert final.name == checkpoint_name(manifest.step), f"{final.name} is not of step {manifest.step}"
    for name, record in manifest.files.items():
        if here is None or name in here:
            check_size(staging / name, record)
    text = manifest.to_json().encode()
    write_file(staging / MANIFEST_FILE, text)
    fsync_directory(staging)
    with publishing():
        _publish(staging, final, digest=digest_of(text), fence=fence)
    return final


def _publish(staging: Path, final: Path, *, digest: str, fence: Callable[[], None] | None) -> None:
    """Gives a directory that is whole its name and its marker, unless a newer attempt has taken over."""
    if fence is not None:
        fence()
    if final.exists():
        if is_saved(final):  # a newer attempt's, since the look above
            discard(staging)
            return
        move_to_trash(final)
    _rename(staging, final)
    # This process may have been stopped at any line while a newer attempt began, so the fence is asked again.
    _take_back_unless(fence, final)
    _mark_complete(final, digest)
    _take_back_unless(fence, final)


def discard(path: Path) -> None:
    """Removes a directory that nobody trusts; where that fails, what is left has no checkpoint's name.

    Raises:
        OSError: the file system refuses.
    """
    if path.exists():
        shutil.rmtree(move_to_trash(path))


def move_to_trash(path: Path) -> Path:
    """Takes a directory's name away in one step, and gives the name it has now."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(4)}")
    _rename(path, trash)
    return trash


def _take_back_unless(fence: Callable[[], None] | None, final: Path) -> None:
    """Removes what was just named if the fence says that it should not have been."""
    if fence is None:
        return
    try:
        fence()
    except BaseException:
        with contextlib.suppress(OSError):
            discard(final)
        raise


def _mark_complete(final: Path, digest: str) -> None:
    """Makes name and marker durable; a directory that got no marker is taken away again, it would only use space."""
    try:
        fsync_directory(final.parent)
        write_atomic(final / COMPLETE_FILE, digest)
        fsync_directory(final.parent)
    except BaseException:
        if not (final / COMPLETE_FILE).exists():
            with contextlib.suppress(OSError):
                discard(final)
        raise


def _is_unreadable(err: BaseException | None) -> bool:
    """Says whether an error goes back to the file system's refusal to read, not to what was read."""
    while err is not None:
        if isinstance(err, OSError) and not isinstance(err, FileNotFoundError):
            return True
        err = err.__cause__
    return False


def _rename(source: Path, target: Path) -> None:
    """Renames; on NFS a repeated request may report "no such file" for a rename that was carried out."""
    try:
        source.rename(target)
    except FileNotFoundError:
        if source.exists() or not target.exists():
            raise
