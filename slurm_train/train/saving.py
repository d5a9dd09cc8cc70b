"""Where a run stands, how that gets into a checkpoint and out of it, and when the next save is due.

A periodic save costs the training a copy in memory; a thread writes it while training goes on. The save at a stop or
at the end is the same, waited for. The loop asks `news` after each step. Failures that all ranks agreed on, a full disk
say, cost one checkpoint and are printed. Others end the run: they are kept until all ranks have stopped at the same
step, and are raised there.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from slurm_train.checkpoint.agreement import on_every_rank
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.division import CALLBACKS, Agreement, Division, full_name, leaves_of, own_part, own_tensors
from slurm_train.checkpoint.filling import Saved
from slurm_train.checkpoint.load import Choice, choose_checkpoint, load_rank_state, load_tensors, require_fit
from slurm_train.checkpoint.local import LocalSaves
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.checkpoint.save import BackgroundSaver, Outcome, save_to
from slurm_train.checkpoint.state import (
    StagingBuffers,
    merge_state,
    module_states,
    number_groups,
    require_loadable_states,
    restore_training_state,
    set_modes,
    split_state,
    take_extra_states,
    training_state,
)
from slurm_train.config.frozen import trained_settings, training_changes
from slurm_train.config.parallel import AXES, ParallelLayout
from slurm_train.config.schema import RunConfig
from slurm_train.data.build import ALLOW_WORLD_CHANGE
from slurm_train.data.stream import StreamSource
from slurm_train.distributed.seeds import rng_state, set_rng_state
from slurm_train.errors import CheckpointError, DataError, RunError, SlurmTrainError
from slurm_train.launch.snapshot import digest_code, names_own_code, read_index
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import (
    AcceptedChange,
    SaveLog,
    covers_code,
    covers_config,
    covers_data,
    read_changes,
)
from slurm_train.rundir.files import fsync_file, read_json
from slurm_train.rundir.lineage import Origin, record_origin
from slurm_train.rundir.paths import PASSED_OVER_PREFIX, RunDirectory
from slurm_train.train.callbacks import Callback
from slurm_train.train.context import Parts, Rank
from slurm_train.train.optimizer import settings_of_groups
from slurm_train.train.position import Position

_FIRST_AFTER_STEPS = 10
# A measured cost of nothing would ask for a save at every step.
_LEAST_COST_S = 0.01
# The disk should be idle half of the time, or the next save waits for it.
_LEAST_SAVE_TIMES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuity:
    """What this attempt trains; every checkpoint holds all of it.

    The login half compares too, before anything is submitted. This is the last gate: it also sees files that were
    edited by hand, and data that only the ranks can open.
    """

    run: RunDirectory
    settings: dict[str, Any]
    """What decides the training, by dotted key."""
    code: str
    """Digest of the code snapshot, "" where there is none."""
    data: str
    """Fingerprint of the data set."""
    num_samples: int
    """Samples of one epoch."""
    changes: list[AcceptedChange]
    """What was accepted in the middle of the run so far."""

    def as_extra(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it."""
        facts = {"settings": self.settings, "code": self.code, "num_samples": self.num_samples}
        accepted = [{"number": item.number, "step": item.step, "names": item.names} for item in self.changes]
        return {**facts, "changes": accepted} if accepted else facts

    def reason_against(self, manifest: Manifest) -> str:
        """Returns why a checkpoint on the nodes' disks is none to go on from, "" where it is one.

        A change is accepted from the newest checkpoint in the run directory on, so what goes beyond that step without
        the change is not part of the run.
        """
        known = [accepted["number"] for accepted in manifest.extra.get("changes", ())]
        for change in self.changes:
            if change.number not in known and manifest.step > change.step:
                return f"{', '.join(change.names)} was changed, as accepted, from step {change.step} on"
        try:
            self.check(manifest)
        except (RunError, DataError) as err:
            return err.message
        return ""

    def check(self, manifest: Manifest) -> list[str]:
        """Returns notes for the user about accepted changes that this checkpoint does not have yet.

        Raises:
            RunError: settings or code are not those of the checkpoint, and the change was not accepted.
            DataError: the data set is not.
        """
        trained, step, since = manifest.extra, manifest.step, f"from step {manifest.step} on, as accepted:"
        accept = f"accept it: `resume {self.run.run_id} --accept"
        found = [
            change
            for change in training_changes(trained.get("settings") or self.settings, self.settings)
            if change.kind != "harmless"
        ]
        left = [change for change in found if not covers_config(self.changes, change.key, change.new)]
        if left:
            raise RunError(
                f"{self.run.config} is not what step {step} was trained with: {', '.join(map(str, left))}",
                hint=f"put it back, or {accept} config`",
            )
        notes = [f"{since} {change}" for change in found]
        if self.code and trained.get("code") not in ("", None, self.code):
            if not covers_code(self.changes, self.code):
                raise RunError(
                    f"the code in {self.run.code} is not what step {step} was trained with",
                    hint=f"{accept} code` takes your files as they are now",
                )
            notes.append(f"{since} other code")
        old = manifest.data_fingerprint
        if old != self.data:
            what = f"{trained.get('num_samples')} -> {self.num_samples} samples, fingerprint {old} -> {self.data}"
            if not covers_data(self.changes, old=old, new=self.data):
                raise DataError(
                    f"the data set has changed since step {step}: {what}",
                    hint=f"bring the old data back, or {accept} data`; run.name=NAME starts another run",
                )
            notes.append(f"{since} another data set, {what}")
        return notes


