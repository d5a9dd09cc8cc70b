"""The loss of a model that gives scores: they are compared with targets here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import WITH_POSITIONS, Batch, inputs_in, labels_in
from slurm_train.models.loss import LOW_TOLERANCE, Loss
from slurm_train.models.model_call import ModelCall
from slurm_train.models.own_loss import scores_in
from slurm_train.models.scores import (
    decide_classes_second,
    default_loss,
    default_sums,
    note_of_classes,
    note_of_probabilities,
    num_counted,
    precise,
    require_labels,
    require_values,
)

_LOSS_METHODS = ("loss", "compute_loss", "get_loss", "loss_fn", "criterion")
"""Usual names of a model's method or function that computes its loss."""


class ScoreLoss(Loss):
    """The model's scores, compared with targets.

    Args:
        call: how the model is called.
    """

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call.model)
        self._call = call
        self.default_loss = default_loss
        # Whether scores have their classes in dimension 1; None until the first whole-number targets tell.
        self._classes_second: bool | None = None
        # Lines that were returned already: scores are looked at before the evaluations and before the first step.
        self._said: set[str] = set()

    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the sum of the loss over the targets that count, and their number."""
        batch = self._call.within_context(batch)
        return self.sum_and_count_of(self._call.outputs_of(batch), batch)

    def sum_and_count_of(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the same from what the model gave for a batch."""
        scores, targets = self._pair_of(outputs, batch)
        loss, count = self.loss_of(scores, targets)
        return self.with_router(loss, count, outputs), count

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns "loss", "count" and, for classes, "correct"."""
        batch = self._call.within_context(batch)
        return self.sums_in(self._call.outputs_of(batch), batch)

    def sums_in(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Returns the same from what the model gave for a batch."""
        scores, targets = self._pair_of(outputs, batch)
        sums = self.sums_of(scores, targets)
        sums["loss"] = self.with_router(sums["loss"], sums["count"], outputs)
        return sums

    def _pair_of(self, outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
        scores = self._scores_in(outputs)
        targets = self._call.targets_of(batch)
        self._decide_classes(scores, targets, batch)
        return scores, targets

    def loss_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns sum and count, from what the model gave for the inputs (and targets, if it takes them)."""
        if self._call.takes_targets:
            return outputs[0], num_counted(targets)
        return self.default_loss(outputs, targets, classes_second=self._classes_second)

    def sums_of(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns the sums of a batch, from what the model gave."""
        if self._call.takes_targets:
            return {"loss": outputs[0], "count": num_counted(targets), "correct": outputs[1]}
        return default_sums(outputs, targets, classes_second=self._classes_second)

    def _decide_classes(self, scores: Tensor, targets: Tensor, batch: Batch) -> None:
        """Finds out where scores have their classes, unless it is known: the same for all batches of a run."""
        if self._classes_second is None and not self._call.takes_targets:
            self._classes_second = decide_classes_second(scores, targets, inputs_in(batch))

    def check_batch(self, batch: Batch) -> None:
        """Checks the batch, and finds out what its labels are; probabilities of classes are refused as targets."""
        self._call.check_batch(batch)
        if not isinstance(batch, dict) and len(batch) in (2, WITH_POSITIONS):
            require_values(batch[1])

    def other_loss(self, batch: Batch) -> str | None:
        """Returns a line about a loss that a person may have meant and that is not the one that is trained.

        None where the model computes the trained loss itself, or nothing points to another one.
        """
        if self._call.takes_targets or self._call.own_loss.takes_labels:
            return None
        targets = labels_in(batch)
        if targets is None:
            return None
        kind = "mean squared error" if targets.is_floating_point() else "cross entropy"
        names = _names_of_losses(self.model)
        if names:
            return (
                f"the {kind} of the output is trained; {', '.join(names)} of {type(self.model).__name__} counts only "
                "if its forward uses it: define training_loss(batch) on the model for another loss"
            )
        is_one = targets == 1
        if targets.is_floating_point() and is_one.any() and not is_one.all() and (is_one | (targets == 0)).all():
            return (
                "the targets are 0 and 1 as floats, so the mean squared error of the output is trained: for a binary "
                "cross entropy define training_loss(batch) on the model"
            )
        return None

    def check_scores(self, samples: Batch, labels: Tensor | None) -> str | None:
        """Checks scores and labels, unless the model compares them itself."""
        if self._call.takes_targets:
            return None
        samples = self._call.within_context(samples)
        with torch.compiler.set_stance("force_eager"):
            outputs = self._call.outputs_of(samples)
        return self.check_scores_in(outputs, samples, labels)

    def check_scores_in(self, outputs: Any, samples: Batch, labels: Tensor | None) -> str | None:
        """Checks the scores that the model gave for some samples, and the labels of all of the micro-batch."""
        scores, targets = self._pair_of(outputs, samples)
        if targets.is_floating_point():
            default_loss(scores, targets)
            return None
        all_labels = targets if labels is None else labels
        require_labels(all_labels, num_scores=scores.shape[1 if self._classes_second else -1])
        # Only now: torch would raise for labels without a score, and a GPU would be lost.
        default_loss(scores, targets, classes_second=self._classes_second)
        second = self._classes_second
        notes = (
            note_of_classes(scores, targets, classes_second=second),
            note_of_probabilities(scores, classes_second=second, is_training=self.model.training),
        )
        new_notes = [note for note in notes if note is not None and note not in self._said]
        self._said.update(new_notes)
        return "; ".join(new_notes) or None

    def check_documents(self, samples: Batch) -> None:
        """Checks that the scores of a document do not depend on the tokens before it.

        Those of the shipped GPT do not. A model of a library may take `position_ids` and use them to turn by alone.
        """
        has_positions = isinstance(samples, tuple) and len(samples) == WITH_POSITIONS
        if self._call.takes_targets or not has_positions:
            return
        first: Any = samples
        tokens = first[0][:1]
        # Two documents of equal length, so that all ranks do the same whatever their samples are.
        half = tokens.shape[1] // 2
        order = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        position_ids = torch.where(order < half, order, order - half)
        others = tokens.clone()
        others[:, :half] = tokens[:, half : 2 * half]
        with self._evaluating():
            scores, changed = (
                precise(self._scores_in(self.model(words, position_ids=position_ids))) for words in (tokens, others)
            )
        difference = float((scores - changed)[:, half:].abs().max())
        if difference > LOW_TOLERANCE * max(float(scores[:, half:].abs().max()), 1.0):
            raise ConfigError(
                f"{self._call.own_loss.name} takes position_ids, and the scores of a document still depend on the "
                f"tokens of the one before it (by {difference:.3g})",
                hint="data.document_mask=false trains it as it is; an attention of its own has to begin anew where "
                "position_ids are 0",
            )

    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Compares the loss with that of a model that takes labels beside the inputs, too."""
        gives_loss = self._call.own_loss.takes_labels and not self._call.takes_targets
        if not gives_loss or isinstance(batch, dict) or len(batch) != 2:
            return None
        with self._evaluating():
            batch, own_losses = self._call.own_losses(self._call.within_context(batch))
            self._call.require_same(self.sum_and_count(batch), own_losses, tolerance=tolerance)
        return None

    def with_router(self, loss: Tensor, count: Tensor, outputs: Any) -> Tensor:
        """Returns a sum of losses with that of a mixture's routers, which is a mean, added to every item."""
        routers = getattr(outputs, "aux_loss", None)
        scale = self._call.own_loss.router_scale
        if not scale or routers is None:
            return loss
        return loss + scale * precise(routers) * count

    def _scores_in(self, outputs: Any) -> Any:
        if self._call.takes_targets:
            return outputs
        scores = scores_in(outputs)
        if not isinstance(scores, Tensor):
            raise ConfigError(
                f"{type(self.model).__name__} gave a {type(scores).__name__}, not a tensor of scores",
                hint="give the tensor, or an object with it as `.logits`, or define training_loss(batch) on the model",
            )
        return scores


def _names_of_losses(model: nn.Module) -> list[str]:
    """Returns the modules of torch in a model that compute losses, and its methods that are called so."""
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.modules.loss._Loss)]
    methods = [name for name in _LOSS_METHODS if name not in modules and callable(getattr(model, name, None))]
    return modules + methods
