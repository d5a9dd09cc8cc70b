"""Periodic checkpoints on the nodes' own disks, and their copies into the run directory while training goes on.

Two threads: one saves to the node, one copies; a copy that takes longer than the saves do skips some of them. What
all ranks must decide alike - which one is copied - rank 0 decides within an exchange of the save.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import torch.distributed as dist

from slurm_train.checkpoint.agreement import on_every_rank, on_rank_zero
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.directory import newest_committed_step
from slurm_train.checkpoint.load import Choice
from slurm_train.checkpoint.local import NodePlace, copy_to_run, newest_reachable, open_private
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.save import Saved
from slurm_train.distributed.group import open_side_group
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.train.context import Rank


@dataclass(slots=True, kw_only=True)
class LocalSaves:
    """This rank's part in the fast tier. All ranks make the same calls in the same order."""

    run: RunDirectory
    place: NodePlace
    """This node's folder."""
    target: Place
    """The run directory's checkpoints, where copies go."""
    copy_every: int
    group: dist.ProcessGroup
    """Of the copying thread alone."""
    thread: ThreadPoolExecutor
    """Copies, one checkpoint after the other."""
    saves_since_copy: int = 0
    copying: list[str] = field(default_factory=list)
    """Names of the checkpoints that are being copied, or are about to be."""
    news: deque[str] = field(default_factory=deque)
    """Notes for the user about copies."""

    def copy_if_due(self, saved: Saved, *, group: dist.ProcessGroup) -> None:
        """Hands a save on to the copying thread, where it is due and rank 0 is copying nothing. Collective."""
        manifest, name = saved.manifest, saved.path.name
        assert manifest is not None
        self.saves_since_copy += 1
        if on_rank_zero(group, lambda: self.saves_since_copy >= self.copy_every and not self.copying):
            self.saves_since_copy = 0
            self.copying.append(name)
            self.thread.submit(self._copy, manifest, name)

    def take_news(self) -> list[str]:
        """Returns notes for the user, each once."""
        return [self.news.popleft() for _ in range(len(self.news))]

    def choose(self, choose_in_run: Callable[[], Choice | None]) -> tuple[Choice | None, list[str]]:
        """Returns the checkpoint that all ranks load, from the nodes if they have a newer one. Collective.

        Args:
            choose_in_run: chooses among those in the run directory.

        Returns:
            The choice, None where nothing was ever saved; and notes for the user.

        Raises:
            CheckpointError: as `choose_checkpoint`.
        """
        group = dist.group.WORLD
        on_every_rank(group, self.place.claim_all)
        notes = self.bring_in(above=on_rank_zero(group, lambda: newest_committed_step(self.target.root)))
        try:
            choice = choose_in_run()
        except CheckpointError:
            # All in the run directory are damaged.
            notes += self.bring_in(above=-1)
            return choose_in_run(), notes
        if choice is not None and choice.passed_over and (more := self.bring_in(above=choice.manifest.step)):
            return choose_in_run(), notes + more
        return choice, notes

    def bring_in(self, *, above: int) -> list[str]:
        """Copies what the nodes have beyond a step into the run directory; returns notes for the user."""
        attempts = on_rank_zero(dist.group.WORLD, lambda: sorted(recent_attempts(self.run, self.place.attempt)))
        found = newest_reachable(
            self.place, lambda manifest: manifest.attempt in attempts and manifest.step > above, group=dist.group.WORLD
        )
        if found is None:
            return []
        step = found.manifest.step
        try:
            copy_to_run(self.place, self.target, found, group=dist.group.WORLD)
        except CheckpointError as err:
            return [f"step {step} lies on the nodes, but could not be copied into the run directory: {err.message}"]
        return [f"step {step} was on the nodes only; copied into the run directory"]

    def close(self) -> None:
        """Leaves nothing on the node: the run is finished, and all that counts is in the run directory."""
        self.thread.shutdown()
        if self.place.is_leader:
            with contextlib.suppress(OSError):
                self.place.discard_from(0)
                self.place.root.rmdir()
                self.place.root.parent.rmdir()

    def _copy(self, manifest: Manifest, name: str) -> None:
        """Copies a checkpoint; a failure costs the copy alone. Runs in the copying thread."""
        try:
            found = newest_reachable(self.place, lambda held: held == manifest, group=self.group)
            if found is None:
                raise CheckpointError(
                    "it is not whole on the nodes any more",
                    hint="the newest checkpoint in the run directory counts; checkpoint.copy_every=1 copies all",
                )
            self.news.extend(copy_to_run(self.place, self.target, found, group=self.group).problems)
        except Exception as err:  # whatever it is, training goes on
            text = f"the copy of step {manifest.step} into the run directory failed: {err}"
            self.news.append(f"{text}; it stays on the nodes, and the next one is tried")
        finally:
            self.copying.remove(name)


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


def build_local_saves(rank: Rank, target: Place) -> LocalSaves | None:
    """Returns this rank's part in the fast tier, None where none is configured. Collective over all ranks.

    Args:
        rank: this rank.
        target: the run directory's checkpoints.

    Raises:
        ConfigError: `checkpoint.local_dir` names a variable that is not set.
        CheckpointError: the folder is not there, or not this user's.
    """
    settings, place, run = rank.config.checkpoint, rank.place, rank.run
    if settings.local_dir is None:
        return None
    base = Path(expand(settings.local_dir, rank.env))
    key = hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
    # Nodes that share the folder after all, a network mount say, do not share their files.
    parts = (f"{run.name}-{run.run_id}-{key}", f"{place.host}-{place.node_rank}")
    is_leader = place.local_rank == 0
    # One rank of a node makes the folder, and the others take it: its name may be a random one.
    opened = on_every_rank(
        dist.group.WORLD, lambda: (place.node_rank, str(open_private(base, *parts)) if is_leader else "")
    )
    node = NodePlace(
        root=Path(next(path for node, path in opened if path and node == place.node_rank)),
        node=place.node_rank,
        is_leader=is_leader,
        keep=settings.local_keep,
        attempt=rank.attempt,
        fence=target.fence,
    )
    return LocalSaves(
        run=run,
        place=node,
        target=target,
        copy_every=settings.copy_every,
        group=open_side_group(settings.save_timeout_s),
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
