"""Which checkpoints stay: the newest `keep` that are whole, counted by what is on disk.

Called by rank 0 after a save is durable, so a failed save never costs an old checkpoint. Only the marker and the sizes
are checked here, not every byte: this run wrote or verified the files before. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from slurm_train.checkpoint.commit import discard
from slurm_train.checkpoint.directory import (
    TRASH_PREFIX,
    check_sizes,
    list_checkpoints,
    staging_attempt,
    step_of,
)
from slurm_train.checkpoint.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest
from slurm_train.errors import CheckpointError
from slurm_train.rundir.files import fsync_directory


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a round of retention did.

    Args:
        kept: whole checkpoints that stay, newest first.
        removed: directories that were removed.
        untrusted: directories with a marker that do not hold what it says; left for a person to look at.
        problems: one line for each directory that could not be removed.
    """

    kept: tuple[Path, ...]
    removed: tuple[Path, ...]
    untrusted: tuple[Path, ...]
    problems: tuple[str, ...]


def prune(root: Path, *, keep: int, attempt: int, epoch_fence: int, protect: Collection[str] = ()) -> Pruned:
    """Removes whole checkpoints beyond the newest `keep`, and what dead attempts left.

    Args:
        root: the directory of checkpoints.
        keep: how many whole ones stay, at least 1.
        attempt: this attempt; staging directories of earlier attempts go, those of this and later ones stay.
        epoch_fence: this attempt's fence; a checkpoint that a newer attempt wrote is never removed.
        protect: directory names that stay whatever their age.

    Raises:
        CheckpointError: keep is below 1.
    """
    check_keep(keep)
    whole, untrusted = _whole_checkpoints(root)
    kept = [path for path, _ in whole[:keep]]
    doomed: list[Path] = []
    for path, manifest in whole[keep:]:
        is_ours = manifest.epoch_fence <= epoch_fence and path.name not in protect
        (doomed if is_ours else kept).append(path)
    removed, problems = _remove_each(doomed, _remove_checkpoint)
    swept = sweep(root, attempt=attempt, epoch_fence=epoch_fence)
    return Pruned(tuple(kept), (*removed, *swept.removed), tuple(untrusted), (*problems, *swept.problems))


def check_keep(keep: int) -> None:
    """Refuses a number that would remove the newest checkpoint.

    Raises:
        CheckpointError: keep is below 1.
    """
    if keep < 1:
        raise CheckpointError(f"checkpoint.keep={keep} would remove the newest checkpoint", hint="keep at least 1")


def sweep(root: Path, *, attempt: int, epoch_fence: int) -> Pruned:
    """Removes what no reader trusts: trash, staging directories of earlier attempts, checkpoints without a marker."""
    doomed = [path for path in _entries(root) if _is_leftover(path, attempt)]
    doomed += [path for path in list_checkpoints(root) if _never_finished(path, epoch_fence)]
    removed, problems = _remove_each(doomed, discard)
    return Pruned((), removed, (), problems)


def _whole_checkpoints(root: Path) -> tuple[list[tuple[Path, Manifest]], list[Path]]:
    """Gives the whole checkpoints, newest first, and those whose marker says more than the files hold."""
    whole: list[tuple[Path, Manifest]] = []
    untrusted: list[Path] = []
    for path in list_checkpoints(root):
        try:
            whole.append((path, check_sizes(path)))
        except CheckpointError:
            if (path / COMPLETE_FILE).exists():
                untrusted.append(path)
    return whole, untrusted


def _remove_each(paths: list[Path], remove: Callable[[Path], None]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Removes what it can: one directory that resists must not keep the others, nor fail a save that is durable."""
    removed: list[Path] = []
    problems: list[str] = []
    for path in paths:
        try:
            remove(path)
            removed.append(path)
        except OSError as err:
            problems.append(f"cannot remove {path}: {err}")
    return tuple(removed), tuple(problems)


def _remove_checkpoint(path: Path) -> None:
    """Takes the marker first, so that a half removed checkpoint is never trusted."""
    (path / COMPLETE_FILE).unlink()
    fsync_directory(path)
    discard(path)


def _entries(root: Path) -> list[Path]:
    return sorted(root.iterdir()) if root.is_dir() else []


def _is_leftover(path: Path, attempt: int) -> bool:
    writer = staging_attempt(path.name)
    return path.name.startswith(TRASH_PREFIX) or (writer is not None and writer < attempt)


def _never_finished(path: Path, epoch_fence: int) -> bool:
    """Says whether a save or a removal stopped half way; a newer attempt may be between its rename and its marker."""
    if (path / COMPLETE_FILE).exists():
        return False
    try:
        return Manifest.from_json((path / MANIFEST_FILE).read_text(encoding="utf-8")).epoch_fence <= epoch_fence
    except (OSError, ValueError, CheckpointError):
        return False


def discard_from(root: Path, step: int) -> list[Path]:
    """Removes all checkpoints of a step and later ones, trusted or not: a run goes back to before it. Rank 0.

    Raises:
        OSError: the file system refuses.
    """
    doomed = [path for path in list_checkpoints(root) if (step_of(path.name) or 0) >= step]
    for path in doomed:
        (path / COMPLETE_FILE).unlink(missing_ok=True)
        fsync_directory(path)
        discard(path)
    return doomed
