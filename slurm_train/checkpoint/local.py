"""The fast tier: checkpoints on the nodes' own disks, each node with the files of its own ranks, and their copies.

Where the job outlives its nodes (`cluster.spare_nodes`, or a range) a node also has the files of the node before it
(see `copies`), since the run goes on without a node that is lost.

Written with the discipline of any other: fresh directory, fsync, the manifest of all files on every node, rename,
COMPLETE. The run directory stays the truth. A local checkpoint is whole if the nodes of the job together hold every
file of its manifest, and it counts if it is on the line of the run, see `rundir.lineage`: a disk that comes back with
its node may hold a past that the run has left. To be loaded it is copied into the run directory first, every hash
compared, and committed there like any other; so a reader knows one place, and a node that dies takes only what is
nowhere else. What a rank's own node has of the checkpoint that all ranks load, it reads there, every hash compared
again.

One thread saves to the node, another one copies, so a copy that takes longer than the saves do skips some of them.
Which one is copied, rank 0 decides within an exchange of the save.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from typing import NamedTuple

from torch.distributed import ProcessGroup

from slurm_train.checkpoint.agreement import Group, as_agreed, on_every_rank, on_rank, on_rank_zero, rank_in, size_of
from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.commit import Place, Pruned
from slurm_train.checkpoint.filling import Records, Saved, begin_filling
from slurm_train.checkpoint.manifest import FileRecord, Manifest, check_size, copy_file, digest_of
from slurm_train.checkpoint.tier import Tier
from slurm_train.checkpoint.verify import newest_committed_step, read_manifest, survey, wait_until_visible
from slurm_train.config.schema import CheckpointSection
from slurm_train.distributed.group import open_side_group
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import CheckpointError, ConfigError, UnknownCheckpointError
from slurm_train.rundir.ledger import Action, read_attempt
from slurm_train.rundir.lineage import Stretch, is_on_line, read_line, read_origins
from slurm_train.rundir.node_disk import open_private
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of

_LOST_HINT = "the newest checkpoint in the run directory counts; checkpoint.local_keep keeps more on the nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace(Place):
    """One node's folder of checkpoints, as one rank of that node uses it; each node's leader changes its names."""

    node: int

    def claim_all(self) -> None:
        """Makes this attempt the owner of what earlier ones left on the node; before anything is read or saved.

        Raises:
            CheckpointError: a later attempt has claimed it.
            OSError: the file system refuses.
        """
        if self.is_leader:
            self.revoke_stale_staging()
            for path in list_checkpoints(self.root):
                self.claim_checkpoint(path)

    def prune(self, newest: Path, *, protect: Collection[str] = ()) -> Pruned:
        """Discards the node's checkpoints but the one just saved and those before it; files elsewhere do not count.

        One of the same or a later step is of a past that the run has left, and is discarded as well.
        """
        candidates = []
        for path in list_checkpoints(self.root):
            if path != newest and name_of(path).attempt <= self.attempt:
                candidates.append(path)
        kept = [path for path in candidates if name_of(path).step < name_of(newest).step][: self.keep - 1]
        outdated = [path for path in candidates if path not in kept and path.name not in protect]
        pruned = Pruned()
        pruned.discard(outdated, self._discard)
        return pruned


class Reachable(NamedTuple):
    """A local checkpoint that the nodes of this job hold completely.

    Args:
        manifest: what it holds.
        holders: the ranks that copy each file, one after the other until one of them can.
    """

    manifest: Manifest
    holders: Mapping[str, Sequence[int]]


class Held(NamedTuple):
    """A checkpoint that a node has a part of; not the manifest itself, which is as long as the job is large."""

    step: int
    attempt: int
    digest: str
    """Hash of the manifest's text."""


