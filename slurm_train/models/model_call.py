"""How a model is called with a batch, and which label belongs to each of its scores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.config.target import training_step_error
from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import WITH_POSITIONS, Batch, labels_in, sequences_in
from slurm_train.models.own_loss import IGNORED, LABELS, loss_in, next_labels, own_loss_of
from slurm_train.models.scores import require_labels

_OTHER_LABELS = ("label", "label_ids", "target", "targets", "y")
"""What labels are called elsewhere; the collators of transformers rename the first two."""


class ModelCall:
    """Calls a model with batches, and finds out what their labels are.

    Args:
        model: what is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Of a class derived from such a model `forward` may have the inputs alone.
        words = inspect.signature(model.forward).parameters
        self.takes_targets = hasattr(model, "takes_targets") and "targets" in words
        """Whether `model(inputs, targets=targets)` gives what `models.head.linear_cross_entropy` does."""
        self.takes_positions = "position_ids" in words
        """Whether the model can keep documents of one sequence apart."""
        self.own_loss = own_loss_of(model)
        """What the model says of a loss of its own."""
        self.repeats: bool | None = None
        """Whether labels repeat the inputs, as far as this rank's batches have told; None: they have not."""
        self._are_next = False

    def outputs_of(self, batch: Batch) -> Any:
        """Returns what the model gives for a batch; it gets the targets where it computes the loss from them."""
        if isinstance(batch, dict):
            if not self.takes_targets or LABELS not in batch:
                return self.model(**self.own_loss.words(batch))
            words = {name: tensor for name, tensor in batch.items() if name != LABELS}
            return self.model(**words, targets=self.targets_of(batch))
        if len(batch) not in (2, WITH_POSITIONS):
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

    def targets_of(self, batch: Batch) -> Tensor:
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

    @property
    def gives_loss_of_tuples(self) -> bool:
        """Whether targets that stand beside the inputs are labels as the model takes them."""
        return self.own_loss.takes_labels and self.own_loss.shifts is False

    def check_batch(self, batch: Batch) -> None:
        """Checks a batch before it is trained with, and finds out what its labels are.

        Raises:
            ConfigError: the targets are the inputs, so that copying them would be learned; or the batch has tensors
                that the model does not take; or the model has a training step of its own, which would not be called.
        """
        require_forward(self.model)
        if isinstance(batch, dict):
            self._check_names(batch)
        else:
            self._check_call(batch)
        self._require_labels_of_own_loss(batch)
        pair = sequences_in(batch)
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

    def _check_names(self, batch: dict[str, Tensor]) -> None:
        parameters = inspect.signature(self.model.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        unknown = [name for name in batch if name not in parameters and name != LABELS]
        if unknown and not takes_any:
            raise ConfigError(
                f"a batch has {', '.join(unknown)}, which {type(self.model).__name__} does not take "
                f"(forward takes {', '.join(parameters)})",
                hint=hint_to_rename(batch)
                or "leave them out of the samples, or define training_loss(batch) on the model",
            )

    def _check_call(self, batch: tuple[Tensor, ...]) -> None:
        """Checks that the model can be called with what `outputs_of` gives it of a tuple."""
        name = type(self.model).__name__
        if len(batch) == WITH_POSITIONS and not self.takes_positions:
            raise ConfigError(
                f"the samples say where each token is in its document, and {name}.forward takes no position_ids",
                hint="data.document_mask=false lets a token attend to the documents before its own; or let forward "
                "take position_ids, 0 where a document begins",
            )
        if len(batch) not in (2, WITH_POSITIONS):
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


def require_forward(model: nn.Module) -> None:
    """Checks that a model without a `training_loss` is one that is called.

    Raises:
        ConfigError: it has no `forward`, or a training step of its own, which would not be called.
    """
    if hasattr(model, "training_step"):
        raise training_step_error(type(model).__name__)
    if type(model).forward is nn.Module.forward:
        raise ConfigError(
            f"{type(model).__name__} has no method forward",
            hint="define forward(inputs), which gives scores, or training_loss(batch) on the model",
        )


def hint_to_rename(batch: Mapping[str, Any]) -> str | None:
    """Returns a hint where the labels of a batch have another name; else None."""
    name = next((name for name in _OTHER_LABELS if name in batch and LABELS not in batch), None)
    if name is None:
        return None
    return f"rename {name} to {LABELS} in the samples, e.g. data.rename_column({name!r}, {LABELS!r})"
