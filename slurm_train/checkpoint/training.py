"""A model and its optimizers, as a checkpoint holds them and as they are restored from one, on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.load import load_tensors, require_fit
from slurm_train.checkpoint.manifest import MODEL
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.state import (
    Optimizers,
    add_later_state,
    listed,
    make_buffers,
    number_groups,
    plain_names,
    restore_training_state,
    take_extra_states,
    training_state,
)
from slurm_train.errors import RunError
from slurm_train.formatting import shorten

MADE_BUFFERS = "made_buffers"
"""Key in a manifest's `extra`: buffers that training has made, or given other shapes than the constructor."""


def restore_training(
    choice: Choice,
    model: nn.Module,
    optimizers: Optimizers,
    *,
    group: ProcessGroup | None,
    extra_states: dict[str, Any] | None,
    settings: Collection[str] | None,
    group_names: list[list[str]] | None = None,
    makes_state: bool = True,
    may_lack_state: bool = False,
) -> Any:
    """Restores a model and its optimizers. Collective.

    Long because each of its parts is loaded in the order in which it needs the ones before it.

    Args:
        choice: the checkpoint.
        model: this rank's.
        optimizers: of its parameters.
        group: a gloo group of all ranks; None for one process.
        extra_states: what modules have saved by `get_extra_state`, by name; None: it is among the tensors, as in older
            checkpoints.
        settings: names in the optimizers' groups that stay as they are here; None: all come from the checkpoint, and
            each group has to have the parameters that it had.
        group_names: names of the parameters in each group of the whole model, where this rank has a stage of it.
        makes_state: give an optimizer that has not stepped yet its state, all of which the checkpoint has to have; else
            it gets the state that the checkpoint has.
        may_lack_state: what the checkpoint has no state of has had no gradient yet; else it is an error.

    Returns:
        What `read_metadata` has returned for the checkpoint.

    Raises:
        RunError: model or optimizers do not fit the checkpoint.
        CheckpointError: it cannot be read.
    """
    # Imported late, since it takes long.
    from slurm_train.checkpoint.tensors import cuts_of, tensor_shapes

    described = read_metadata(choice.path)
    saved = tensor_shapes(choice.path, described=described)
    make_buffers(model, choice.manifest.extra.get(MADE_BUFFERS, []), saved=of_model(saved))
    state = training_state(model, optimizers, makes_state=makes_state)
    groups: list[dict[str, Any]] = state["optimizer"].pop("param_groups")
    if group_names is None:
        numbered = {str(number): members for number, members in enumerate(groups)}
    else:
        numbered = number_groups(groups, group_names)
    saved_of_groups = {}
    for number, members in numbered.items():
        begin = f"optimizer.param_groups.{number}"
        wanted = {
            name: value
            for name, value in members.items()
            if (name not in settings if settings is not None else f"{begin}.{name}" in described.state_dict_metadata)
        }
        if settings is None:
            wanted |= _later_settings(number, members, paths=described.planner_data or {}, saved=saved)
        if wanted:
            saved_of_groups[number] = wanted
    if saved_of_groups:
        state["optimizer"]["param_groups"] = saved_of_groups
    # Older checkpoints have extra states among the tensors.
    extra = {} if extra_states is None else take_extra_states(state["model"])
    kept = state["optimizer"]["state"]
    paths = described.planner_data or {}
    if may_lack_state:
        with_state = {path[2] for path in paths.values() if path[:2] == ("optimizer", "state")}
        for name in kept.keys() - with_state:
            del kept[name]
    optimized = {
        id(parameter)
        for optimizer in listed(optimizers)
        for members in optimizer.param_groups
        for parameter in members["params"]
    }
    plain = plain_names(model)
    trained = {plain(name): tensor for name, tensor in model.named_parameters() if id(tensor) in optimized}
    add_later_state(kept, parameters=trained, paths=paths, saved=saved, cuts=cuts_of(described))
    require_fit(choice.path, state["model"], kept=kept, is_stage=group_names is not None, described=described)
    load_tensors(choice.path, state, group=group, near=choice.near, described=described)
    if settings is None:
        _require_same_groups(choice, numbered, saved_of_groups, paths=paths)
    state["optimizer"]["param_groups"] = [
        members | saved_of_groups.get(number, {}) for members, number in zip(groups, numbered, strict=True)
    ]
    if extra_states is not None:
        state["model"] |= {name: extra_states.get(name, value) for name, value in extra.items()}
    restore_training_state(model, optimizers, state)
    return described


def _later_settings(
    number: str, group: Mapping[str, Any], *, paths: Mapping[str, Sequence[Any]], saved: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns places for the settings that training has added to a group of an optimizer, by name."""
    later: dict[str, Any] = {}
    for full, path in paths.items():
        begin, name = [str(key) for key in path[:3]], path[-1]
        if begin == ["optimizer", "param_groups", number] and len(path) == 4 and name not in group:
            later[name] = torch.empty_like(saved[full]) if full in saved else None
    return later


def _require_same_groups(
    choice: Choice,
    groups: Mapping[str, Mapping[str, Any]],
    saved: Mapping[str, Mapping[str, Any]],
    *,
    paths: Mapping[str, Sequence[Any]],
) -> None:
    """Checks that each group of the optimizers has the parameters whose learning rate and so on were saved for it.

    Raises:
        RunError: naming the first group that has others, or that is missing.
    """
    for number, group in groups.items():
        names = saved.get(number, {}).get("params", [])
        if sorted(names) != sorted(group["params"]):
            raise RunError(
                f"group {number} of the optimizer has {shorten(group['params'])}, and {choice.path.name} has "
                f"{shorten(names) or 'no such group'} in it",
                hint="make the same groups as before, or start another run with run.name=NAME",
            )
    written = {str(path[2]) for path in paths.values() if path[:2] == ("optimizer", "param_groups")}
    missing = sorted(written - groups.keys(), key=int)
    if missing:
        raise RunError(
            f"{choice.path.name} has {len(written)} groups of the optimizer, and the program has {len(groups)} now: "
            "the parameters of the missing groups would not be trained any more",
            hint="make the same groups as before `resume`, or start another run with run.name=NAME",
        )


def of_model(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the model among those of a checkpoint, by their names in it."""
    return {name.removeprefix(MODEL): tensor for name, tensor in saved.items() if name.startswith(MODEL)}
