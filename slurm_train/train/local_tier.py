"""Periodic checkpoints on the nodes' own disks, and their copies into the run directory while training goes on.

Two threads: one saves to the node, one copies; a copy that takes longer than the saves do skips some of them. What
all ranks must decide alike - which one is copied - rank 0 decides within an exchange of the save.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.directory import newest_committed_step
from slurm_train.checkpoint.load import choose_checkpoint
from slurm_train.checkpoint.local import NodePlace, Reachable, copy_to_run, newest_reachable, open_private
from slurm_train.checkpoint.save import save_to
from slurm_train.distributed.group import open_side_group
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.rundir.attempts import check_fence, read_ledger
from slurm_train.train.context import Rank

if TYPE_CHECKING:
    from slurm_train.checkpoint.load import Choice
    from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
    from slurm_train.checkpoint.save import BackgroundSaver, Saved
    from slurm_train.rundir.paths import RunDirectory


@dataclass(slots=True, kw_only=True)
class Copier:
    """The thread that copies, one checkpoint at a time, on a group of its own."""

    saver: BackgroundSaver
    group: dist.ProcessGroup
    name: str = ""
    """The checkpoint that is being copied."""
    lines: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_idle(self) -> bool:
        """Returns whether the copy before has ended; notes how."""
        with self.lock:
            self._note(wait=False)
            return not self.name

    def start(self, work: Callable[[], Saved], *, step: int, name: str) -> None:
        """Begins a copy. Rank 0 was idle, so here too the one before is over but for its last line."""
        with self.lock:
            self._note(wait=True)
            self.name = name
            self.saver.start(work, step=step)

    def settle(self) -> None:
        """Returns when nothing is being copied."""
        with self.lock:
            self._note(wait=True)

    def news(self) -> list[str]:
        """Returns notes for the user, each once."""
        with self.lock:
            self._note(wait=False)
            lines, self.lines = self.lines, []
            return lines

    def _note(self, *, wait: bool) -> None:
        outcome = self.saver.wait() if wait else self.saver.poll()
        if outcome is None:
            return
        self.name = ""
        if isinstance(outcome.result, Exception):
            text = f"the copy of step {outcome.step} into the run directory failed: {outcome.result}"
            self.lines.append(f"{text}; it stays on the nodes, and the next one is tried")
        else:
            self.lines += outcome.result.problems


@dataclass(slots=True, kw_only=True)
class LocalSaves:
    """This rank's part in the fast tier. All ranks make the same calls in the same order."""

    run: RunDirectory
    tier: NodePlace
    keep: int
    """Whole checkpoints that stay in the run directory."""
    copy_every: int
    copier: Copier
    saves_since_copy: int = 0

    def work(
        self, tensors: dict[str, Any], rank_state: dict[str, Any], header: CheckpointHeader, group: Any
    ) -> Callable[[], Saved]:
        """Returns the save of these tensors on the nodes, for the saving thread; it hands copies on."""

        def save() -> Saved:
            saved = save_to(
                self.tier,
                tensors=tensors,
                rank_state=rank_state,
                header=header,
                group=group,
                protect={self.copier.name},
            )
            manifest = saved.manifest
            assert manifest is not None
            self.saves_since_copy += 1
            if on_rank_zero(group, lambda: self.saves_since_copy >= self.copy_every and self.copier.is_idle()):
                self.saves_since_copy = 0
                self.copier.start(lambda: self._copy(manifest), step=header.step, name=saved.path.name)
            return saved

        return save

    def bring_in(self, *, above: int) -> list[str]:
        """Copies what the nodes have beyond a step into the run directory; returns notes for the user."""
        attempts = on_rank_zero(dist.group.WORLD, lambda: sorted(recent_attempts(self.run, self.tier.attempt)))
        found = newest_reachable(
            self.tier, lambda manifest: manifest.attempt in attempts and manifest.step > above, group=dist.group.WORLD
        )
        if found is None:
            return []
        step = found.manifest.step
        try:
            self._copy_to_run(found, group=dist.group.WORLD)
        except CheckpointError as err:
            return [f"step {step} lies on the nodes, but could not be copied into the run directory: {err.message}"]
        return [f"step {step} was on the nodes only; copied into the run directory"]

    def discard_from(self, step: int) -> None:
        """Removes this node's checkpoints of a step and later ones: the run goes back to before it."""
        if self.tier.is_leader:
            self.tier.discard_from(step)

    def close(self) -> None:
        """Leaves nothing on the node: the run is finished, and all that counts is in the run directory."""
        self.copier.settle()
        if self.tier.is_leader:
            with contextlib.suppress(OSError):
                self.tier.discard_from(0)
                self.tier.root.rmdir()
                self.tier.root.parent.rmdir()

    def _copy(self, manifest: Manifest) -> Saved:
        found = newest_reachable(self.tier, lambda held: held == manifest, group=self.copier.group)
        if found is None:
            raise CheckpointError(
                f"step {manifest.step} is not whole on the nodes any more",
                hint="the newest checkpoint in the run directory counts; checkpoint.copy_every=1 copies all of them",
            )
        return self._copy_to_run(found, group=self.copier.group)

    def _copy_to_run(self, found: Reachable, *, group: dist.ProcessGroup | None) -> Saved:
        tier = self.tier
        run = Place(
            root=self.run.checkpoints,
            attempt=tier.attempt,
            keep=self.keep,
            fence=tier.fence,
            is_leader=dist.get_rank() == 0,
        )
        return copy_to_run(tier, run, found, group=group)


