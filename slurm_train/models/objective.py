"""The loss that a model is trained with, and the sums that it is evaluated by.

A loss here is always a sum and a count, never a mean: sums over micro-batches and ranks divided by the sum of counts
give every item the same weight, however a batch was split. A model may bring its own by defining

    training_loss(batch: Batch) -> tuple[Tensor, Tensor]     # float32 sum, count
    evaluation_sums(batch: Batch) -> dict[str, Tensor]       # "loss", "count", optionally "correct", ...

either or both. Otherwise a batch is (inputs, targets) and `model(inputs)` is scored by cross entropy where targets are
whole numbers and by squared error where they are not (`models.scores`). A language model whose last layer computes
the cross entropy itself (`models.head`) has `takes_targets = True` and is called as `model(inputs, targets=targets)`.

Such a batch may have a third tensor, (inputs, targets, position_ids) of texts: where each token is in its document, 0
where another one begins (`models.documents`). It is for models whose `forward` takes `position_ids`.

Or a batch is a dict: the model gets its tensors by name. A model that takes `labels` and gives a loss for them, as
those of transformers do, is trained with that loss; it is a mean, and counts as many times as labels count
(`models.own_loss`). A model that gives scores alone is scored by the cross entropy of `labels`.

Or a batch is (images, targets) with lists of tensors or dicts in it, as detectors take them: `model(images, targets)`
gives a dict of losses, and their sum, a mean, counts as many times as there are images.

So there are four losses, a class each; `Objective._loss_for` alone says which of them scores a batch.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slurm_train.config.target import training_step_error
from slurm_train.errors import ConfigError
from slurm_train.models.own_loss import IGNORED, LABELS, loss_in, next_labels, own_loss_of, scores_in
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

Batch = tuple[Tensor, ...] | dict[str, Tensor]
Tokens = NDArray[np.unsignedinteger[Any]]
_ALPHA = 0.1
_TOLERANCE = 1e-3
"""Relative difference of a loss in float32 that is rounding."""
_LOW_TOLERANCE = 3e-2
"""The same in types of 16 bits."""
_NUM_SHOWN = 3
_WITH_POSITIONS = 3
"""Tensors of a batch (inputs, targets, position_ids)."""
_OTHER_LABELS = ("label", "label_ids", "target", "targets", "y")
"""What labels are called elsewhere; the collators of transformers rename the first two."""
_REDUCTIONS = ("ctc_loss_reduction",)
"""Settings of transformers that make a model's loss a sum."""
_LOSS_METHODS = ("loss", "compute_loss", "get_loss", "loss_fn", "criterion")
"""Usual names of a model's method or function that computes its loss."""
# Pairs of tokens counted at once; a block of int64 codes is 8 MB.
_BLOCK = 2**20


