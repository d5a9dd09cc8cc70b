"""The loss of a model that brings its own: its method `training_loss`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import Batch, kind_of, repeated
from slurm_train.models.loss import Loss


class TrainingLoss(Loss):
    """The sum and the count that the model's `training_loss` returns."""

    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns what the model gave; a count that is a plain number as a tensor.

        Raises:
            ConfigError: it is no sum with a count.
        """
        training_loss: Any = self.model.training_loss
        result = training_loss(batch)
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        has_loss = is_pair and isinstance(result[0], Tensor) and result[0].dim() == 0
        if not has_loss or not isinstance(result[1], (Tensor, int, float)):
            raise ConfigError(
                f"{type(self.model).__name__}.training_loss gave {kind_of(result)}, not the sum of the loss as a "
                "scalar tensor and the number of items",
                hint="return losses.sum(), losses.numel(); of a mean over n items mean * n, n",
            )
        loss, count = result
        if not isinstance(count, Tensor):
            count = torch.full((), count, device=loss.device)
        return loss, count

    def check_batch(self, batch: Batch) -> None:
        """Accepts any batch: only the model knows what is in it."""

    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Returns a line where the mean loss that a `training_loss` means depends on the size of a micro-batch.

        A sample and the same sample twice have the same mean. Not tried with shards, which an exception inside of a
        model leaves half gathered.
        """
        if self._is_sharded:
            return None
        try:
            with self._evaluating():
                pairs = [self.sum_and_count(repeated(batch, number)) for number in (1, 2)]
        except Exception:  # anybody's code, which may need more samples; the first step tells what is wrong with it
            return None
        (once, num_once), (twice, num_twice) = ((float(loss), float(count)) for loss, count in pairs)
        if not (num_once > 0 and num_twice > 0 and math.isfinite(once) and abs(once) > tolerance):
            return None
        ratio = (twice / num_twice) / (once / num_once)
        if not any(abs(ratio - factor) <= tolerance * factor for factor in (0.5, 2.0)):
            return None
        return (
            f"training_loss of {type(self.model).__name__} gives {once:.6f} and {num_once:g} items for a sample, "
            f"{twice:.6f} and {num_twice:g} for the same sample twice: loss / items would depend on the number of "
            "ranks and micro-batches; return the sum of the loss and the number of items, of a mean over n items "
            "mean * n, n"
        )