def newest_reachable(
    place: NodePlace, wanted: Callable[[Manifest], bool], *, group: ProcessGroup | None
) -> Reachable | None:
    """Returns the newest local checkpoint that the nodes hold completely, among those that are wanted. Collective."""
    texts: dict[Held, str] = {}
    held = on_every_rank(group, lambda: held_here(place, wanted, texts))
    return choose_reachable(held, lambda candidate, rank: on_rank(rank, group, lambda: texts[candidate]))


def held_here(place: NodePlace, wanted: Callable[[Manifest], bool], texts: dict[Held, str]) -> dict[Held, list[int]]:
    """Returns which files of each marked local checkpoint are on this node, by position in the sorted names.

    Args:
        place: this rank's node.
        wanted: whether a checkpoint counts.
        texts: gets the text of each manifest.
    """
    held = {}
    for path, manifest in survey(place.root, read_manifest):
        if isinstance(manifest, Manifest) and wanted(manifest):
            text = manifest.to_json()
            names = sorted(manifest.files)
            candidate = Held(manifest.step, manifest.attempt, digest_of(text.encode()).decode())
            texts[candidate] = text
            held[candidate] = [n for n, name in enumerate(names) if _has(path / name, manifest.files[name])]
    return held


def choose_reachable(
    held: Sequence[Mapping[Held, Collection[int]]], fetch: Callable[[Held, int], str]
) -> Reachable | None:
    """Returns the newest checkpoint whose files the ranks' nodes hold together; ranks of a node share the copying.

    Args:
        held: what each rank's node holds, in rank order, see `held_here`.
        fetch: gives the text of a manifest that a rank's node has; called alike on all ranks.
    """
    for candidate in sorted({candidate for of_rank in held for candidate in of_rank}, reverse=True):
        first_holder = min(rank for rank, of_rank in enumerate(held) if candidate in of_rank)
        manifest = Manifest.from_json(fetch(candidate, first_holder))
        ranks_with_file: list[list[int]] = [[] for _ in manifest.files]
        for rank, of_rank in enumerate(held):
            for number in of_rank.get(candidate, ()):
                ranks_with_file[number].append(rank)
        if all(ranks_with_file):
            names = sorted(manifest.files)
            return Reachable(manifest, {name: _holders(ranks_with_file[n], n) for n, name in enumerate(names)})
    return None


def _holders(ranks: Sequence[int], number: int) -> tuple[int, ...]:
    """Returns the ranks that copy a file, one after the other until one can; files in turn begin with other ranks.

    Where two nodes hold it, the first and the last of its ranks are on different ones.
    """
    return tuple(dict.fromkeys((ranks[number % len(ranks)], ranks[0], ranks[-1])))


def copy_to_run(place: NodePlace, run: Place, reachable: Reachable, *, group: ProcessGroup | None) -> Saved:
    """Copies a local checkpoint into the run directory and commits it there. Collective.

    Args:
        place: this rank's node.
        run: the run's directory of checkpoints.
        reachable: the checkpoint, and which rank copies what.
        group: a gloo group of all ranks; None for one process.

    Raises:
        CheckpointError: no node has a file as its manifest says, or it cannot be written; nothing is left of the copy.
    """
    manifest = reachable.manifest
    rank = rank_in(group)

    def copy_own(staging: Path, names: Sequence[str]) -> tuple[Records, dict[str, str]]:
        """Returns what was copied, and why other files were not."""
        if not names:
            return {}, {}
        wait_until_visible(staging)
        source = _find(place, manifest)
        reasons = dict[str, str]()
        for name in names:
            try:
                if source is None:
                    raise CheckpointError(f"step {manifest.step} is not on this node any more", hint=_LOST_HINT)
                copy_file(source / name, staging / name, manifest.files[name])
            except (CheckpointError, OSError) as err:
                reasons[name] = f"rank {rank} on {socket.gethostname()}: {as_agreed(err).message}"
                with contextlib.suppress(OSError):
                    (staging / name).unlink()
        return {name: manifest.files[name] for name in names if name not in reasons}, reasons

    def copy_all(staging: Path) -> list[Records]:
        records: list[Records] = [{} for _ in range(size_of(group))]
        names = sorted(reachable.holders)
        tries = 0
        while names:
            own_names = [name for name in names if reachable.holders[name][tries] == rank]
            outcomes = on_every_rank(group, partial(copy_own, staging, own_names))
            failed = dict[str, str]()
            for of_rank, (copied, reasons) in zip(records, outcomes, strict=True):
                of_rank |= copied
                failed |= reasons
            names = sorted(failed)
            tries += 1
            lost = [reason for name, reason in failed.items() if len(reachable.holders[name]) == tries]
            if lost:
                raise CheckpointError("; ".join(dict.fromkeys(lost)), hint=_LOST_HINT)
        return records

    filling = begin_filling(run, manifest, group=group)
    return filling.end(lambda: copy_all(filling.staging))