def build_continuity(
    run: RunDirectory, config: RunConfig, *, global_size: int, data: str, num_samples: int
) -> Continuity:
    """Returns what this attempt trains.

    Args:
        run: where configuration, snapshot and accepted changes lie.
        config: the frozen configuration.
        global_size: samples per optimizer step.
        data: fingerprint of the training samples.
        num_samples: how many there are.
    """
    index = read_index(run)
    return Continuity(
        run=run,
        settings=trained_settings(config, global_size=global_size),
        code="" if index is None else digest_code(index, is_own_code=names_own_code(config)),
        data=data,
        num_samples=num_samples,
        changes=read_changes(run),
    )


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and restores one run's training state. All ranks call the same methods in the same order.

    Wide because a checkpoint holds all of a training: each part of it is a field here.
    """

    parts: Parts
    callbacks: Mapping[str, Callback]
    """By the names of their states."""
    continuity: Continuity
    """Settings, code and data: what makes this the same training as the checkpoints'."""
    config_hash: str
    """Of the frozen configuration, as in `plan.json`; a change that is accepted changes it, not the run id."""
    lr: dict[str, Any]
    """Peak learning rate, and how it follows the global batch; for the manifest."""
    place: Place
    """The run directory's checkpoints."""
    local: LocalSaves | None
    """Where periodic checkpoints go to the nodes' own disks first."""
    group: dist.ProcessGroup
    """A gloo group of all ranks, used by saves alone."""
    division: Division
    """Which rank writes what."""
    saver: BackgroundSaver
    buffers: StagingBuffers
    """Where states are copied to, so that training can go on."""
    log: SaveLog | None
    """Rank 0's record of the saves."""
    blocked_s: float = 0.0
    """Seconds that saves have kept the training waiting."""
    longest_save_s: float = 0.0
    """Longest time from the begin of a save until it was durable."""
    last_save_s: float | None = None
    """That of the newest good save; None before it has ended."""
    fatal: Exception | None = None
    """Set when a save fails in a way that ends the run: the loop then requests a stop, and the save at that stop raises
    this error on every rank."""
    stream_state: dict[str, Any] | None = None
    """Where this rank's stream of samples was at the checkpoint; None to begin anew."""
    origin: Origin = field(default_factory=Origin)
    """What training was loaded from."""
    _has_moved_on: bool = False
    """A step from there was taken, and that is on record."""
    _news: list[str] = field(default_factory=list)

    def resume(self) -> tuple[Position, list[str]]:
        """Restores the newest verified checkpoint; returns the position and notes for the user.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded.
            CheckpointError: what the model gives as extra state cannot be saved.
            RunError: settings or code are not those that the checkpoint was trained with.
            DataError: the data set is not the one that the checkpoint was trained on.
        """
        self.finish()
        require_loadable_states(self.parts.model)
        place = self.place
        choose = partial(
            choose_checkpoint, place.root, group=dist.group.WORLD, attempt=place.attempt, fence=place.fence
        )
        notes: list[str] = []
        if self.local is None:
            choice = choose()
        else:
            reason_against = self.continuity.reason_against
            choice, notes = self.local.choose(lambda copied: choose(copied=copied), reason_against=reason_against)
        self._has_moved_on = False
        place.passed_over[:] = [] if choice is None else [passed.path for passed in choice.passed_over]
        if choice is None:
            self.origin = Origin()
            return Position(), notes
        manifest = choice.manifest
        self.origin = choice.origin
        position, accepted = Position.of(manifest), self.continuity.check(manifest)
        if accepted:  # who changes a run that a callback has ended wants it to go on
            position.ended = ""
        accepted += self._restore(choice)
        growth = manifest.batch_plan.get("growth", {})
        if (manifest.batch_plan.get("global_size"), growth) != tuple(self._batch_sizes.values()):
            position.batch_since = [manifest.step, manifest.samples]
        for passed in choice.passed_over:
            aside = f"{PASSED_OVER_PREFIX}{passed.path.name}"
            notes.append(f"passed over {passed.path.name}: {passed.reason}; it becomes {aside} when training goes on")
        return position, [*notes, *accepted, f"resuming from {choice.path.name} (step {position.step})"]

    def move_on(self) -> None:
        """Takes note that a step was taken from what was loaded; what was passed over for it is left behind.

        To be called after each step; not collective. Where the file system refuses, the next step tries again.
        """
        if self._has_moved_on:
            return
        if self.parts.rank.place.is_first:
            # A newer attempt that has taken over is found by the next save.
            with contextlib.suppress(OSError, RunError):
                self.place.move_aside()
                record_origin(self.parts.rank.run, self.place.attempt, self.origin)
                self._has_moved_on = True
        else:
            self._has_moved_on = True

    def save(self, position: Position) -> None:
        """Writes a checkpoint of this moment into the run directory; returns when it is durable.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
            RunError: a newer attempt has taken over.
        """
        outcome = self._save(position, local=None, waits=True)
        assert outcome is not None
        if isinstance(outcome.result, Exception):
            raise _error_of(outcome)

    def save_soon(self, position: Position, *, is_kept: bool = False) -> None:
        """Begins a periodic save; returns when this moment is copied. `news` tells if it failed.

        Args:
            position: of this moment.
            is_kept: it is to be kept, so it goes into the run directory at once.

        Raises:
            SlurmTrainError: the save before it failed in a way that ends the run.
        """
        self._save(position, local=None if is_kept else self.local, waits=False)

    def _save(self, position: Position, *, local: LocalSaves | None, waits: bool) -> Outcome | None:
        """Saves once the save before it has ended; returns how, None if it goes on in the background."""
        start, in_background = self.parts.rank.clock(), self.parts.rank.config.checkpoint.background
        self.finish()
        modules = module_states(self.parts.model)
        state, values, agreed = self._own_state()
        # The thread cannot read tensors on a GPU, not even while training waits.
        if in_background and (not waits or self.buffers.is_remote):
            state = self.buffers.stage(state)
            # The next forward pass changes running statistics already; rotary tables are never saved nor changed.
            if any(name in state["model"] for name, _ in self.parts.model.named_buffers()):
                self.buffers.hold_changes()
        work, outcome = self._work(state, values, modules, position, agreed=agreed, local=local), None
        if in_background:
            self.saver.start(work, step=position.step)
            outcome = self.saver.wait() if waits else None
        else:
            outcome = self.saver.run(work, step=position.step)
        stall_s = self.parts.rank.clock() - start
        self.blocked_s += stall_s
        if self.log is not None:
            self.log.stalled(position.step, stall_s)
        if outcome is not None:
            self._note_outcome(outcome)
        return outcome

    def prepare(self) -> None:
        """Makes the first save as cheap as the later ones, memory and imports, while training goes on; not collective.

        Call it when the optimizer's state is there.
        """
        if not self.parts.rank.config.checkpoint.background:
            return
        rank, num_ranks = self._share
        tensors = own_tensors(self.parts.model, self.parts.optimizer, rank=rank, num_ranks=num_ranks)

        def work() -> None:
            # Imports what a save needs: 0.1 s or more, so better before the first save than in it.
            import slurm_train.checkpoint.tensors  # noqa: F401

            self.buffers.prepare(tensors)

        self.saver.prepare(work)

    def finish(self) -> None:
        """Waits for a save under way; what became of it is among the `news`.

        Raises:
            SlurmTrainError: it, or one before it, failed in a way that ends the run.
        """
        if (outcome := self.saver.wait()) is not None:
            self._note_outcome(outcome)
        if self.fatal is not None:
            raise self.fatal

    def finish_within(self, limit_s: float) -> None:
        """Waits for a save under way, but not longer; what is not complete then does not count.

        Raises:
            SlurmTrainError: it, or one before it, failed in a way that ends the run.
        """
        if self.saver.is_done_within(limit_s):
            self.finish()

    def news(self) -> list[str]:
        """Returns notes for the user about saves, each once; costs next to nothing."""
        if (outcome := self.saver.poll()) is not None:
            self._note_outcome(outcome)
        news, self._news = self._news, []
        return news if self.local is None else [*news, *self.local.take_news()]

    def discard_from(self, step: int) -> None:
        """Removes all checkpoints of a step and later ones: the run goes back to before it. Collective."""
        # On the nodes first: what is left there after a kill could be brought in again.
        for place in [self.place] if self.local is None else [self.local.place, self.place]:
            on_every_rank(dist.group.WORLD, partial(place.discard_from, step))

    def close(self) -> None:
        """Takes away what a finished run has on this node's own disk."""
        if self.local is not None:
            self.local.close()

    def _note_outcome(self, outcome: Outcome) -> None:
        """Records how a save ended."""
        result = outcome.result
        num_bytes, error = (0, str(result)) if isinstance(result, Exception) else (result.num_bytes, "")
        if self.log is not None:
            self.log.ended(outcome.step, num_bytes=num_bytes, save_s=outcome.duration_s, error=error)
        if not isinstance(result, Exception):
            self.last_save_s = outcome.duration_s
            self.longest_save_s = max(self.longest_save_s, outcome.duration_s)
            self._news += result.problems
        elif outcome.is_fatal:
            self.fatal = _error_of(outcome)
        else:
            self._news.append(
                f"the checkpoint of step {outcome.step} failed, training continues; "
                f"the previous checkpoint is intact: {result}"
            )

    def _own_state(self) -> tuple[dict[str, Any], dict[str, Any], Agreement]:
        """Returns what this rank writes, the callbacks' values, and what the ranks agreed on. Collective.

        Raises:
            RunError: on every rank: the ranks hold different things, and what cannot be saved is named.
        """
        callback_tensors, values = self._callbacks_state()
        state = training_state(self.parts.model, self.parts.optimizer)
        take_extra_states(state["model"])
        if self.parts.group_names is not None:
            groups = state["optimizer"]["param_groups"]
            state["optimizer"]["param_groups"] = number_groups(groups, self.parts.group_names)
        if callback_tensors:
            state[CALLBACKS] = callback_tensors
        # A model changes them on each rank by itself.
        buffers = [name for name, _ in self.parts.model.named_buffers()]
        agreed = self.division.agree(state, values=values, of_first_rank=buffers)
        return own_part(state, agreed), values, agreed

    def _callbacks_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the tensors of the callbacks, and a copy of their other values."""
        return split_state({key: callback.state_dict() for key, callback in self.callbacks.items()})

    @property
    def _share(self) -> tuple[int, int]:
        """This rank's number among those that hold the same layers, and how many they are."""
        peers = self.parts.rank.layout.members([axis for axis in AXES if axis != "pp"], self.parts.rank.place.rank)
        return peers.index(self.parts.rank.place.rank), len(peers)

    def _work(
        self,
        tensors: dict[str, Any],
        callback_values: dict[str, Any],
        modules: dict[str, Any],
        position: Position,
        *,
        agreed: Agreement,
        local: LocalSaves | None,
    ) -> Callable[[], Saved]:
        """Returns the save of these tensors with everything else as it is now, into the run directory or a node's."""
        header = self._header(position, weights=agreed.weights)
        rank_state: dict[str, Any] = {"rng": rng_state(), "modules": modules}
        if isinstance(source := self.parts.train_data, StreamSource):
            rank_state["data"] = source.state(position.samples)
        if self.callbacks and self.parts.rank.place.is_first:
            rank_state[CALLBACKS] = callback_values

        def work() -> Saved:
            if self.parts.rank.place.is_first:
                # No later attempt writes the lines of steps that a checkpoint has. Without them training can go on.
                with contextlib.suppress(OSError):
                    fsync_file(self.parts.rank.run.metrics)
            self.buffers.wait_for_copy()
            place, protect = (self.place, ()) if local is None else (local.place, tuple(local.copying))
            saved = save_to(
                place,
                tensors=tensors,
                rank_state=rank_state,
                header=header,
                group=self.group,
                protect=protect,
                expected=agreed.tensors,
            )
            if local is not None:
                local.copy_if_due(saved, group=self.group)
            return saved

        return work

    def _restore(self, choice: Choice) -> list[str]:
        """Restores what a checkpoint holds; returns notes for the user."""
        layout = self.parts.rank.layout
        state = training_state(self.parts.model, self.parts.optimizer)
        groups: list[dict[str, Any]] = state["optimizer"].pop("param_groups")
        numbered = number_groups(groups, self.parts.group_names or [group["params"] for group in groups])
        # The configuration's settings may have been changed on purpose; what else a group holds is state.
        settings = settings_of_groups(self.parts.optimizer)
        kept = {
            number: own
            for number, group in numbered.items()
            if (own := {name: value for name, value in group.items() if name not in settings})
        }
        if kept:
            state["optimizer"]["param_groups"] = kept
        # Random streams belong to samples, not to ranks.
        index = layout.data_parallel_index(self.parts.rank.place.rank)
        reader = ParallelLayout(**choice.manifest.mesh).first_reader(index)
        rank_state = (None if reader is None else load_rank_state(choice.path, reader)) or {}
        is_stage = self.parts.group_names is not None
        modules = self._saved_modules(choice)
        # Older checkpoints have extra states among the tensors.
        extra = {} if modules is None else take_extra_states(state["model"])
        described = require_fit(choice.path, state["model"], kept=state["optimizer"]["state"], is_stage=is_stage)
        load = partial(load_tensors, choice.path, group=dist.group.WORLD, near=choice.near, described=described)
        load(state)
        pairs = zip(groups, numbered, strict=True)
        state["optimizer"]["param_groups"] = [group | kept.get(number, {}) for group, number in pairs]
        if modules is not None:
            state["model"] |= {name: modules["extra"].get(name, value) for name, value in extra.items()}
        restore_training_state(self.parts.model, self.parts.optimizer, state)
        if modules is not None:
            set_modes(self.parts.model, modules["in_evaluation"])
        if "rng" in rank_state:
            set_rng_state(rank_state["rng"])
        notes = self._restore_stream(choice.manifest, rank_state.get("data"))
        if self.callbacks:
            notes += self._restore_callbacks(choice, load, stored=described.planner_data or {})
        return notes

    def _saved_modules(self, choice: Choice) -> dict[str, Any] | None:
        """Returns the `module_states` of this rank, in another layout of rank 0; None in an older checkpoint."""
        is_same = choice.manifest.mesh == self.parts.rank.layout.as_mapping
        states = load_rank_state(choice.path, self.parts.rank.place.rank if is_same else 0) or {}
        modules: dict[str, Any] | None = states.get("modules")
        return modules

    def _restore_callbacks(
        self, choice: Choice, load: Callable[[dict[str, Any]], None], *, stored: Mapping[str, Sequence[Any]]
    ) -> list[str]:
        """Gives the callbacks their state back: values to all ranks, tensors to the ranks that have them.

        Args:
            choice: the checkpoint.
            load: fills tensors.
            stored: path of each saved tensor and value, by full name.
        """
        saved = (load_rank_state(choice.path, 0) or {}).get(CALLBACKS, {})
        callbacks, step = self.callbacks, choice.manifest.step
        tensors, values = self._callbacks_state()
        tensors = {key: value for key, value in tensors.items() if key in saved}
        if saved:  # on all ranks, also on one whose stage has no tensor of theirs
            load({CALLBACKS: tensors} if tensors else {})
        in_checkpoint = {name: path for name, path in stored.items() if path[0] == CALLBACKS}
        with_tensors = {path[1] for path in in_checkpoint.values()}
        for key in callbacks.keys() & saved.keys():
            gives_nothing = key not in tensors and not values[key]
            if key not in with_tensors or not gives_nothing:
                callbacks[key].load_state_dict(merge_state(saved[key], tensors.get(key, {})))
        new = [key for key in callbacks if key not in saved]
        notes = [f"callback {key}: begins at step {step}, where it has no state" for key in new]
        notes += [f"callback {key}: left out from step {step} on" for key in saved if key not in callbacks]
        if in_checkpoint:
            lacking = in_checkpoint.keys() - {full_name(path) for path, _ in leaves_of({CALLBACKS: tensors})}
            for name in sorted(set[str].intersection(*on_every_rank(dist.group.WORLD, lambda: lacking))):
                _, key, *path = in_checkpoint[name]
                if key in callbacks:
                    notes.append(f"callback {key}: no rank has its tensor {full_name(path)} of step {step} any more")
        return notes

    def _restore_stream(self, manifest: Manifest, state: dict[str, Any] | None) -> list[str]:
        self.stream_state, notes = state, list[str]()
        was, now = ParallelLayout(**manifest.mesh).data_parallel_size, self.parts.rank.layout.data_parallel_size
        if was != now and isinstance(self.parts.train_data, StreamSource):
            if not (self.parts.rank.config.data or {}).get(ALLOW_WORLD_CHANGE):
                raise DataError(
                    f"step {manifest.step} was saved with streams of {was} data-parallel ranks, and there are {now}",
                    hint=f"resume on {was}; or with +data.{ALLOW_WORLD_CHANGE}=true all streams begin anew, so samples "
                    "of the present pass come again",
                )
            self.stream_state = None
            notes = [
                f"stream state of {was} ranks cannot resume on {now}: resetting it, "
                "samples of the present pass come again"
            ]
        return notes

    @property
    def _batch_sizes(self) -> dict[str, Any]:
        rank = self.parts.rank
        return {"global_size": rank.plan.global_size, "growth": rank.config.batch.growth}

    def _header(self, position: Position, *, weights: dict[str, str]) -> CheckpointHeader:
        rank, place = self.parts.rank, self.parts.rank.place
        kept = [rule for callback in self.callbacks.values() if (rule := callback.kept_steps()) is not None]
        return CheckpointHeader(
            step=position.step,
            samples=position.samples,
            epoch=position.samples // self.continuity.num_samples,
            world_size=place.world_size,
            mesh=rank.layout.as_mapping,
            batch_plan={**asdict(rank.plan), **self._batch_sizes},
            config_hash=self.config_hash,
            data_fingerprint=self.continuity.data,
            torch_version=str(torch.__version__),
            attempt=rank.attempt,
            # Letters, digits and "_".
            job=rank.env.get("SLURM_JOB_ID", "local"),
            written_by=f"{place.host} pid {os.getpid()}" if place.is_first else "",
            parent=self.origin.save_id,
            weights=weights,
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


def _error_of(outcome: Outcome) -> Exception:
    """Returns the error to raise in the training thread for a save that failed."""
    assert isinstance(outcome.result, Exception)
    if isinstance(outcome.result, SlurmTrainError):
        return outcome.result
    lost = CheckpointError(
        f"an exchange between the ranks failed while saving step {outcome.step}: {outcome.result}",
        hint="another rank died or hangs; if its disk is that slow, raise checkpoint.save_timeout_s",
    )
    lost.__cause__ = outcome.result
    return lost


class SavePace:
    """Decides at which steps to save, the same on every rank: every N steps, or as often as pays off.

    "auto" follows Young and Daly: with a save that holds the training up for C seconds and an interruption every M
    seconds, sqrt(2 C M) seconds between saves lose the least. Rank 0 measures and decides; a save tells all ranks.

    Args:
        every: steps between saves, "auto", or None for never.
        start_step: step at which this attempt begins.
        failure_every_s: seconds between interruptions, for auto.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        *,
        start_step: int = 0,
        failure_every_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._failure_every_s, self._clock = every, failure_every_s, clock
        self._next = start_step + _FIRST_AFTER_STEPS
        self._blocked_s = 0.0
        self._since: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether to save after this step."""
        if self._every == "auto":
            if self._since is None:  # the first step's time is start-up
                self._since = (step, self._clock())
            return step >= self._next
        return self._every is not None and step % self._every == 0

    def saved(self, step: int, *, blocked_s: float, save_s: float | None) -> str | None:
        """Records a save that was just begun; returns a note for the user, if any. Collective for auto.

        Args:
            step: the save's.
            blocked_s: seconds that saves have kept the training waiting, all together.
            save_s: seconds until the newest was on disk; None where that is not known.
        """
        if self._every != "auto":
            return None
        now = self._clock()
        since_step, since = self._since or (step, now)
        cost_s, self._blocked_s = blocked_s - self._blocked_s, blocked_s
        steps = interval_steps(
            cost_s=cost_s,
            save_s=save_s or 0.0,
            step_s=max(now - since - cost_s, 0.0) / max(step - since_step, 1),
            failure_every_s=self._failure_every_s,
        )
        box = torch.tensor(steps, dtype=torch.int64)
        dist.broadcast(box, src=0)
        steps = int(box.item())
        before, self._next, self._since = self._next - since_step, step + steps, (step, now)
        if 0.5 < steps / max(before, 1) < 2.0:
            return None
        return f"the next checkpoint is due in {steps} steps: a save takes {cost_s:.2f} s of training"


def interval_steps(*, cost_s: float, save_s: float, step_s: float, failure_every_s: float) -> int:
    """Returns the steps between two saves that lose the least time, at least 1.

    Args:
        cost_s: seconds that a save holds the training up.
        save_s: seconds until it is on disk.
        step_s: seconds of a step.
        failure_every_s: seconds between interruptions.
    """
    best_s = math.sqrt(2.0 * max(cost_s, _LEAST_COST_S) * failure_every_s)
    return max(1, math.ceil(max(best_s, _LEAST_SAVE_TIMES * save_s) / max(step_s, 1e-6)))


def failure_every_s(attempts: Iterable[Mapping[str, Any]], *, expected_s: float) -> float:
    """Returns the seconds between interruptions: what was expected, corrected by what the run has seen.

    Args:
        attempts: the ledger, one mapping per attempt; those that ended (with "end_time_unix_s") were interrupted.
        expected_s: counts as one interruption after so many seconds.
    """
    spans = [
        max(float(entry["end_time_unix_s"]) - float(entry["time_unix_s"]) - float(entry.get("suspended_s", 0.0)), 0.0)
        for entry in attempts
        if "end_time_unix_s" in entry and "time_unix_s" in entry
    ]
    return (expected_s + sum(spans)) / (1 + len(spans))


def build_save_pace(rank: Rank, *, start_step: int) -> SavePace:
    """Returns when a run saves.

    Args:
        rank: this rank; the run's ledger says how often it was interrupted, and is only read for auto.
        start_step: step at which this attempt begins.
    """
    settings = rank.config.checkpoint
    attempts = read_ledger(rank.run) if settings.every_steps == "auto" else []
    every_s = failure_every_s(attempts, expected_s=3600 * settings.failure_every_h)
    return SavePace(settings.every_steps, start_step=start_step, failure_every_s=every_s, clock=rank.clock)
