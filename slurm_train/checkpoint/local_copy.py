"""From the nodes' own disks into the run directory, which stays the truth.

A local checkpoint is whole if the nodes together hold every file of its manifest. To be loaded it is copied into the
run directory first, every hash compared, and committed there like any other; so a reader knows one place, and a node
that dies takes only what had not been copied yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero, rank_in
from slurm_train.checkpoint.commit import discard, open_staging, own_saved
from slurm_train.checkpoint.directory import read_manifest, survey, wait_until_visible
from slurm_train.checkpoint.local import LocalTier
from slurm_train.checkpoint.manifest import FileRecord, Manifest
from slurm_train.checkpoint.save import Saved, commit_and_prune
from slurm_train.checkpoint.shards import check_size, copy_file
from slurm_train.errors import CheckpointError, SlurmTrainError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_VISIBLE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Reachable:
    """A local checkpoint that the nodes of this job hold completely.

    Args:
        manifest: what it holds.
        holders: the rank that copies each file.
    """

    manifest: Manifest
    holders: Mapping[str, int]


def newest_reachable(
    tier: LocalTier, *, group: ProcessGroup | None, attempts: Collection[int], above: int
) -> Reachable | None:
    """Returns the newest local checkpoint that the nodes hold completely. Collective.

    Args:
        tier: this rank's node.
        group: a gloo group of all ranks; None for one process.
        attempts: whose checkpoints count; others are of a past that the run has left.
        above: only later steps than this.
    """
    return choose_reachable(on_every_rank(group, lambda: held_here(tier)), attempts=attempts, above=above)


def held_by_all(tier: LocalTier, manifest: Manifest, *, group: ProcessGroup | None) -> Reachable | None:
    """Returns who copies what of one checkpoint, None where the nodes do not hold all of it. Collective."""
    text = manifest.to_json()
    held = on_every_rank(group, lambda: {text: held_here(tier).get(text, [])})
    return choose_reachable(held, attempts={manifest.attempt}, above=-1)


def held_here(tier: LocalTier) -> dict[str, list[str]]:
    """Returns the files of each whole-looking local checkpoint on this node, by the text of its manifest."""
    found: dict[str, list[str]] = {}
    for path, manifest in survey(tier.root, read_manifest):
        if isinstance(manifest, Manifest):
            found[manifest.to_json()] = [name for name, record in manifest.files.items() if _has(path / name, record)]
    return found


def choose_reachable(
    held: Sequence[Mapping[str, Collection[str]]], *, attempts: Collection[int], above: int
) -> Reachable | None:
    """Returns the newest checkpoint whose files the ranks' nodes hold together, and who copies which.

    Args:
        held: what each rank's node holds, in rank order, see `held_here`.
        attempts: whose checkpoints count.
        above: only later steps than this.
    """
    manifests = [Manifest.from_json(text) for text in {text for of_rank in held for text in of_rank}]
    manifests = [item for item in manifests if item.attempt in attempts and item.step > above]
    for manifest in sorted(manifests, key=lambda item: (item.step, item.attempt), reverse=True):
        text = manifest.to_json()
        holders = {
            name: rank
            for rank in reversed(range(len(held)))
            for name in held[rank].get(text, ())
            if name in manifest.files
        }
        if holders.keys() == manifest.files.keys():
            return Reachable(manifest, _share_work(holders, held, text))
    return None


def _share_work(holders: Mapping[str, int], held: Sequence[Mapping[str, Collection[str]]], text: str) -> dict[str, int]:
    """Spreads the files of a node over its ranks, which hold the same ones."""
    able = {name: [rank for rank, of_rank in enumerate(held) if name in of_rank.get(text, ())] for name in holders}
    return {name: able[name][number % len(able[name])] for number, name in enumerate(sorted(holders))}


def copy_to_run(tier: LocalTier, root: Path, reachable: Reachable, *, group: ProcessGroup | None, keep: int) -> Saved:
    """Copies a local checkpoint into the run directory and commits it there. Collective.

    Args:
        tier: this rank's node.
        root: the run's directory of checkpoints.
        reachable: the checkpoint, and which rank copies what.
        group: a gloo group of all ranks; None for one process.
        keep: whole checkpoints that stay in the run directory.

    Raises:
        CheckpointError: a file is not what its manifest says, or cannot be written; nothing is left of the copy.
    """
    manifest, attempt, fence = reachable.manifest, tier.attempt, tier.fence
    saved, staging = on_rank_zero(group, lambda: _begin(tier, root, manifest))
    if saved is not None:
        return Saved(saved, num_bytes=0)
    names = [name for name, rank in reachable.holders.items() if rank == rank_in(group)]
    try:
        on_every_rank(group, lambda: copy_files(tier, staging, names, manifest))
        return on_rank_zero(group, lambda: commit_and_prune(staging, manifest, keep=keep, attempt=attempt, fence=fence))
    except SlurmTrainError:
        if rank_in(group) == 0:
            with contextlib.suppress(OSError):
                discard(staging)
        raise


def _begin(tier: LocalTier, root: Path, manifest: Manifest) -> tuple[Path | None, Path]:
    """Returns the checkpoint if it is in the run directory already, and the directory to copy into. Rank 0."""
    tier.fence()
    if (saved := own_saved(root, step=manifest.step, attempt=tier.attempt)) is not None:
        return saved, saved
    return None, open_staging(root, step=manifest.step, attempt=tier.attempt)


def copy_files(tier: LocalTier, staging: Path, names: Collection[str], manifest: Manifest) -> None:
    """Copies files of a local checkpoint, durable, each read back and compared with its record.

    Raises:
        CheckpointError: one is not what the manifest says, or is gone.
        OSError: the file system refuses.
    """
    if not names:
        return
    source = next((path for path, found in survey(tier.root, read_manifest) if found == manifest), None)
    if source is None:
        raise CheckpointError(
            f"step {manifest.step} is not on this node any more",
            hint="the newest checkpoint in the run directory counts; checkpoint.local_keep keeps more on the nodes",
        )
    wait_until_visible(staging, timeout_s=_VISIBLE_TIMEOUT_S)
    for name in names:
        copy_file(source / name, staging / name, manifest.files[name])


def _has(path: Path, record: FileRecord) -> bool:
    try:
        check_size(path, record)
    except CheckpointError:
        return False
    return True
