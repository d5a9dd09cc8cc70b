"""Makes a run's checkpoints: decides when one is due, copies the state, has a thread write it, and records the result.

A periodic save costs the training a copy in memory; a thread writes the copy while training goes on. A copy may be made
before it is known whether its step was good, and is dropped if not. A save at a stop or at the end is the same, but
waited for. The caller gives the content of a checkpoint as `Content`, so nothing here knows a model or a trainer.

A failure that all ranks have agreed on, e.g. a full disk, costs one checkpoint and is among the `news`. Any other
failure ends the run: it is kept in `fatal` until all ranks have stopped at the same step, where the save of the stop
raises it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.checkpoint.agreement import on_every_rank
from slurm_train.checkpoint.choice import Choice, choose_checkpoint
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.filling import Saved
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.checkpoint.save import BackgroundSaver, Outcome, save_to
from slurm_train.checkpoint.save_pace import SavePace, build_save_pace
from slurm_train.checkpoint.state import StagingBuffers
from slurm_train.checkpoint.tier import Tier
from slurm_train.config.schema import CheckpointSection
from slurm_train.distributed.group import open_side_group
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import CheckpointError, SlurmTrainError
from slurm_train.rundir.events import SaveLog
from slurm_train.rundir.files import fsync_file
from slurm_train.rundir.paths import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What this rank writes into a checkpoint."""

    tensors: dict[str, Any]
    """Nested dictionary of tensors and plain values."""
    facts: Callable[[], tuple[dict[str, Any], CheckpointHeader]]
    """Gives, when the writing begins, this rank's own state, which `torch.load(weights_only=True)` reads back, and the
    facts for the manifest, of which rank 0's count."""
    expected: Mapping[str, str] | None = None
    """Number type and shape of each tensor that some rank holds; None: the weights of the header."""
    changes_in_forward: bool = False
    """The next forward pass changes some of the tensors already, e.g. running statistics."""


class Copied(NamedTuple):
    """A moment of the training that is not written yet; the next copy takes its place."""

    content: Content
    tensors: dict[str, Any]
    """Those of the content as they were at that moment; without a background, those themselves."""
    duration_s: float
    """Seconds that the training has waited for it."""


@dataclass(slots=True)
class SaveTimes:
    """What the saves of this attempt took, and how the newest ended."""

    blocked_s: float = 0.0
    """Seconds that saves have kept the training waiting, all together."""
    longest_s: float = 0.0
    """Longest time from the begin of a save until it was durable."""
    newest_s: float | None = None
    """That of the newest good save; None before the first has ended."""
    newest_error: CheckpointError | None = None
    """Why the newest save failed, None if it did not."""


