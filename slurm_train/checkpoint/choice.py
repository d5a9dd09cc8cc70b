"""Which checkpoint all ranks load: rank 0 chooses the newest one that verifies, and every rank checks that it sees it.

Every byte is verified and the owner is checked before anything is parsed. Imports no torch, so a program without it
resumes as well.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint.agreement import Group, on_every_rank, on_rank_zero, rank_in, size_of
from slurm_train.checkpoint.commit import Fence, Place, no_fence
from slurm_train.checkpoint.manifest import COMPLETE_FILE, Manifest
from slurm_train.checkpoint.verify import (
    PassedOver,
    check_copied,
    read_manifest,
    share_of,
    verify,
    verify_share,
    wait_until_visible,
)
from slurm_train.errors import CheckpointError, RunError, SlurmTrainError
from slurm_train.rundir.files import LOOKS_AT_STALE, ask_server, is_stale
from slurm_train.rundir.lineage import Origin
from slurm_train.rundir.paths import PASSED_OVER_PREFIX, name_of


class Choice(NamedTuple):
    """The checkpoint that all ranks load.

    Args:
        path: its directory.
        manifest: what it holds.
        passed_over: newer ones that were not trusted, newest first; worth a warning.
        near: where this node's own disk has files of it; None where it has none.
    """

    path: Path
    manifest: Manifest
    passed_over: tuple[PassedOver, ...]
    near: Path | None = None

    @property
    def origin(self) -> Origin:
        """What training goes on from when this is loaded."""
        manifest = self.manifest
        save_id = name_of(self.path).save_id
        return Origin(step=manifest.step, save_id=save_id, saved_in=manifest.attempt, parent=manifest.parent)

    @property
    def warnings(self) -> list[str]:
        """A line for the user about each checkpoint that was passed over."""
        return [
            f"passed over {passed.path.name}: {passed.reason}; "
            f"it becomes {PASSED_OVER_PREFIX}{passed.path.name} when training goes on"
            for passed in self.passed_over
        ]

    @property
    def resuming(self) -> str:
        """A line for the user that says what is loaded."""
        return f"resuming from {self.path.name} (step {self.manifest.step})"


def choose_checkpoint(
    root: Path, *, group: Group | None, attempt: int, fence: Fence = no_fence, copied: Path | None = None
) -> Choice | None:
    """Chooses the newest checkpoint that verifies; None means that nothing was ever saved completely. Collective.

    Rank 0 chooses; of what it looks at, each rank reads and hashes a share of the files.

    It is renamed to this attempt's number first, so that no earlier attempt can remove it any more, see `commit`.

    Args:
        root: the directory of checkpoints.
        group: a group of all ranks that exchanges objects on the host, e.g. a gloo group; None for one process.
        attempt: this attempt of the run.
        fence: called by rank 0 before each rename; raises if a newer attempt has taken over.
        copied: one that this attempt has just copied there, each byte compared; it is not read again.

    Raises:
        CheckpointError: all of them are damaged (starting over would hide the loss), a rank does not see the chosen
            one, another user owns it, or a later attempt does.
        RunError: a rank finds files damaged that rank 0 finds whole.
    """

    verify_all = verify if size_of(group) == 1 else partial(_verify_together, group=group)

    def check(path: Path) -> Manifest:
        return check_copied(path) if path == copied else verify_all(path)

    def choose() -> Choice | None:
        search = Place(root=root, attempt=attempt, fence=fence).claim(check)
        if search.newest is not None:
            return Choice(*search.newest, search.passed_over)
        if search.passed_over:
            raise CheckpointError(
                f"none of the {len(search.passed_over)} checkpoints in {root} verifies; the newest: "
                f"{search.passed_over[0].reason}",
                hint=f"restore one, or move them out of {root} to start from the beginning",
            )
        return None

    choice = on_rank_zero(group, choose)
    while isinstance(choice, _Question):
        _verify_share(choice, group)
        choice = on_rank_zero(group, choose)
    if choice is not None:
        on_every_rank(group, lambda: _check_here(choice, group))
    return choice


class _Question(NamedTuple):
    """Rank 0 wants a checkpoint verified by all ranks."""

    path: Path
    manifest: Manifest


def _verify_together(path: Path, *, group: Group | None) -> Manifest:
    """Returns what `verify` does; rank 0 calls it while the other ranks wait for its choice or for a question.

    Raises:
        CheckpointError: rank 0 sees the damage as well.
        RunError: another rank finds something wrong that rank 0 does not: its node must not cost a good checkpoint.
    """
    # Not within the exchange: an error would be raised on all ranks, and rank 0 alone passes over a checkpoint.
    question = _Question(path, read_manifest(path))
    on_rank_zero(group, lambda: question)
    outcomes = dict(enumerate(_verify_share(question, group)))
    problems = {number: problem for number, problem in outcomes.items() if problem}
    for number in problems:
        verify_share(path, question.manifest, number=number, of=size_of(group))
    if problems:
        raise RunError(
            f"{next(iter(problems.values()))}; rank 0 finds these files whole",
            hint="look at that node: its memory, its mounts; or leave it out with cluster.exclude",
        )
    return question.manifest


def _verify_share(question: _Question, group: Group | None) -> list[str]:
    """Returns what each rank finds wrong in its share of the files, "" for nothing. Collective."""
    number = rank_in(group)
    of = size_of(group)

    def find() -> str:
        path, manifest = question
        for look in range(LOOKS_AT_STALE):
            try:
                wait_until_visible(path / COMPLETE_FILE)
                verify_share(path, manifest, number=number, of=of)
            except Exception as err:  # whatever it is, rank 0 looks at the same files
                if is_stale(err) and look + 1 < LOOKS_AT_STALE:
                    ask_server(path)
                    continue
                text = err.message if isinstance(err, SlurmTrainError) else f"{type(err).__name__}: {err}"
                return f"rank {number} on {socket.gethostname()}: {text}"
            break
        return ""

    return on_every_rank(group, find)


def _check_here(choice: Choice, group: Group | None) -> None:
    """Checks that this node sees the same checkpoint, and that no other user could have written this rank's share."""
    wait_until_visible(choice.path / COMPLETE_FILE)
    if read_manifest(choice.path) != choice.manifest:
        raise CheckpointError(
            f"{choice.path} is another checkpoint on this node than on rank 0",
            hint="the run directory must lie on a path that all nodes share: run.root=/shared/path",
        )
    check_owners(choice.path, share_of(choice.manifest, rank_in(group), size_of(group)))


def check_owners(path: Path, names: Iterable[str]) -> None:
    """Refuses a checkpoint that another user (root excepted) owns or may write, in whole or in part.

    Args:
        path: the checkpoint.
        names: the files to look at.

    Raises:
        CheckpointError: naming the file and its owner.
    """
    for member in [path, *(path / name for name in names)]:
        status = member.lstat()
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CheckpointError(
                f"{member} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}; "
                f"loading it would trust whoever can write it with your account (uid {os.geteuid()})",
                hint="chown it to yourself and remove group and world write permission, if you trust its content",
            )