def _find(place: NodePlace, manifest: Manifest) -> Path | None:
    """Returns where a node has its files of a checkpoint."""
    for path, outcome in survey(place.root, read_manifest):
        if outcome == manifest:
            return path
    return None


def _has(path: Path, record: FileRecord) -> bool:
    try:
        check_size(path, record)
    except CheckpointError:
        return False
    return True


@dataclass(slots=True, kw_only=True)
class LocalSaves(Tier):
    """This rank's part in the fast tier. All ranks make the same calls in the same order."""

    run: RunDirectory
    place: NodePlace
    """This node's folder."""
    target: Place
    """The run directory's checkpoints, where copies go."""
    copy_every: int
    peers: ProcessGroup | None
    """All ranks, for exchanges of the training's own thread; None for one process."""
    group: ProcessGroup | None
    """Of the copying thread alone."""
    thread: ThreadPoolExecutor
    """Copies, one checkpoint after the other."""
    saves_since_copy: int = 0
    copying: list[str] = field(default_factory=list)
    """Names of the checkpoints that are being copied, or are about to be."""
    newest: tuple[Manifest, str] | None = None
    """The newest checkpoint on the nodes, and its name; None before the first, and once it is in the run directory."""
    last_copy: Future[None] | None = None
    """The copy that was begun last; it raises nothing."""
    news: deque[str] = field(default_factory=deque)
    """Notes for the user about copies."""

    @property
    def places(self) -> list[Place]:
        """See `Tier.places`: killed in between, what the nodes still have could be copied back, so they come first."""
        return [self.place, self.target]

    @property
    def protected(self) -> Collection[str]:
        """See `Tier.protected`: those that are being copied."""
        return self.copying

    def add(self, saved: Saved, *, group: Group | None) -> None:
        """Hands a save on to the copying thread, where it is due and rank 0 is copying nothing. Collective."""
        manifest = saved.manifest
        name = saved.path.name
        assert manifest is not None
        self.newest = (manifest, name)
        self.saves_since_copy += 1
        if on_rank_zero(group, lambda: self.saves_since_copy >= self.copy_every and not self.copying):
            self.saves_since_copy = 0
            self.copying.append(name)
            self.last_copy = self.thread.submit(self._copy, manifest, name)

    def bring_home(self) -> None:
        """See `Tier.bring_home`; a copy of the newest that has failed is tried once more."""
        if self.last_copy is not None:
            self.last_copy.result()
        if self.newest is None:
            return
        manifest, name = self.newest
        if not self._has_in_run(manifest):
            self.copying.append(name)
            # Here: at the end of the interpreter no thread begins any more.
            self._copy(manifest, name)
            if not self._has_in_run(manifest):
                raise CheckpointError(
                    f"step {manifest.step}, the last one, is on the nodes only: {'; '.join(self.take_news())}",
                    hint="start the run again: it takes the step from the nodes, if they are there",
                )
        # The groups may have ended where this is called again.
        self.newest = None

    def _has_in_run(self, manifest: Manifest) -> bool:
        """Returns whether the run directory has a checkpoint of that step or a later one. Collective."""
        return on_rank_zero(self.group, lambda: newest_committed_step(self.target.root) >= manifest.step)

    def take_news(self) -> list[str]:
        """See `Tier.take_news`: notes about copies."""
        return [self.news.popleft() for _ in range(len(self.news))]

    def choose(
        self, choose_in_run: Callable[[Path | None], Choice | None], *, reason_against: Callable[[Manifest], str]
    ) -> tuple[Choice | None, list[str]]:
        """See `Tier.choose`; from the nodes if they have a newer one."""
        group = self.peers
        on_every_rank(group, self.place.claim_all)
        # Read before anything is claimed: what owns the newest checkpoint now is what the run went on from.
        line = on_rank_zero(group, lambda: read_line(self.run) or _line_without_record(self.target.root))
        removed = on_rank_zero(group, lambda: removed_step(self.run, self.place.attempt))
        if removed is not None:
            line = []
        bring_in = partial(self.bring_in, line=line, reason_against=reason_against)
        copied, notes = bring_in(above=on_rank_zero(group, lambda: newest_committed_step(self.target.root)))
        if removed is not None:
            notes.append(f"step {removed} was taken out of the run directory, so nothing is taken from the nodes")
        above = None
        try:
            choice = choose_in_run(copied)
            if choice is not None and choice.passed_over:
                above = choice.manifest.step
        except UnknownCheckpointError:
            raise
        except CheckpointError:
            # All in the run directory are damaged.
            choice = None
            above = -1
        if above is not None:
            copied, more = bring_in(above=above)
            if more or choice is None:
                choice = choose_in_run(copied)
                notes = notes + more
        return choice and choice._replace(near=_find(self.place, choice.manifest)), notes

    def bring_in(
        self, *, above: int, line: Sequence[Stretch], reason_against: Callable[[Manifest], str]
    ) -> tuple[Path | None, list[str]]:
        """Copies what the nodes have beyond a step into the run directory; returns its path, and notes for the user.

        Args:
            above: the step.
            line: what the run has come from.
            reason_against: as for `choose`.
        """
        notes: dict[str, None] = {}

        def is_wanted(manifest: Manifest) -> bool:
            step = manifest.step
            if step <= above or not is_on_line(line, attempt=manifest.attempt, parent=manifest.parent, step=step):
                return False
            reason = reason_against(manifest)
            if reason:
                notes[f"step {step} lies on the nodes, but the run does not go on from it: {reason}"] = None
            return not reason

        reachable = newest_reachable(self.place, is_wanted, group=self.peers)
        if reachable is None:
            return None, list(notes)
        step = reachable.manifest.step
        try:
            saved = copy_to_run(self.place, self.target, reachable, group=self.peers)
        except CheckpointError as err:
            note = f"step {step} lies on the nodes, but could not be copied into the run directory: {err.message}"
            return None, [*notes, note]
        return saved.path, [*notes, f"step {step} was on the nodes only; copied into the run directory"]

    def close(self) -> None:
        """See `Tier.close`."""
        self.thread.shutdown()
        if self.place.is_leader:
            with contextlib.suppress(OSError):
                self.place.discard_from(0)
                self.place.root.rmdir()
                self.place.root.parent.rmdir()

    def _copy(self, manifest: Manifest, name: str) -> None:
        """Copies a checkpoint; a failure costs the copy alone. By the copying thread, or once nothing is left to it."""
        try:
            reachable = newest_reachable(self.place, lambda held: held == manifest, group=self.group)
            if reachable is None:
                raise CheckpointError(
                    "it is not whole on the nodes any more",
                    hint="the newest checkpoint in the run directory counts; checkpoint.copy_every=1 copies all",
                )
            self.news.extend(copy_to_run(self.place, self.target, reachable, group=self.group).problems)
        except Exception as err:  # whatever it is, training goes on
            text = f"the copy of step {manifest.step} into the run directory failed: {err}"
            self.news.append(f"{text}; it stays on the nodes, and the next one is tried")
        finally:
            self.copying.remove(name)


