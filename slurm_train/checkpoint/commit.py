"""Every change of a checkpoint directory's name: open, commit, claim, discard, prune. Rank 0 (or a node's leader).

Two words for what goes. To *discard* a directory is to rename it to a name in the trash (`.trash-...`), durably, and
then to delete its content. To *prune* is to discard what retention does not keep, and what earlier attempts left.

A process may be stopped in any file-system call (a frozen node, a stuck file server) and carry it out after any length
of time, while its successor works. Nothing here depends on when that is, because names have one owner:

- A name carries the attempt that owns it and the random id of one save. An attempt acts on names of its own number, or
  of lower ones that are not claimed, never of higher ones; no name is used for a second save.
- A directory is changed in three ways only: staging -> checkpoint (everything in it durable, COMPLETE included), a
  checkpoint that was passed over -> aside, and anything -> trash. Each is one rename within the directory of
  checkpoints. Nothing is written to or removed from a directory that has a checkpoint's name.
- A new attempt first moves the staging directories of earlier attempts to the trash, then claims what it trusts: it
  verifies a checkpoint and renames it to its own number. A late rename of an earlier attempt then finds no source.

So a delayed rename lands before the claim, where the new attempt sees it, or after it, where it fails. The fence
(is there a newer attempt?) is checked before each rename; it ends an overtaken process early, safety does not depend on
it.

A checkpoint that an attempt has passed over, because it is damaged, is moved aside before the attempt saves: to a name
that no reader trusts, where a person can look at it. Otherwise the step that it stands for would count as saved when
the run reaches it again. One that another version wrote, or that cannot be read here, is never passed over or pruned:
the attempt ends, since what is not understood is not broken.

The newest `keep` whole checkpoints stay, counted by what is on disk, and only those of the attempt's own number count;
only marker and sizes are checked, since this attempt wrote or fully verified them before. Others are removed after a
save is durable, so a failed save never costs an old checkpoint.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_train.checkpoint.manifest import (
    COMPLETE_FILE,
    MANIFEST_FILE,
    Manifest,
    check_sizes_in,
    digest_of,
    write_file,
)
from slurm_train.checkpoint.verify import Search, check_sizes, list_kept, newest_verified, read_manifest
from slurm_train.errors import CheckpointError, UnknownCheckpointError
from slurm_train.rundir.attempts import publishing
from slurm_train.rundir.files import fsync_directory, make_folder, rename
from slurm_train.rundir.paths import PASSED_OVER_PREFIX, CheckpointName, list_checkpoints, name_of, parse_name
from slurm_train.rundir.pins import awaited_saves, pinned_saves
from slurm_train.rundir.removal import remove_tree

TRASH_PREFIX = ".trash-"
STAGING_SUFFIX = ".tmp"
DIRECTORY_MODE = 0o700
_LONGEST_ID_STEP = 2**16
"""From the id of a save to that of the next one of the same step: 30,000 of them have room above the first."""

Fence = Callable[[], None]
"""Raises if a newer attempt has taken over."""


def no_fence() -> None:
    """Never raises: for callers whose attempt cannot be overtaken."""


@dataclass(slots=True)
class Pruned:
    """What a round of pruning did."""

    discarded: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One line for each directory that could not be discarded."""
    untrusted: list[Path] = field(default_factory=list)
    """Directories with a checkpoint's name that do not count; left for a person to look at."""

    def discard(self, paths: Iterable[Path], act: Callable[[Path], object]) -> None:
        """Calls `act`, which discards a directory, for each path; an error of one does not stop the others.

        A directory that cannot be discarded must not fail a save that is durable.
        """
        for path in paths:
            try:
                act(path)
            except OSError as err:
                self.problems.append(f"cannot discard {path}: {err}")
            else:
                self.discarded.append(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory of checkpoints as one attempt changes it: the run's; a node's is a `local.NodePlace`.

    Raises:
        CheckpointError: keep is below 1, which would remove the newest checkpoint.
    """

    root: Path
    """May be absent; its parent must be private to the user."""
    attempt: int
    keep: int = 1
    """How many whole checkpoints stay."""
    fence: Fence = no_fence
    """Called before each change of a name."""
    node: int | None = None
    """Position of the node in the job; None where all ranks see the directory."""
    is_leader: bool = True
    """This rank makes, commits and discards the directories."""
    keeps_copies: bool = False
    """A node's place: it has copies of the files of the node before it as well."""
    passed_over: list[Path] = field(default_factory=list)
    """What this attempt has passed over and `move_aside` has not moved yet; whoever chooses for it sets it, as `claim`
    does."""
    outdated: list[Path] = field(default_factory=list)
    """What lacks something that the run has done since at the same step, see `save_again`."""

    def __post_init__(self) -> None:
        """Refuses a number that would remove the newest checkpoint."""
        if self.keep < 1:
            raise CheckpointError(
                f"checkpoint.keep={self.keep} would remove the newest checkpoint", hint="keep at least 1"
            )

    def begin(self, step: int) -> Path:
        """Returns a fresh directory to write a step into, or this attempt's checkpoint of it if that is whole.

        Of one that this attempt has written or verified, marker and sizes are enough, as for `prune`. One that it has
        passed over is moved aside first, and one that is outdated is left until the new one has its name.

        Raises:
            UnknownCheckpointError: it is there and cannot be read just now.
            OSError: the file system refuses.
        """
        self.fence()
        self.move_aside()
        for path in list_checkpoints(self.root) if self.node is None else ():
            if name_of(path)[:2] == (step, self.attempt) and path not in self.outdated:
                try:
                    check_sizes(path)
                except UnknownCheckpointError:
                    raise
                except CheckpointError:
                    continue
                fsync_directory(self.root)
                return path
        self.prune_leftovers()
        return self.open_staging(step)

    def save_again(self, step: int) -> None:
        """Lets the next save of a step replace the attempt's checkpoint of it, which lacks what was done since."""
        names = ((path, name_of(path)) for path in list_checkpoints(self.root))
        self.outdated[:] = [path for path, name in names if name[:2] == (step, self.attempt)]

    def open_staging(self, step: int) -> Path:
        """Makes the directory to write into, always a fresh one, newer by its name than what it replaces.

        Two saves into one directory would mix: torch keeps the older metadata while shards change.

        Raises:
            CheckpointError: the step has been saved so often that there is no newer name.
            OSError: the file system refuses.
        """
        replaced = [name_of(path) for path in self.outdated if name_of(path).step == step]
        last = max((int(name.save_id, 16) for name in replaced), default=None)
        # A random step, since an attempt that was overtaken may be counting on from the same one.
        ids = range(2**31) if last is None else range(last + 1, min(last + _LONGEST_ID_STEP, 2**32 - 1) + 1)
        if not ids:
            raise CheckpointError(
                f"step {step} was saved under the highest id, {last:08x}, so no newer save of it can have a name",
                hint="nothing is lost: what was saved stays; a later step is saved as usual",
            )
        if not self.root.exists():
            self.root.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            fsync_directory(self.root.parent)
        while True:
            save_id = f"{secrets.choice(ids):08x}"
            staging = self.root / f"{CheckpointName(step, self.attempt, save_id)}{STAGING_SUFFIX}"
            try:
                staging.mkdir(mode=DIRECTORY_MODE)
            except FileExistsError:  # on NFS a repeated request says so of what the first one has made
                with contextlib.suppress(OSError):
                    staging.rmdir()
                continue
            make_folder(staging, within=staging)
            return staging

    def commit(self, staging: Path, manifest: Manifest, *, here: Collection[str] | None = None) -> Path:
        """Turns a staging directory, whose files are durable, into a checkpoint and returns its path.

        Args:
            staging: where all ranks have written.
            manifest: what was written.
            here: the files that lie here, where other nodes have the rest; None: all of them.

        Raises:
            CheckpointError: a file is missing or has another size than its rank said.
            OSError: the file system refuses.
        """
        final = committed_path(staging)
        assert name_of(final).step == manifest.step, f"{final.name} is not of step {manifest.step}"
        files = manifest.files
        check_sizes_in(staging, files if here is None else {name: files[name] for name in here if name in files})
        text = manifest.to_json().encode()
        write_file(staging / MANIFEST_FILE, text)
        write_file(staging / COMPLETE_FILE, digest_of(text))
        fsync_directory(staging)
        with publishing():
            self.fence()
            rename(staging, final)
            fsync_directory(final.parent)
        return final

    def claim(self, check: Callable[[Path], Manifest] | None = None) -> Search:
        """Makes the attempt the owner of what it goes on from, and returns the newest checkpoint that verifies.

        Older ones are claimed by marker and sizes. Newer ones that do not hold lose their name when the attempt has
        trained on from the claimed one, see `move_aside`. To be called before anything is loaded or saved.

        Args:
            check: see `newest_verified`.

        Raises:
            UnknownCheckpointError: see `newest_verified`.
            CheckpointError: a later attempt has claimed it.
            OSError: the file system refuses.
        """
        self.revoke_stale_staging()
        while True:
            search = newest_verified(self.root, check)
            if search.newest is None:
                return search
            path, manifest = search.newest
            claimed = self.claim_checkpoint(path)
            if claimed is not None:
                break
            # Its owner has just moved it: look again.
        for older in list_checkpoints(self.root):
            if name_of(older) < name_of(claimed):
                with contextlib.suppress(OSError, CheckpointError):  # unclaimed, it only does not count
                    check_sizes(older)
                    self.claim_checkpoint(older)
        fsync_directory(self.root)
        self.passed_over[:] = [passed.path for passed in search.passed_over]
        return Search((claimed, manifest), search.passed_over)

    def move_aside(self) -> list[Path]:
        """Takes the name from each checkpoint that was passed over; returns where they are now.

        An attempt that ends before its first step moves nothing.

        Raises:
            OSError: the file system refuses; it is tried again the next time.
            SlurmTrainError: what the fence raised.
        """
        moved = []
        for path in tuple(self.passed_over):
            aside = path.with_name(f"{PASSED_OVER_PREFIX}{path.name}")
            if name_of(path).attempt <= self.attempt and _is_moved(path, aside, self.fence):
                moved.append(aside)
            with contextlib.suppress(ValueError):  # another thread of this attempt has just done the same
                self.passed_over.remove(path)
        if moved:
            fsync_directory(self.root)
        return moved

    def revoke_stale_staging(self) -> None:
        """Renames earlier attempts' staging directories, so that they cannot commit; `prune_leftovers` deletes them."""
        for path in self._stale_staging():
            _move_to_trash(path, self.fence)

    def claim_checkpoint(self, path: Path) -> Path | None:
        """Renames a checkpoint to the attempt's number; returns its new path, None where its owner has just moved it.

        Raises:
            CheckpointError: it belongs to a later attempt.
        """
        name = name_of(path)
        if name.attempt > self.attempt:
            raise CheckpointError(
                f"{path} belongs to attempt {name.attempt}, so attempt {self.attempt} cannot go on from it",
                hint="nothing to do: the later attempt carries on",
            )
        claimed = path.with_name(str(name._replace(attempt=self.attempt)))
        if claimed == path or _is_moved(path, claimed, self.fence):
            return claimed
        return None

    def prune(self, newest: Path, *, protect: Collection[str] = ()) -> Pruned:
        """Discards the attempt's whole checkpoints beyond the newest `keep`, and what earlier attempts left.

        What the newest says is to be kept stays, too, see `list_kept`, and what evaluations need, see `rundir.pins`,
        and the newest of what was passed over.

        Args:
            newest: the one that was just saved or verified; it stays, and a newer one counts for nothing.
            protect: names of directories that stay whatever their age.

        Raises:
            CheckpointError: the newest cannot be read.
            SlurmTrainError: what the fence raised.
        """
        whole: list[Path] = [newest]
        untrusted: list[Path] = []
        replaced = [path for path in self.outdated if name_of(path).step == name_of(newest).step]
        for path in list_checkpoints(self.root):
            if path == newest:
                continue
            is_of_this_attempt = name_of(path).attempt == self.attempt and path not in replaced
            if is_of_this_attempt and name_of(path) < name_of(newest) and _is_whole(path):
                whole.append(path)
            else:
                untrusted.append(path)
        kept = {entry.path for entry in list_kept(read_manifest(newest), whole)}
        pinned = pinned_saves(self.root)
        needed = pinned | awaited_saves(self.root, map(name_of, whole))
        outdated = [
            path
            for path in whole[self.keep :]
            if path.name not in protect and path not in kept and name_of(path).save_id not in needed
        ]
        # Saved again, and this time it holds.
        same_step = [path for path in untrusted if name_of(path).step == name_of(newest).step]
        passed_over = [path for path in list_passed_over(self.root)[1:] if path.name[-8:] not in pinned]
        # Of one that is replaced an evaluation may still need the weights.
        same_step = [path for path in same_step if path not in replaced or name_of(path).save_id not in pinned]
        outdated += [path for path in same_step if name_of(path).attempt <= self.attempt and _is_understood(path)]
        pruned = Pruned(untrusted=[path for path in untrusted if path not in outdated])
        pruned.discard([*outdated, *filter(_is_understood, passed_over)], self._discard)
        return self.prune_leftovers(pruned)

    def prune_leftovers(self, pruned: Pruned | None = None) -> Pruned:
        """Discards what no reader trusts: the trash, and staging directories of attempts before this one.

        Args:
            pruned: what was discarded before in this round.
        """
        pruned = pruned or Pruned()
        pruned.discard(sorted(self.root.glob(f"{TRASH_PREFIX}*")), remove_tree)
        pruned.discard(self._stale_staging(), self._discard)
        return pruned

    def discard_from(self, step: int) -> list[Path]:
        """Discards all checkpoints of a step and later ones, trusted or not: the run goes back to before it.

        Only the leader does it. A checkpoint that an evaluation needs is moved aside. Returns what was there.

        Raises:
            OSError: the file system refuses.
            SlurmTrainError: what the fence raised.
        """
        if not self.is_leader:
            return []
        pinned = pinned_saves(self.root)
        discarded = []
        for path in list_checkpoints(self.root):
            name = name_of(path)
            if name.step < step or name.attempt > self.attempt:
                continue
            if name.save_id in pinned:
                was_there = _is_moved(path, path.with_name(f"{PASSED_OVER_PREFIX}{path.name}"), self.fence)
            else:
                was_there = self._discard(path)
            if was_there:
                discarded.append(path)
        return discarded

    def _stale_staging(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        stale = []
        for path in sorted(self.root.iterdir()):
            if not path.name.endswith(STAGING_SUFFIX):
                continue
            name = parse_name(committed_path(path).name)
            if name is not None and name.attempt < self.attempt:
                stale.append(path)
        return stale

    def _discard(self, path: Path) -> bool:
        return discard(path, fence=self.fence)


def list_passed_over(root: Path) -> list[Path]:
    """Returns the directories that `move_aside` has moved, those of the newest attempt first; `root` may be absent.

    A link that a person has left in the place of one is that person's.
    """
    directories = [path for path in root.glob("passed_over_*") if not path.is_symlink()]
    names = [(path, parse_name(path.name.removeprefix(PASSED_OVER_PREFIX))) for path in directories]
    order = {path: (name.attempt, name.step, name.save_id) for path, name in names if name is not None}
    return sorted(order, key=order.__getitem__, reverse=True)


def committed_path(staging: Path) -> Path:
    """Returns the name that a staging directory gets when it is committed."""
    return staging.with_name(staging.name.removesuffix(STAGING_SUFFIX))


def discard(path: Path, *, fence: Fence = no_fence) -> bool:
    """Renames a directory into the trash, durably, and then deletes its content; returns whether it was there.

    Raises:
        OSError: the file system refuses; what is left has no checkpoint's name.
    """
    trash = _move_to_trash(path, fence)
    if trash is not None:
        # Durable before its content goes: a name that comes back after a power cut is that of a whole checkpoint.
        fsync_directory(path.parent)
        remove_tree(trash)
    return trash is not None


def _move_to_trash(path: Path, fence: Fence) -> Path | None:
    """Returns the name that a directory has now, None where it was not there."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(4)}")
    return trash if _is_moved(path, trash, fence) else None


def _is_whole(path: Path) -> bool:
    try:
        check_sizes(path)
    except CheckpointError:
        return False
    return True


def _is_understood(path: Path) -> bool:
    """Returns whether a directory is known to be whole or damaged; what is not is never pruned."""
    try:
        check_sizes(path)
    except UnknownCheckpointError:
        return False
    except CheckpointError:
        return True
    return True


def _is_moved(source: Path, target: Path, fence: Fence) -> bool:
    """Renames, and returns whether the source was still there."""
    fence()
    try:
        rename(source, target)
    except FileNotFoundError:
        return False
    return True
