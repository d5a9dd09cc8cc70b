"""What the built-in trainer adds to its checkpoints: the facts of its loop, and which parts it has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.contents import State, Terms
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.checkpoint.resumption import Resumption, run_place
from slurm_train.checkpoint.saver import Saver
from slurm_train.checkpoint.saves import build_saves
from slurm_train.checkpoint.state import training_state
from slurm_train.config.frozen import config_hash
from slurm_train.data.build import ALLOW_WORLD_CHANGE
from slurm_train.data.stream import StreamSource
from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import Spent
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
class TrainerFacts:
    """The `TrainingFacts` of the built-in trainer. All ranks call the same methods in the same order."""

    parts: Parts
    position: Position
    """Of the loop, which keeps it up to date."""
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
    resumption: Resumption
    """The checkpoint that the training was loaded from."""

    def reason_against(self, manifest: Manifest) -> str:
        """See `Continuity.reason_against`."""
        return self.continuity.reason_against(manifest)

    def begin_from(self, choice: Choice | None) -> list[str]:
        """Takes over the position of a checkpoint of this training. See `TrainingFacts`.

        Raises:
            RunError: settings or code are not those that the checkpoint was trained with.
            DataError: the data set is not the one that the checkpoint was trained on.
        """
        self.resumption.begin_from(choice)
        if choice is None:
            return []
        position = self.position
        position.continue_from(choice.manifest)
        accepted = self.continuity.check(choice.manifest)
        if accepted:
            # A person who changes a run that a callback has ended wants it to continue.
            position.ended = ""
        with refusing_parts(self.parts.optimizer):
            # Creates the state of an optimizer that has not stepped yet, so that it can be filled.
            training_state(self.parts.model, self.parts.optimizer)
        return accepted

    def continue_from(self, choice: Choice | None) -> list[str]:
        """Compares data and batch with those of a checkpoint. See `TrainingFacts`."""
        if choice is None:
            return []
        manifest = choice.manifest
        notes = [self.continuity.note_on_measures(manifest) or ""]
        if self.stream is not None:
            notes += self.stream.check_readers(manifest, num_readers=self.parts.rank.layout.data_parallel_size)
        saved_sizes = {
            "global_size": manifest.batch_plan.get("global_size"),
            "growth": manifest.batch_plan.get("growth", {}),
        }
        if saved_sizes != self._batch_sizes:
            self.position.batch_since = [manifest.step, manifest.samples]
        return notes

    def steps_until(self, _step: int) -> int | None:
        """Returns None: the loop counts its steps by itself, and a rollback counts some again."""
        return None

    @property
    def _batch_sizes(self) -> dict[str, Any]:
        rank = self.parts.rank
        return {"global_size": rank.plan.global_size, "growth": rank.config.batch.growth}

    def header(self, step: int) -> CheckpointHeader:
        """See `TrainingFacts`; the samples are those of the position by now."""
        rank = self.parts.rank
        position = self.position
        place = rank.place
        rules = [callback.kept_steps() for callback in self.callbacks.values()]
        kept = [rule for rule in rules if rule is not None]
        return CheckpointHeader(
            step=step,
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


def build_facts(
    parts: Parts,
    position: Position,
    *,
    callbacks: Mapping[str, Callback],
    peak_lr: float,
) -> TrainerFacts:
    """Returns what the trainer knows of its checkpoints.

    Args:
        parts: model, optimizer and data of this rank.
        position: of the loop.
        callbacks: by the names of their states.
        peak_lr: for the manifest.
    """
    rank = parts.rank
    config = rank.config
    global_size = rank.plan.global_size
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
    place = run_place(rank.run, rank.attempt, keep=config.checkpoint.keep, is_leader=rank.place.is_first)
    return TrainerFacts(
        parts=parts,
        position=position,
        stream=stream,
        callbacks=callbacks,
        continuity=continuity,
        config_hash=config_hash(config, global_size=global_size),
        lr={
            "peak": peak_lr,
            "retune": config.optim.lr_retune,
            "tuned_for_global_size": config.optim.lr_global_size,
        },
        resumption=Resumption(rank.run, place),
    )


def build_saver(facts: TrainerFacts, *, spent: Spent) -> Saver:
    """Returns the saver of this run; the owners of the loop's parts add them to its state. Collective over all ranks.

    Args:
        facts: what the trainer knows of its checkpoints.
        spent: the account of this rank.
    """
    rank = facts.parts.rank
    saves = build_saves(
        rank.run,
        place=facts.resumption.place,
        rank_place=rank.place,
        settings=rank.config.checkpoint,
        env=rank.env,
        device=rank.device,
        clock=rank.clock,
        peers=dist.group.WORLD,
        keeps_copies=rank.config.slurm.outlives_nodes,
    )
    state = build_state(facts.parts, callbacks=facts.callbacks, stream=facts.stream)
    return Saver(state, saves, facts, spent=spent, say=rank.say)


def build_state(parts: Parts, *, callbacks: Mapping[str, Callback], stream: StreamPlace | None) -> State:
    """Returns what is saved of a training; the parts of the loop are added by their owners.

    Args:
        parts: model, optimizer and data of this rank.
        callbacks: by the names of their states.
        stream: see `TrainerFacts`.
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
