"""What a checkpoint holds of a training, and how it is restored into model, optimizer, data and callbacks.

`checkpoint.saves` decides when checkpoints are written, and writes them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.division import OTHERS, Division, own_part, own_tensors
from slurm_train.checkpoint.load import load_rank_state
from slurm_train.checkpoint.manifest import MODEL, CheckpointHeader, Manifest
from slurm_train.checkpoint.parts import StateParts
from slurm_train.checkpoint.replicas import parts_of_ranks
from slurm_train.checkpoint.resumption import Resumption, run_place
from slurm_train.checkpoint.saves import Content, Saves, build_saves
from slurm_train.checkpoint.state import (
    buffer_shapes,
    module_states,
    number_groups,
    require_known_state,
    require_loadable_states,
    saved_buffers,
    set_modes,
    take_extra_states,
    training_state,
)
from slurm_train.checkpoint.training import MADE_BUFFERS, restore_training
from slurm_train.config.frozen import config_hash
from slurm_train.config.parallel import AXES, ParallelLayout
from slurm_train.data.build import ALLOW_WORLD_CHANGE
from slurm_train.data.stream import StreamSource
from slurm_train.distributed.pipeline import refuse_saved_buffers
from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.errors import ConfigError, DataError, RunError
from slurm_train.formatting import shorten
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory
from slurm_train.train.callbacks import Callback
from slurm_train.train.context import Parts
from slurm_train.train.continuity import Continuity, build_continuity
from slurm_train.train.optimizer import refusing_parts, settings_of_groups
from slurm_train.train.position import Position


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Collects what a training has to save, and restores it. All ranks call the same methods in the same order."""

    parts: Parts
    callbacks: Mapping[str, Callback]
    """By the names of their states."""
    others: StateParts
    """The callbacks, as parts of what is saved."""
    continuity: Continuity
    """Settings, code and data: what makes this the same training as the checkpoints'."""
    config_hash: str
    """Hash of the frozen configuration, as in `plan.json`; an accepted change changes it, but not the run id."""
    lr: dict[str, Any]
    """Peak learning rate, and how it was adapted to the global batch; for the manifest."""
    division: Division
    """Which rank writes what."""
    saves: Saves
    """Writes the checkpoints."""
    resumption: Resumption
    """The checkpoint that the training was loaded from."""
    resumed_from: Manifest | None = None
    """Of that checkpoint; None at the beginning of a run."""
    stream_state: dict[str, Any] | None = None
    """Where this rank's stream of samples was at the checkpoint; None to begin anew."""
    parameters: frozenset[str] = frozenset()
    """Names of the parameters that the constructor has made."""
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the buffers that the constructor has made, by name."""

    def resume(self) -> tuple[Position, list[str]]:
        """Restores the newest verified checkpoint; returns the position and notes for the user. Collective.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded; or what the model gives as extra state cannot be
                saved.
            RunError: settings or code are not those that the checkpoint was trained with.
            DataError: the data set is not the one that the checkpoint was trained on.
        """
        self.saves.finish()
        model = self.parts.model
        require_loadable_states(model)
        require_known_state(self.parts.optimizer)
        self.parameters = frozenset(name for name, _ in model.named_parameters())
        self.buffers = buffer_shapes(model)
        choice, notes = self.saves.choose(reason_against=self.continuity.reason_against)
        self.resumption.begin_from(choice)
        if choice is None:
            return Position(), notes
        manifest = choice.manifest
        self.resumed_from = manifest
        position = Position.of(manifest)
        accepted = self.continuity.check(manifest)
        if accepted:
            # A person who changes a run that a callback has ended wants it to continue.
            position.ended = ""
        restored = self._restore(choice)
        saved_sizes = {
            "global_size": manifest.batch_plan.get("global_size"),
            "growth": manifest.batch_plan.get("growth", {}),
        }
        if saved_sizes != self._batch_sizes:
            position.batch_since = [manifest.step, manifest.samples]
        others = filter(None, [self.continuity.note_on_measures(manifest)])
        return position, [*notes, *choice.warnings, *accepted, *others, *restored, choice.resuming]

    def require_savable(self) -> None:
        """Checks after the first step that a save will have all that was trained, and that it will load. Collective.

        Raises:
            RunError: on every rank: the step has made other buffers, or of other shapes, on some ranks.
            ConfigError: the step has made parameters, which the optimizer does not have, or buffers in a pipeline.
            CheckpointError: the optimizer keeps something that no checkpoint has.
        """
        require_known_state(self.parts.optimizer)
        if self.parts.group_names is not None:
            refuse_saved_buffers(self.parts.model)
        made = sorted({name for name, _ in self.parts.model.named_parameters()} - self.parameters)
        if made:
            raise ConfigError(
                f"the first step has made parameters that the optimizer does not have: {shorten(made)}; they would not "
                "be trained",
                hint="make all parameters in the constructor of the model",
            )
        # At the next step each rank takes rank 0's buffers, of which it would mistake parts for other buffers.
        self.division.check({"model": saved_buffers(self.parts.model)})
        if self.parts.group_names is None:
            self._require_whole_optimizer()

    def _require_whole_optimizer(self) -> None:
        """Refuses an optimizer that keeps a part of its state on each rank under the name of the whole. Collective."""
        optimizer = training_state(self.parts.model, self.parts.optimizer, makes_state=False)["optimizer"]
        self.division.check({"optimizer": optimizer})
        parts = parts_of_ranks(optimizer["state"], group=self.saves.group)
        if parts:
            raise RunError(
                f"the optimizer keeps another part of {shorten(parts)} on each rank under one name, and a checkpoint "
                "would have that of one rank",
                hint="cut its state as DTensors, as parallel.dp_shard does; `run.training` of a program of your own "
                "saves it for each rank",
            )

    def content(self, position: Position) -> Content:
        """Returns what this rank writes of the training as it is now. Collective.

        Args:
            position: of this moment.

        Raises:
            RunError: on every rank: the ranks hold different things, and what cannot be saved is named.
        """
        model = self.parts.model
        modules = module_states(model)
        others = self.others.content()
        state = training_state(model, self.parts.optimizer)
        take_extra_states(state["model"])
        if self.parts.group_names is not None:
            groups = state["optimizer"]["param_groups"]
            state["optimizer"]["param_groups"] = number_groups(groups, self.parts.group_names)
        if others.tensors:
            state[OTHERS] = others.tensors
        # A model changes its buffers on each rank, so rank 0's are saved.
        buffers = buffer_shapes(model)
        of_first_rank = [MODEL + name for name in buffers]
        agreed = self.division.agree(state, values=others.values, of_first_rank=of_first_rank)
        tensors = own_part(state, agreed)
        rank_state: dict[str, Any] = {"rng": rng_state(), "modules": modules}
        source = self.parts.train_data
        if isinstance(source, StreamSource):
            rank_state["data"] = source.state(position.samples)
        if self.callbacks and self.parts.rank.place.is_first:
            rank_state[self.others.key] = others.values
        return Content(
            tensors=tensors,
            rank_state=rank_state,
            header=self._header(position, weights=agreed.weights, buffers=buffers),
            expected=agreed.tensors,
            # Saved buffers are e.g. running statistics; rotary tables are neither saved nor changed.
            changes_in_forward=any(name in tensors["model"] for name in buffers),
        )

    def own_tensors(self) -> list[Tensor]:
        """Returns the tensors that this rank is going to write; the optimizer must have its state."""
        rank = self.parts.rank.place.rank
        peers = self.parts.rank.layout.members([axis for axis in AXES if axis != "pp"], rank)
        return own_tensors(self.parts.model, self.parts.optimizer, rank=peers.index(rank), num_ranks=len(peers))

    def _restore(self, choice: Choice) -> list[str]:
        """Restores what a checkpoint holds; returns notes for the user."""
        parts = self.parts
        with refusing_parts(parts.optimizer):
            # Creates the state of an optimizer that has not stepped yet, so that it can be filled.
            training_state(parts.model, parts.optimizer)
        rank_state = self._saved_rank_state(choice)
        modules = self._saved_modules(choice)
        described = restore_training(
            choice,
            parts.model,
            parts.optimizer,
            group=dist.group.WORLD,
            extra_states=None if modules is None else modules["extra"],
            # The configuration's settings may have been changed on purpose.
            settings=settings_of_groups(parts.optimizer),
            group_names=parts.group_names,
            may_lack_state=self._may_lack_gradients,
        )
        if modules is not None:
            set_modes(parts.model, modules["in_evaluation"])
        if "rng" in rank_state:
            set_rng_state(rank_state["rng"])
        notes = self._restore_stream(choice.manifest, rank_state.get("data"))
        return notes + self.others.restore(choice, described=described)

    def _saved_rank_state(self, choice: Choice) -> dict[str, Any]:
        """Returns the saved state of a rank that read the samples of this one; {} where there was none."""
        # Random streams belong to samples and not to ranks.
        index = self.parts.rank.layout.data_parallel_index(self.parts.rank.place.rank)
        reader = ParallelLayout(**choice.manifest.mesh).first_reader(index)
        if reader is None:
            return {}
        return load_rank_state(choice.path, reader) or {}

    def _saved_modules(self, choice: Choice) -> dict[str, Any] | None:
        """Returns the saved `module_states` of this rank; of rank 0 where the layout was another one.

        None for a checkpoint of an older version.
        """
        has_same_layout = choice.manifest.mesh == self.parts.rank.layout.as_mapping
        states = load_rank_state(choice.path, self.parts.rank.place.rank if has_same_layout else 0) or {}
        modules: dict[str, Any] | None = states.get("modules")
        return modules

    def _restore_stream(self, manifest: Manifest, state: dict[str, Any] | None) -> list[str]:
        """Keeps the state of a stream of samples until the stream begins; returns notes for the user.

        Raises:
            DataError: the state is of another number of ranks, and `data.allow_world_change` is not set.
        """
        self.stream_state = state
        num_saved = ParallelLayout(**manifest.mesh).data_parallel_size
        num_ranks = self.parts.rank.layout.data_parallel_size
        if num_saved == num_ranks or not isinstance(self.parts.train_data, StreamSource):
            return []
        if not (self.parts.rank.config.data or {}).get(ALLOW_WORLD_CHANGE):
            raise DataError(
                f"step {manifest.step} was saved with streams of {num_saved} data-parallel ranks, and there are "
                f"{num_ranks}",
                hint=f"resume on {num_saved}; or with +data.{ALLOW_WORLD_CHANGE}=true all streams begin anew, so "
                "samples of the present pass come again",
            )
        self.stream_state = None
        return [
            f"stream state of {num_saved} ranks cannot resume on {num_ranks}: resetting it, "
            "samples of the present pass come again"
        ]

    @property
    def _may_lack_gradients(self) -> bool:
        ddp = self.parts.rank.config.ddp
        return ddp.find_unused_parameters or ddp.static_graph

    @property
    def _batch_sizes(self) -> dict[str, Any]:
        rank = self.parts.rank
        return {"global_size": rank.plan.global_size, "growth": rank.config.batch.growth}

    def _header(
        self, position: Position, *, weights: dict[str, str], buffers: Mapping[str, tuple[int, ...]]
    ) -> CheckpointHeader:
        rank = self.parts.rank
        place = rank.place
        rules = [callback.kept_steps() for callback in self.callbacks.values()]
        kept = [rule for rule in rules if rule is not None]
        made = sorted(name for name, shape in buffers.items() if self.buffers.get(name) != shape)
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
            weights=weights,
            extra={
                **position.as_extra(),
                "lr": self.lr,
                **self.continuity.as_extra(),
                **({"kept": copy.deepcopy(kept)} if kept else {}),
                **({MADE_BUFFERS: made} if made else {}),
                **(tracker_ids(rank.run) if place.is_first else {}),
            },
        )


def tracker_ids(run: RunDirectory) -> dict[str, dict[str, str]]:
    """Returns {"trackers": {"wandb": "5d2030c7-8a1f04", ...}} for a checkpoint's manifest; {} where there are none."""
    states = {path.stem: read_json(path) or {} for path in sorted(run.trackers.glob("*.json"))}
    ids = {name: str(state["tracker_id"]) for name, state in states.items() if state.get("tracker_id")}
    return {"trackers": ids} if ids else {}


def build_checkpointer(parts: Parts, *, callbacks: Mapping[str, Callback], peak_lr: float) -> Checkpointer:
    """Returns the checkpointer of this run. Collective over all ranks."""
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
    others = StateParts(key=OTHERS, noun="callback ", group=dist.group.WORLD)
    for name, callback in callbacks.items():
        others.add(name, callback, of="run")
    return Checkpointer(
        parts=parts,
        callbacks=callbacks,
        others=others,
        continuity=continuity,
        config_hash=config_hash(config, global_size=global_size),
        lr={
            "peak": peak_lr,
            "retune": config.optim.lr_retune,
            "tuned_for_global_size": config.optim.lr_global_size,
        },
        division=Division(group=saves.group, stage=rank.layout.coordinates(rank.place.rank).pp),
        saves=saves,
        resumption=Resumption(rank.run, saves.place),
    )
