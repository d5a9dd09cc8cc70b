"""What a program with its own loop has to save, and how it is restored.

Weights and optimizer are saved once over all ranks, or in their shards, by names: any number of ranks can load them.
What else the program hands over is saved as the objects themselves say by `state_dict`: once where all ranks say the
same, else for each rank.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from slurm_train.checkpoint.agreement import rank_in, size_of
from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.division import OTHERS, Agreement, Division, own_part, own_tensors
from slurm_train.checkpoint.load import load_rank_state
from slurm_train.checkpoint.manifest import MODEL, CheckpointHeader, Manifest
from slurm_train.checkpoint.optimizer_steps import OptimizerSteps
from slurm_train.checkpoint.parts import PER_RANK, Generator, GeneratorState, Stateful, StateParts
from slurm_train.checkpoint.readers import (
    has_schedule,
    holds_schedule,
    may_know_place,
    require_moved,
    require_whole_state,
)
from slurm_train.checkpoint.replicas import differing_states, digest, parts_of_ranks, require_replicas
from slurm_train.checkpoint.saves import Content
from slurm_train.checkpoint.state import (
    buffer_shapes,
    module_states,
    names_of_groups,
    plain_names,
    require_known_state,
    require_loadable,
    require_loadable_states,
    saved_buffers,
    take_extra_states,
    training_state,
)
from slurm_train.checkpoint.switches import Switches
from slurm_train.checkpoint.training import MADE_BUFFERS, restore_training
from slurm_train.checkpoint.tree import (
    encode,
    filtered,
    on_host,
    plain_number,
    split_state,
)
from slurm_train.checkpoint.unsaved import UnsavedState
from slurm_train.errors import ConfigError, RunError
from slurm_train.formatting import shorten

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
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._parts = StateParts(key="others", group=group, device=self.device)
        for name, other in others.items():
            self._parts.add(name, other)
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
        parts = self._parts.content()
        if parts.tensors:
            state[OTHERS] = parts.tensors
        own_buffers = self._own_buffers()
        shapes = buffer_shapes(self._model)
        state, own_state, agreed = self._agree(
            state, of_first_rank=[MODEL + name for name in shapes] + parts.of_first_rank
        )
        require_replicas(self._model, group=self._group)
        made = sorted(name for name, shape in shapes.items() if self._buffers.get(name) != shape)
        kinds = [type(optimizer).__name__ for optimizer in self._optimizers]
        extra = {**header.extra, _OPTIMIZERS: kinds, PER_RANK: parts.per_rank}
        extra |= {MADE_BUFFERS: made} if made else {}
        extra |= {OWN_BUFFERS: sorted(own_buffers)} if own_buffers else {}
        extra |= {OWN_STATE: sorted(self._own_state)} if self._own_state else {}
        extra |= {_LATER_GROUPS: later} if any(later := self._later_groups()) else {}
        return Content(
            tensors=own_part(state, agreed),
            rank_state={
                **more,
                "extra": module_states(self._model)["extra"],
                self._parts.key: on_host(self._parts.own_values(parts)),
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
        self._parts.require_ranks(manifest)
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
        notes += self._parts.restore(choice, described=described)
        self._is_resumed = True
        self._unsaved = self._first_state()
        self._note_streams()
        return notes

    def pending_gradient(self) -> str:
        """Returns the name of a parameter whose gradient is being added up for the next step, "" for none."""
        return self._steps.pending()

    def check_before_save(self, num_steps: int | None = None) -> list[str]:
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

    def check_after_first_step(self, *, has_order: bool, has_pass: bool) -> list[str]:
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
        for name, other in self._parts.objects.items():
            if name in self._begin_of_streams:
                has_moved = digest(encode(other.state_dict())) != self._begin_of_streams[name]
                require_moved(name, other, has_moved=has_moved)
        notes = self.check_before_save()
        others = [other for other in self._parts.objects.values() if not isinstance(other, GeneratorState)]
        scheduled = [type(optimizer).__name__ for optimizer in self._optimizers if has_schedule(optimizer)]
        if scheduled and not any(holds_schedule(other) for other in others):
            notes.append(
                f"the learning-rate schedule of {scheduled[0]} is in no checkpoint: after a resume it begins anew "
                "unless the program sets it to its step; hand it over: training(model, optimizer, schedule=schedule)"
            )
        places = [name for name, other in self._parts.objects.items() if may_know_place(other)]
        if self._is_resumed and not has_order and not has_pass and places:
            notes.append(
                f"since the resume, the program reads its samples by its own code and the state of {shorten(places)}: "
                "nothing compares them with those before; a state that is not exact gives some again or leaves some out"
            )
        if self._is_resumed and not has_order and not any(may_know_place(other) for other in others):
            notes.append(
                "the checkpoint does not say which samples of the present epoch were used: a loader that begins anew "
                "gives them again; take run.replay(loader) or run.batches, or hand over a stateful loader"
            )
        return notes

    def _first_state(self) -> UnsavedState:
        """Returns what no checkpoint will have, as it is before the first step."""
        others = {name: other for name, other in self._parts.objects.items() if not isinstance(other, GeneratorState)}
        return UnsavedState(self._model, others)

    def _note_streams(self) -> None:
        """Keeps what the states of streams are before the first step."""
        self._begin_of_streams = {
            name: digest(encode(other.state_dict()))
            for name, other in self._parts.objects.items()
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
        for name, other in self._parts.objects.items():
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
            for name, other in self._parts.objects.items()
            if not callable(getattr(other, "state_dict", None)) or not callable(getattr(other, "load_state_dict", None))
        ]
        if stateless:
            raise ConfigError(
                f"{shorten(stateless)} has no state_dict or no load_state_dict, so nothing of it could be saved",
                hint="hand over the object that has them, or give its class the two methods",
            )
        for name, other in self._parts.objects.items():
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
        differing = differing_states({name: {"": buffer} for name, buffer in buffers.items()}, group=self._group)
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


def _merge(state: dict[Any, Any], parts: Mapping[Any, Any], *, device: torch.device) -> None:
    """Puts nested tensors into what an optimizer keeps; its count of steps stays on the host, as torch has it."""
    for key, value in parts.items():
        if isinstance(value, dict):
            _merge(state.setdefault(key, {}), value, device=device)
        else:
            state[key] = value if key == "step" else value.to(device)
