"""What a program with its own loop has to save, and how it is restored.

Weights and optimizer are saved once over all ranks, or in their shards, by names: any number of ranks can load them.
What else the program hands over is saved as the objects themselves say by `state_dict`: once where all ranks say the
same, else for each rank.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from slurm_train.checkpoint.agreement import on_every_rank, rank_in, size_of
from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.division import (
    CALLBACKS,
    Agreement,
    Division,
    filtered,
    full_name,
    leaves_of,
    own_part,
    own_tensors,
)
from slurm_train.checkpoint.encoding import decode, encode, plain_number
from slurm_train.checkpoint.load import load_rank_state, load_tensors
from slurm_train.checkpoint.manifest import MODEL, CheckpointHeader, Manifest
from slurm_train.checkpoint.optimizer_steps import OptimizerSteps
from slurm_train.checkpoint.readers import (
    go_to_epoch,
    has_schedule,
    holds_schedule,
    is_at_end_of_pass,
    may_know_place,
    require_moved,
    require_whole_state,
)
from slurm_train.checkpoint.replicas import digest, parts_of_ranks, require_replicas
from slurm_train.checkpoint.saves import Content
from slurm_train.checkpoint.state import (
    buffer_shapes,
    merge_state,
    module_states,
    names_of_groups,
    on_host,
    plain_names,
    require_known_state,
    require_loadable,
    require_loadable_states,
    saved_buffers,
    split_state,
    take_extra_states,
    training_state,
)
from slurm_train.checkpoint.switches import Switches
from slurm_train.checkpoint.training import MADE_BUFFERS, restore_training
from slurm_train.checkpoint.unsaved import UnsavedState
from slurm_train.errors import ConfigError, RunError
from slurm_train.formatting import shorten

PER_RANK = "per_rank"
"""Key in a manifest's `extra`: objects whose state each rank has saved for itself."""
OWN_BUFFERS = "own_buffers"
"""Key in a manifest's `extra`, and among a rank's states: buffers of the model that each rank has saved for itself."""
OWN_STATE = "own_state"
"""Key in a manifest's `extra`, and among a rank's states: what optimizers keep that each rank has saved for itself."""
_SWITCHES = "switches"
_AHEAD = "a step ahead"
_LATER_GROUPS = "later_groups"
"""Key in a manifest's `extra`: names of the parameters in the groups that training has added to each optimizer."""
# By name, since importing them takes long. What they hold looks like the whole, and is a part.
_OF_PARTS = ("FullyShardedDataParallel", "ZeroRedundancyOptimizer", "DeepSpeedEngine")
_OPTIMIZERS = "optimizers"
_OTHERS = "others"


Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Stateful(Protocol):
    """What has a state: a schedule, a scaler, an average of weights, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Returns it."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes it over."""


class _OfGenerator:
    """A generator of random numbers as an object with a state."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Returns what comes next of it."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return {"state": generator.get_state()}
        if isinstance(generator, np.random.Generator):
            return {"state": generator.bit_generator.state}
        if isinstance(generator, np.random.RandomState):
            return {"state": generator.get_state(legacy=False)}
        return {"state": generator.getstate()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes it over."""
        generator, state = self._generator, state_dict["state"]
        if isinstance(generator, torch.Generator):
            generator.set_state(state.cpu())
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.setstate(state)