def choose(run: RunDirectory, attempt: int, local: LocalSaves | None) -> tuple[Choice | None, list[str]]:
    """Returns the checkpoint that all ranks load, from the nodes if they have a newer one. Collective.

    Returns:
        The choice, None where nothing was ever saved; and notes for the user.

    Raises:
        CheckpointError: as `choose_checkpoint`.
    """
    group = dist.group.WORLD
    choose_in_run = partial(
        choose_checkpoint, run.checkpoints, group=group, attempt=attempt, fence=lambda: check_fence(run, attempt)
    )
    if local is None:
        return choose_in_run(), []
    tier = local.tier
    on_every_rank(group, tier.claim_all)
    notes = local.bring_in(above=on_rank_zero(group, lambda: newest_committed_step(run.checkpoints)))
    try:
        choice = choose_in_run()
    except CheckpointError:
        # All in the run directory are damaged.
        notes += local.bring_in(above=-1)
        return choose_in_run(), notes
    if choice is not None and choice.passed_over and (more := local.bring_in(above=choice.manifest.step)):
        return choose_in_run(), notes + more
    return choice, notes


def recent_attempts(run: RunDirectory, attempt: int) -> set[int]:
    """Returns the attempts whose local checkpoints are of this run's present: back to the last one that made steps.

    What lies on a node from before that may have been overtaken by steps that other nodes made.
    """
    found = {attempt}
    for entry in reversed(read_ledger(run)):
        number = int(entry["attempt"])
        if number >= attempt:
            continue
        found.add(number)
        if "last_step" not in entry or int(entry["last_step"]) > int(entry.get("first_step", 0)):
            break
    return found


def build_local_saves(rank: Rank) -> LocalSaves | None:
    """Returns this rank's part in the fast tier, None where none is configured. Collective over all ranks.

    Raises:
        ConfigError: `checkpoint.local_dir` names a variable that is not set.
        CheckpointError: the folder is not there, or not this user's.
    """
    settings, place, run = rank.config.checkpoint, rank.place, rank.run
    if settings.local_dir is None:
        return None
    from slurm_train.checkpoint.save import BackgroundSaver

    base = Path(expand(settings.local_dir, rank.env))
    key = hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
    # Nodes that share the folder after all, a network mount say, do not share their files.
    parts = (f"{run.name}-{run.run_id}-{key}", f"{place.host}-{place.node_rank}")
    is_leader = place.local_rank == 0
    # One rank of a node makes the folder, and the others take it: its name may be a random one.
    opened = on_every_rank(
        dist.group.WORLD, lambda: (place.node_rank, str(open_private(base, *parts)) if is_leader else "")
    )
    tier = NodePlace(
        root=Path(next(path for node, path in opened if path and node == place.node_rank)),
        node=place.node_rank,
        is_leader=is_leader,
        keep=settings.local_keep,
        attempt=rank.attempt,
        fence=partial(check_fence, run, rank.attempt),
    )
    copier = Copier(saver=BackgroundSaver(), group=open_side_group(settings.save_timeout_s))
    return LocalSaves(run=run, tier=tier, keep=settings.keep, copy_every=settings.copy_every, copier=copier)


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