def removed_step(run: RunDirectory, attempt: int) -> int | None:
    """Returns the step of a checkpoint that somebody took out of the run directory between two attempts, else None.

    Whoever does that wants to go on from an older one, so the nodes' disks must not bring the newer steps back. A
    checkpoint that is damaged is still there.

    Args:
        run: the run.
        attempt: the attempt that begins; a rollback of its own is none of a person's.
    """
    previous = read_attempt(run, attempt - 1)
    present = read_attempt(run, attempt)
    if previous is None or previous.end is None or present is None:
        return None
    # An attempt whose supervisor was lost is known by its start line alone.
    last = previous.start.first_committed if previous.action is Action.LOST else previous.end.last_committed
    first = present.start.first_committed
    if last is None or first is None or first >= last or any(number == attempt for number, _ in read_origins(run)):
        return None
    is_left = any(name_of(path).step == last for path in list_checkpoints(run.checkpoints))
    return None if is_left else last


def _line_without_record(root: Path) -> list[Stretch]:
    """Returns the line of a run that an older version has trained: what the owner of the newest checkpoint has saved.

    Its manifests name no parent. An attempt that resumes becomes the owner of what it goes on from, so what an attempt
    before it has left on a node does not count.
    """
    newest = next(iter(list_checkpoints(root)), None)
    return [] if newest is None else [Stretch(name_of(newest).attempt, parent="")]


