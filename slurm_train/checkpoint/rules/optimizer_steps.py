"""Which optimizers of this process take steps, and whether gradients were added up since: neither is in a state.

A program that trains with an optimizer which it has not handed over, or that saves between the batches of a step, goes
on otherwise after a resume, and nothing in what it has handed over shows it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from slurm_train.checkpoint.state import local_part, plain_names

# With two steps of an optimizer for each of the program's, the first save would look the same.
_FEWEST_STEPS = 5
# Inner loops make a new optimizer for each of their tasks.
_MOST_STRANGERS = 1000


class _Gradient(NamedTuple):
    """Which gradient an optimizer's first parameter that has one had when the optimizer took its newest step."""

    parameter: Tensor
    address: int
    version: int
    """Changes in place that torch has counted."""


class OptimizerSteps:
    """The steps that optimizers of this process take from now on.

    Args:
        model: that is saved.
        optimizers: that are saved, of its parameters.
        others: further objects that are saved.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._known = [*optimizers, *(part for other in others for part in _optimizers_of(other))]
        self._newest: dict[int, _Gradient] = {}
        """By the identity of an optimizer's state, which a wrapper shares."""
        self._num_steps = 0
        """Steps of all optimizers that are saved."""
        self._strangers: dict[str, bool] = {}
        """Other optimizers that took a step, in words; whether they train a parameter of the model."""
        self._named: set[str] = set()
        self._seen: set[tuple[str, int]] = set()
        """Kind and first parameter of other optimizers."""
        # The hook is the process's: it must not keep a training alive.
        register_optimizer_step_post_hook(functools.partial(_note_step, weakref.ref(self)))

    def note_step(self, optimizer: Optimizer) -> None:
        """Takes note of a step."""
        if any(optimizer is known or optimizer.state is known.state for known in self._known):
            self._num_steps += 1
            trained = _first_with_gradient(optimizer)
            if trained is not None:
                self._newest[id(optimizer.state)] = _Gradient(trained, *_place_of_gradient(trained))
            return
        first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
        key = (type(optimizer).__name__, id(first))
        if key in self._seen or len(self._seen) == _MOST_STRANGERS:
            return
        self._seen.add(key)
        plain = plain_names(self._model)
        name = next((plain(name) for name, parameter in self._model.named_parameters() if parameter is first), "")
        words = f"{type(optimizer).__name__} of {name or 'other parameters'}"
        if words not in self._named:
            self._strangers[words] = bool(name)

    def notes(self) -> list[str]:
        """Returns what is to be said of optimizers that are not saved and took a step; once for each."""
        notes = []
        for words, is_of_model in self._strangers.items():
            if is_of_model:
                lost, call = "its state is", "run.training(model, optimizer, second=second)"
            else:
                lost, call = (
                    "its state and they are",
                    'run.training({"first": model, "second": other}, [optimizer, second])',
                )
            notes.append(
                f"an optimizer that is not saved took a step, {words}: {lost} in no checkpoint, so a resume begins "
                f"with new ones; if it belongs to the training, save it: in a callback's state_dict, or by {call}"
            )
        self._named |= self._strangers.keys()
        self._strangers.clear()
        return notes

    def is_one_ahead(self, num_steps: int) -> bool:
        """Returns whether the only optimizer has taken one step more than a save is to say."""
        return len(self._known) == 1 and num_steps >= _FEWEST_STEPS and self._num_steps == num_steps + 1

    def pending(self) -> str:
        """Returns the name of a parameter whose gradient has been added up since the newest step, "" for none.

        The gradients that the loss of one model leaves in another are none, as in a GAN: each optimizer has to have
        some. Gradients that are zero, or not finite, as those of a step that a GradScaler has left out, are none.
        """
        pending: Tensor | None = None
        for optimizer in self._optimizers:
            newest = self._newest.get(id(optimizer.state))
            # Steps that are compiled are not seen.
            if newest is None or newest.parameter.grad is None:
                return ""
            if _place_of_gradient(newest.parameter) == (newest.address, newest.version):
                return ""
            if not _has_gradients(optimizer):
                return ""
            pending = newest.parameter
        plain = plain_names(self._model)
        return next((plain(name) for name, parameter in self._model.named_parameters() if parameter is pending), "")


def _optimizers_of(other: Any) -> list[Optimizer]:
    """Returns an object that is an optimizer, and those that it holds, as an agent does."""
    held = list(vars(other).values()) if hasattr(other, "__dict__") else []
    for value in list(held):
        held += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [part for part in (other, *held) if isinstance(part, Optimizer)]


def _note_step(steps: weakref.ref[OptimizerSteps], optimizer: Optimizer, _args: Any, _keywords: Any) -> None:
    # A step that is being compiled would have the hook in its graph.
    present = None if torch.compiler.is_compiling() else steps()
    if present is not None:
        present.note_step(optimizer)


def _first_with_gradient(optimizer: Optimizer) -> Tensor | None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter for parameter in parameters if parameter.grad is not None), None)


def _place_of_gradient(parameter: Tensor) -> tuple[int, int]:
    """Returns what differs once something was added to a gradient: where it is, and its changes in place."""
    assert parameter.grad is not None
    part = local_part(parameter.grad)
    return 0 if part.is_sparse else part.data_ptr(), part._version


def _has_gradients(optimizer: Optimizer) -> bool:
    """Returns whether its gradients are finite, and not all zero."""
    gradients = [
        local_part(parameter.grad.detach())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if any(gradient.is_sparse for gradient in gradients):
        return False
    are_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    return are_finite and any(bool(gradient.count_nonzero()) for gradient in gradients)
