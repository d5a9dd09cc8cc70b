"""What a loss is: a sum and a count for a batch, and what is checked of it before the first step.

The four are `score_loss`, `mean_loss`, `list_loss` and `training_loss`; `Objective.choose` says which of them scores a
batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import Batch, repeated

TOLERANCE = 1e-3
"""Relative difference of a loss in float32 that is rounding."""
LOW_TOLERANCE = 3e-2
"""The same in types of 16 bits."""
_REDUCTIONS = ("ctc_loss_reduction",)
"""Settings of transformers that make a model's loss a sum."""


class Loss(ABC):
    """A way to score a batch, with what is checked of it before the first step; base class of the four.

    What is checked leaves the model as it was only within `preserved`, and is called without gradients.

    Args:
        model: what is scored.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the float32 sum of the loss over the counted items, and their number (a scalar tensor)."""

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over the items of a batch: "loss" and "count", of a classifier "correct"."""
        loss, count = self.sum_and_count(batch)
        return {"loss": loss, "count": count}

    @abstractmethod
    def check_batch(self, batch: Batch) -> None:
        """Checks a batch before it is trained with, and finds out what its labels are.

        Raises:
            ConfigError: the model cannot be trained with such a batch, or would learn something that nobody wants.
        """

    def other_loss(self, batch: Batch) -> str | None:
        """Returns a line about a loss that a person may have meant and that is not the one that is trained.

        None where the model computes the trained loss itself, or nothing points to another one.
        """
        del batch
        return None

    def check_scores(self, samples: Batch, labels: Tensor | None) -> str | None:
        """Checks the model's scores in its present mode; returns a new line if they are odd. Collective if it is cut.

        A loss that the model computes itself is checked by `compare`.

        Args:
            samples: some of a micro-batch, on the model's device.
            labels: of all samples of the micro-batch, on any device; None: those of the samples.

        Raises:
            ConfigError: no loss fits the shapes, or labels have no score.
        """
        del samples, labels
        return None

    def check_documents(self, samples: Batch) -> None:
        """Checks that the model keeps the documents of a sequence apart. Collective where the model is cut.

        Args:
            samples: some of a micro-batch, on the model's device.

        Raises:
            ConfigError: the scores of a document depend on the tokens before it.
        """
        del samples

    @abstractmethod
    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Compares the loss that is trained with what the model computes itself. Collective where it is cut.

        Args:
            batch: some samples, on the model's device.
            tolerance: relative difference that is rounding, `TOLERANCE` or `LOW_TOLERANCE`.

        Returns:
            A line where a `training_loss` does not return a sum and the number of its items.

        Raises:
            ConfigError: they differ, with both numbers; or the model's own is a sum over the samples, no mean.
        """

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Has the model compute in evaluation mode, not compiled."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    @property
    def _is_sharded(self) -> bool:
        return any(hasattr(module, "reshard") for module in self.model.modules())


class LossOfMean(Loss):
    """What the two have in common whose model computes a mean itself."""

    @abstractmethod
    def mean_of(self, batch: Batch) -> Tensor | None:
        """Returns the mean that the model gives for a batch, None where it gives none."""

    def _require_mean(self, batch: Batch, *, tolerance: float) -> None:
        """Checks that the model's own loss of a sample and of the same sample twice is the same, as that of a mean is.

        Raises:
            ConfigError: it is twice as large; with both numbers.
        """
        losses = [self._mean_if_any(repeated(batch, number)) for number in (1, 2)]
        once, twice = (math.nan if loss is None else float(loss) for loss in losses)
        is_sum = abs(twice - 2 * once) <= tolerance * abs(twice)
        if not is_sum or abs(once) <= tolerance:
            return
        config = getattr(self.model, "config", None)
        setting = next((name for name in _REDUCTIONS if getattr(config, name, None) == "sum"), None)
        hint = "let the model give the mean over the items that count"
        if setting is not None:
            hint = f"give its configuration {setting}='mean' (from_pretrained takes it: model.{setting}=mean)"
        raise ConfigError(
            f"the loss that {self._name} computes is a sum over the samples: {once:.6f} for a sample and "
            f"{twice:.6f} for the same sample twice; a step's loss would depend on the number of ranks and "
            "micro-batches",
            hint=f"{hint}; or define training_loss(batch) on the model: it returns the sum and the number of items",
        )

    @property
    def _name(self) -> str:
        """Of the class that computes the mean."""
        return type(self.model).__name__

    def _mean_if_any(self, batch: Batch) -> Tensor | None:
        """Returns the loss that the model computes itself; None where it gives none, or takes no batch of this size.

        Shards, which an exception leaves half gathered, raise it.
        """
        try:
            return self.mean_of(batch)
        except (RuntimeError, ValueError, IndexError):
            if self._is_sharded:
                raise
            return None