def build_local_saves(
    run: RunDirectory,
    base: Path,
    *,
    target: Place,
    rank_place: RankPlace,
    settings: CheckpointSection,
    keeps_copies: bool,
    peers: ProcessGroup | None,
) -> LocalSaves:
    """Returns this rank's part in the checkpoints on the nodes' disks. Collective over all ranks.

    Args:
        run: the run.
        base: the folder on each node.
        target: the run directory's checkpoints.
        rank_place: this rank and its node.
        settings: of checkpoints.
        keeps_copies: each node also keeps the files of the node before it.
        peers: see `Saves`.

    Raises:
        RunError: the folder is not there, or not this user's.
    """
    path_hash = hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
    host = rank_place.host
    node_rank = rank_place.node_rank
    is_leader = rank_place.local_rank == 0
    # The folder's name has the host, in case nodes share it after all (a network mount). It has no node rank, so a node
    # keeps its folder when it gets another place in the job.
    places = on_every_rank(peers, lambda: (host, node_rank))
    nodes_of_host = sorted({number for name, number in places if name == host})
    folders = (f"{run.name}-{run.run_id}-{path_hash}", f"{host}-{nodes_of_host.index(node_rank)}")

    def open_folder() -> tuple[int, str]:
        # One rank of a node creates the folder and tells the others its path, which may contain a random name.
        path = str(open_private(base, *folders, key="checkpoint.local_dir")) if is_leader else ""
        return node_rank, path

    opened = on_every_rank(peers, open_folder)
    root = next(path for number, path in opened if path and number == node_rank)
    node = NodePlace(
        root=Path(root),
        node=node_rank,
        is_leader=is_leader,
        keep=settings.local_keep,
        attempt=target.attempt,
        fence=target.fence,
        keeps_copies=keeps_copies,
    )
    return LocalSaves(
        run=run,
        place=node,
        target=target,
        copy_every=settings.copy_every,
        peers=peers,
        group=None if peers is None else open_side_group(settings.save_timeout_s),
        thread=ThreadPoolExecutor(1, thread_name_prefix="copy"),
    )


def expand(path: str, env: Mapping[str, str]) -> str:
    """Returns a path with its $VARIABLES filled in, as this node has them.

    Raises:
        ConfigError: one of them is not set here.
    """
    full = Template(path).safe_substitute(env)
    if "$" in full:
        raise ConfigError(
            f"checkpoint.local_dir={path} names a variable that is not set on this node: {full}",
            hint="name a folder that every node has, e.g. /tmp",
        )
    return full