class Objective(nn.Module):
    """Wraps a model so that calling it returns the training loss; DDP and compile wrap this module.

    DDP synchronises gradients only for calls of the wrapper's `forward`: if the loss called a method of the model
    directly, each rank would train on its own.

    Args:
        model: the model; its state dict is saved, this wrapper has no state.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scores = ScoreLoss(model)
        """How scores are compared with targets."""
        self._means = MeanLoss(model, self.scores)
        self._lists = ListLoss(model)
        self._own = TrainingLoss(model) if hasattr(model, "training_loss") else None

    def _loss_for(self, batch: Batch) -> Loss:
        """Returns the way in which a batch is scored; a collate function may give lists and tensors in turn."""
        if self._own is not None:
            return self._own
        if _has_lists(batch):
            return self._lists
        may_have_mean = isinstance(batch, dict) or self.scores.gives_loss_of_tuples
        return self._means if may_have_mean and not self.scores.takes_targets else self.scores

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the float32 sum of the loss over the counted items, and their number (a scalar tensor)."""
        return self._loss_for(batch).sum_and_count(batch)

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over the items of a batch: "loss", "count", "correct" for a classifier, or the model's own.

        Called without gradients, on any number of batches per rank.
        """
        evaluation_sums = getattr(self.model, "evaluation_sums", None)
        if evaluation_sums is not None:
            return self._checked_sums(evaluation_sums(batch))
        return self._loss_for(batch).sums(batch)

    def _checked_sums(self, sums: Any) -> dict[str, Tensor]:
        """Returns what the model's `evaluation_sums` gave, plain numbers as tensors."""
        if not isinstance(sums, dict) or not {"loss", "count"} <= set(sums):
            raise ConfigError(
                f"{type(self.model).__name__}.evaluation_sums gave {kind_of(sums)}, not a dict with loss and count",
                hint='return the sum of the loss over the batch as "loss" and the number of items as "count"',
            )
        return {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in sums.items()}

    @property
    def may_lack_held_out_loss(self) -> bool:
        """Whether the model could be a detector, which gives predictions alone in evaluation mode."""
        has_own = any(hasattr(self.model, name) for name in ("training_loss", "evaluation_sums"))
        return not has_own and not self.scores.takes_targets and _takes_two(self.model)

    def gives_held_out_loss(self, batch: Batch) -> bool:
        """Returns whether `evaluation_sums` can score such a batch, as far as lists are concerned.

        To be called in evaluation mode, without gradients.
        """
        return not _has_lists(batch) or self._lists.scored(batch) is not None

    @property
    def context(self) -> int | None:
        """Positions that a table of the model has, None where it has no such table."""
        return self.scores.own_loss.context

    def num_too_long(self, batch: Batch) -> int:
        """Returns how many samples of a batch on the CPU have more tokens than the model has positions."""
        return self.scores.num_too_long(batch)

    # --- before the first step ---

    def check_batch(self, batch: Batch) -> None:
        """Checks a batch before it is trained with, and finds out what its labels are.

        Raises:
            ConfigError: the targets are the inputs, so that copying them would be learned, or probabilities of classes;
                or the batch has tensors that the model does not take; or the model has a training step of its own,
                which would not be called.
        """
        if self._own is None and hasattr(self.model, "training_step"):
            raise training_step_error(type(self.model).__name__)
        self._loss_for(batch).check_batch(batch)

    def other_loss(self, batch: Batch) -> str | None:
        """Returns a line about a loss that a person may have meant and that is not the one that is trained.

        None where the model computes the trained loss itself, or nothing points to another one.
        """
        return self._loss_for(batch).other_loss(batch)

    @property
    def repeats(self) -> bool | None:
        """Whether labels repeat the inputs, as far as this rank's batches have told; None: they have not."""
        return self.scores.repeats

    def agree(self, repeats: Iterable[bool | None]) -> str | None:
        """Takes over what the batches of all ranks have told, and returns a line that says what follows from it.

        Args:
            repeats: `repeats` of every rank, in the same order on each.

        Raises:
            ConfigError: labels are the next tokens already, and the model takes the next ones again.
        """
        return self.scores.agree(repeats)

    @torch.no_grad()
    def check_scores(self, samples: Batch, labels: Tensor | None) -> str | None:
        """Checks the model's scores in its present mode; returns a new line if they are odd. Collective if it is cut.

        A loss that the model computes itself is checked by `compare`.

        Args:
            samples: some of a micro-batch, on the model's device.
            labels: of all samples of the micro-batch, on any device; None: those of the samples.

        Raises:
            ConfigError: no loss fits the shapes, or labels have no score.
        """
        return self._loss_for(samples).check_scores(samples, labels)

    @torch.no_grad()
    def check_documents(self, samples: Batch) -> None:
        """Checks that the model keeps the documents of a sequence apart. Collective where the model is cut.

        Args:
            samples: some of a micro-batch, on the model's device.

        Raises:
            ConfigError: the scores of a document depend on the tokens before it.
        """
        self._loss_for(samples).check_documents(samples)

    @torch.no_grad()
    def compare(self, batch: Batch, *, is_precise: bool) -> str | None:
        """Compares the loss that is trained with what the model computes itself. Collective where it is cut.

        Args:
            batch: some samples, on the model's device.
            is_precise: the model computes in float32.

        Returns:
            A line where a `training_loss` does not return a sum and the number of its items.

        Raises:
            ConfigError: they differ, with both numbers; or the model's own is a sum over the samples, no mean.
        """
        if self.scores.takes_targets:
            return None
        return self._loss_for(batch).compare(batch, tolerance=_TOLERANCE if is_precise else _LOW_TOLERANCE)


class Loss(ABC):
    """A way to score a batch, with what is checked of it before the first step; base class of the four.

    Args:
        model: what is scored.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns what `Objective.forward` does."""

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns what `Objective.evaluation_sums` does."""
        loss, count = self.sum_and_count(batch)
        return {"loss": loss, "count": count}

    @abstractmethod
    def check_batch(self, batch: Batch) -> None:
        """Does what `Objective.check_batch` does."""

    def other_loss(self, _batch: Batch) -> str | None:
        """Returns what `Objective.other_loss` does."""
        return None

    def check_scores(self, _samples: Batch, _labels: Tensor | None) -> str | None:
        """Returns what `Objective.check_scores` does."""
        return None

    def check_documents(self, _samples: Batch) -> None:
        """Does what `Objective.check_documents` does."""
        return

    @abstractmethod
    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Returns what `Objective.compare` does; differences up to `tolerance` are rounding."""

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
                pairs = [self.sum_and_count(_repeated(batch, number)) for number in (1, 2)]
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


