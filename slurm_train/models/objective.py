"""What a model is trained for and measured by.

A loss here is always a sum and a count, never a mean: sums over micro-batches and ranks divided by the sum of counts
give every item the same weight, however a batch was split. A model may bring its own by defining

    training_loss(batch: Batch) -> tuple[Tensor, Tensor]     # float32 sum, count
    evaluation_sums(batch: Batch) -> dict[str, Tensor]       # "loss", "count", optionally "correct", ...

either or both. Otherwise a batch is (inputs, targets) and `model(inputs)` is scored by cross entropy where targets are
whole numbers (-100 is passed over) and by squared error where they are not. A language model whose last layer computes
the cross entropy itself (`models.head`) has `takes_targets = True` and is called as `model(inputs, targets=targets)`.
Or a batch is a dict: the model gets its tensors
by name, and is scored by `labels` in the same way as models of transformers are: by cross entropy, of the next token
where the labels repeat `input_ids`. Without whole-number labels the model's own `.loss`, a mean over samples, counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError

Batch = tuple[Tensor, ...] | dict[str, Tensor]
IGNORED = -100
_LABELS = "labels"
Tokens = NDArray[np.unsignedinteger[Any]]
_ALPHA = 0.1
# Pairs of tokens counted at once; a block of int64 codes is 8 MB.
_BLOCK = 2**20


class Objective(nn.Module):
    """Wraps a model so that calling it gives the training loss: what DDP and compile are put around.

    Gradients are only synchronised for a call that goes through the wrapper's `forward`; a method of the model called
    directly would train each rank on its own.

    Args:
        model: the model; its state dict is the one to save, this wrapper has no state.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Of a class derived from such a model `forward` may have the inputs alone.
        self.takes_targets = (
            hasattr(model, "takes_targets") and "targets" in inspect.signature(model.forward).parameters
        )
        """Whether `model(inputs, targets=targets)` gives what `models.head.linear_cross_entropy` does."""
        self.default_loss = default_loss
        # Whether labels are the inputs themselves; None while no batch has told.
        self._repeats: bool | None = None
        self._takes_labels = False

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the float32 sum of the loss over the counted items, and their number (a scalar tensor)."""
        own = self._own_loss(batch)
        if own is not None:
            return self._sum_and_count(own(batch))
        outputs, targets = self._score(batch)
        return self.loss_of(outputs, targets)

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over the items of a batch: "loss", "count", "correct" for a classifier, or the model's own.

        Called without gradients, on any number of batches per rank.
        """
        own = getattr(self.model, "evaluation_sums", None)
        if own is not None:
            sums = own(batch)
            if not isinstance(sums, dict) or not {"loss", "count"} <= set(sums):
                raise ConfigError(
                    f"{type(self.model).__name__}.evaluation_sums gave {_kind(sums)}, not a dict with loss and count",
                    hint='return the sum of the loss over the batch as "loss" and the number of items as "count"',
                )
            return {name: one if isinstance(one, Tensor) else torch.tensor(one) for name, one in sums.items()}
        own_loss = self._own_loss(batch)
        if own_loss is not None:
            loss, count = self._sum_and_count(own_loss(batch))
            return {"loss": loss, "count": count}
        return self.sums_of(*self._score(batch))

    def loss_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what `forward` does, from what the model gave for the inputs (and targets, if it takes them)."""
        if self.takes_targets:
            return outputs[0], (targets != IGNORED).sum()
        return self.default_loss(outputs, targets)

    def sums_of(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns what `evaluation_sums` does, from what the model gave."""
        if self.takes_targets:
            return {"loss": outputs[0], "count": (targets != IGNORED).sum(), "correct": outputs[1]}
        return default_sums(outputs, targets)

    def look_at(self, batch: Batch) -> None:
        """Checks a batch before it is trained with, and finds out what its labels are.

        Raises:
            ConfigError: the targets are the inputs, so that copying them would be learned; or the batch has tensors
                that the model does not take.
        """
        if hasattr(self.model, "training_loss"):
            return
        if isinstance(batch, dict):
            inputs, targets = batch.get("input_ids"), batch.get(_LABELS)
            self._check_names(batch)
        else:
            inputs, targets = batch if len(batch) == 2 else (None, None)
        if inputs is None or targets is None or inputs.shape != targets.shape or targets.dim() < 2:
            self._repeats = False
            return
        counted = targets != IGNORED
        is_same = bool((inputs == targets)[counted].all())
        is_next = bool((inputs[:, 1:] == targets[:, :-1])[counted[:, :-1]].all())
        # A constant sequence is both, and tells nothing.
        if is_same == is_next and is_same:
            return
        self._repeats = is_same and not targets.is_floating_point()
        if self._repeats and not isinstance(batch, dict):
            raise ConfigError(
                "the targets are the inputs wherever they count, so the model would learn to copy them",
                hint="give (tokens[:-1], tokens[1:]), or a dict with input_ids and labels, whose labels are shifted "
                "here as transformers does; define training_loss(batch) on a model that has to copy",
            )

    def _check_names(self, batch: dict[str, Tensor]) -> None:
        known = inspect.signature(self.model.forward).parameters
        self._takes_labels = _LABELS in known and (
            known[_LABELS].default is inspect.Parameter.empty
            or getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        )
        others = [name for name in batch if name not in known and name != _LABELS]
        if others and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            raise ConfigError(
                f"a batch has {', '.join(others)}, which {type(self.model).__name__} does not take "
                f"(forward takes {', '.join(known)})",
                hint="leave them out of the samples, or define training_loss(batch) on the model",
            )

    def _own_loss(self, batch: Batch) -> Callable[[Batch], Any] | None:
        own = getattr(self.model, "training_loss", None)
        if own is None and isinstance(batch, dict):
            labels = batch.get(_LABELS)
            own = self._mean_over_samples if labels is None or labels.is_floating_point() else None
        return cast("Callable[[Batch], Any] | None", own)

    def _sum_and_count(self, made: Any) -> tuple[Tensor, Tensor]:
        """Returns what the model's own loss gave; a count that is a plain number as a tensor."""
        if (
            not isinstance(made, (tuple, list))
            or len(made) != 2
            or not (isinstance(made[0], Tensor) and made[0].dim() == 0 and isinstance(made[1], (Tensor, int, float)))
        ):
            raise ConfigError(
                f"{type(self.model).__name__}.training_loss gave {_kind(made)}, not the sum of the loss as a scalar "
                "tensor and the number of items",
                hint="return losses.sum(), losses.numel(); of a mean over n items mean * n, n",
            )
        loss, count = made
        return loss, count if isinstance(count, Tensor) else torch.full((), count, device=loss.device)

    def _mean_over_samples(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = getattr(self.model(**batch), "loss", None)
        if loss is None:
            raise ConfigError(
                f"a batch of {', '.join(batch)} has no whole-number labels, and {type(self.model).__name__} gives no "
                "loss of its own for it",
                hint="add `labels` to the samples (for a language model a copy of input_ids, shifted here), or "
                "define training_loss(batch) on the model",
            )
        count = torch.full((), len(next(iter(batch.values()))), device=loss.device)
        return _precise(loss) * count, count

    def _score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if isinstance(batch, dict):
            if self._repeats is None:
                self.look_at(batch)
            labels = batch[_LABELS]
            named = {name: one for name, one in batch.items() if name != _LABELS or self._takes_labels}
            if self._repeats is not False and labels.dim() > 1:
                labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            if self.takes_targets:
                return self.model(**named, targets=labels), labels
            return self._scores_in(self.model(**named)), labels
        if len(batch) != 2:
            raise ConfigError(
                f"a batch of {len(batch)} tensors has no (inputs, targets)",
                hint="define training_loss(batch) and evaluation_sums(batch) on the model",
            )
        if self.takes_targets:
            return self.model(batch[0], targets=batch[1]), batch[1]
        return self._scores_in(self.model(batch[0])), batch[1]

    def _scores_in(self, outputs: Any) -> Tensor:
        # Models of the transformers library give an object that holds the logits.
        scores = getattr(outputs, "logits", outputs)
        if not isinstance(scores, Tensor):
            raise ConfigError(
                f"{type(self.model).__name__} gave a {type(scores).__name__}, not a tensor of scores",
                hint="give the tensor, or an object with it as `.logits`, or define training_loss(batch) on the model",
            )
        return scores


def default_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the loss, float32 (of float64 scores float64), and the number of items it is over.

    Args:
        outputs: (..., classes) or (n, classes, ...) for whole-number targets, else the shape of the targets.
        targets: whole numbers (...), -100 where an item does not count; or float (...).

    Raises:
        ConfigError: the shapes do not fit.
    """
    if targets.is_floating_point():
        if outputs.shape != targets.shape:
            raise ConfigError(
                f"the model gave {tuple(outputs.shape)} for targets of {tuple(targets.shape)}",
                hint="give as many numbers as there are targets, or define training_loss(batch) on the model",
            )
        precise = _precise(outputs)
        loss = functional.mse_loss(precise, targets.to(precise.dtype), reduction="sum")
        return loss, torch.full((), targets.numel(), device=loss.device)
    logits, labels = _by_item(outputs, targets)
    loss = functional.cross_entropy(_precise(logits), labels, ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def default_sums(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Returns the sums of a batch: "loss", "count" and, for whole-number targets, "correct"."""
    loss, count = default_loss(outputs, targets)
    sums = {"loss": loss, "count": count}
    if not targets.is_floating_point():
        logits, labels = _by_item(outputs, targets)
        # A label that is passed over is negative, which no class is.
        sums["correct"] = (logits.argmax(dim=-1) == labels).sum()
    return sums


def _by_item(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits (items, classes) and labels (items,)."""
    if outputs.shape[:-1] == targets.shape:
        return outputs.flatten(0, -2), targets.long().flatten()
    if outputs.dim() >= 3 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape):
        return outputs.movedim(1, -1).flatten(0, -2), targets.long().flatten()
    raise ConfigError(
        f"the model gave {tuple(outputs.shape)} for whole-number targets of {tuple(targets.shape)}",
        hint="give one score per class, classes last, or define training_loss(batch) on the model",
    )


def _kind(value: object) -> str:
    """Returns what a value is, e.g. "(tensor of (4, 1), int)", "dict with loss"."""
    if isinstance(value, Tensor):
        return f"tensor of {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_kind, value))})"
    return f"dict with {', '.join(map(str, value))}" if isinstance(value, dict) else type(value).__name__


def _precise(values: Tensor) -> Tensor:
    """Returns the values in float32, or in float64 where they come in it."""
    return values if values.dtype == torch.float64 else values.float()


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
