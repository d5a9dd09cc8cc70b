"""A training as checkpoints have it: model, optimizers and named parts. What is saved is defined here alone.

The built-in trainer and a program with its own loop have one each. Weights and optimizers are saved once over all
ranks, or in their shards, by names: any number of ranks can load them. What else there is says by `state_dict` what of
it is saved, and `Of` says whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurm_train.checkpoint.agreement import on_every_rank, rank_in, size_of
from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.division import OTHERS, Agreement, Division, own_part, own_tensors
from slurm_train.checkpoint.earlier import EXTRA, MODES, VALUES, read_states
from slurm_train.checkpoint.manifest import MODEL, CheckpointHeader, Manifest
from slurm_train.checkpoint.parts import PER_RANK, Generator, GeneratorState, Of, Stateful, StateParts
from slurm_train.checkpoint.replicas import differing_states, parts_of_ranks, require_replicas
from slurm_train.checkpoint.rules.listed import AFTER_FIRST_STEP, BEFORE_SAVE, EACH_SAVE, HANDED_OVER, WHO_HAS_WHAT, ask
from slurm_train.checkpoint.rules.watched import Watched
from slurm_train.checkpoint.saves import Content
from slurm_train.checkpoint.state import (
    Structure,
    names_of_groups,
    number_groups,
    plain_names,
    saved_buffers,
    set_modes,
    structure_of,
    take_extra_states,
    training_state,
)
from slurm_train.checkpoint.switches import Switches
from slurm_train.checkpoint.training import MADE_BUFFERS, restore_training
from slurm_train.checkpoint.tree import filtered, on_host
from slurm_train.config.parallel import AXES, ParallelLayout
from slurm_train.errors import RunError
from slurm_train.formatting import shorten

OWN_BUFFERS = "own_buffers"
"""Key in a manifest's `extra`, and among a rank's states: buffers of the model that each rank has saved for itself."""
OWN_STATE = "own_state"
"""Key in a manifest's `extra`, and among a rank's states: what optimizers keep that each rank has saved for itself."""
_SWITCHES = "switches"
_LATER_GROUPS = "later_groups"
"""Key in a manifest's `extra`: names of the parameters in the groups that training has added to each optimizer."""
_OPTIMIZERS = "optimizers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a training is held, and what its owner sees to; the defaults are those of a program with its own loop."""

    layout: ParallelLayout | None = None
    """Which ranks hold the same layers and read the same samples; None: replicas with samples of their own."""
    group_names: list[list[str]] | None = None
    """Names of the parameters in each group of the optimizer, where this rank has a stage of the model."""
    settings: Collection[str] | None = None
    """Settings of the optimizer's groups that do not come from the checkpoint; None: all do."""
    makes_state: bool = False
    """See `restore_training`."""
    may_lack_state: bool = False
    """See `restore_training`."""
    keeps_replicas: bool = False
    """Whether the owner compares the replicas, and gives all ranks rank 0's buffers before each step."""
    has_modes: bool = False
    """Whether the modes of modules are saved; not where a program sets them around each evaluation by itself."""
    host: str = ""
    """Name of this rank's node."""
    of: Of = None
    """Whose the state of a named object is."""
    noun: str = ""
    """What notes call a named object before its name, e.g. "callback "."""