class _OfMeans(Loss):
    """What the two have in common whose model computes a mean itself."""

    @abstractmethod
    def mean_of(self, batch: Batch) -> Tensor | None:
        """Returns the mean that the model gives for a batch, None where it gives none."""

    def _require_mean(self, batch: Batch, *, tolerance: float) -> None:
        """Checks that the model's own loss of a sample and of the same sample twice is the same, as that of a mean is.

        Raises:
            ConfigError: it is twice as large; with both numbers.
        """
        losses = [self._mean_if_any(_repeated(batch, number)) for number in (1, 2)]
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


class ListLoss(_OfMeans):
    """The sum of the losses that a model gives for (images, targets), as detectors do; a mean over the images."""

    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses times the images, and the number of these.

        Raises:
            ConfigError: the model gives something else.
        """
        scored = self.scored(batch)
        if scored is None:
            raise ConfigError(
                f"{type(self.model).__name__}(images, targets) gave no loss of a batch that is {kind_of(batch)}",
                hint="return a dict of losses (scalar tensors) in training mode, as detectors of torchvision do; "
                "or define training_loss(batch) on the model",
            )
        return scored

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns "loss" and "count" of a batch.

        Raises:
            ConfigError: the model gives predictions alone in evaluation mode.
        """
        scored = self.scored(batch)
        if scored is None:
            raise ConfigError(
                f"{type(self.model).__name__} gives no loss of held-out samples in evaluation mode",
                hint="define evaluation_sums(batch) on the model, which returns sums of its loss or of a measure",
            )
        loss, count = scored
        return {"loss": loss, "count": count}

    def check_batch(self, batch: Batch) -> None:
        """Checks that the batch has two parts, and that the model is called with two."""
        self._images_and_targets(batch)
        _require_forward(self.model)

    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Checks that the losses are means; detectors give them in training mode alone."""
        self._require_mean(batch, tolerance=tolerance)
        return None

    def mean_of(self, batch: Batch) -> Tensor | None:
        """Returns the sum of the losses, None where the model gives none."""
        scored = self.scored(batch)
        return None if scored is None else scored[0] / scored[1]

    def scored(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Returns the sum of the losses that the model gives for (images, targets) times the images, and their number.

        None where it gives something else, as detectors do in evaluation mode.
        """
        images, targets = self._images_and_targets(batch)
        outputs = self.model(images, targets)
        mean = loss_in(outputs)
        if isinstance(outputs, Mapping) and "loss" not in outputs:
            mean = _sum_of_losses(outputs)
        if mean is None:
            return None
        count = torch.full((), len(images), device=mean.device)
        return precise(mean) * len(images), count

    def _images_and_targets(self, batch: Batch) -> tuple[Any, Any]:
        """Returns the two parts of a batch that has lists.

        Raises:
            ConfigError: there are others, or the model is not called with two.
        """
        if isinstance(batch, tuple) and len(batch) == 2 and _takes_two(self.model):
            return batch
        raise ConfigError(
            f"a batch is {kind_of(batch)}, with which {type(self.model).__name__} cannot be scored",
            hint="give (images, targets) to a model that is called with both and returns a dict of losses; or define "
            "training_loss(batch) and evaluation_sums(batch) on the model, which get the batch as it is",
        )


