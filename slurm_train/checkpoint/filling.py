"""From a fresh directory to a checkpoint, whatever fills it: the trainer's tensors, or files of a program's own.

Two exchanges, beside those of the writing itself: the directory's name, and the outcome. If any rank fails, all ranks
raise the same error, the directory is removed and the previous checkpoint is untouched. No torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from slurm_train.checkpoint.agreement import Group, Peers, on_every_rank, on_rank_zero, rank_in
from slurm_train.checkpoint.commit import Place, committed_path, discard
from slurm_train.checkpoint.manifest import CheckpointHeader, FileRecord, Manifest
from slurm_train.errors import CheckpointError, SlurmTrainError
from slurm_train.rundir.paths import parse_name

Records = dict[str, FileRecord]


class Saved(NamedTuple):
    """A durable checkpoint.

    Args:
        path: its directory.
        manifest: what it holds; None where it had been saved before.
        problems: what retention could not remove, one line each; the checkpoint itself is whole.
    """

    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all its files; 0 where it had been saved before."""
        return 0 if self.manifest is None else self.manifest.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """A directory of a place that the ranks fill. All ranks call the same methods in the same order."""

    place: Place
    header: CheckpointHeader
    """Rank 0's facts, with this rank's weights."""
    group: Group | None
    staging: Path
    """Where to write; the checkpoint itself where the step was saved already."""
    nodes: Sequence[int | None]
    """Position of each rank's node, for a place that nodes have of their own."""
    answers: Sequence[str] = ()
    """What each rank has said at the beginning."""
    protect: Collection[str] = ()

    @property
    def is_saved(self) -> bool:
        """Whether this attempt has saved the step already, so that nothing is to be written."""
        return parse_name(self.staging.name) is not None

    def end(self, write: Callable[[], list[Records]], *, last: Callable[[], Records] | None = None) -> Saved:
        """Has the directory written, gives it its name, and removes older checkpoints. Collective.

        Args:
            write: collective; writes this rank's files, durable, and returns all ranks' records, in rank order.
            last: writes on rank 0 what describes the others' files.

        Raises:
            SlurmTrainError: on every rank; what was written is removed.
        """
        if self.is_saved:
            return Saved(self.staging, manifest=None)
        try:
            return self._commit(write(), last=last)
        except SlurmTrainError:
            # All ranks have stopped writing when they raise.
            self.discard()
            raise

    def _commit(self, records: Sequence[Records], *, last: Callable[[], Records] | None) -> Saved:
        place = self.place
        group = self.group
        staging = self.staging
        if place.node is not None and last is not None:
            # The leaders of all nodes list it.
            return self._commit([records[0] | on_rank_zero(group, last), *records[1:]], last=None)
        here = {
            name for node, of_rank in zip(self.nodes, records, strict=True) if node == place.node for name in of_rank
        }
        if place.keeps_copies and group is not None:
            here |= self._copy_to_keepers(records)
        files = {name: record for of_rank in records for name, record in of_rank.items()}

        def end() -> tuple[Records, list[str]]:
            described = last() if last is not None and rank_in(group) == 0 else {}
            if not place.is_leader:
                return described, []
            manifest = Manifest.of(self.header, files | described)
            return described, _commit_and_prune(place, staging, manifest, here | described.keys(), self.protect)

        outcomes = on_every_rank(group, end)
        for described, _ in outcomes:
            files |= described
        problems = tuple(line for _, of_rank in outcomes for line in of_rank)
        return Saved(committed_path(staging), Manifest.of(self.header, files), problems)

    def discard(self) -> None:
        """Removes what was written; all ranks have stopped writing."""
        if self.place.is_leader:
            with contextlib.suppress(OSError):  # the reason of the failure matters more; a later sweep removes it
                discard(self.staging)

    def _copy_to_keepers(self, records: Sequence[Mapping[str, FileRecord]]) -> set[str]:
        """Returns the files of other nodes that this node has a copy of now. Collective."""
        from slurm_train.checkpoint.copies import exchange_files, keepers

        group = self.group
        assert group is not None and not isinstance(group, Peers), "copies travel through torch's group"
        keeper_of = keepers(self.nodes)
        if not keeper_of:
            return set()
        on_every_rank(group, lambda: exchange_files(self.staging, records, keeper_of, group=group))
        kept: set[str] = set()
        for rank, keeper in keeper_of.items():
            if self.nodes[keeper] == self.place.node:
                kept |= records[rank].keys()
        return kept


def begin_filling(
    place: Place,
    header: CheckpointHeader,
    *,
    group: Group | None,
    protect: Collection[str] = (),
    answer: Callable[[], str] = str,
) -> Filling:
    """Returns a fresh directory of a place for all ranks. Collective.

    Args:
        place: where to; each node has one leader, and so has a directory that all ranks see.
        header: the facts for the manifest; rank 0's count, the others' need not be equal to the letter, but for the
            weights.
        group: a group of all ranks that exchanges objects on the host; None for one process.
        protect: names of checkpoints that stay, whatever their age: they are being copied.
        answer: gives what this rank says to all others with this exchange.

    Raises:
        SlurmTrainError: on every rank.
    """

    def begin() -> tuple[int | None, str, CheckpointHeader | None, str]:
        said = answer()
        name = place.begin(header.step).name if place.is_leader else ""
        # What is gathered takes the room of the longest on each rank, times ranks; the weights are known everywhere.
        return place.node, name, replace(header, weights={}) if rank_in(group) == 0 else None, said

    openings = on_every_rank(group, begin)
    return Filling(
        place=place,
        header=replace(openings[0][2] or header, weights=header.weights),
        group=group,
        staging=place.root / next(name for node, name, *_ in openings if name and node == place.node),
        nodes=[node for node, *_ in openings],
        answers=[said for *_, said in openings],
        protect=protect,
    )


def _commit_and_prune(
    place: Place, staging: Path, manifest: Manifest, here: Collection[str], protect: Collection[str]
) -> list[str]:
    final = place.commit(staging, manifest, here=here)
    try:
        return place.prune(final, protect=protect).problems
    except (OSError, CheckpointError) as err:  # what was just saved is durable, so the save has not failed
        return [f"cannot look for old checkpoints: {err}"]
