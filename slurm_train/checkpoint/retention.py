"""Which checkpoints stay: the newest `keep` that are whole, counted by what is on disk.

Called by rank 0 after a save is durable, so a failed save never costs an old checkpoint. Only an attempt's own
checkpoints count and go, never more than marker and sizes are checked: it wrote or claimed them. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_train.checkpoint.commit import Fence, discard, empty_trash, no_fence, stale_staging
from slurm_train.checkpoint.directory import TRASH_PREFIX, check_sizes
from slurm_train.errors import CheckpointError
from slurm_train.rundir.layout import list_checkpoints, name_of


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a round of retention did.

    Args:
        kept: whole checkpoints that stay, newest first.
        removed: directories that were removed.
        untrusted: directories with a checkpoint's name that do not count; left for a person to look at.
        problems: one line for each directory that could not be removed.
    """

    kept: tuple[Path, ...]
    removed: tuple[Path, ...]
    untrusted: tuple[Path, ...]
    problems: tuple[str, ...]


def prune(
    root: Path, *, newest: Path, keep: int, attempt: int, fence: Fence = no_fence, protect: Collection[str] = ()
) -> Pruned:
    """Removes an attempt's whole checkpoints beyond the newest `keep`, and what earlier attempts left.

    Args:
        root: the directory of checkpoints.
        newest: the one that was just saved or verified; it stays, and a newer one counts for nothing.
        keep: how many whole ones stay, at least 1.
        attempt: this attempt; another one's checkpoints are not touched.
        fence: checked before each removal.
        protect: directory names that stay whatever their age.

    Raises:
        CheckpointError: keep is below 1.
        SlurmTrainError: what the fence raised.
    """
    check_keep(keep)
    whole: list[Path] = [newest]
    untrusted: list[Path] = []
    for path in list_checkpoints(root):
        if path != newest:
            is_whole = name_of(path) < name_of(newest) and name_of(path).attempt == attempt and _holds(path)
            (whole if is_whole else untrusted).append(path)
    doomed = [path for path in whole[keep:] if path.name not in protect]
    # Saved again, and this time it holds.
    doomed += [path for path in untrusted if _step(path) == _step(newest) and name_of(path).attempt <= attempt]
    removed, problems = _remove_each(doomed, lambda path: discard(path, fence=fence))
    swept = sweep(root, attempt=attempt, fence=fence)
    return Pruned(
        kept=tuple(path for path in whole if path not in doomed),
        removed=(*removed, *swept.removed),
        untrusted=tuple(path for path in untrusted if path not in doomed),
        problems=(*problems, *swept.problems),
    )


def check_keep(keep: int) -> None:
    """Refuses a number that would remove the newest checkpoint.

    Raises:
        CheckpointError: keep is below 1.
    """
    if keep < 1:
        raise CheckpointError(f"checkpoint.keep={keep} would remove the newest checkpoint", hint="keep at least 1")


def sweep(root: Path, *, attempt: int, fence: Fence = no_fence) -> Pruned:
    """Removes what no reader trusts: trash, and staging directories of attempts before this one."""
    trash = sorted(root.glob(f"{TRASH_PREFIX}*"))
    removed, problems = _remove_each(trash, empty_trash)
    stale, more = _remove_each(stale_staging(root, below=attempt), lambda path: discard(path, fence=fence))
    return Pruned((), (*removed, *stale), (), (*problems, *more))


def discard_from(root: Path, step: int, *, attempt: int, fence: Fence = no_fence) -> list[Path]:
    """Removes all checkpoints of a step and later ones, trusted or not: a run goes back to before it. Rank 0.

    Raises:
        OSError: the file system refuses.
        SlurmTrainError: what the fence raised.
    """
    doomed = [path for path in list_checkpoints(root) if _step(path) >= step and name_of(path).attempt <= attempt]
    return [path for path in doomed if discard(path, fence=fence)]


def _remove_each(paths: Iterable[Path], remove: Callable[[Path], object]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
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


def _holds(path: Path) -> bool:
    try:
        check_sizes(path)
    except CheckpointError:
        return False
    return True


def _step(path: Path) -> int:
    return name_of(path).step