class MeanLoss(_OfMeans):
    """The mean that a model gives for labels, as those of transformers do; where it gives none, its scores decide.

    Args:
        model: what is scored.
        scores: how it is called, and how its scores are compared.
    """

    def __init__(self, model: nn.Module, scores: ScoreLoss) -> None:
        super().__init__(model)
        self._scores = scores

    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the mean times the number of items it is over, and that number."""
        batch = self._scores.within_context(batch)
        outputs = self._scores.call(batch)
        mean = self._mean_in(outputs, batch)
        if mean is None:
            return self._scores.sum_and_count_of(outputs, batch)
        count = self._count(batch)
        return precise(mean) * count, count

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns "loss" and "count", and "correct" where the model gives scores of classes, too."""
        batch = self._scores.within_context(batch)
        outputs = self._scores.call(batch)
        mean = self._mean_in(outputs, batch)
        if mean is None:
            return self._scores.sums_in(outputs, batch)
        count = self._count(batch)
        sums = {"loss": precise(mean) * count, "count": count}
        correct = _num_correct(scores_in(outputs), self._scores.own_loss.aligned(labels_in(batch)))
        if correct is not None:
            sums["correct"] = correct
        return sums

    def check_batch(self, batch: Batch) -> None:
        """Checks the batch, and finds out what its labels are."""
        self._scores.check_batch(batch)

    def other_loss(self, batch: Batch) -> str | None:
        """Returns a line where the model takes no labels, and has a loss that is not trained."""
        return self._scores.other_loss(batch)

    def check_scores(self, samples: Batch, labels: Tensor | None) -> str | None:
        """Checks the scores of a model that gives no mean."""
        if self._scores.own_loss.takes_labels:
            return None
        samples = self._scores.within_context(samples)
        with torch.compiler.set_stance("force_eager"):
            outputs = self._scores.call(samples)
        if self._mean_in(outputs, samples) is not None:
            return None
        return self._scores.check_scores_in(outputs, samples, labels)

    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Checks that the loss is a mean, and the one that is trained."""
        with self._evaluating():
            batch = self._scores.within_context(batch)
            self._require_mean(batch, tolerance=tolerance)
            if not self._scores.own_loss.takes_labels:
                return None
            if isinstance(batch, dict):
                if LABELS not in batch or self._scores.own_loss.shifts is None:
                    return None
                outputs = self.model(**batch)
                own_losses = [loss_in(outputs)]
                self._scores.learn_shift(outputs, batch[LABELS], tolerance=tolerance)
            elif len(batch) == 2:
                batch, own_losses = self._scores.own_losses(batch)
            else:
                return None
            self._scores.require_same(self.sum_and_count(batch), own_losses, tolerance=tolerance)
        return None

    def mean_of(self, batch: Batch) -> Tensor | None:
        """Returns the mean that the model gives, None where it gives none."""
        return loss_in(self._scores.call(batch))

    @property
    def _name(self) -> str:
        return self._scores.own_loss.name

    def _mean_in(self, outputs: Any, batch: Batch) -> Tensor | None:
        """Returns the loss that the model gave itself; None where it gave scores to be compared with targets."""
        mean = loss_in(outputs)
        labels = labels_in(batch)
        if mean is None and isinstance(batch, dict) and (labels is None or labels.is_floating_point()):
            raise ConfigError(
                f"a batch of {', '.join(batch)} has no whole-number labels, and {type(self.model).__name__} gives no "
                "loss of its own for it",
                hint=_hint_to_rename(batch)
                or "add `labels` to the samples (for a language model a copy of input_ids, shifted here), or define "
                "training_loss(batch) on the model",
            )
        return mean

    def _count(self, batch: Batch) -> Tensor:
        """Returns how many items the model's own mean is over."""
        first: Tensor = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return self._scores.own_loss.count(labels_in(batch), size=len(first)).to(first.device)


