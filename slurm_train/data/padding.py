"""Batches of samples of unequal length: each tensor padded to the longest of its batch.

For `data.collate=slurm_train.data.padding.pad`. How little there is to pad is up to the batch: `batch.by_length=true`
puts samples of about equal length together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100
"""What torch's cross entropy passes over: padded targets do not count."""


def pad(samples: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns a batch of (inputs, targets, ...): inputs padded with 0, all that follows with -100.

    Args:
        samples: tuples of tensors (length, ...) of the same kind; tensors without dimensions are stacked.
    """
    columns = zip(*samples, strict=True)
    return tuple(_pad(list(column), value=IGNORED if number else 0) for number, column in enumerate(columns))


def _pad(column: list[Tensor], *, value: int) -> Tensor:
    if column[0].dim() == 0:
        return torch.stack(column)
    return pad_sequence(column, batch_first=True, padding_value=value)