class ProgramState:
    """A model, its optimizers and further objects of a program.

    Args:
        model: this rank's.
        optimizers: of its parameters.
        others: by name.
        group: a gloo group of all ranks; None for one process.

    Raises:
        ConfigError: no checkpoint of these could be complete.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        others: Mapping[str, Stateful | Generator],
        *,
        group: ProcessGroup | None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._others = {
            name: _OfGenerator(other) if isinstance(other, _GENERATORS) else other for name, other in others.items()
        }
        self._group = group
        self._division = Division(group=group)
        self.require_savable()
        self._buffers = buffer_shapes(model)
        """Shapes of the buffers as the program has made the model."""
        # Programs set modes around each evaluation by themselves.
        self._switches = Switches(model, has_modes=False)
        self._steps = OptimizerSteps(model, optimizers, list(others.values()))
        self._unsaved = self._first_state()
        self._num_groups = [len(optimizer.param_groups) for optimizer in optimizers]
        """Groups of each optimizer as the program has made it."""
        self._own_state: set[str] = set()
        """Full names of what optimizers keep under one name, each rank another part of it."""
        self._named: set[str] = set()
        """What was said already."""
        self._is_resumed = False
        self._begin_of_streams: dict[str, str] = {}
        self._note_streams()
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def content(self, header: CheckpointHeader, *, more: Mapping[str, Any]) -> Content:
        """Returns what this rank writes of this moment. Collective.

        Args:
            header: facts for the manifest.
            more: further states of this rank.

        Raises:
            RunError: on every rank: the ranks hold different things, and what cannot be saved is named.
            CheckpointError: a state could not be loaded again.
        """
        self.require_savable()
        state = training_state(self._model, self._optimizers, makes_state=False)
        take_extra_states(state["model"])
        states = {name: encode(other.state_dict()) for name, other in self._others.items()}
        # A module changes its buffers on each rank by itself, and so does an average of modules.
        buffers = {
            name: saved_buffers(other).keys() for name, other in self._others.items() if isinstance(other, nn.Module)
        }
        compared = {
            name: {key: value for key, value in state.items() if key not in buffers.get(name, ())}
            for name, state in states.items()
        }
        per_rank = self._differing(compared)
        averaged = [full_name((CALLBACKS, name, key)) for name, keys in buffers.items() for key in keys]
        tensors, values = split_state(states)
        for name in per_rank:
            own, tensors[name] = _take_plain(tensors.get(name, {}))
            values[name] = merge_state(values[name], own)
        tensors = {name: inner for name, inner in tensors.items() if inner}
        if tensors:
            state[CALLBACKS] = tensors
        own_buffers = self._own_buffers()
        shapes = buffer_shapes(self._model)
        state, own_state, agreed = self._agree(state, of_first_rank=[MODEL + name for name in shapes] + averaged)
        require_replicas(self._model, group=self._group)
        if rank_in(self._group):
            values = {name: values[name] for name in per_rank}
        made = sorted(name for name, shape in shapes.items() if self._buffers.get(name) != shape)
        kinds = [type(optimizer).__name__ for optimizer in self._optimizers]
        extra = {**header.extra, _OPTIMIZERS: kinds, PER_RANK: per_rank}
        extra |= {MADE_BUFFERS: made} if made else {}
        extra |= {OWN_BUFFERS: sorted(own_buffers)} if own_buffers else {}
        extra |= {OWN_STATE: sorted(self._own_state)} if self._own_state else {}
        extra |= {_LATER_GROUPS: later} if any(later := self._later_groups()) else {}
        return Content(
            tensors=own_part(state, agreed),
            rank_state={
                **more,
                "extra": module_states(self._model)["extra"],
                _OTHERS: on_host(values),
                OWN_BUFFERS: on_host(own_buffers),
                OWN_STATE: on_host(own_state),
                _SWITCHES: self._switches.changed(),
            },
            header=replace(header, weights=agreed.weights, extra=extra),
            expected=agreed.tensors,
            # The program may change anything as soon as the call returns.
            changes_in_forward=True,
        )

    def own_tensors(self) -> list[Tensor]:
        """Returns the tensors of model and optimizers that this rank is probably going to write; not collective."""
        rank = rank_in(self._group)
        return own_tensors(self._model, self._optimizers, rank=rank, num_ranks=size_of(self._group))

    def restore(self, choice: Choice) -> list[str]:
        """Restores all of it, and returns notes for the user. Collective.

        Raises:
            RunError: model, optimizer or another object do not fit the checkpoint.
            CheckpointError: it cannot be read.
        """
        require_loadable_states(self._model)
        manifest = choice.manifest
        kinds = [type(optimizer).__name__ for optimizer in self._optimizers]
        if manifest.extra[_OPTIMIZERS] != kinds:
            raise RunError(
                f"{choice.path.name} has the state of {shorten(manifest.extra[_OPTIMIZERS])}, and the program has "
                f"{shorten(kinds)} now",
                hint="take the optimizer back, or start another run with run.name=NAME",
            )
        is_same_size = manifest.world_size == size_of(self._group)
        of_first = load_rank_state(choice.path, 0) or {}
        own = load_rank_state(choice.path, rank_in(self._group))
        per_rank = manifest.extra.get(PER_RANK, [])
        lost = sorted(self._others.keys() & set(per_rank))
        if lost and not is_same_size:
            raise RunError(
                f"each of the {manifest.world_size} ranks has saved its own state of {shorten(lost)}, and there are "
                f"{size_of(self._group)} ranks now",
                hint=f"resume on {manifest.world_size} ranks; or leave it out of `training(...)`, and it begins anew",
            )
        own_state = manifest.extra.get(OWN_STATE, [])
        own_state_of_rank = (own or {}).get(OWN_STATE, {})
        if own_state and not is_same_size:
            raise RunError(
                f"each of the {manifest.world_size} ranks has saved its own part of {shorten(own_state)}, and there "
                f"are {size_of(self._group)} ranks now",
                hint=f"resume on {manifest.world_size} ranks; an optimizer that cuts its state as DTensors (FSDP2) can "
                "be resumed on any number",
            )
        notes = self._add_groups(manifest.extra.get(_LATER_GROUPS, []))
        for name, parameter, optimizer in self._optimized():
            if name in own_state_of_rank:
                # What an optimizer makes before its first step is not in the shared part.
                optimizer.state.pop(parameter, None)
        described = restore_training(
            choice,
            self._model,
            self._optimizers,
            group=self._group,
            extra_states=(own if is_same_size and own else of_first).get("extra", {}),
            settings=None,
            makes_state=False,
        )
        self._switches.set(of_first.get(_SWITCHES, {}))
        self._restore_own_state(manifest, own_state_of_rank)
        notes += self._restore_own_buffers(manifest, (own or {}).get(OWN_BUFFERS, {}))
        values = {**of_first.get(_OTHERS, {}), **((own or {}).get(_OTHERS, {}) if lost else {})}
        notes += self._restore_others(choice, values, described=described)
        self._is_resumed = True
        self._unsaved = self._first_state()
        self._note_streams()
        return notes

    def pending_gradient(self) -> str:
        """Returns the name of a parameter whose gradient is being added up for the next step, "" for none."""
        return self._steps.pending()

    def look_before_save(self, num_steps: int | None = None) -> list[str]:
        """Returns notes for the user about what a resume would not have of this rank; each once.

        Args:
            num_steps: done by this attempt, as the save is to say; None before the first save.
        """
        notes = self._steps.notes()
        if num_steps is not None and _AHEAD not in self._named and self._steps.is_one_ahead(num_steps):
            self._named.add(_AHEAD)
            notes.append(
                f"a save says that {num_steps} steps were taken since the start, and the optimizer has taken "
                f"{num_steps + 1}: a resume would take one of them again; `save` wants how many steps are done, so "
                "count them from 1: enumerate(loader, start=done + 1)"
            )
        own_state = sorted(self._own_state - self._named)
        self._named |= self._own_state
        if own_state:
            notes.append(
                f"the optimizer keeps another part of {shorten(own_state)} on each rank: each rank saves "
                "its own, and a resume needs as many ranks"
            )
        plain = plain_names(self._model)
        changed = [plain(name) for name in (*self._unsaved.changed_buffers(), *self._unsaved.changed_attributes())]
        names = [name for name in changed if name not in self._named]
        self._named |= set(names)
        if names:
            notes.append(
                f"training changes {shorten(names)} of the model, which no checkpoint has: a resume begins with the "
                "first value; let it follow from the step, or save it by register_buffer or get_extra_state"
            )
        return notes + self._unsaved.notes_on_others()

    def look(self, *, has_order: bool, has_pass: bool) -> list[str]:
        """Checks on this rank, after the first step, what could be wrong with a save; returns notes for the user.

        Args:
            has_order: the samples follow from the step.
            has_pass: a loader of torch gives them, whose first batch is compared.

        Raises:
            ConfigError: a save would lack something that is trained, or where the samples are.
            CheckpointError: a resume could not read what it has, so that no save would succeed.
        """
        self.require_savable()
        self._require_loadable()
        for name, other in self._others.items():
            if name in self._begin_of_streams:
                has_moved = digest(encode(other.state_dict())) != self._begin_of_streams[name]
                require_moved(name, other, has_moved=has_moved)
        notes = self.look_before_save()
        others = [other for other in self._others.values() if not isinstance(other, _OfGenerator)]
        scheduled = [type(optimizer).__name__ for optimizer in self._optimizers if has_schedule(optimizer)]
        if scheduled and not any(holds_schedule(other) for other in others):
            notes.append(
                f"the learning-rate schedule of {scheduled[0]} is in no checkpoint: after a resume it begins anew "
                "unless the program sets it to its step; hand it over: training(model, optimizer, schedule=schedule)"
            )
        places = [name for name, other in self._others.items() if may_know_place(other)]
        if self._is_resumed and not has_order and not has_pass and places:
            notes.append(
                f"since the resume, the program reads its samples by its own code and the state of {shorten(places)}: "
                "nothing compares them with those before; a state that is not exact gives some again or leaves some out"
            )
        if self._is_resumed and not has_order and not any(may_know_place(other) for other in others):
            notes.append(
                "the checkpoint does not say which samples of the present epoch were used: a loader that begins anew "
                "gives them again; take run.batches, hand over a stateful loader, or leave out what is done"
            )
        return notes

    def _first_state(self) -> UnsavedState:
        """Returns what no checkpoint will have, as it is before the first step."""
        others = {name: other for name, other in self._others.items() if not isinstance(other, _OfGenerator)}
        return UnsavedState(self._model, others)

    def _note_streams(self) -> None:
        """Keeps what the states of streams are before the first step."""
        self._begin_of_streams = {
            name: digest(encode(other.state_dict()))
            for name, other in self._others.items()
            if isinstance(other, IterableDataset)
        }

    def _require_loadable(self) -> None:
        """Checks that a resume could read what a save would have now beside tensors.

        Raises:
            CheckpointError: it could not.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                settings = {key: plain_number(value) for key, value in group.items() if key != "params"}
                _require_loadable(settings, f"a group of {type(optimizer).__name__}")
        for name, other in self._others.items():
            _require_loadable(split_state(encode(other.state_dict()))[1], f"the state of {name}")

    def require_savable(self) -> None:
        """Checks on this rank, e.g. after the first step, that a save will have all that is trained.

        Raises:
            ConfigError: it will not.
            CheckpointError: an optimizer keeps something that no checkpoint has.
        """
        wrapped = sorted(
            {
                kind.__name__
                for part in (*self._model.modules(), *self._optimizers)
                for kind in type(part).__mro__
                if kind.__name__ in _OF_PARTS
            }
        )
        if wrapped:
            raise ConfigError(
                f"{wrapped[0]} keeps parts of other ranks' state under the names of the whole",
                hint="shard by fully_shard (FSDP2), or write the files yourself in `with run.save(step)`",
            )
        stateless = [
            name
            for name, other in self._others.items()
            if not callable(getattr(other, "state_dict", None)) or not callable(getattr(other, "load_state_dict", None))
        ]
        if stateless:
            raise ConfigError(
                f"{shorten(stateless)} has no state_dict or no load_state_dict, so nothing of it could be saved",
                hint="hand over the object that has them, or give its class the two methods",
            )
        for name, other in self._others.items():
            require_whole_state(name, other)
        for optimizer in self._optimizers:
            require_known_state(optimizer)
        plain = plain_names(self._model)
        of_model = {id(parameter) for _, parameter in self._model.named_parameters()}
        strangers = [
            tuple(parameter.shape)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in of_model
        ]
        if strangers:
            raise ConfigError(
                f"the optimizer has {len(strangers)} parameters that are not the model's, of shapes "
                f"{shorten(map(str, strangers))}: they would not be saved",
                hint='hand over all modules: run.training({"model": model, "loss": loss}, optimizer)',
            )
        holders = Counter(
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        twice = [plain(name) for name, parameter in self._model.named_parameters() if holders[id(parameter)] > 1]
        if twice:
            raise ConfigError(
                f"several optimizers have {shorten(twice)}, and a checkpoint has one state of each parameter",
                hint="hand over the later one by a name: run.training(model, first, second=second)",
            )
        names = [plain(name) for name, _ in self._model.named_parameters()]
        if len(set(names)) < len(names):
            raise ConfigError("two parameters of the model have the same name", hint="rename one of the modules")

    def _later_groups(self) -> list[list[list[str]]]:
        """Returns the names of the parameters in the groups that training has added to each optimizer."""
        return [
            names_of_groups(self._model, optimizer)[number:]
            for optimizer, number in zip(self._optimizers, self._num_groups, strict=True)
        ]

    def _add_groups(self, later: Sequence[Sequence[Sequence[str]]]) -> list[str]:
        """Adds the groups that training had added, where the program has not done so; returns notes for the user."""
        notes = []
        plain = plain_names(self._model)
        parameters = {plain(name): parameter for name, parameter in self._model.named_parameters()}
        for optimizer, groups in zip(self._optimizers, later, strict=False):
            present = {name for names in names_of_groups(self._model, optimizer) for name in names}
            added: list[Sequence[Tensor]] = []
            for names in groups:
                # What the model has no more is named when the checkpoint is compared with it.
                if present.isdisjoint(names) and parameters.keys() >= set(names):
                    added.append([parameters[name] for name in names])
                    optimizer.add_param_group({"params": list(added[-1])})
                    notes.append(f"{type(optimizer).__name__} has its group of {shorten(names)} again")
            if added:
                _add_once(optimizer, added)
        return notes

    def _agree(
        self, state: dict[str, Any], *, of_first_rank: list[str]
    ) -> tuple[dict[str, Any], dict[str, Any], Agreement]:
        """Returns what the ranks share out, what each keeps for itself of the optimizers, and who writes what.

        Optimizers that shard by hand keep a part on each rank under the name of the whole, of one shape. Collective.
        """
        while True:
            shared = filtered(state, lambda name: name not in self._own_state)
            agreed = self._division.agree(shared, values={}, of_first_rank=of_first_rank)
            differing = parts_of_ranks(shared["optimizer"]["state"], group=self._group)
            if not differing:
                break
            self._own_state |= set(differing)
        own = filtered(state["optimizer"]["state"], lambda name: name in self._own_state, ("optimizer", "state"))
        return shared, {name: parts for name, parts in own.items() if parts}, agreed

    def _restore_own_state(self, manifest: Manifest, own: Mapping[str, Any]) -> None:
        """Gives this rank what its optimizers have saved for this rank alone."""
        self._own_state = set(manifest.extra.get(OWN_STATE, []))
        for name, parameter, optimizer in self._optimized():
            if name in own:
                _merge(optimizer.state[parameter], own[name], device=parameter.device)

    def _optimized(self) -> Iterator[tuple[str, Tensor, Optimizer]]:
        """Yields each parameter that is optimized, with its name and its optimizer."""
        for optimizer in self._optimizers:
            for group, names in zip(optimizer.param_groups, names_of_groups(self._model, optimizer), strict=True):
                for name, parameter in zip(names, group["params"], strict=True):
                    yield name, parameter, optimizer

    def _own_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that differ from rank to rank. Collective.

        Those that DDP broadcasts at each step are left out: rank 0's count.
        """
        if self._group is None:
            return {}
        plain = plain_names(self._model)
        broadcast = [
            f"{prefix}.module.".lstrip(".")
            for prefix, module in self._model.named_modules()
            if isinstance(module, DistributedDataParallel) and module.broadcast_buffers
        ]
        buffers = {
            plain(name): buffer
            for name, buffer in saved_buffers(self._model).items()
            if not name.startswith(tuple(broadcast)) and not hasattr(buffer, "placements")
        }
        differing = self._differing({name: {"": buffer} for name, buffer in buffers.items()})
        return {name: buffers[name] for name in differing}

    def _restore_own_buffers(self, manifest: Manifest, own: Mapping[str, Tensor]) -> list[str]:
        """Gives this rank the buffers that it has saved for itself; returns notes for the user."""
        names = manifest.extra.get(OWN_BUFFERS, [])
        if names and manifest.world_size != size_of(self._group):
            return [
                f"each of the {manifest.world_size} ranks had its own {shorten(names)} at step {manifest.step}; all of "
                f"the {size_of(self._group)} ranks now go on with those of rank 0"
            ]
        plain = plain_names(self._model)
        with torch.no_grad():
            for name, buffer in saved_buffers(self._model).items():
                if plain(name) in own:
                    buffer.copy_(own[plain(name)])
        return []

    def _differing(self, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Returns the names of the objects whose states differ from rank to rank. Collective."""
        digests = on_every_rank(self._group, lambda: {name: digest(state) for name, state in states.items()})
        names = {name for of_rank in digests for name in of_rank}
        missing = sorted(name for name in names if any(name not in of_rank for of_rank in digests))
        if missing:
            raise RunError(
                f"some ranks have handed over {shorten(missing)}, and others have not",
                hint="call `training` alike on all ranks",
            )
        return sorted(name for name in names if len({of_rank[name] for of_rank in digests}) > 1)

    def _restore_others(self, choice: Choice, values: Mapping[str, Any], *, described: Any) -> list[str]:
        """Gives the further objects their states; returns notes for the user."""
        from slurm_train.checkpoint.tensors import tensor_shapes

        saved = tensor_shapes(choice.path, described=described)
        paths = {
            full: path
            for full, path in (described.planner_data or {}).items()
            if path[0] == CALLBACKS and path[1] in self._others
        }
        # A loader begins to read when it is asked, so only those that have saved tensors are.
        states = {name: encode(self._others[name].state_dict()) for name in {path[1] for path in paths.values()}}
        present = {full_name(path): tensor for path, tensor in leaves_of({CALLBACKS: split_state(states)[0]})}
        wanted: dict[str, Any] = {}
        for full, path in paths.items():
            here = present.get(full)
            if here is not None and hasattr(here, "placements"):
                empty = torch.empty_like(here)
            else:
                device = self.device if here is None else here.device
                empty = torch.empty(saved[full].shape, dtype=saved[full].dtype, device=device)
            _put(wanted, path, empty)
        load_tensors(choice.path, wanted, group=self._group, near=choice.near, described=described)
        of_objects = wanted.get(CALLBACKS, {})
        step = choice.manifest.step
        notes = [f"{name}: left out from step {step} on" for name in values if name not in self._others]
        for name, other in self._others.items():
            if name in values:
                # It is none where an object has had no state yet, as a stream before its first sample.
                if isinstance(values[name], dict):
                    state = decode(merge_state(values[name], of_objects.get(name, {})))
                    go_to_epoch(other, state)
                    if not state and other.state_dict():
                        notes.append(f"{name}: begins at step {step}, where its state was empty")
                    other.load_state_dict(state)
                    if is_at_end_of_pass(other, state):
                        notes.append(
                            f"{name} had given the last batch of its pass at step {step}, so its first loop has none: "
                            "an epoch that follows from the step would be left out; save the number of the epoch, too"
                        )
            else:
                notes.append(f"{name}: begins at step {step}, where it has no state")
        return notes


def _add_once(optimizer: Optimizer, present: list[Sequence[Tensor]]) -> None:
    """Has an optimizer ignore that the program adds a group which a resume has added, in the epoch that goes on."""
    add = optimizer.add_param_group
    remaining = [{id(parameter) for parameter in group} for group in present]

    def add_new(group: dict[str, Any]) -> None:
        parameters = group["params"]
        # It may be a generator, which can be read once.
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        identities = {id(part[1] if isinstance(part, tuple) else part) for part in listed}
        if identities in remaining:
            remaining.remove(identities)
            return
        add({**group, "params": listed})

    optimizer.add_param_group = add_new  # type: ignore[method-assign, assignment]  # of this object alone


def _require_loadable(values: dict[str, Any], subject: str) -> None:
    data = io.BytesIO()
    torch.save(values, data)
    require_loadable(data, subject)


def _put(state: dict[str, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def _merge(state: dict[Any, Any], parts: Mapping[Any, Any], *, device: torch.device) -> None:
    """Puts nested tensors into what an optimizer keeps; its count of steps stays on the host, as torch has it."""
    for key, value in parts.items():
        if isinstance(value, dict):
            _merge(state.setdefault(key, {}), value, device=device)
        else:
            state[key] = value if key == "step" else value.to(device)


def _take_plain(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors that a rank holds whole, and those that are cut, both nested as before."""
    whole: dict[str, Any] = {}
    cut: dict[str, Any] = {}
    for path, tensor in leaves_of(tensors):
        _put(cut if hasattr(tensor, "placements") else whole, path, tensor)
    return whole, cut
