"""Where a run stands, and how that gets into a checkpoint and out of it.

A periodic save costs the training a copy in memory; a thread writes it while training goes on. The save at a stop or
at the end is the same, waited for. The loop asks `news` after each step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from slurm_train.config.batch import BatchPlan
from slurm_train.distributed.group import open_side_group
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.errors import CheckpointError, DataError, SlurmTrainError
from slurm_train.rundir.attempts import check_fence
from slurm_train.rundir.layout import RunDirectory
from slurm_train.train.evaluate import broadcast_buffers

if TYPE_CHECKING:
    from slurm_train.checkpoint.background import BackgroundSaver, Outcome
    from slurm_train.checkpoint.load import Choice
    from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
    from slurm_train.checkpoint.save import Saved
    from slurm_train.checkpoint.staging import StagingBuffers


@dataclass(slots=True)
class Position:
    """How far a run is: a few integers, counted at the optimizer."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Global samples that they consumed."""
    items: int = 0
    """Tokens (or samples) that their losses counted."""
    loss: float | None = None
    """Loss of the newest step that was read."""
    evaluation_due: bool = False
    """The evaluation of this step was broken off by a stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What saving beside the training needs."""

    saver: BackgroundSaver
    buffers: StagingBuffers
    group: dist.ProcessGroup
    """Of all ranks, used by the saver's thread alone."""


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and restores one run's training state. All ranks call the same methods in the same order."""

    run: RunDirectory
    place: RankPlace
    plan: BatchPlan
    attempt: int
    keep: int
    model: nn.Module
    optimizer: Optimizer
    data_fingerprint: str
    num_samples: int
    """Samples of one epoch."""
    job: str = "local"
    background: Background | None = None
    """None: every save is waited for."""
    blocked_s: float = 0.0
    """Seconds that saves have kept the training waiting."""
    fatal: Exception | None = field(default=None, init=False)
    """Why the run has to end; set by `news`, raised by the next save."""
    _news: list[str] = field(default_factory=list, init=False)

    def resume(self) -> tuple[Position, list[str]]:
        """Restores the newest verified checkpoint; returns where it stands and what a person should know.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded.
            DataError: the data set is not the one that the checkpoint was trained on.
        """
        from slurm_train.checkpoint.load import choose_checkpoint

        self._finish()
        choice = choose_checkpoint(self.run.checkpoints, group=dist.group.WORLD)
        if choice is None:
            return Position(), []
        self._check_data(choice.manifest)
        self._restore(choice)
        manifest = choice.manifest
        extra = manifest.extra
        position = Position(
            step=manifest.step,
            samples=manifest.samples,
            items=int(extra.get("items", 0)),
            loss=extra.get("loss"),
            evaluation_due=bool(extra.get("evaluation_due", False)),
        )
        notes = [f"passed over {passed.path.name}: {passed.reason}" for passed in choice.passed_over]
        return position, [*notes, f"resuming from {choice.path.name} (step {position.step})"]

    def save(self, position: Position) -> None:
        """Writes a checkpoint of this moment; returns when it is durable. A save under way is waited for.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
            RunError: a newer attempt has taken over.
        """
        start = time.monotonic()
        self._finish()
        work = self._work(self._own_state(), position)
        if self.background is None:
            work()
        else:
            self.background.saver.start(work, step=position.step)
            outcome = self.background.saver.wait()
            if outcome is not None and isinstance(outcome.result, Exception):
                raise _raised(outcome) from outcome.result
        self.blocked_s += time.monotonic() - start

    def save_soon(self, position: Position) -> None:
        """Saves this moment while training goes on; returns when it is copied. `news` tells if it failed.

        Raises:
            SlurmTrainError: the save before it failed in a way that ends the run.
        """
        if self.background is None:
            self.save(position)
            return
        start = time.monotonic()
        self._finish()
        buffers = self.background.buffers
        work = self._work(buffers.stage(self._own_state()), position)
        if any(True for _ in self.model.buffers()):
            buffers.hold_changes()  # the next forward pass changes running statistics already

        def when_copied() -> Saved:
            buffers.wait_for_copy()
            return work()

        self.background.saver.start(when_copied, step=position.step)
        self.blocked_s += time.monotonic() - start

    def prepare(self) -> None:
        """Makes the first save as cheap as the later ones: buffers and imports, beside the training.

        Call it when the optimizer's state is there. Not collective.
        """
        if self.background is None:
            return
        from slurm_train.checkpoint.state import own_tensors
        from slurm_train.checkpoint.tensors import load_writer

        buffers, place = self.background.buffers, self.place
        tensors = own_tensors(self.model, self.optimizer, rank=place.rank, num_ranks=place.world_size)

        def work() -> None:
            load_writer()
            buffers.prepare(tensors)

        self.background.saver.prepare(work)

    def hold_changes(self) -> None:
        """Makes the next change of the tensors wait until they are copied; costs the host nothing."""
        if self.background is not None:
            self.background.buffers.hold_changes()

    def news(self) -> list[str]:
        """Returns what a person should know of background saves, each line once. Costs next to nothing.

        A failure that ends the run is kept in `fatal`: the caller asks for a stop, so that all ranks end at the same
        step, and the save of that stop raises it.
        """
        if self.background is not None and (outcome := self.background.saver.poll()) is not None:
            self._take(outcome)
        news, self._news = self._news, []
        return news

    def _finish(self) -> None:
        """Waits for a save under way.

        Raises:
            SlurmTrainError: it, or one before it, failed in a way that ends the run.
        """
        if self.background is not None and (outcome := self.background.saver.wait()) is not None:
            self._take(outcome)
        if self.fatal is not None:
            raise self.fatal

    def _take(self, outcome: Outcome) -> None:
        result = outcome.result
        if not isinstance(result, Exception):
            self._news += result.problems
        elif outcome.is_fatal:
            self.fatal = _raised(outcome)
        else:
            self._news.append(
                f"the checkpoint of step {outcome.step} failed, training goes on; the one before is untouched: {result}"
            )

    def _own_state(self) -> dict[str, Any]:
        from slurm_train.checkpoint.state import own_part, training_state

        broadcast_buffers(self.model)
        state = training_state(self.model, self.optimizer)
        return own_part(state, rank=self.place.rank, num_ranks=self.place.world_size)

    def _work(self, tensors: dict[str, Any], position: Position) -> Callable[[], Saved]:
        """Returns the save of these tensors with everything else as it is now."""
        from slurm_train.checkpoint.save import save_checkpoint

        rank_state, header, fence = {"rng": rng_state()}, self._header(position), self._fence
        group = dist.group.WORLD if self.background is None else self.background.group
        return lambda: save_checkpoint(
            self.run.checkpoints,
            tensors=tensors,
            rank_state=rank_state,
            header=header,
            group=group,
            keep=self.keep,
            fence=fence,
        )

    @property
    def _fence(self) -> Callable[[], None]:
        return lambda: check_fence(self.run, self.attempt)

    def _restore(self, choice: Choice) -> None:
        from slurm_train.checkpoint.load import load_rank_state, load_tensors
        from slurm_train.checkpoint.state import restore_training_state, training_state

        state = training_state(self.model, self.optimizer)
        load_tensors(choice.path, state, group=dist.group.WORLD)
        restore_training_state(self.model, self.optimizer, state)
        own = load_rank_state(choice.path, self.place.rank)
        if own is not None:
            set_rng_state(own["rng"])

    def _check_data(self, manifest: Manifest) -> None:
        if manifest.data_fingerprint != self.data_fingerprint:
            raise DataError(
                f"the data set has changed since step {manifest.step}: fingerprint {self.data_fingerprint}, "
                f"the checkpoint has {manifest.data_fingerprint}",
                hint="bring the old data back, or start another run with run.name=...",
            )

    def _header(self, position: Position) -> CheckpointHeader:
        from slurm_train.checkpoint.manifest import CheckpointHeader

        return CheckpointHeader(
            step=position.step,
            samples=position.samples,
            epoch=position.samples // self.num_samples,
            world_size=self.place.world_size,
            mesh={"dp_replicate": self.place.world_size},
            batch_plan={**asdict(self.plan), "global_size": self.plan.global_size},
            config_hash=self.run.run_id,
            data_fingerprint=self.data_fingerprint,
            torch_version=str(torch.__version__),
            attempt=self.attempt,
            epoch_fence=self.attempt,
            job=self.job,
            written_by=f"{self.place.host} pid {os.getpid()}" if self.place.is_first else "",
            extra={"items": position.items, "loss": position.loss, "evaluation_due": position.evaluation_due},
        )


def build_background(device: torch.device, *, timeout_s: float) -> Background:
    """Returns what background saves need. Collective over all ranks.

    Args:
        device: where the training's tensors live.
        timeout_s: seconds that the ranks wait for each other in a save.
    """
    from slurm_train.checkpoint.background import BackgroundSaver
    from slurm_train.checkpoint.staging import StagingBuffers

    return Background(saver=BackgroundSaver(), buffers=StagingBuffers(device), group=open_side_group(timeout_s))


def _raised(outcome: Outcome) -> Exception:
    """Returns the error to raise in the training thread for a save that failed."""
    assert isinstance(outcome.result, Exception)
    if isinstance(outcome.result, SlurmTrainError):
        return outcome.result
    return CheckpointError(
        f"the ranks lost each other while saving step {outcome.step}: {outcome.result}",
        hint="another rank died or hangs; if its disk is that slow, raise checkpoint.save_timeout_s",
    )