@dataclass(slots=True, kw_only=True)
class Saves:
    """Makes the checkpoints of one run. All ranks call the same methods in the same order."""

    run: RunDirectory
    place: Place
    """The run directory's checkpoints."""
    tier: Tier
    """Where periodic checkpoints go first."""
    group: dist.ProcessGroup | None
    """A gloo group of all ranks, used by saves alone; None for one process."""
    peers: dist.ProcessGroup | None
    """The group of all ranks for exchanges of the training's own thread."""
    pace: SavePace
    saver: BackgroundSaver
    buffers: StagingBuffers
    """Where states are copied to, so that training can go on."""
    log: SaveLog | None
    """Rank 0's record of the saves."""
    in_background: bool
    """Whether a thread writes while training goes on."""
    clock: Callable[[], float]
    times: SaveTimes = field(default_factory=SaveTimes)
    fatal: Exception | None = None
    """Set when a save fails in a way that ends the run: the loop then requests a stop, and the save at that stop raises
    this error on every rank."""
    is_requested: bool = False
    """A checkpoint of the present step was requested, whatever the pace."""
    _news: list[str] = field(default_factory=list)

    def choose(self, *, reason_against: Callable[[Manifest], str]) -> tuple[Choice | None, list[str]]:
        """Returns the newest verified checkpoint, None before the first, and notes for the user. Collective.

        Args:
            reason_against: says why a checkpoint on the nodes' disks is not to be loaded, "" where it may be.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded.
        """
        place = self.place
        choose = partial(choose_checkpoint, place.root, group=self.peers, attempt=place.attempt, fence=place.fence)
        return self.tier.choose(lambda copied: choose(copied=copied), reason_against=reason_against)

    def request(self) -> None:
        """Asks for a checkpoint of this step in the run directory; on all ranks at the same step."""
        self.is_requested = True

    def save_again(self, step: int) -> None:
        """Lets the next save of a step replace this attempt's checkpoint of that step."""
        if self.place.is_leader:
            self.place.save_again(step)

    def save(self, content: Callable[[], Content], *, step: int) -> None:
        """Writes a checkpoint of this moment into the run directory; returns when it is durable. Collective.

        Args:
            content: returns what to write; called when the save before has ended.
            step: number of the optimizer step.

        Raises:
            CheckpointError: it could not be written; the previous checkpoint is intact.
            RunError: a newer attempt has taken over.
        """
        copied = self.copy(content, waits=True)
        outcome = self._write(copied, step=step, tier=Tier(place=self.place), waits=True)
        assert outcome is not None
        if isinstance(outcome.result, Exception):
            raise _error_of(outcome)

    def copy(self, content: Callable[[], Content], *, waits: bool = False) -> Copied:
        """Copies this moment when the save before has ended, for `save_soon`, or to be dropped. Collective.

        On a GPU the copy begins when the step that is under way is done; the host goes on at once.

        Args:
            content: returns what to write; called when the save before has ended.
            waits: the training stands still until it is written.

        Raises:
            SlurmTrainError: the save before it failed in a way that ends the run.
        """
        start_s = self.clock()
        self.finish()
        written = content()
        tensors = written.tensors
        # Tensors on a GPU are always copied: the thread writes from host memory.
        if self.in_background and (not waits or self.buffers.is_remote):
            tensors = self.buffers.stage(tensors)
            if written.changes_in_forward:
                self.buffers.hold_changes()
        return Copied(written, tensors, self.clock() - start_s)

    def save_soon(self, copied: Copied, *, step: int) -> str | None:
        """Begins a periodic or requested save; training goes on when this returns. Collective.

        A requested checkpoint is to be kept, so it is written into the run directory at once. If the save fails, `news`
        says so.

        Args:
            copied: the newest copy, of this step.
            step: number of the optimizer step.

        Returns:
            A note for the user about the next save, if there is one.
        """
        tier = Tier(place=self.place) if self.is_requested else self.tier
        self._write(copied, step=step, tier=tier, waits=False)
        self.is_requested = False
        return self.pace.saved(step, blocked_s=self.times.blocked_s, save_s=self.times.newest_s, group=self.peers)

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Makes the first save as cheap as the later ones, memory and imports, while training goes on; not collective.

        Args:
            tensors: what this rank is going to write.
        """
        if not self.in_background:
            return

        def work() -> None:
            # Imports what a save needs: 0.1 s or more, so better before the first save than in it.
            import slurm_train.checkpoint.tensors  # noqa: F401

            self.buffers.prepare(tensors)

        self.saver.prepare(work)

    def finish(self) -> None:
        """Waits for a save that is running, and for a copy, and records the outcome of the save, see `news`.

        Raises:
            SlurmTrainError: it, or one before it, failed in a way that ends the run.
        """
        outcome = self.saver.wait()
        if outcome is not None:
            self._record(outcome)
        # One that was dropped may still be read from tensors that are about to be replaced.
        self.buffers.wait_for_copy()
        if self.fatal is not None:
            raise self.fatal

    def bring_home(self) -> None:
        """Returns when the newest checkpoint is in the run directory, after the last save. Collective.

        Raises:
            CheckpointError: it is not; as `finish`.
        """
        self.finish()
        self.tier.bring_home()

    def finish_within(self, limit_s: float) -> None:
        """Waits at most so long for a save that is running; a save that is not complete then does not count.

        Raises:
            SlurmTrainError: it, or one before it, failed in a way that ends the run.
        """
        if self.saver.is_done_within(limit_s):
            self.finish()

    def news(self) -> list[str]:
        """Returns notes for the user about saves, each once; cheap enough for every step."""
        outcome = self.saver.poll()
        if outcome is not None:
            self._record(outcome)
        news = self._news
        self._news = []
        return [*news, *self.tier.take_news()]

    def discard_from(self, step: int) -> None:
        """Removes all checkpoints of a step and later ones: the run goes back to before it. Collective."""
        for place in self.tier.places:
            on_every_rank(self.peers, partial(place.discard_from, step))

    def close(self) -> None:
        """Removes what a finished run has outside of the run directory."""
        self.tier.close()

    def _write(self, copied: Copied, *, step: int, tier: Tier, waits: bool) -> Outcome | None:
        """Writes a copy; returns the outcome, None while the save runs in the background."""
        start_s = self.clock()
        work = self._work(copied, tier)
        outcome = None
        if not self.in_background:
            outcome = self.saver.run(work, step=step)
        else:
            self.saver.start(work, step=step)
            if waits:
                outcome = self.saver.wait()
        stall_s = copied.duration_s + self.clock() - start_s
        self.times.blocked_s += stall_s
        if self.log is not None:
            self.log.stalled(step, stall_s)
        if outcome is not None:
            self._record(outcome)
        return outcome

    def _work(self, copied: Copied, tier: Tier) -> Callable[[], Saved]:
        """Returns the writing of a copy, with the facts of now."""
        rank_state, header = copied.content.facts()

        def work() -> Saved:
            if self.place.is_leader:
                # No later attempt writes the lines of the steps before this checkpoint again. An error may lose them.
                with contextlib.suppress(OSError):
                    fsync_file(self.run.metrics)
            self.buffers.wait_for_copy()
            saved = save_to(
                tier.place,
                tensors=copied.tensors,
                rank_state=rank_state,
                header=header,
                group=self.group,
                protect=tuple(tier.protected),
                expected=copied.content.expected,
            )
            tier.add(saved, group=self.group)
            return saved

        return work

    def _record(self, outcome: Outcome) -> None:
        """Records the outcome of a save: on disk, in `times`, and in `news` or `fatal`."""
        result = outcome.result
        step = outcome.step
        seconds = outcome.duration_s
        if not isinstance(result, Exception):
            if self.log is not None:
                self.log.ended(step, num_bytes=result.num_bytes, save_s=seconds, error="")
            self.times.newest_error = None
            self.times.newest_s = seconds
            self.times.longest_s = max(self.times.longest_s, seconds)
            self._news += result.problems
            return
        if self.log is not None:
            self.log.ended(step, num_bytes=0, save_s=seconds, error=str(result))
        self.times.newest_error = result if isinstance(result, CheckpointError) else None
        if outcome.is_fatal:
            self.fatal = _error_of(outcome)
        else:
            self._news.append(
                f"the checkpoint of step {step} failed, training continues; the previous checkpoint is intact: {result}"
            )


def _error_of(outcome: Outcome) -> Exception:
    """Returns the error to raise in the training thread for a save that failed."""
    assert isinstance(outcome.result, Exception)
    if isinstance(outcome.result, SlurmTrainError):
        return outcome.result
    error = CheckpointError(
        f"an exchange between the ranks failed while saving step {outcome.step}: {outcome.result}",
        hint="another rank died or hangs; if its disk is that slow, raise checkpoint.save_timeout_s",
    )
    error.__cause__ = outcome.result
    return error


def build_saves(
    run: RunDirectory,
    *,
    place: Place,
    rank_place: RankPlace,
    settings: CheckpointSection,
    env: Mapping[str, str],
    device: torch.device,
    clock: Callable[[], float],
    peers: dist.ProcessGroup | None,
    keeps_copies: bool = False,
) -> Saves:
    """Returns the saves of a run. Collective over all ranks.

    Args:
        run: the run.
        place: its checkpoints.
        rank_place: this rank and its node.
        settings: the section `checkpoint` of the configuration.
        env: this process's environment, for variables in `checkpoint.local_dir`.
        device: device of the tensors.
        clock: seconds that never run backwards.
        peers: see `Saves`.
        keeps_copies: each node also keeps the local files of the node before it.

    Raises:
        ConfigError: `checkpoint.local_dir` names a variable that is not set.
        RunError: its folder is not there, or not this user's.
    """
    group = None if peers is None else open_side_group(settings.save_timeout_s)
    tier = Tier(place=place)
    if settings.local_dir is not None:
        from slurm_train.checkpoint import local

        base = Path(local.expand(settings.local_dir, env))
        tier = local.build_local_saves(
            run, base, target=place, rank_place=rank_place, settings=settings, keeps_copies=keeps_copies, peers=peers
        )
    return Saves(
        run=run,
        place=place,
        tier=tier,
        group=group,
        peers=peers,
        pace=build_save_pace(run, settings=settings, clock=clock),
        saver=BackgroundSaver(clock=clock),
        buffers=StagingBuffers(device),
        log=SaveLog(run, place.attempt) if rank_place.is_first else None,
        in_background=settings.background,
        clock=clock,
    )
