"""What reads a program's samples, among the objects that it hands over: whether its state says where it is.

Libraries are recognized by the names of their classes, since importing them takes long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from slurm_train.errors import ConfigError

_SHUFFLING = "BufferShuffledExamplesIterable"
"""Part of a stream of `datasets` that keeps samples which its state leaves out."""


def require_whole_state(name: str, other: Any) -> None:
    """Checks that the state of an object has all samples that it has read and not given.

    Raises:
        ConfigError: it is a stream of `datasets`, or a loader of one, that shuffles in a buffer.
    """
    for part in _parts_of(getattr(getattr(other, "dataset", other), "_ex_iterable", None)):
        size = getattr(part, "buffer_size", 0)
        if type(part).__name__ == _SHUFFLING and size > 1:
            raise ConfigError(
                f"{name} shuffles in a buffer of {size} samples, which its state_dict leaves out: each resume would "
                "lose the samples that are in it",
                hint="shuffle shards only, shuffle(buffer_size=1); or take a data set with a length, and run.batches",
            )


def go_to_epoch(other: Any, state: Any) -> None:
    """Brings a stream of `datasets`, or that of a loader, to the epoch of a state, which another epoch ignores."""
    stream = getattr(other, "dataset", other)
    epoch = _epoch_in(state)
    if hasattr(stream, "_ex_iterable") and epoch is not None:
        stream.set_epoch(epoch)


def is_at_end_of_pass(other: Any, state: Any) -> bool:
    """Returns whether the state of a torchdata `StatefulDataLoader` is that of its last batch, before its loop ended.

    The first loop over the loader has no batches then, as the rest of the loop that was saved. A program that takes the
    epoch from the number of steps is in the next epoch by then, and leaves it out.

    Args:
        other: any object that was handed over.
        state: that it was given.
    """
    if not any(kind.__name__ == "StatefulDataLoader" for kind in type(other).__mro__):
        return False
    num_given = state.get("_num_yielded")
    if num_given is None:  # with workers
        snapshot = state.get("_snapshot", {})
        num_given = snapshot.get("_snapshot_step", 0) + state.get("_steps_since_snapshot", 0)
    try:
        num_batches = len(other)
    except TypeError:  # a stream
        return False
    return not state.get("_iterator_finished", True) and num_given == num_batches


def require_moved(name: str, other: Any, *, has_moved: bool) -> None:
    """Checks that a stream's state has changed since the training began; called after a step.

    Raises:
        ConfigError: it has not, since it is read in the workers of a loader.
    """
    if isinstance(other, IterableDataset) and not has_moved:
        raise ConfigError(
            f"the state of {name} is as it was before the first step: workers of a loader read copies of it, so a "
            "resume would read the same samples again",
            hint="read it by torchdata's StatefulDataLoader, and hand over that loader; or set num_workers=0",
        )


def may_know_place(other: Any) -> bool:
    """Returns whether the state of an object may say which samples were read."""
    is_scaler = isinstance(other, torch.amp.GradScaler)
    return not (isinstance(other, (nn.Module, Optimizer)) or is_scaler or holds_schedule(other))


def holds_schedule(other: Any) -> bool:
    """Returns whether an object is a learning-rate schedule of torch, or has one."""
    values = vars(other).values() if hasattr(other, "__dict__") else ()
    return any(isinstance(value, LRScheduler) for value in (other, *values))


def has_schedule(optimizer: Optimizer) -> bool:
    """Returns whether a learning-rate schedule of torch was made for an optimizer."""
    return hasattr(getattr(optimizer, "optimizer", optimizer).step, "_wrapped_by_lr_sched")


def _epoch_in(state: Any) -> int | None:
    """Returns the epoch in the state of a stream of `datasets`, which may be within that of a loader."""
    if not isinstance(state, dict):
        return None
    if "examples_iterable" in state and "epoch" in state:
        epoch: int = state["epoch"]
        return epoch
    epochs = (_epoch_in(item) for item in state.values())
    return next((epoch for epoch in epochs if epoch is not None), None)


def _parts_of(stream: Any) -> Iterator[Any]:
    """Yields the parts of a stream of `datasets`, each of which reads from the next ones."""
    if stream is None:
        return
    yield stream
    for part in (getattr(stream, "ex_iterable", None), *getattr(stream, "ex_iterables", ())):
        yield from _parts_of(part)
