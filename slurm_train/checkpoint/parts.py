"""What a training saves beside model and optimizers: named objects with a state, as callbacks, schedules and readers.

A part's tensors are in the checkpoint by names, its other values in the file of each rank that has its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from slurm_train.checkpoint.agreement import on_every_rank, rank_in, size_of
from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.division import OTHERS
from slurm_train.checkpoint.earlier import VALUES, read_states
from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.manifest import Manifest
from slurm_train.checkpoint.readers import go_to_epoch, is_at_end_of_pass
from slurm_train.checkpoint.replicas import differing_states
from slurm_train.checkpoint.state import saved_buffers
from slurm_train.checkpoint.tree import decode, encode, full_name, leaves_of, merge_state, put, split_state
from slurm_train.errors import RunError
from slurm_train.formatting import shorten

PER_RANK = "per_rank"
"""Key in a manifest's `extra`: parts whose state each rank has saved for itself."""

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
Of: TypeAlias = Literal["run", "reader", "rank"] | None
"""Whose a part's state is.

"run": the same on all ranks, saved once; "reader": of the ranks that read the same samples, found again on any layout;
"rank": each rank's own; None: found out at each save by whether the ranks say the same.
"""


class Stateful(Protocol):
    """What has a state: a schedule, a scaler, an average of weights, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Returns it."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes it over."""


class GeneratorState:
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


class PartsContent(NamedTuple):
    """What this rank saves of the parts."""

    tensors: dict[str, Any]
    """Nested, by the parts' names."""
    values: dict[str, Any]
    """All else of what this rank writes for itself, nested in the same way."""
    values_of_run: dict[str, Any]
    """Those of the run's parts, of which rank 0 writes all."""
    per_rank: list[str]
    """The parts of which each rank writes its own."""
    of_first_rank: list[str]
    """Full names of tensors that the first rank writes although ranks may hold other numbers."""


