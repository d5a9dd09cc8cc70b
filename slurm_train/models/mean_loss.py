"""The loss that a model computes itself where it is called with labels, as those of transformers do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import Batch, labels_in
from slurm_train.models.loss import LossOfMean
from slurm_train.models.model_call import ModelCall, hint_to_rename
from slurm_train.models.own_loss import LABELS, loss_in, next_labels, scores_in
from slurm_train.models.score_loss import ScoreLoss
from slurm_train.models.scores import default_loss, precise


class MeanLoss(LossOfMean):
    """The mean that a model gives for labels, as those of transformers do; where it gives none, its scores decide.

    Args:
        call: how the model is called.
        scores: how its scores are compared.
    """

    def __init__(self, call: ModelCall, scores: ScoreLoss) -> None:
        super().__init__(call.model)
        self._call = call
        self._scores = scores

    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the mean times the number of items it is over, and that number."""
        batch = self._call.within_context(batch)
        outputs = self._call.outputs_of(batch)
        mean = self._mean_in(outputs, batch)
        if mean is None:
            return self._scores.sum_and_count_of(outputs, batch)
        count = self._count(batch)
        return precise(mean) * count, count

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns "loss" and "count", and "correct" where the model gives scores of classes, too."""
        batch = self._call.within_context(batch)
        outputs = self._call.outputs_of(batch)
        mean = self._mean_in(outputs, batch)
        if mean is None:
            return self._scores.sums_in(outputs, batch)
        count = self._count(batch)
        sums = {"loss": precise(mean) * count, "count": count}
        correct = _num_correct(scores_in(outputs), self._call.own_loss.aligned(labels_in(batch)))
        if correct is not None:
            sums["correct"] = correct
        return sums

    def check_batch(self, batch: Batch) -> None:
        """Checks the batch, and finds out what its labels are."""
        self._call.check_batch(batch)

    def other_loss(self, batch: Batch) -> str | None:
        """Returns a line where the model takes no labels, and has a loss that is not trained."""
        return self._scores.other_loss(batch)

    def check_scores(self, samples: Batch, labels: Tensor | None) -> str | None:
        """Checks the scores of a model that gives no mean."""
        if self._call.own_loss.takes_labels:
            return None
        samples = self._call.within_context(samples)
        with torch.compiler.set_stance("force_eager"):
            outputs = self._call.outputs_of(samples)
        if self._mean_in(outputs, samples) is not None:
            return None
        return self._scores.check_scores_in(outputs, samples, labels)

    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Checks that the loss is a mean, and the one that is trained."""
        with self._evaluating():
            batch = self._call.within_context(batch)
            self._require_mean(batch, tolerance=tolerance)
            if not self._call.own_loss.takes_labels:
                return None
            if isinstance(batch, dict):
                if LABELS not in batch or self._call.own_loss.shifts is None:
                    return None
                outputs = self.model(**batch)
                own_losses = [loss_in(outputs)]
                self._learn_shift(outputs, batch[LABELS], tolerance=tolerance)
            elif len(batch) == 2:
                batch, own_losses = self._call.own_losses(batch)
            else:
                return None
            self._call.require_same(self.sum_and_count(batch), own_losses, tolerance=tolerance)
        return None

    def mean_of(self, batch: Batch) -> Tensor | None:
        """Returns the mean that the model gives, None where it gives none."""
        return loss_in(self._call.outputs_of(batch))

    @property
    def _name(self) -> str:
        return self._call.own_loss.name

    def _mean_in(self, outputs: Any, batch: Batch) -> Tensor | None:
        """Returns the loss that the model gave itself; None where it gave scores to be compared with targets."""
        mean = loss_in(outputs)
        labels = labels_in(batch)
        if mean is None and isinstance(batch, dict) and (labels is None or labels.is_floating_point()):
            raise ConfigError(
                f"a batch of {', '.join(batch)} has no whole-number labels, and {type(self.model).__name__} gives no "
                "loss of its own for it",
                hint=hint_to_rename(batch)
                or "add `labels` to the samples (for a language model a copy of input_ids, shifted here), or define "
                "training_loss(batch) on the model",
            )
        return mean

    def _count(self, batch: Batch) -> Tensor:
        """Returns how many items the model's own mean is over."""
        first: Tensor = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return self._call.own_loss.count(labels_in(batch), size=len(first)).to(first.device)

    def _learn_shift(self, outputs: Any, labels: Tensor, *, tolerance: float) -> None:
        """Finds out whether the model compares labels with the scores before them; a name does not always tell."""
        loss = loss_in(outputs)
        scores = scores_in(outputs)
        can_be = isinstance(scores, Tensor) and labels.dim() > 1 and scores.shape[:-1] == labels.shape
        if loss is None or not can_be or labels.is_floating_point():
            return
        matches = []
        for targets in (labels, next_labels(labels)):
            total, count = default_loss(scores, targets)
            mean = self._scores.with_router(total, count, outputs) / count
            matches.append(bool((mean - loss).abs() <= tolerance * loss.abs()))
        if any(matches) and not all(matches):
            self._call.own_loss = self._call.own_loss.shifted(matches[1])


def _num_correct(scores: Any, labels: Tensor | None) -> Tensor | None:
    """Returns how many scores are highest at their label; None where they are no scores of classes."""
    if not isinstance(scores, Tensor) or labels is None or labels.is_floating_point():
        return None
    if scores.dim() < 2 or scores.shape[:-1] != labels.shape or scores.shape[-1] < 2:
        return None
    correct: Tensor = (scores.argmax(dim=-1) == labels).sum()
    return correct
