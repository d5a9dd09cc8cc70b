"""A batch as a model gets it: where its inputs and labels are, and what it is made of.

It is (inputs, targets), or (inputs, targets, position_ids) of texts; a dict of tensors by name; or (images, targets)
with lists of tensors or dicts, as detectors take them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurm_train.models.own_loss import LABELS

Batch = tuple[Tensor, ...] | dict[str, Tensor]
WITH_POSITIONS = 3
"""Tensors of a batch (inputs, targets, position_ids)."""
_NUM_SHOWN = 3


def labels_in(batch: Batch) -> Tensor | None:
    """Returns `labels` of a dict, or the second of (inputs, targets) and position_ids; None for other tuples."""
    if isinstance(batch, dict):
        return batch.get(LABELS)
    return batch[1] if len(batch) in (2, WITH_POSITIONS) else None


def inputs_in(batch: Batch) -> Tensor | None:
    """Returns the inputs of a batch, of a dict what comes first."""
    if not isinstance(batch, dict):
        return batch[0]
    return next((tensor for name, tensor in batch.items() if name != LABELS), None)


def has_lists(batch: Batch) -> bool:
    """Returns whether parts of a batch are lists or dicts of tensors, which only a model's own loss can take."""
    parts: Any = batch.values() if isinstance(batch, dict) else batch
    return not all(isinstance(part, Tensor) for part in parts)


def repeated(batch: Any, number: int) -> Any:
    """Returns the first sample of a batch so many times."""
    if isinstance(batch, Tensor):
        return torch.cat([batch[:1]] * number)
    if isinstance(batch, dict):
        return {name: repeated(part, number) for name, part in batch.items()}
    if has_lists(batch):
        return tuple(repeated(part, number) if isinstance(part, Tensor) else [*part[:1]] * number for part in batch)
    return tuple(repeated(part, number) for part in batch)


def sequences_in(batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Returns inputs and targets where there is a target for each position of a sequence, else None."""
    if isinstance(batch, dict):
        inputs = batch.get("input_ids")
        targets = batch.get(LABELS)
    elif len(batch) in (2, WITH_POSITIONS):
        inputs, targets = batch[:2]
    else:
        return None
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if inputs.shape != targets.shape or targets.dim() < 2:
        return None
    return inputs, targets


def kind_of(value: object) -> str:
    """Returns what a value is, e.g. "(tensor of (4, 1), int)", "dict with loss"."""
    if isinstance(value, Tensor):
        return f"tensor of {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        more = ", ..." if len(value) > _NUM_SHOWN else ""
        return f"({', '.join(map(kind_of, value[:_NUM_SHOWN]))}{more})"
    return f"dict with {', '.join(map(str, value))}" if isinstance(value, dict) else type(value).__name__