class StateParts:
    """The parts of one training.

    Args:
        noun: what notes call a part before its name, e.g. "callback ".
        group: a gloo group of all ranks; None for one process.
        device: of tensors that a part has not made yet.
    """

    def __init__(self, *, group: ProcessGroup | None, noun: str = "", device: torch.device | None = None) -> None:
        self._noun = noun
        self._group = group
        self._device = device
        self.objects: dict[str, Stateful] = {}
        """The parts by name."""
        self._of: dict[str, Of] = {}

    def add(self, name: str, part: Stateful | Generator, *, of: Of = None) -> None:
        """Adds a part; on all ranks in the same order, since a part may communicate while it loads its state.

        Args:
            name: of its state.
            part: a generator of random numbers, or what has a state.
            of: "run", or None.
        """
        self.objects[name] = GeneratorState(part) if isinstance(part, _GENERATORS) else part
        self._of[name] = of

    def content(self) -> PartsContent:
        """Returns what this rank saves; collective where a part is not said to be the run's.

        Raises:
            RunError: on every rank: the ranks have other parts.
        """
        states = {name: self._state_of(name) for name in self.objects}
        # A module changes its buffers on each rank by itself, and so does an average of modules.
        buffers = {
            name: saved_buffers(part).keys() for name, part in self.objects.items() if isinstance(part, nn.Module)
        }
        compared = {
            name: {key: value for key, value in state.items() if key not in buffers.get(name, ())}
            for name, state in states.items()
            if self._of[name] is None
        }
        per_rank = differing_states(compared, group=self._group) if compared else []
        tensors, values = split_state(states)
        for name in per_rank:
            own, tensors[name] = _take_plain(tensors.get(name, {}))
            values[name] = merge_state(values[name], own)
        return PartsContent(
            {name: inner for name, inner in tensors.items() if inner},
            values,
            {name: own for name, own in values.items() if self._of[name] == "run"},
            per_rank,
            [full_name((OTHERS, name, key)) for name, keys in buffers.items() for key in keys],
        )

    def own_values(self, content: PartsContent) -> dict[str, Any]:
        """Returns the values that this rank writes: the first one all, others those that each rank has."""
        if rank_in(self._group) == 0:
            return content.values
        return {name: content.values[name] for name in content.per_rank}

    def require_ranks(self, manifest: Manifest) -> None:
        """Refuses another number of ranks where each had its own state of a part.

        Raises:
            RunError: naming such parts.
        """
        lost = self._per_rank_of(manifest)
        if lost and manifest.world_size != size_of(self._group):
            raise RunError(
                f"each of the {manifest.world_size} ranks has saved its own state of {shorten(lost)}, and there are "
                f"{size_of(self._group)} ranks now",
                hint=f"resume on {manifest.world_size} ranks; or leave it out of `training(...)`, and it begins anew",
            )

    def restore(self, choice: Choice, *, described: Any) -> list[str]:
        """Gives the parts their states, and returns notes for the user. Collective.

        Args:
            choice: the checkpoint.
            described: what `read_metadata` has returned for it.
        """
        manifest = choice.manifest
        values = read_states(choice, 0).get(VALUES, {})
        if self._per_rank_of(manifest):
            values = values | read_states(choice, rank_in(self._group)).get(VALUES, {})
        stored = {
            full: path
            for full, path in (described.planner_data or {}).items()
            if path[0] == OTHERS and path[1] in self.objects
        }
        with_tensors = {path[1] for path in stored.values()}
        # A loader begins to read when it is asked, so only those that have saved tensors are.
        states = {name: self._state_of(name) for name in self.objects if name in with_tensors}
        tensors = self._load_tensors(choice, stored, split_state(states)[0], described=described)
        step = manifest.step
        notes = [f"{self._noun}{name}: left out from step {step} on" for name in values if name not in self.objects]
        for name, part in self.objects.items():
            if name not in values:
                notes.append(f"{self._noun}{name}: begins at step {step}, where it has no state")
                continue
            # Another rank may have all of it, as another stage of a pipeline has.
            is_elsewhere = self._of[name] == "run" and name in with_tensors and not states[name]
            # There is no state where an object has had none yet, as a stream before its first sample.
            if is_elsewhere or not isinstance(values[name], dict):
                continue
            state = decode(merge_state(values[name], tensors.get(name, {})))
            go_to_epoch(part, state)
            if not state and part.state_dict():
                notes.append(f"{self._noun}{name}: begins at step {step}, where its state was empty")
            part.load_state_dict(state)
            if is_at_end_of_pass(part, state):
                notes.append(
                    f"{name} had given the last batch of its pass at step {step}, so its first loop has none: "
                    "an epoch that follows from the step would be left out; save the number of the epoch, too"
                )
        return notes + self._notes_on_missing(stored, tensors, step=step)

    def _state_of(self, name: str) -> Any:
        return encode(self.objects[name].state_dict(), keeps_order=self._of[name] is None)

    def _per_rank_of(self, manifest: Manifest) -> list[str]:
        return sorted(self.objects.keys() & set(manifest.extra.get(PER_RANK, [])))

    def _load_tensors(
        self, choice: Choice, stored: Mapping[str, Sequence[Any]], present: dict[str, Any], *, described: Any
    ) -> dict[str, Any]:
        """Returns the saved tensors, nested by part; of a part of the run those that this rank has. Collective.

        Args:
            choice: the checkpoint.
            stored: path of each tensor and value in it, by full name.
            present: the parts' tensors as they are now, nested.
            described: see `restore`.
        """
        from slurm_train.checkpoint.tensors import tensor_shapes

        if not stored:
            return {}
        saved = tensor_shapes(choice.path, described=described)
        here = {full_name(path): tensor for path, tensor in leaves_of({OTHERS: present})}
        wanted: dict[str, Any] = {}
        for full, path in stored.items():
            tensor = here.get(full)
            if self._of[path[1]] == "run":
                target = tensor
            elif tensor is not None and hasattr(tensor, "placements"):
                target = torch.empty_like(tensor)
            else:
                device = self._device if tensor is None else tensor.device
                target = torch.empty(saved[full].shape, dtype=saved[full].dtype, device=device)
            if target is not None:
                put(wanted, path, target)
        load_tensors(choice.path, wanted, group=self._group, near=choice.near, described=described)
        tensors: dict[str, Any] = wanted.get(OTHERS, {})
        return tensors

    def _notes_on_missing(
        self, stored: Mapping[str, Sequence[Any]], tensors: Mapping[str, Any], *, step: int
    ) -> list[str]:
        """Returns notes on tensors of the run's parts that no rank has any more. Collective."""
        of_run = {full: path for full, path in stored.items() if self._of[path[1]] == "run"}
        if not of_run:
            return []
        loaded = {full_name(path) for path, _ in leaves_of({OTHERS: tensors})}
        missing_by_rank = on_every_rank(self._group, lambda: of_run.keys() - loaded)
        missing = [of_run[full] for full in sorted(set[str].intersection(*missing_by_rank))]
        return [
            f"{self._noun}{name}: no rank has its tensor {full_name(path)} of step {step} any more"
            for _, name, *path in missing
        ]


def _take_plain(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors that a rank holds whole, and those that are cut, both nested as before."""
    whole: dict[str, Any] = {}
    cut: dict[str, Any] = {}
    for path, tensor in leaves_of(tensors):
        put(cut if hasattr(tensor, "placements") else whole, path, tensor)
    return whole, cut
