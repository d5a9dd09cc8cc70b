"""What reads a training's samples, among the objects that are saved: whether its state says how far it is.

Libraries are recognized by the names of their classes, since importing them takes long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from slurm_train.checkpoint.replicas import digest
from slurm_train.checkpoint.rules.watched import Watched
from slurm_train.checkpoint.tree import encode
from slurm_train.errors import ConfigError
from slurm_train.formatting import shorten

_SHUFFLING = "BufferShuffledExamplesIterable"
"""Part of a stream of `datasets` that keeps samples which its state leaves out."""


def refuse_lost_samples(watched: Watched) -> list[str]:
    """Refuses an object whose state lacks samples that it has read and not given.

    Raises:
        ConfigError: it is a stream of `datasets`, or a loader of one, that shuffles in a buffer.
    """
    for name, other in watched.objects.items():
        for part in _parts_of(getattr(getattr(other, "dataset", other), "_ex_iterable", None)):
            size = getattr(part, "buffer_size", 0)
            if type(part).__name__ == _SHUFFLING and size > 1:
                raise ConfigError(
                    f"{name} shuffles in a buffer of {size} samples, which its state_dict leaves out: each resume "
                    "would lose the samples that are in it",
                    hint="shuffle shards only, shuffle(buffer_size=1); or take a data set with a length, and "
                    "run.batches",
                )
    return []


def refuse_unmoved(watched: Watched) -> list[str]:
    """Refuses a stream whose state has not changed since the training began; called after a step.

    Raises:
        ConfigError: it is read in the workers of a loader.
    """
    for name, before in watched.streams.items():
        if digest(encode(watched.objects[name].state_dict())) == before:
            raise ConfigError(
                f"the state of {name} is as it was before the first step: workers of a loader read copies of it, so a "
                "resume would read the same samples again",
                hint="read it by torchdata's StatefulDataLoader, and hand over that loader; or set num_workers=0",
            )
    return []


def note_schedules(watched: Watched) -> list[str]:
    """Notes a learning-rate schedule of torch that is not saved."""
    scheduled = [type(optimizer).__name__ for optimizer in watched.optimizers if has_schedule(optimizer)]
    if not scheduled or any(holds_schedule(other) for _, other in watched.others()):
        return []
    return [
        f"the learning-rate schedule of {scheduled[0]} is in no checkpoint: after a resume it begins anew unless it is "
        "set to its step; save it in a callback's state_dict, or by run.training(model, optimizer, schedule=schedule)"
    ]


def note_readers(watched: Watched) -> list[str]:
    """Notes that nothing tells, or nothing compares, where the samples go on after a resume."""
    if not watched.is_resumed or watched.has_order:
        return []
    notes = []
    places = [name for name, other in watched.objects.items() if may_know_place(other)]
    if not watched.has_pass and places:
        notes.append(
            f"since the resume, the program reads its samples by its own code and the state of {shorten(places)}: "
            "nothing compares them with those before; a state that is not exact gives some again or leaves some out"
        )
    if not any(may_know_place(other) for _, other in watched.others()):
        notes.append(
            "the checkpoint does not say which samples of the present epoch were used: a loader that begins anew "
            "gives them again; take run.replay(loader) or run.batches, or hand over a stateful loader"
        )
    return notes


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


def _parts_of(stream: Any) -> Iterator[Any]:
    """Yields the parts of a stream of `datasets`, each of which reads from the next ones."""
    if stream is None:
        return
    yield stream
    for part in (getattr(stream, "ex_iterable", None), *getattr(stream, "ex_iterables", ())):
        yield from _parts_of(part)