class ScoreLoss(Loss):
    """The model's scores, compared with targets.

    Args:
        model: what is scored.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # Of a class derived from such a model `forward` may have the inputs alone.
        self.takes_targets = (
            hasattr(model, "takes_targets") and "targets" in inspect.signature(model.forward).parameters
        )
        """Whether `model(inputs, targets=targets)` gives what `models.head.linear_cross_entropy` does."""
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        """Whether the model can keep documents of one sequence apart."""
        self.default_loss = default_loss
        self.own_loss = own_loss_of(model)
        """What the model says of a loss of its own."""
        # Whether labels are the inputs themselves; None while no batch has told.
        self.repeats: bool | None = None
        self._are_next = False
        # Whether scores have their classes in dimension 1; None until the first whole-number targets tell.
        self._classes_second: bool | None = None
        # Lines that were returned already: scores are looked at before the evaluations and before the first step.
        self._said: set[str] = set()

    def sum_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the sum of the loss over the targets that count, and their number."""
        batch = self.within_context(batch)
        return self.sum_and_count_of(self.call(batch), batch)

    def sum_and_count_of(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the same from what the model gave for a batch."""
        scores, targets = self._pair_of(outputs, batch)
        loss, count = self.loss_of(scores, targets)
        return self._with_router(loss, count, outputs), count

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns "loss", "count" and, for classes, "correct"."""
        batch = self.within_context(batch)
        return self.sums_in(self.call(batch), batch)

    def sums_in(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Returns the same from what the model gave for a batch."""
        scores, targets = self._pair_of(outputs, batch)
        sums = self.sums_of(scores, targets)
        sums["loss"] = self._with_router(sums["loss"], sums["count"], outputs)
        return sums

    def _pair_of(self, outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
        scores = self._scores_in(outputs)
        targets = self._targets(batch)
        self._decide_classes(scores, targets, batch)
        return scores, targets

    def loss_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns sum and count, from what the model gave for the inputs (and targets, if it takes them)."""
        if self.takes_targets:
            return outputs[0], num_counted(targets)
        return self.default_loss(outputs, targets, classes_second=self._classes_second)

    def sums_of(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns the sums of a batch, from what the model gave."""
        if self.takes_targets:
            return {"loss": outputs[0], "count": num_counted(targets), "correct": outputs[1]}
        return default_sums(outputs, targets, classes_second=self._classes_second)

    def _decide_classes(self, scores: Tensor, targets: Tensor, batch: Batch) -> None:
        """Finds out where scores have their classes, unless it is known: the same for all batches of a run."""
        if self._classes_second is None and not self.takes_targets:
            self._classes_second = decide_classes_second(scores, targets, inputs_in(batch))

    # --- before the first step ---

    def check_batch(self, batch: Batch) -> None:
        """Checks a batch before it is trained with, and finds out what its labels are.

        Raises:
            ConfigError: the targets are the inputs, so that copying them would be learned, or probabilities of classes;
                or the batch has tensors that the model does not take.
        """
        if isinstance(batch, dict):
            self._check_names(batch)
        else:
            self._check_call(batch)
            if len(batch) in (2, _WITH_POSITIONS) and not self.gives_loss_of_tuples:
                require_values(batch[1])
        self._require_labels_of_own_loss(batch)
        pair = _sequences_in(batch)
        if pair is None:
            self.repeats = False
            return
        inputs, targets = pair
        counted = targets != IGNORED
        is_same = bool((inputs == targets)[counted].all())
        is_next = bool((inputs[:, 1:] == targets[:, :-1])[counted[:, :-1]].all())
        # A constant sequence is both, and tells nothing.
        if is_same == is_next and is_same:
            return
        self._are_next = is_next and isinstance(batch, dict)
        self.repeats = is_same and not targets.is_floating_point()
        if self.repeats and not isinstance(batch, dict) and self.own_loss.shifts is not False:
            raise ConfigError(
                "the targets are the inputs wherever they count, so the model would learn to copy them",
                hint="give (tokens[:-1], tokens[1:]), or a dict with input_ids and labels, whose labels are shifted "
                "as transformers does; define training_loss(batch) on a model that has to copy",
            )

    def _require_labels_of_own_loss(self, batch: Batch) -> None:
        """Checks the range of labels that a model of transformers scores itself: a GPU would be lost by one outside.

        Raises:
            ConfigError: a label has no score.
        """
        num_scores = self.own_loss.num_scores
        gives_loss = isinstance(batch, dict) or self.gives_loss_of_tuples
        if num_scores is None or not gives_loss:
            return
        labels = labels_in(batch)
        if labels is not None and not labels.is_floating_point():
            require_labels(labels, num_scores=num_scores)

    def other_loss(self, batch: Batch) -> str | None:
        """Returns a line about a loss that a person may have meant and that is not the one that is trained.

        None where the model computes the trained loss itself, or nothing points to another one.
        """
        if self.takes_targets or self.own_loss.takes_labels:
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

    def agree(self, repeats: Iterable[bool | None]) -> str | None:
        """Takes over what the batches of all ranks have told, and returns a line that says what follows from it.

        Args:
            repeats: `repeats` of every rank, in the same order on each.

        Raises:
            ConfigError: labels are the next tokens already, and the model takes the next ones again.
        """
        if self._are_next and self.own_loss.shifts:
            raise ConfigError(
                f"the labels are the next tokens already, and {self.own_loss.name} compares scores with the label "
                "after them, so it would learn the token after the next",
                hint="let labels be a copy of input_ids (-100 where a token does not count), or give tuples "
                "(tokens[:-1], tokens[1:])",
            )
        known_answers = [answer for answer in repeats if answer is not None]
        if known_answers:
            self.repeats = all(known_answers)
        own_loss = self.own_loss
        is_guessed = own_loss.shifts is None and not own_loss.takes_labels
        if not self.repeats or not is_guessed:
            return None
        return (
            f"labels repeat input_ids, and {own_loss.name} gives no loss of its own: its scores are compared with "
            "the next token"
        )

    def check_scores(self, samples: Batch, labels: Tensor | None) -> str | None:
        """Checks scores and labels, unless the model compares them itself."""
        if self.takes_targets:
            return None
        samples = self.within_context(samples)
        with torch.compiler.set_stance("force_eager"):
            outputs = self.call(samples)
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
        has_positions = isinstance(samples, tuple) and len(samples) == _WITH_POSITIONS
        if self.takes_targets or not has_positions:
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
        if difference > _LOW_TOLERANCE * max(float(scores[:, half:].abs().max()), 1.0):
            raise ConfigError(
                f"{self.own_loss.name} takes position_ids, and the scores of a document still depend on the tokens of "
                f"the one before it (by {difference:.3g})",
                hint="data.document_mask=false trains it as it is; an attention of its own has to begin anew where "
                "position_ids are 0",
            )

    def compare(self, batch: Batch, *, tolerance: float) -> str | None:
        """Compares the loss with that of a model that takes labels beside the inputs, too."""
        if not self.own_loss.takes_labels or isinstance(batch, dict) or len(batch) != 2:
            return None
        with self._evaluating():
            batch, own_losses = self.own_losses(self.within_context(batch))
            self.require_same(self.sum_and_count(batch), own_losses, tolerance=tolerance)
        return None

    def own_losses(self, batch: Any) -> tuple[Batch, list[Tensor | None]]:
        """Returns (inputs, targets) to compare, and the losses that a model which takes labels may compute of them."""
        inputs, targets = batch
        follows = self.own_loss.shifts is not False and targets.dim() > 1 and targets.shape == inputs.shape
        if not follows:
            return batch, [loss_in(self.model(inputs, labels=targets))]
        # A model that shifts labels itself never looks at the last score.
        targets = torch.cat((targets[:, :-1], torch.full_like(targets[:, -1:], IGNORED)), dim=1)
        losses = [loss_in(self.model(inputs, labels=labels)) for labels in (targets, targets.roll(1, dims=1))]
        return (inputs, targets), losses

    def learn_shift(self, outputs: Any, labels: Tensor, *, tolerance: float) -> None:
        """Finds out whether the model compares labels with the scores before them; a name does not always tell."""
        loss = loss_in(outputs)
        scores = scores_in(outputs)
        can_be = isinstance(scores, Tensor) and labels.dim() > 1 and scores.shape[:-1] == labels.shape
        if loss is None or not can_be or labels.is_floating_point():
            return
        matches = []
        for targets in (labels, next_labels(labels)):
            total, count = default_loss(scores, targets)
            mean = self._with_router(total, count, outputs) / count
            matches.append(bool((mean - loss).abs() <= tolerance * loss.abs()))
        if any(matches) and not all(matches):
            self.own_loss = self.own_loss.shifted(matches[1])

    def require_same(self, scored: tuple[Tensor, Tensor], own_losses: list[Tensor | None], *, tolerance: float) -> None:
        """Checks that the loss that is trained is the model's own.

        Args:
            scored: sum and count of the loss that is trained.
            own_losses: those that the model computes; one of them has to be the same.
            tolerance: relative difference that is rounding.

        Raises:
            ConfigError: it is another one.
        """
        total, count = scored
        loss = float(total / count)
        losses = [own_loss.item() for own_loss in own_losses if own_loss is not None]
        differences = [abs(own_loss - loss) for own_loss in losses if math.isfinite(own_loss)]
        if not differences or not math.isfinite(loss) or min(differences) <= tolerance * max(1.0, abs(loss)):
            return
        raise ConfigError(
            f"the loss of the first samples is {loss:.6f} here, and {self.own_loss.name} computes {losses[-1]:.6f} "
            "itself",
            hint="give dicts with `labels`, with which the model's own loss is trained; or define training_loss(batch) "
            "on the model; or take `labels` out of its forward if that loss is not meant",
        )

    def _check_names(self, batch: dict[str, Tensor]) -> None:
        parameters = inspect.signature(self.model.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        unknown = [name for name in batch if name not in parameters and name != LABELS]
        if unknown and not takes_any:
            raise ConfigError(
                f"a batch has {', '.join(unknown)}, which {type(self.model).__name__} does not take "
                f"(forward takes {', '.join(parameters)})",
                hint=_hint_to_rename(batch)
                or "leave them out of the samples, or define training_loss(batch) on the model",
            )

    def _check_call(self, batch: tuple[Tensor, ...]) -> None:
        """Checks that the model can be called with what `_call` gives it of a tuple."""
        name = type(self.model).__name__
        _require_forward(self.model)
        if len(batch) == _WITH_POSITIONS and not self.takes_positions:
            raise ConfigError(
                f"the samples say where each token is in its document, and {name}.forward takes no position_ids",
                hint="data.document_mask=false lets a token attend to the documents before its own; or let forward "
                "take position_ids, 0 where a document begins",
            )
        if len(batch) not in (2, _WITH_POSITIONS):
            return
        words = {"targets": None} if self.takes_targets else {}
        if self.gives_loss_of_tuples:
            words = {LABELS: None}
        signature = inspect.signature(self.model.forward)
        try:
            signature.bind(batch[0], **words)
        except TypeError as err:
            raise ConfigError(
                f"{name}.forward takes {', '.join(signature.parameters)}; of a batch (inputs, targets) it is called "
                f"with the inputs alone: {err}",
                hint="let it take the inputs and return scores, whose loss is computed here; or define "
                "training_loss(batch) on the model: it returns the sum of the loss and the number of items, of a mean "
                "over n items mean * n, n",
            ) from err

    # --- what every step does ---

    def call(self, batch: Batch) -> Any:
        """Returns what the model gives for a batch; it gets the targets where it computes the loss from them."""
        if isinstance(batch, dict):
            if not self.takes_targets or LABELS not in batch:
                return self.model(**self.own_loss.words(batch))
            words = {name: tensor for name, tensor in batch.items() if name != LABELS}
            return self.model(**words, targets=self._targets(batch))
        if len(batch) not in (2, _WITH_POSITIONS):
            raise ConfigError(
                f"a batch of {len(batch)} tensors has no (inputs, targets)",
                hint="define training_loss(batch) and evaluation_sums(batch) on the model",
            )
        inputs, targets, *positions = batch
        words = {"position_ids": positions[0]} if positions else {}
        if self.takes_targets:
            return self.model(inputs, targets=targets, **words)
        if self.gives_loss_of_tuples:
            words |= self.own_loss.words({LABELS: targets})
        return self.model(inputs, **words)

    def num_too_long(self, batch: Batch) -> int:
        """Returns how many samples of a batch on the CPU have more tokens than the model has positions."""
        tokens = self._tokens_in(batch)
        context = self.own_loss.context
        if tokens is None or context is None or tokens.shape[1] <= context:
            return 0
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        return len(tokens) if mask is None else int(mask[:, context:].any(dim=1).sum())

    def _tokens_in(self, batch: Batch) -> Tensor | None:
        tokens = batch.get("input_ids") if isinstance(batch, dict) else batch[0]
        is_text = isinstance(tokens, Tensor) and tokens.dim() == 2 and not tokens.is_floating_point()
        return tokens if is_text else None

    def within_context(self, batch: Batch) -> Batch:
        """Returns a batch whose texts end where the model's table of positions does."""
        context = self.own_loss.context
        if context is None:
            return batch
        tokens = self._tokens_in(batch)
        if tokens is None or tokens.shape[1] <= context:
            return batch
        length = tokens.shape[1]

        def cut(tensor: Tensor) -> Tensor:
            has_positions = tensor.dim() > 1 and tensor.shape[1] == length
            return tensor[:, :context].contiguous() if has_positions else tensor

        if isinstance(batch, dict):
            return {name: cut(tensor) for name, tensor in batch.items()}
        return tuple(cut(tensor) for tensor in batch)

    @property
    def gives_loss_of_tuples(self) -> bool:
        """Whether targets that stand beside the inputs are labels as the model takes them."""
        return self.own_loss.takes_labels and self.own_loss.shifts is False

    def _targets(self, batch: Batch) -> Tensor:
        """Returns what scores are compared with, each at its place."""
        labels = labels_in(batch)
        assert labels is not None
        if not isinstance(batch, dict):
            return labels
        shifts = self.own_loss.shifts
        if shifts is None:
            # The model does not say it, so the batches have to.
            if self.repeats is None:
                self.check_batch(batch)
            shifts = self.repeats is not False
        return next_labels(labels) if shifts and labels.dim() > 1 else labels

    def _with_router(self, loss: Tensor, count: Tensor, outputs: Any) -> Tensor:
        """Returns a sum of losses with that of a mixture's routers, which is a mean, added to every item."""
        routers = getattr(outputs, "aux_loss", None)
        if not self.own_loss.router_scale or routers is None:
            return loss
        return loss + self.own_loss.router_scale * precise(routers) * count

    def _scores_in(self, outputs: Any) -> Any:
        if self.takes_targets:
            return outputs
        scores = scores_in(outputs)
        if not isinstance(scores, Tensor):
            raise ConfigError(
                f"{type(self.model).__name__} gave a {type(scores).__name__}, not a tensor of scores",
                hint="give the tensor, or an object with it as `.logits`, or define training_loss(batch) on the model",
            )
        return scores


def _require_forward(model: nn.Module) -> None:
    if type(model).forward is nn.Module.forward:
        raise ConfigError(
            f"{type(model).__name__} has no method forward",
            hint="define forward(inputs), which gives scores, or training_loss(batch) on the model",
        )


def _hint_to_rename(batch: Mapping[str, Any]) -> str | None:
    """Returns a hint where the labels of a batch have another name; else None."""
    name = next((name for name in _OTHER_LABELS if name in batch and LABELS not in batch), None)
    if name is None:
        return None
    return f"rename {name} to {LABELS} in the samples, e.g. data.rename_column({name!r}, {LABELS!r})"


def inputs_in(batch: Batch) -> Tensor | None:
    """Returns the inputs of a batch, of a dict what comes first."""
    if not isinstance(batch, dict):
        return batch[0]
    return next((tensor for name, tensor in batch.items() if name != LABELS), None)


def _repeated(batch: Any, number: int) -> Any:
    """Returns the first sample of a batch so many times."""
    if isinstance(batch, Tensor):
        return torch.cat([batch[:1]] * number)
    if isinstance(batch, dict):
        return {name: _repeated(part, number) for name, part in batch.items()}
    if _has_lists(batch):
        return tuple(_repeated(part, number) if isinstance(part, Tensor) else [*part[:1]] * number for part in batch)
    return tuple(_repeated(part, number) for part in batch)


def _sequences_in(batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Returns inputs and targets where there is a target for each position of a sequence, else None."""
    if isinstance(batch, dict):
        inputs = batch.get("input_ids")
        targets = batch.get(LABELS)
    elif len(batch) in (2, _WITH_POSITIONS):
        inputs, targets = batch[:2]
    else:
        return None
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if inputs.shape != targets.shape or targets.dim() < 2:
        return None
    return inputs, targets


def _sum_of_losses(outputs: Mapping[str, Any]) -> Tensor | None:
    """Returns the sum of a dict of losses; None where something else is in it."""
    losses = [loss for loss in outputs.values() if isinstance(loss, Tensor) and not loss.dim()]
    if not losses or len(losses) != len(outputs):
        return None
    return torch.stack([precise(loss) for loss in losses]).sum()


def _names_of_losses(model: nn.Module) -> list[str]:
    """Returns the modules of torch in a model that compute losses, and its methods that are called so."""
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.modules.loss._Loss)]
    methods = [name for name in _LOSS_METHODS if name not in modules and callable(getattr(model, name, None))]
    return modules + methods


def labels_in(batch: Batch) -> Tensor | None:
    """Returns `labels` of a dict, or the second of (inputs, targets) and position_ids; None for other tuples."""
    if isinstance(batch, dict):
        return batch.get(LABELS)
    return batch[1] if len(batch) in (2, _WITH_POSITIONS) else None


def _num_correct(scores: Any, labels: Tensor | None) -> Tensor | None:
    """Returns how many scores are highest at their label; None where they are no scores of classes."""
    if not isinstance(scores, Tensor) or labels is None or labels.is_floating_point():
        return None
    if scores.dim() < 2 or scores.shape[:-1] != labels.shape or scores.shape[-1] < 2:
        return None
    correct: Tensor = (scores.argmax(dim=-1) == labels).sum()
    return correct


def _has_lists(batch: Batch) -> bool:
    """Returns whether parts of a batch are lists or dicts of tensors."""
    parts: Any = batch.values() if isinstance(batch, dict) else batch
    return not all(isinstance(part, Tensor) for part in parts)


def _takes_two(model: nn.Module) -> bool:
    """Returns whether `model(inputs, targets)` can be called."""
    try:
        inspect.signature(model.forward).bind(None, None)
    except TypeError:
        return False
    return True


def kind_of(value: object) -> str:
    """Returns what a value is, e.g. "(tensor of (4, 1), int)", "dict with loss"."""
    if isinstance(value, Tensor):
        return f"tensor of {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        more = ", ..." if len(value) > _NUM_SHOWN else ""
        return f"({', '.join(map(kind_of, value[:_NUM_SHOWN]))}{more})"
    return f"dict with {', '.join(map(str, value))}" if isinstance(value, dict) else type(value).__name__


def bigram_bits_per_byte(
    train: Iterable[Tokens], heldout: Iterable[Tokens], *, vocab_size: int, bytes_per_target: float = 1.0
) -> float:
    """Returns the held-out bits per byte of a bigram model with add-0.1 smoothing: what a language model must beat.

    In every array all tokens but the first are targets, each predicted from the token before it: the same targets as a
    model's, which sees more than one token back.

    Args:
        train: arrays (n,) of token ids to count.
        heldout: arrays (n,) of token ids to predict; at least one target in all.
        vocab_size: number of token ids; the table has its square of entries, so this is for bytes.
        bytes_per_target: bytes of text per predicted token.
    """
    counts = _count_pairs(train, vocab_size)
    bits = -np.log2((counts + _ALPHA) / (counts + _ALPHA).sum(axis=1, keepdims=True))
    predicted = _count_pairs(heldout, vocab_size)
    return float((predicted * bits).sum() / predicted.sum() / bytes_per_target)


def _count_pairs(arrays: Iterable[Tokens], vocab_size: int) -> NDArray[np.int64]:
    """Returns how often the second token follows the first, int64 (vocab_size, vocab_size)."""
    counts = np.zeros(vocab_size * vocab_size, dtype=np.int64)
    for tokens in arrays:
        for start in range(0, len(tokens) - 1, _BLOCK):
            block = tokens[start : start + _BLOCK + 1].astype(np.int64)
            counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=len(counts))
    return counts.reshape(vocab_size, vocab_size)
