"""The loss of a model that is called with lists of images and targets, as detectors are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import Batch, kind_of
from slurm_train.models.loss import LossOfMean
from slurm_train.models.model_call import require_forward
from slurm_train.models.own_loss import loss_in
from slurm_train.models.scores import precise


class ListLoss(LossOfMean):
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
        require_forward(self.model)

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
        if isinstance(batch, tuple) and len(batch) == 2 and takes_two(self.model):
            return batch
        raise ConfigError(
            f"a batch is {kind_of(batch)}, with which {type(self.model).__name__} cannot be scored",
            hint="give (images, targets) to a model that is called with both and returns a dict of losses; or define "
            "training_loss(batch) and evaluation_sums(batch) on the model, which get the batch as it is",
        )


def takes_two(model: nn.Module) -> bool:
    """Returns whether `model(inputs, targets)` can be called."""
    try:
        inspect.signature(model.forward).bind(None, None)
    except TypeError:
        return False
    return True


def _sum_of_losses(outputs: Mapping[str, Any]) -> Tensor | None:
    """Returns the sum of a dict of losses; None where something else is in it."""
    losses = [loss for loss in outputs.values() if isinstance(loss, Tensor) and not loss.dim()]
    if not losses or len(losses) != len(outputs):
        return None
    return torch.stack([precise(loss) for loss in losses]).sum()
