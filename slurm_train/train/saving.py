"""Where a run stands, and how that gets into a checkpoint and out of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from slurm_train.config.batch import BatchPlan
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.errors import DataError
from slurm_train.rundir.attempts import check_fence
from slurm_train.rundir.layout import RunDirectory
from slurm_train.train.evaluate import broadcast_buffers

if TYPE_CHECKING:
    from slurm_train.checkpoint.load import Choice
    from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest


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
    recent_losses: list[float] = field(default_factory=list)
    """Newest losses, oldest first; only kept where spikes are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointer:
    """Saves and restores one run's training state. Every method is collective."""

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

    def resume(self) -> tuple[Position, list[str]]:
        """Restores the newest verified checkpoint; returns where it stands and what a person should know.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded.
            DataError: the data set is not the one that the checkpoint was trained on.
        """
        from slurm_train.checkpoint.load import choose_checkpoint

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
            recent_losses=[float(loss) for loss in extra.get("recent_losses", [])],
        )
        notes = [f"passed over {passed.path.name}: {passed.reason}" for passed in choice.passed_over]
        return position, [*notes, f"resuming from {choice.path.name} (step {position.step})"]

    def save(self, position: Position) -> None:
        """Writes a checkpoint of this moment; returns when it is durable.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
            RunError: a newer attempt has taken over.
        """
        from slurm_train.checkpoint.save import save_checkpoint
        from slurm_train.checkpoint.state import training_state

        broadcast_buffers(self.model)
        save_checkpoint(
            self.run.checkpoints,
            tensors=training_state(self.model, self.optimizer),
            rank_state={"rng": rng_state()},
            header=self._header(position),
            group=dist.group.WORLD,
            keep=self.keep,
            fence=self._fence,
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
            extra={
                "items": position.items,
                "loss": position.loss,
                "evaluation_due": position.evaluation_due,
                "recent_losses": position.recent_losses,
            },
        )
