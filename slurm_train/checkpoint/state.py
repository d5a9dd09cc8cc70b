"""Model and optimizer as one nested dictionary, keyed by full parameter names.

Names, not positions: the dictionary of a DDP-wrapped or compiled model equals that of the bare one, and the optimizer's
state can be loaded at another world size or mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def training_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Gives the state to save, or to be filled by load_tensors; its tensors are the live ones, not copies.

    An optimizer that has not stepped yet gets its state made (zero gradients, zero learning rate), so that there is
    something to fill; it must have no gradients at that moment. Collective for sharded models.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def restore_training_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Puts a filled state back; hyperparameters of the parameter groups (learning rate, betas) come back too."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def names_of_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Gives the names of the parameters in each group of an optimizer, in its order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def set_group_names(state: dict[str, Any], names: list[list[str]]) -> None:
    """Puts names into the groups of a training state: those of all stages for a save, a stage's own for a restore."""
    for group, own in zip(state["optimizer"]["param_groups"], names, strict=True):
        group["params"] = own


def share_of(sizes: dict[str, int], *, rank: int, num_ranks: int) -> set[str]:
    """Gives the names that one rank writes of what all ranks hold alike; the shares' bytes are about equal.

    Args:
        sizes: bytes by name, the same on all ranks.
        rank: the rank whose share it is.
        num_ranks: ranks that share the work.
    """
    loads = [0] * num_ranks
    own: set[str] = set()
    for name, num_bytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += num_bytes
        if lightest == rank:
            own.add(name)
    return own


def own_part(state: dict[str, Any], *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Gives the part of a training state that this rank has to save, so that it copies no more than it writes.

    Replicated tensors are shared out; shards, values and what lies in lists stay on every rank.
    """
    sizes = {name: value.nbytes for name, value in _replicated(state, "")}
    return _without(state, "", sizes.keys() - share_of(sizes, rank=rank, num_ranks=num_ranks))


def own_tensors(model: nn.Module, optimizer: Optimizer, *, rank: int, num_ranks: int) -> list[Tensor]:
    """Gives the tensors that `own_part` of the training state will hold, without importing torch's checkpoint room."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names.get(id(parameter), str(id(parameter))): entry for parameter, entry in optimizer.state.items()}
    part = own_part({"model": model.state_dict(), "optimizer": {"state": state}}, rank=rank, num_ranks=num_ranks)
    return list(_tensors(part))


def _tensors(state: dict[str, Any]) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif hasattr(value, "nbytes"):
            yield value


def _replicated(state: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = f"{prefix}/{key}"
        if isinstance(value, dict):
            yield from _replicated(value, name)
        elif hasattr(value, "nbytes") and not hasattr(value, "placements"):
            yield name, value


def _without(state: dict[str, Any], prefix: str, left_out: set[str]) -> dict[str, Any]:
    named = {key: (f"{prefix}/{key}", value) for key, value in state.items()}
    return {
        key: _without(value, name, left_out) if isinstance(value, dict) else value
        for key, (name, value) in named.items()
        if name not in left_out
    }
