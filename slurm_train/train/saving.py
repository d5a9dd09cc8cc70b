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
from slurm_train.config.layout import AXES, ParallelLayout
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.metrics.trackers.follow import tracker_ids
from slurm_train.rundir.attempts import check_fence
from slurm_train.rundir.events import SaveLog
from slurm_train.rundir.layout import RunDirectory
from slurm_train.train.beside import SavingBeside
from slurm_train.train.continuity import Continuity
from slurm_train.train.evaluate import broadcast_buffers
from slurm_train.train.exchange import Exchange

if TYPE_CHECKING:
    from slurm_train.checkpoint.background import Outcome
    from slurm_train.checkpoint.load import Choice
    from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
    from slurm_train.checkpoint.save import Saved
    from slurm_train.train.local_tier import LocalSaves


_CONFIGURED = ("betas", "eps", "weight_decay")


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
    batch_since: tuple[int, int] = (0, 0)
    """Steps and samples done when the global batch got its present size."""

    def samples_at(self, step: int, *, global_size: int) -> int:
        """Returns the samples that the run will have seen at a step, as planned."""
        since_step, since_samples = self.batch_since
        return since_samples + (step - since_step) * global_size


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and restores one run's training state. All ranks call the same methods in the same order."""

    run: RunDirectory
    place: RankPlace
    layout: ParallelLayout
    plan: BatchPlan
    attempt: int
    keep: int
    model: nn.Module
    optimizer: Optimizer
    config_hash: str
    """Of the frozen configuration, as in `plan.json`; a change that is accepted changes it, not the run id."""
    continuity: Continuity
    """Settings, code and data: what makes this the same training as the checkpoints'."""
    group_names: list[list[str]] | None = None
    """Names in the optimizer's groups over all stages of a pipeline; None where every rank has them all."""
    lr: dict[str, Any] = field(default_factory=dict)
    """Peak learning rate, and how it follows the global batch; for the manifest."""
    job: str = "local"
    beside: SavingBeside | None = None
    """Saves while training goes on; None: every save is waited for."""
    clock: Callable[[], float] = time.monotonic
    local: LocalSaves | None = None
    """Periodic checkpoints go to the nodes' own disks first."""
    log: SaveLog | None = None
    """Rank 0's record of the saves."""
    exchange: Exchange | None = None
    """What is exchanged if not whole gradients; it may have a state of each rank."""
    blocked_s: float = 0.0
    """Seconds that saves have kept the training waiting."""
    longest_save_s: float = 0.0
    """Longest time from the begin of a save until it was durable."""

    def resume(self) -> tuple[Position, list[str]]:
        """Restores the newest verified checkpoint; returns where it stands and what a person should know.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded.
            RunError: settings or code are not those that the checkpoint was trained with.
            DataError: the data set is not the one that the checkpoint was trained on.
        """
        from slurm_train.train.local_tier import choose

        self.finish()
        choice, brought = choose(self.run, self.attempt, self.local)
        if choice is None:
            return Position(), []
        accepted = self.continuity.check(choice.manifest)
        accepted += self._restore(choice)
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
        position.batch_since = self._batch_since(manifest)
        return position, [*brought, *notes, *accepted, f"resuming from {choice.path.name} (step {position.step})"]

    def discard_local_from(self, step: int) -> None:
        """Removes what this node's own disk has of a step and later ones."""
        if self.local is not None:
            self.local.discard_from(step)

    def close(self) -> None:
        """Takes away what a finished run has on this node's own disk."""
        if self.local is not None:
            self.local.close()

    def finish(self) -> None:
        """Waits for a save under way; what became of it is among the `news`."""
        if self.beside is not None:
            self.beside.finish()

    def finish_within(self, limit_s: float) -> None:
        """Waits for a save under way, but not longer; what is not whole then is nobody's checkpoint.

        Raises:
            SlurmTrainError: one before it failed in a way that ends the run.
        """
        if self.beside is not None and self.beside.is_done_within(limit_s):
            self.beside.finish()
        self._measure()

    def save(self, position: Position) -> None:
        """Writes a checkpoint of this moment; returns when it is durable. A save under way is waited for.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
            RunError: a newer attempt has taken over.
        """
        start = self.clock()
        if self.beside is None:
            self._save_now(position, local=None)
            return
        self.beside.finish()
        state = self._own_state()
        if self.beside.must_copy:
            state = self.beside.copy(state, changes_at_once=False)
        try:
            self.beside.run(self._work(state, position), step=position.step)
        finally:
            self._stood_still(position.step, self.clock() - start)
            self._measure()

    def save_soon(self, position: Position) -> None:
        """Saves this moment while training goes on; returns when it is copied. `news` tells if it failed.

        Raises:
            SlurmTrainError: the save before it failed in a way that ends the run.
        """
        if self.beside is None:
            self._save_now(position, local=self.local)
            return
        start = self.clock()
        self.beside.finish()
        # The next forward pass changes running statistics already.
        has_statistics = any(True for _ in self.model.buffers())
        copied = self.beside.copy(self._own_state(), changes_at_once=has_statistics)
        self.beside.start(self._work(copied, position, local=self.local), step=position.step)
        self._stood_still(position.step, self.clock() - start)

    def prepare(self) -> None:
        """Makes the first save as cheap as the later ones, beside the training; not collective.

        Call it when the optimizer's state is there.
        """
        from slurm_train.checkpoint.state import own_tensors

        if self.beside is not None:
            rank, num_ranks = self._share
            self.beside.prepare(own_tensors(self.model, self.optimizer, rank=rank, num_ranks=num_ranks))

    def hold_changes(self) -> None:
        """Makes the next change of the tensors wait until they are copied; costs the host nothing."""
        if self.beside is not None:
            self.beside.hold_changes()

    def news(self) -> list[str]:
        """Returns what a person should know of background saves, each line once; costs next to nothing.

        A failure that ends the run is kept in `fatal`: the caller asks for a stop, so that all ranks end at the same
        step, and the save of that stop raises it.
        """
        saves = [] if self.beside is None else self.beside.news()
        self._measure()
        return saves if self.local is None else [*saves, *self.local.copier.news()]

    @property
    def last_save_s(self) -> float | None:
        """Seconds until the newest background save was on disk; None before it is, and without background saves."""
        return None if self.beside is None else self.beside.last_save_s

    def _save_now(self, position: Position, *, local: LocalSaves | None) -> None:
        """Saves while the training waits, without a thread."""
        start = self.clock()
        saved = self._work(self._own_state(), position, local=local)()
        took_s = self.clock() - start
        self.longest_save_s = max(self.longest_save_s, took_s)
        self._stood_still(position.step, took_s)
        if self.log is not None:
            self.log.ended(position.step, num_bytes=saved.num_bytes, save_s=took_s)

    def _stood_still(self, step: int, seconds: float) -> None:
        self.blocked_s += seconds
        if self.log is not None:
            self.log.stalled(step, seconds)

    def _measure(self) -> None:
        self.longest_save_s = max(self.longest_save_s, self.last_save_s or 0.0)
        for outcome in () if self.beside is None else self.beside.ended():
            if self.log is not None:
                _write_down(outcome, self.log)

    @property
    def fatal(self) -> Exception | None:
        """Why the run has to end; None while it may go on."""
        return None if self.beside is None else self.beside.fatal

    def _own_state(self) -> dict[str, Any]:
        from slurm_train.checkpoint.state import own_part, set_group_names, training_state

        broadcast_buffers(self.model)
        state = training_state(self.model, self.optimizer)
        if self.group_names is not None:
            set_group_names(state, self.group_names)
        rank, num_ranks = self._share
        return own_part(state, rank=rank, num_ranks=num_ranks)

    @property
    def _share(self) -> tuple[int, int]:
        """This rank's number among those that hold the same layers, and how many they are."""
        peers = self.layout.members([axis for axis in AXES if axis != "pp"], self.place.rank)
        return peers.index(self.place.rank), len(peers)

    def _work(
        self, tensors: dict[str, Any], position: Position, *, local: LocalSaves | None = None
    ) -> Callable[[], Saved]:
        """Returns the save of these tensors with everything else as it is now, into the run directory or a node's."""
        from slurm_train.checkpoint.save import save_checkpoint

        rank_state, header, fence = self._rank_state(), self._header(position), self._fence
        group = dist.group.WORLD if self.beside is None else self.beside.group
        if local is not None:
            return local.work(tensors, rank_state, header, group)
        return lambda: save_checkpoint(
            self.run.checkpoints,
            tensors=tensors,
            rank_state=rank_state,
            header=header,
            group=group,
            keep=self.keep,
            fence=fence,
        )

    def _rank_state(self) -> dict[str, Any]:
        own = {"rng": rng_state()}
        return own if self.exchange is None else {**own, "exchange": {self.exchange.name: self.exchange.state()}}

    @property
    def _fence(self) -> Callable[[], None]:
        return lambda: check_fence(self.run, self.attempt)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _restore(self, choice: Choice) -> list[str]:
        """Restores what a checkpoint holds; returns what a person should know about it."""
        from slurm_train.checkpoint.load import load_rank_state, load_tensors, require_fit
        from slurm_train.checkpoint.state import (
            names_of_groups,
            restore_training_state,
            set_group_names,
            training_state,
        )

        state = training_state(self.model, self.optimizer)
        # What may have been changed on purpose is the configuration's, not the checkpoint's.
        settings = [{name: group[name] for name in _CONFIGURED if name in group} for group in self._groups]
        require_fit(choice.path, state["model"], is_stage=self.group_names is not None)
        load_tensors(choice.path, state, group=dist.group.WORLD)
        if self.layout.pp > 1:  # the checkpoint names the parameters of all stages
            set_group_names(state, names_of_groups(self.model, self.optimizer))
        restore_training_state(self.model, self.optimizer, state)
        for group, own in zip(self._groups, settings, strict=True):
            group.update(own)
        # Random streams belong to samples, not to ranks.
        index = self.layout.data_parallel_index(self.place.rank)
        rank = ParallelLayout(**choice.manifest.mesh).first_reader(index)
        rank_state = None if rank is None else load_rank_state(choice.path, rank)
        if rank_state is not None:
            set_rng_state(rank_state["rng"])
        return self._restore_exchange(choice.manifest, (rank_state or {}).get("exchange", {}))

    def _restore_exchange(self, manifest: Manifest, states: dict[str, Any]) -> list[str]:
        if self.exchange is None:
            return []
        state = states.get(self.exchange.name)
        if manifest.world_size == self.place.world_size or not state:
            self.exchange.load(state or {})
            return []
        self.exchange.forget()
        return [
            f"{self.exchange.name}: what {manifest.world_size} ranks have kept of their gradients fits no "
            f"{self.place.world_size}, so it begins anew"
        ]

    def _batch_since(self, manifest: Manifest) -> tuple[int, int]:
        if manifest.batch_plan.get("global_size") != self.plan.global_size:
            return manifest.step, manifest.samples
        step, samples = manifest.extra.get("batch_since", (0, 0))
        return int(step), int(samples)

    def _header(self, position: Position) -> CheckpointHeader:
        from slurm_train.checkpoint.manifest import CheckpointHeader

        return CheckpointHeader(
            step=position.step,
            samples=position.samples,
            epoch=position.samples // self.continuity.num_samples,
            world_size=self.place.world_size,
            mesh=self.layout.as_mapping,
            batch_plan={**asdict(self.plan), "global_size": self.plan.global_size},
            config_hash=self.config_hash,
            data_fingerprint=self.continuity.data,
            torch_version=str(torch.__version__),
            attempt=self.attempt,
            job=self.job,
            written_by=f"{self.place.host} pid {os.getpid()}" if self.place.is_first else "",
            extra={
                "items": position.items,
                "loss": position.loss,
                "evaluation_due": position.evaluation_due,
                "recent_losses": position.recent_losses,
                "batch_since": list(position.batch_since),
                "lr": self.lr,
                **self.continuity.as_extra(),
                **(tracker_ids(self.run) if self.place.is_first else {}),
            },
        )


def _write_down(outcome: Outcome, log: SaveLog) -> None:
    result = outcome.result
    num_bytes, error = (0, str(result)) if isinstance(result, Exception) else (result.num_bytes, "")
    log.ended(outcome.step, num_bytes=num_bytes, save_s=outcome.duration_s, error=error)
