"""Saving: all ranks write into a fresh directory, rank 0 publishes it when every byte is durable.

Four exchanges: the directory's name, torch's own plan, the records of the files, the outcome. Whatever fails on any
rank, all ranks hear it, the directory is removed and the previous checkpoint is untouched. Nothing here depends on the
calling thread, so the same function serves a background save that brings its own tensors and its own group.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero, rank_in
from slurm_train.checkpoint.commit import Fence, commit, discard, no_fence, open_staging, own_saved
from slurm_train.checkpoint.manifest import CheckpointHeader, FileRecord, Manifest
from slurm_train.checkpoint.retention import check_keep, prune, sweep
from slurm_train.checkpoint.shards import seal_file, write_file
from slurm_train.checkpoint.tensors import tensor_files, write_tensors
from slurm_train.errors import CheckpointError, SlurmTrainError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable checkpoint.

    Args:
        path: its directory.
        num_bytes: size of all its files; 0 where it had been saved before.
        problems: what retention could not remove, one line each; the checkpoint itself is whole.
    """

    path: Path
    num_bytes: int
    problems: tuple[str, ...] = ()


def rank_file(rank: int) -> str:
    """Gives the name of a rank's own file, for example "rank_00007.pt"."""
    return f"rank_{rank:05d}.pt"


def save_checkpoint(
    root: Path,
    *,
    tensors: dict[str, Any],
    rank_state: dict[str, Any],
    header: CheckpointHeader,
    group: ProcessGroup | None,
    keep: int,
    fence: Fence = no_fence,
) -> Saved:
    """Saves one checkpoint. Collective: all ranks call it with the same header.

    A step that is saved already (the periodic save and the last one may meet) costs one exchange and a verification.

    Args:
        root: the directory of checkpoints; made if absent, its parent must be private to the user.
        tensors: nested dictionary of tensors and plain values, equal on all ranks or DTensors; not changed meanwhile.
        rank_state: this rank's own state; only what torch.load(weights_only=True) reads back.
        header: the facts for the manifest.
        group: a gloo group of all ranks; None for one process without a group.
        keep: how many whole checkpoints stay, at least 1.
        fence: called by rank 0 before it gives or takes a checkpoint's name; raises if a newer attempt has taken over.

    Raises:
        CheckpointError: it could not be saved; the text names the rank, its node and the system's reason.
        SlurmTrainError: what the fence raised, on every rank.
    """
    check_keep(keep)
    saved, staging = on_rank_zero(group, lambda: _begin(root, header, fence))
    if saved is not None:
        return Saved(saved, num_bytes=0)
    try:
        write_tensors(staging, tensors, group=group)
        records = on_every_rank(group, lambda: write_rank(staging, rank_state, rank=rank_in(group)))
        return on_rank_zero(group, lambda: _publish(staging, header, records, keep=keep, fence=fence))
    except SlurmTrainError:
        _abandon(staging, group)
        raise


def _begin(root: Path, header: CheckpointHeader, fence: Fence) -> tuple[Path | None, Path]:
    """Returns the checkpoint of this step, None where it is to be saved, and the directory to write into. Rank 0."""
    fence()
    if (saved := own_saved(root, step=header.step, attempt=header.attempt)) is not None:
        return saved, saved
    sweep(root, attempt=header.attempt, fence=fence)
    return None, open_staging(root, step=header.step, attempt=header.attempt)


def write_rank(staging: Path, rank_state: dict[str, Any], *, rank: int) -> dict[str, FileRecord]:
    """Writes this rank's own file, makes all files that this rank wrote durable, and gives their records."""
    own = rank_file(rank)
    records = {own: write_file(staging / own, _to_bytes(rank_state))}
    return records | {path.name: seal_file(path) for path in tensor_files(staging, rank=rank)}


def _to_bytes(rank_state: dict[str, Any]) -> bytes:
    """Gives the file content, and proves that a resume will be able to read it."""
    import torch

    buffer = io.BytesIO()
    torch.save(rank_state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getbuffer()), weights_only=True)
    except Exception as err:
        reason = str(err).rpartition("WeightsUnpickler error:")[2].strip().splitlines()[0]
        raise CheckpointError(
            f"rank state could not be loaded again with weights_only=True: {reason}",
            hint="keep tensors, numbers, strings, lists and dicts only",
        ) from err
    return buffer.getvalue()


def _publish(
    staging: Path,
    header: CheckpointHeader,
    records: list[dict[str, FileRecord]],
    *,
    keep: int,
    fence: Fence,
) -> Saved:
    """Commits, then prunes. Rank 0."""
    files = {name: record for of_rank in records for name, record in of_rank.items()}
    manifest = Manifest.of(header, files)
    return commit_and_prune(staging, manifest, keep=keep, attempt=header.attempt, fence=fence)


def commit_and_prune(staging: Path, manifest: Manifest, *, keep: int, attempt: int, fence: Fence) -> Saved:
    """Commits what all ranks have written, then removes older checkpoints. Rank 0."""
    final = commit(staging, manifest, fence=fence)
    try:
        pruned = prune(final.parent, newest=final, keep=keep, attempt=attempt, fence=fence)
    except OSError as err:  # what was just saved is durable, so the save has not failed
        return Saved(final, manifest.num_bytes, (f"cannot look for old checkpoints: {err}",))
    return Saved(final, manifest.num_bytes, pruned.problems)


def _abandon(staging: Path, group: ProcessGroup | None) -> None:
    """Removes what was written; all ranks have stopped writing when they heard of the failure."""
    if rank_in(group) == 0:
        with contextlib.suppress(OSError):  # the reason of the failure matters more; a later sweep removes it
            discard(staging)
