"""Model and optimizer as one nested dictionary, keyed by full parameter names.

Names, not positions: the dictionary of a DDP-wrapped or compiled model equals that of the bare one, and the optimizer's
state can be loaded at another world size or mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
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
