"""Saves the training and restores it: the trainer's facts around the `State` that any training has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurm_train.checkpoint.agreement import on_every_rank
from slurm_train.checkpoint.contents import State, Terms
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.checkpoint.resumption import Resumption, run_place
from slurm_train.checkpoint.saves import Content, Copied, Saves, build_saves
from slurm_train.checkpoint.state import training_state
from slurm_train.config.frozen import config_hash
from slurm_train.data.build import ALLOW_WORLD_CHANGE
from slurm_train.data.stream import StreamSource
from slurm_train.distributed.pipeline import refuse_saved_buffers
from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory
from slurm_train.train.callbacks import Callback
from slurm_train.train.context import Parts
from slurm_train.train.continuity import Continuity, build_continuity
from slurm_train.train.optimizer import refusing_parts, settings_of_groups
from slurm_train.train.position import Position
from slurm_train.train.samples import StreamPlace


class RandomState:
    """The random streams of this rank's process, as a part of what is saved."""

    def state_dict(self) -> dict[str, Any]:
        """Returns it."""
        return rng_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it over."""
        set_rng_state(state)


@dataclass(slots=True, kw_only=True)
class TrainerSaver:
    """Saves the training at its position, and resumes it. All ranks call the same methods in the same order."""

    parts: Parts
    position: Position
    """Of the loop, which keeps it up to date."""
    state: State
    """All that is saved."""
    stream: StreamPlace | None
    """Where this rank's stream of samples was; None where samples are read by number."""
    callbacks: Mapping[str, Callback]
    """By the names of their states."""
    continuity: Continuity
    """Settings, code and data: what makes this the same training as the checkpoints'."""
    config_hash: str
    """Hash of the frozen configuration, as in `plan.json`; an accepted change changes it, but not the run id."""
    lr: dict[str, Any]
    """Peak learning rate, and how it was adapted to the global batch; for the manifest."""
    saves: Saves
    """Writes the checkpoints."""
    resumption: Resumption
    """The checkpoint that the training was loaded from."""
    resumed_from: Manifest | None = None
    """Of that checkpoint; None at the beginning of a run."""

    def resume(self) -> list[str]:
        """Restores the newest verified checkpoint, the position with it; returns notes for the user. Collective.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded.
            RunError: settings or code are not those that the checkpoint was trained with.
            DataError: the data set is not the one that the checkpoint was trained on.
        """
        self.saves.finish()
        choice, notes = self.saves.choose(reason_against=self.continuity.reason_against)
        self.resumption.begin_from(choice)
        self.resumed_from = None if choice is None else choice.manifest
        if choice is None:
            return notes
        manifest = choice.manifest
        position = self.position
        position.continue_from(manifest)
        accepted = self.continuity.check(manifest)
        if accepted:
            # A person who changes a run that a callback has ended wants it to continue.
            position.ended = ""
        with refusing_parts(self.parts.optimizer):
            # Creates the state of an optimizer that has not stepped yet, so that it can be filled.
            training_state(self.parts.model, self.parts.optimizer)
        restored = self.state.restore(choice)
        if self.stream is not None:
            restored += self.stream.check_readers(manifest, num_readers=self.parts.rank.layout.data_parallel_size)
        saved_sizes = {
            "global_size": manifest.batch_plan.get("global_size"),
            "growth": manifest.batch_plan.get("growth", {}),
        }
        if saved_sizes != self._batch_sizes:
            position.batch_since = [manifest.step, manifest.samples]
        others = filter(None, [self.continuity.note_on_measures(manifest)])
        return [*notes, *choice.warnings, *accepted, *others, *restored, choice.resuming]

    def check_first_step(self) -> list[str]:
        """Checks that a save will have all that was trained, and that it will load; returns notes. Collective.

        Raises:
            RunError: on every rank: the step has made other buffers, or of other shapes, on some ranks.
            ConfigError: a save would lack something that is trained; or there are buffers in a pipeline.
            CheckpointError: the optimizer keeps something that no checkpoint has.
        """
        if self.parts.group_names is not None:
            refuse_saved_buffers(self.parts.model)
        notes = on_every_rank(dist.group.WORLD, self.state.check_after_first_step)
        self.state.watched.has_model_of_first_step = False
        self.state.compare_ranks()
        return notes[0]

    def save(self) -> None:
        """Saves the position; returns when the checkpoint is durable. See `Saves.save`. Collective."""
        self.saves.save(self.content, step=self.position.step)

    def copy(self) -> Copied:
        """Copies the training as it is now; the position counts as it is when the writing begins. Collective."""
        return self.saves.copy(self.content)

    def save_soon(self, copied: Copied) -> str | None:
        """Begins to write a copy of the position. See `Saves.save_soon`. Collective."""
        return self.saves.save_soon(copied, step=self.position.step)

    def content(self) -> Content:
        """Returns what this rank writes of the training as it is now. Collective."""
        return self.state.content(self._header)

    @property
    def _batch_sizes(self) -> dict[str, Any]:
        rank = self.parts.rank
        return {"global_size": rank.plan.global_size, "growth": rank.config.batch.growth}

    def _header(self) -> CheckpointHeader:
        """Returns the facts of a save for its manifest; what follows from the state is added there."""
        rank = self.parts.rank
        position = self.position
        place = rank.place
        rules = [callback.kept_steps() for callback in self.callbacks.values()]
        kept = [rule for rule in rules if rule is not None]
        return CheckpointHeader(
            step=position.step,
            samples=position.samples,
            epoch=position.samples // self.continuity.num_samples,
            mesh=rank.layout.as_mapping,
            batch_plan={**asdict(rank.plan), **self._batch_sizes},
            config_hash=self.config_hash,
            data_fingerprint=self.continuity.data,
            torch_version=str(torch.__version__),
            **self.resumption.facts_of_save(world_size=place.world_size, host=place.host, env=rank.env),
            extra={
                **position.as_extra(),
                "lr": self.lr,
                **self.continuity.as_extra(),
                **({"kept": copy.deepcopy(kept)} if kept else {}),
                **(tracker_ids(rank.run) if place.is_first else {}),
            },
        )


