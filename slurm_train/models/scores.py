"""The loss of scores: what a model's scores and the targets are compared by, and which of them cannot be compared.

Whole-number targets are classes, and the scores are compared with them by cross entropy; float targets are values, and
the outputs are compared with them by squared error. Which dimension of the scores has the classes is decided once, from
the first batch (`decide_classes_second`). What has a shape or a range that no such loss fits is refused, with the
change that makes it fit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slurm_train.errors import ConfigError
from slurm_train.models.own_loss import IGNORED

IGNORED_VALUE = float("-inf")
"""Float target of an item that does not count, as `data.source` has it."""
_TOLERANCE = 1e-3
"""Difference of a sum of probabilities from 1 that is rounding, also of numbers that were written with three digits."""
_LOW_TOLERANCE = 1e-2
"""The same in types of 16 bits."""
_LEAST_ITEMS = 4
"""So many items with a single 1 each are no accident where each may have several."""
_CUSTOMARY_MARKS = (-1, 255)
"""Labels that libraries and data sets of segmentation pass over."""


def default_loss(outputs: Tensor, targets: Tensor, *, classes_second: bool | None = None) -> tuple[Tensor, Tensor]:
    """Returns the sum of the loss, float32 (of float64 scores float64), and the number of items it is over.

    Args:
        outputs: (..., classes) or (n, classes, ...) for whole-number targets, else the shape of the targets.
        targets: whole numbers (...), -100 where an item does not count; or float (...), -inf where it does not.
        classes_second: the classes are in dimension 1; None takes what fits, the last dimension first.

    Raises:
        ConfigError: the shapes do not fit.
    """
    if targets.is_floating_point():
        _require_same_shape(outputs, targets)
        counted = targets != IGNORED_VALUE
        values = torch.where(counted, precise(outputs), 0.0)
        loss = functional.mse_loss(values, torch.where(counted, targets.to(values.dtype), 0.0), reduction="sum")
        return loss, num_counted(targets)
    logits, labels = _by_item(outputs, targets, classes_second)
    loss = functional.cross_entropy(precise(logits), labels, ignore_index=IGNORED, reduction="sum")
    return loss, num_counted(targets)


def num_counted(targets: Tensor) -> Tensor:
    """Returns how many targets count, a whole number (a scalar tensor)."""
    return (targets != (IGNORED_VALUE if targets.is_floating_point() else IGNORED)).sum()


def default_sums(outputs: Tensor, targets: Tensor, *, classes_second: bool | None = None) -> dict[str, Tensor]:
    """Returns the sums of a batch: "loss", "count" and, for whole-number targets, "correct"."""
    loss, count = default_loss(outputs, targets, classes_second=classes_second)
    sums = {"loss": loss, "count": count}
    if not targets.is_floating_point():
        logits, labels = _by_item(outputs, targets, classes_second)
        # A label that is passed over is negative, which no class is.
        sums["correct"] = (logits.argmax(dim=-1) == labels).sum()
    return sums


def precise(values: Tensor) -> Tensor:
    """Returns the values in float32, or in float64 where they come in it."""
    return values if values.dtype == torch.float64 else values.float()


def decide_classes_second(outputs: Tensor, targets: Tensor, inputs: Tensor | None) -> bool | None:
    """Returns whether dimension 1 of scores has the classes; None where the targets are no classes.

    Where both the last dimension and dimension 1 fit, the inputs decide: their places are where those of the targets
    are, behind the samples (texts, (n, places, features)) or behind the channels, as for torch's convolutions.

    Args:
        outputs: scores.
        targets: of the same samples.
        inputs: of the same samples; None where they are several tensors.

    Raises:
        ConfigError: both fit, and the inputs do not decide.
    """
    if targets.is_floating_point():
        return None
    fits_last, fits_second = _fits(outputs, targets)
    if not (fits_last and fits_second):
        return fits_second
    places = targets.shape[1:]
    shape = torch.Size() if inputs is None else inputs.shape
    are_first = shape[1 : 1 + len(places)] == places
    are_behind_channels = shape[2 : 2 + len(places)] == places
    if are_first != are_behind_channels:
        return are_behind_channels
    raise ConfigError(
        f"the model gave {tuple(outputs.shape)} for whole-number targets of {tuple(targets.shape)}: the classes may be "
        "in the last dimension or, as in torch, in dimension 1",
        hint="define training_loss(batch) on the model, e.g. with functional.cross_entropy(scores, targets, "
        'reduction="sum"), or give another number of scores than there are places',
    )


def note_of_classes(outputs: Tensor, targets: Tensor, *, classes_second: bool | None) -> str | None:
    """Returns a line that says which dimension has the classes, where the shapes alone do not."""
    if targets.is_floating_point() or not all(_fits(outputs, targets)):
        return None
    places = "behind a dimension of channels" if classes_second else "behind the samples"
    dim = "dimension 1" if classes_second else "the last dimension"
    return f"scores of {tuple(outputs.shape)} have their classes in {dim}, since the places of the inputs are {places}"


def require_values(targets: Tensor) -> None:
    """Checks that float targets are no probabilities of classes, whose squared error would be trained.

    Raises:
        ConfigError: they are: not negative, and the sum over the last dimension or dimension 1 is 1 for all items.
    """
    if not targets.is_floating_point() or targets.dim() < 2 or not targets.numel():
        return
    tolerance = _LOW_TOLERANCE if targets.element_size() == 2 else _TOLERANCE
    for dim in {1, targets.dim() - 1}:
        sums = precise(targets).sum(dim)
        if targets.shape[dim] < 2 or bool((targets < 0).any()) or bool(((sums - 1).abs() > tolerance).any()):
            continue
        is_one_hot = bool(((targets == 0) | (targets == 1)).all())
        if is_one_hot and sums.numel() < _LEAST_ITEMS:
            continue
        kind = "one-hot rows of classes" if is_one_hot else "probabilities of classes"
        raise ConfigError(
            f"the targets are {kind}: floats of {tuple(targets.shape)} whose sum over dimension {dim} is always 1; "
            "the mean squared error of the output would be trained",
            hint=(f"give the classes as whole numbers, targets.argmax({dim}); or " if is_one_hot else "")
            + "define training_loss(batch) on the model. For a cross entropy: "
            'functional.cross_entropy(scores, targets, reduction="sum") and the number of items; for the squared '
            "error: (outputs - targets).square().sum() and targets.numel()",
        )


def require_labels(labels: Tensor, *, num_scores: int) -> None:
    """Checks that there is a score for each label.

    Args:
        labels: whole numbers of any shape.
        num_scores: scores for each item.

    Raises:
        ConfigError: a label has no score, or there is one score alone, of which no cross entropy can be learned.
    """
    counted = labels[labels != IGNORED]
    if not counted.numel():
        return
    low = int(counted.min())
    high = int(counted.max())
    if num_scores > 1 and low >= 0 and high < num_scores:
        return
    outside = set(counted[(counted < 0) | (counted >= num_scores)].tolist())
    if num_scores == 1:
        hint = (
            "give a score for each class (two for labels 0 and 1); or give float targets of the output's shape and "
            "define training_loss(batch) with functional.binary_cross_entropy_with_logits on the model"
        )
    elif outside <= set(_CUSTOMARY_MARKS):
        mark = min(outside)
        hint = f"-100 marks items that do not count: labels.masked_fill(labels == {mark}, -100), in a type with a sign"
    elif low == 1 and high == num_scores:
        hint = "labels begin at 0: give labels - 1"
    else:
        hint = f"let the model give {high + 1} scores, or correct the labels; -100 marks those that do not count"
    scores = "one score" if num_scores == 1 else f"{num_scores} scores"
    raise ConfigError(f"labels are {low} to {high}, and the model gives {scores} for each item", hint=hint)


def note_of_probabilities(outputs: Tensor, *, classes_second: bool | None, is_training: bool) -> str | None:
    """Returns a line where scores are probabilities already: the cross entropy takes a softmax of them once more.

    None for scores that are alike for all items, as those of a layer that begins with zeros and equal biases.

    Args:
        outputs: scores of some samples.
        classes_second: dimension 1 has the classes.
        is_training: the mode of the model that gave them.
    """
    scores = precise(outputs.detach().movedim(1, -1) if classes_second else outputs.detach()).flatten(0, -2)
    tolerance = _LOW_TOLERANCE if outputs.element_size() == 2 else _TOLERANCE
    if scores.shape[-1] < 2 or not bool(((scores >= 0) & (scores <= 1)).all()):
        return None
    if bool(((scores.sum(-1) - 1).abs() > tolerance).any()) or bool((scores == scores[:1]).all()):
        return None
    return (
        f"in {'training' if is_training else 'evaluation'} mode the scores are probabilities (0 to 1, and their sum is "
        "1), and the cross entropy takes a softmax of them once more: let the model return what goes into its softmax"
    )


def _fits(outputs: Tensor, targets: Tensor) -> tuple[bool, bool]:
    """Returns whether whole-number targets fit scores with the classes last, and with the classes in dimension 1."""
    fits_second = outputs.dim() >= 3 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
    return outputs.shape[:-1] == targets.shape, fits_second


def _require_same_shape(outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape == targets.shape:
        return
    hint = "give as many numbers as there are targets, or define training_loss(batch) on the model"
    if outputs.shape[:-1] == targets.shape:
        hint = "give classes as whole numbers, targets.long(); values in the shape of the output"
    raise ConfigError(f"the model gave {tuple(outputs.shape)} for targets of {tuple(targets.shape)}", hint=hint)


def _by_item(outputs: Tensor, targets: Tensor, classes_second: bool | None) -> tuple[Tensor, Tensor]:
    """Returns logits (items, classes) and labels (items,)."""
    fits_last, fits_second = _fits(outputs, targets)
    if fits_last and not classes_second:
        return outputs.flatten(0, -2), targets.long().flatten()
    if fits_second and classes_second is not False:
        return outputs.movedim(1, -1).flatten(0, -2), targets.long().flatten()
    hint = "give one score per class, classes last, or define training_loss(batch) on the model"
    if outputs.shape == targets.shape:
        hint = (
            "for one score or several labels per sample give float targets and define training_loss(batch) with "
            "functional.binary_cross_entropy_with_logits on the model; of one-hot rows give the classes, "
            "targets.argmax(-1)"
        )
    elif targets.dim() == outputs.dim() and 1 in (targets.shape[1], targets.shape[-1]):
        hint = f"give one label per item: targets.squeeze({1 if targets.shape[1] == 1 else -1})"
    raise ConfigError(
        f"the model gave {tuple(outputs.shape)} for whole-number targets of {tuple(targets.shape)}", hint=hint
    )