class State:
    """A model, its optimizers, further objects by name, and the parts of the loop around them.

    Args:
        model: this rank's.
        optimizers: of its parameters.
        objects: what was handed over beside them, by name.
        group: a gloo group of all ranks; None for one process.
        terms: see there.

    Raises:
        ConfigError: no checkpoint of these could be complete.
        CheckpointError: no checkpoint can hold what the model or an optimizer keeps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        objects: Mapping[str, Stateful | Generator],
        *,
        group: ProcessGroup | None,
        terms: Terms,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._terms = terms
        self._group = group
        self._layout = terms.layout or ParallelLayout(dp_replicate=size_of(group))
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._parts = StateParts(noun=terms.noun, group=group, device=self.device)
        for name, part in objects.items():
            self._parts.add(name, part, of=terms.of)
        self._of_loop: dict[str, tuple[Stateful, Of]] = {}
        self._division = Division(group=group, stage=self._layout.coordinates(self._rank).pp)
        generators = (name for name, part in self._parts.objects.items() if isinstance(part, GeneratorState))
        self.watched = Watched(
            model=model, optimizers=optimizers, objects=self._parts.objects, generators=frozenset(generators)
        )
        """What the rules know of it."""
        self.watched.free_gathered()
        ask(HANDED_OVER, self.watched)
        self.watched.begin()
        self._buffers = structure_of(model).buffer_shapes
        """Shapes of the buffers as the program has made the model."""
        self._switches = Switches(model, has_modes=terms.has_modes)
        self._num_groups = [len(optimizer.param_groups) for optimizer in optimizers]
        """Groups of each optimizer as the program has made it."""
        self._owners: list[Any] = []
        """What `_check_owners` was asked about last."""
        self._is_used = False
        """Whether it was saved or restored, so that training may have changed switches."""

    def add(self, name: str, part: Stateful, *, of: Of) -> None:
        """Adds a part of the loop, whose state is small and in the file of each rank whose it is.

        Args:
            name: its key in that file.
            part: what has the state.
            of: "run", "reader" or "rank".
        """
        self._of_loop[name] = (part, of)

    def content(self, header: Callable[[], CheckpointHeader]) -> Content:
        """Returns what this rank writes of this moment. Collective.

        Args:
            header: returns facts for the manifest; asked, as the parts of the loop are, when the writing begins.

        Raises:
            RunError: on every rank: the ranks hold different things, and what cannot be saved is named.
            CheckpointError: a state could not be loaded again.
        """
        self._is_used = True
        self.watched.free_gathered()
        terms = self._terms
        structure = structure_of(self._model)
        if not terms.keeps_replicas:
            # Between two steps a program may have changed anything.
            self._check_owners(structure)
            ask(EACH_SAVE, self.watched)
        parts = self._parts.content()
        state = training_state(self._model, self._optimizers, makes_state=terms.makes_state, structure=structure)
        extra_of_modules = on_host(take_extra_states(state["model"]))
        if terms.group_names is not None:
            groups = state["optimizer"]["param_groups"]
            state["optimizer"]["param_groups"] = number_groups(groups, terms.group_names)
        if parts.tensors:
            state[OTHERS] = parts.tensors
        shapes = structure.buffer_shapes
        own_buffers = {} if terms.keeps_replicas else self._own_buffers()
        state, own_state, agreed = self._agree(
            state,
            values=parts.values_of_run,
            of_first_rank=[MODEL + name for name in shapes] + parts.of_first_rank,
        )
        if not terms.keeps_replicas:
            require_replicas(
                self._model,
                group=self._group,
                host=terms.host,
                moment="in this save",
                hint="a checkpoint would have the values of one rank: train replicas by DDP, and cut parameters as "
                "DTensors; or write each rank's files in `with run.save(step)`",
            )
        made = sorted(name for name, shape in shapes.items() if self._buffers.get(name) != shape)
        extra: dict[str, Any] = {}
        extra |= {PER_RANK: parts.per_rank} if parts.per_rank else {}
        # A stage may have parameters of one kind only.
        extra |= {_OPTIMIZERS: self._kinds} if terms.group_names is None else {}
        extra |= {MADE_BUFFERS: made} if made else {}
        extra |= {OWN_BUFFERS: sorted(own_buffers)} if own_buffers else {}
        extra |= {OWN_STATE: sorted(self.watched.own_state)} if self.watched.own_state else {}
        extra |= {_LATER_GROUPS: later} if any(later := self._later_groups()) else {}
        own = {
            EXTRA: extra_of_modules,
            VALUES: on_host(self._parts.own_values(parts)),
            OWN_BUFFERS: on_host(own_buffers),
            OWN_STATE: on_host(own_state),
            _SWITCHES: self._switches.changed(structure),
        }

        def facts() -> tuple[dict[str, Any], CheckpointHeader]:
            rank_state = {**self._states_of_loop(), **own}
            given = header()
            return rank_state, replace(given, weights=agreed.weights, extra={**given.extra, **extra})

        return Content(
            tensors=own_part(state, agreed),
            facts=facts,
            expected=agreed.tensors,
            # Saved buffers are e.g. running statistics; rotary tables are neither saved nor changed. A program may
            # change anything as soon as the call returns.
            changes_in_forward=bool(shapes) or not terms.keeps_replicas,
        )

    def own_tensors(self) -> list[Tensor]:
        """Returns the tensors of model and optimizers that this rank is probably going to write; not collective."""
        peers = self._layout.members([axis for axis in AXES if axis != "pp"], self._rank)
        return own_tensors(self._model, self._optimizers, rank=peers.index(self._rank), num_ranks=len(peers))

    def restore(self, choice: Choice) -> list[str]:
        """Restores all of it, and returns notes for the user. Collective.

        Raises:
            RunError: model, optimizers or another object do not fit the checkpoint.
            CheckpointError: it cannot be read.
        """
        self.watched.free_gathered()
        terms = self._terms
        manifest = choice.manifest
        self._require_same_optimizers(choice)
        self._parts.require_ranks(manifest)
        is_same_layout = ParallelLayout(**manifest.mesh) == self._layout
        of_first = read_states(choice, 0)
        own = read_states(choice, self._rank)
        own_state = own.get(OWN_STATE, {})
        self._require_own_state(manifest)
        notes = self._add_groups(manifest.extra.get(_LATER_GROUPS, []))
        for name, parameter, optimizer in self._optimized():
            if name in own_state:
                # What an optimizer makes before its first step is not in the shared part.
                optimizer.state.pop(parameter, None)
        of_modules = own if is_same_layout and own else of_first
        described = restore_training(
            choice,
            self._model,
            self._optimizers,
            group=self._group,
            extra_states=of_modules.get(EXTRA),
            settings=terms.settings,
            group_names=terms.group_names,
            makes_state=terms.makes_state,
            may_lack_state=terms.may_lack_state,
        )
        if MODES in of_modules:
            set_modes(self._model, of_modules[MODES])
        changed = {**of_first.get(_SWITCHES, {}), **of_modules.get(_SWITCHES, {})}
        self._switches.set({**self._switches.at_start, **changed} if self._is_used else changed)
        self._restore_own_state(manifest, own_state)
        notes += self._restore_own_buffers(manifest, own.get(OWN_BUFFERS, {}))
        self._restore_loop(choice)
        notes += self._parts.restore(choice, described=described)
        self._is_used = True
        self.watched.is_resumed = True
        self.watched.begin()
        return notes

    def check_after_first_step(self) -> list[str]:
        """Checks after the first step what could be wrong with a save; returns notes for the user.

        Collective where the owner keeps replicas; the ranks of a program come here one by one.

        Raises:
            ConfigError: a save would lack something that is trained, or where the samples are.
            CheckpointError: a resume could not read what it has, so that no save would succeed.
            RunError: on every rank: the step has made other buffers, or of other shapes, on some ranks; or the
                optimizer keeps another part of its state on each rank under the name of the whole.
        """
        self.watched.free_gathered()
        if not self._terms.keeps_replicas:
            return ask(AFTER_FIRST_STEP, self.watched)
        notes = on_every_rank(self._group, lambda: ask(AFTER_FIRST_STEP, self.watched))
        # An evaluation puts the model back, which would look like a change.
        self.watched.has_model_of_first_step = False
        self._compare_ranks()
        return notes[0]

    def _compare_ranks(self) -> None:
        """Finds after the first step what a save would find on other ranks. Collective."""
        # At the next step each rank takes rank 0's buffers, of which it would mistake parts for other buffers.
        self._division.check({"model": saved_buffers(self._model)})
        if self._terms.group_names is not None:
            return
        optimizer = training_state(self._model, self._optimizers, makes_state=False)["optimizer"]
        self._division.check({"optimizer": optimizer})
        parts = parts_of_ranks(optimizer["state"], group=self._group)
        if parts:
            raise RunError(
                f"the optimizer keeps another part of {shorten(parts)} on each rank under one name, and a checkpoint "
                "would have that of one rank",
                hint="cut its state as DTensors, as parallel.dp_shard does; `run.training` of a program of your own "
                "saves it for each rank",
            )

    def pending_gradient(self) -> str:
        """Returns the name of a parameter whose gradient is being added up for the next step, "" for none."""
        # An evaluation may have put others in the place of those that the optimizers have.
        self.watched.free_gathered()
        return self.watched.steps.pending()

    def check_before_save(self, num_steps: int | None) -> list[str]:
        """Returns notes for the user about what a resume would not have of this rank; each once.

        Args:
            num_steps: done by this attempt, as the save is to say; None where it need not be compared.
        """
        self.watched.num_steps = num_steps
        return ask(BEFORE_SAVE, self.watched)

    def _check_owners(self, structure: Structure) -> None:
        """Checks that each parameter is the model's and one optimizer's, where that may have changed."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        owners = [structure.found, *(id(parameter) for group in groups for parameter in group["params"])]
        if owners != self._owners:
            ask(WHO_HAS_WHAT, self.watched)
            self._owners = owners

    @property
    def _rank(self) -> int:
        return rank_in(self._group)

    @property
    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self._optimizers]

    def _states_of_loop(self) -> dict[str, Any]:
        """Returns the states of the loop's parts that this rank writes."""
        return {
            name: on_host(part.state_dict())
            for name, (part, of) in self._of_loop.items()
            if of != "run" or self._rank == 0
        }

    def _restore_loop(self, choice: Choice) -> None:
        """Gives the loop's parts their states; a part that has none saved begins anew."""
        index = self._layout.data_parallel_index(self._rank)
        reader = ParallelLayout(**choice.manifest.mesh).first_reader(index)
        saved_by = {"run": 0, "reader": reader, "rank": self._rank}
        states = {rank: read_states(choice, rank) for rank in set(saved_by.values()) if rank is not None}
        for name, (part, of) in self._of_loop.items():
            rank = saved_by[of or "rank"]
            state = {} if rank is None else states[rank]
            if name in state:
                part.load_state_dict(state[name])

    def _require_same_optimizers(self, choice: Choice) -> None:
        """Refuses other kinds of optimizers than those of a checkpoint; earlier ones of the trainer do not say it."""
        saved = choice.manifest.extra.get(_OPTIMIZERS, self._kinds)
        if saved != self._kinds and self._terms.group_names is None:
            raise RunError(
                f"{choice.path.name} has the state of {shorten(saved)}, and the training has {shorten(self._kinds)} "
                "now",
                hint="take the optimizer back, or start another run with run.name=NAME",
            )

    def _require_own_state(self, manifest: Manifest) -> None:
        """Refuses another number of ranks where each had its own part of an optimizer's state."""
        own_state = manifest.extra.get(OWN_STATE, [])
        num_ranks = size_of(self._group)
        if own_state and manifest.world_size != num_ranks:
            raise RunError(
                f"each of the {manifest.world_size} ranks has saved its own part of {shorten(own_state)}, and there "
                f"are {num_ranks} ranks now",
                hint=f"resume on {manifest.world_size} ranks; an optimizer that cuts its state as DTensors (FSDP2) can "
                "be resumed on any number",
            )

    def _later_groups(self) -> list[list[list[str]]]:
        """Returns the names of the parameters in the groups that training has added to each optimizer."""
        return [
            names_of_groups(self._model, optimizer)[number:] if len(optimizer.param_groups) > number else []
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
        self, state: dict[str, Any], *, values: Mapping[str, Any], of_first_rank: list[str]
    ) -> tuple[dict[str, Any], dict[str, Any], Agreement]:
        """Returns what the ranks share out, what each keeps for itself of the optimizers, and who writes what.

        Optimizers that shard by hand keep a part on each rank under the name of the whole, of one shape. Collective.
        """
        if self._terms.keeps_replicas:
            return state, {}, self._division.agree(state, values=values, of_first_rank=of_first_rank)
        names = self.watched.own_state

        def is_shared(name: str) -> bool:
            return name not in names

        while True:
            shared = filtered(state, is_shared) if names else state
            agreed = self._division.agree(shared, values=values, of_first_rank=of_first_rank)
            differing = parts_of_ranks(shared["optimizer"]["state"], group=self._group)
            if not differing:
                break
            names |= set(differing)
        own = filtered(state["optimizer"]["state"], names.__contains__, ("optimizer", "state")) if names else {}
        return shared, {name: parts for name, parts in own.items() if parts}, agreed

    def _restore_own_state(self, manifest: Manifest, own: Mapping[str, Any]) -> None:
        """Gives this rank what its optimizers have saved for this rank alone."""
        self.watched.own_state = set(manifest.extra.get(OWN_STATE, []))
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


def _merge(state: dict[Any, Any], parts: Mapping[Any, Any], *, device: torch.device) -> None:
    """Puts nested tensors into what an optimizer keeps; its count of steps stays on the host, as torch has it."""
    for key, value in parts.items():
        if isinstance(value, dict):
            _merge(state.setdefault(key, {}), value, device=device)
        else:
            state[key] = value if key == "step" else value.to(device)