def tracker_ids(run: RunDirectory) -> dict[str, dict[str, str]]:
    """Returns {"trackers": {"wandb": "5d2030c7-8a1f04", ...}} for a checkpoint's manifest; {} where there are none."""
    states = {path.stem: read_json(path) or {} for path in sorted(run.trackers.glob("*.json"))}
    ids = {name: str(state["tracker_id"]) for name, state in states.items() if state.get("tracker_id")}
    return {"trackers": ids} if ids else {}


def build_saver(
    parts: Parts,
    position: Position,
    *,
    callbacks: Mapping[str, Callback],
    peak_lr: float,
) -> TrainerSaver:
    """Returns the saver of this run. Collective over all ranks.

    Args:
        parts: model, optimizer and data of this rank.
        position: of the loop.
        callbacks: by the names of their states.
        peak_lr: for the manifest.
    """
    rank = parts.rank
    config = rank.config
    global_size = rank.plan.global_size
    saves = build_saves(
        rank.run,
        place=run_place(rank.run, rank.attempt, keep=config.checkpoint.keep, is_leader=rank.place.is_first),
        rank_place=rank.place,
        settings=config.checkpoint,
        env=rank.env,
        device=rank.device,
        clock=rank.clock,
        peers=dist.group.WORLD,
        keeps_copies=config.slurm.outlives_nodes,
    )
    continuity = build_continuity(
        rank.run,
        config,
        global_size=global_size,
        data=parts.train_data.fingerprint(),
        num_samples=len(parts.train_data),
        measured=parts.measured,
    )
    stream = None
    if isinstance(parts.train_data, StreamSource):
        may_begin_anew = bool((config.data or {}).get(ALLOW_WORLD_CHANGE))
        stream = StreamPlace(parts.train_data, position, may_begin_anew=may_begin_anew)
    state = build_state(parts, callbacks=callbacks, stream=stream)
    return TrainerSaver(
        parts=parts,
        position=position,
        state=state,
        stream=stream,
        callbacks=callbacks,
        continuity=continuity,
        config_hash=config_hash(config, global_size=global_size),
        lr={
            "peak": peak_lr,
            "retune": config.optim.lr_retune,
            "tuned_for_global_size": config.optim.lr_global_size,
        },
        saves=saves,
        resumption=Resumption(rank.run, saves.place),
    )


def build_state(parts: Parts, *, callbacks: Mapping[str, Callback], stream: StreamPlace | None) -> State:
    """Returns what is saved of a training; the parts of the loop are added by their owners.

    Args:
        parts: model, optimizer and data of this rank.
        callbacks: by the names of their states.
        stream: see `TrainerSaver`.
    """
    rank = parts.rank
    config = rank.config
    state = State(
        parts.model,
        [parts.optimizer],
        callbacks,
        group=dist.group.WORLD,
        terms=Terms(
            layout=rank.layout,
            group_names=parts.group_names,
            # The configuration's settings may have been changed on purpose.
            settings=settings_of_groups(parts.optimizer),
            makes_state=True,
            may_lack_state=config.ddp.find_unused_parameters or config.ddp.static_graph,
            keeps_replicas=True,
            has_modes=True,
            of="run",
            noun="callback ",
        ),
    )
    state.add("rng", RandomState(), of="reader")
    if stream is not None:
        state.add("data", stream, of="reader")
    return state
