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

So there are four losses, a class each; `Objective.choose` alone says which of them scores a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slurm_train.errors import ConfigError
from slurm_train.models.batch_parts import Batch, has_lists, kind_of
from slurm_train.models.list_loss import ListLoss, takes_two
from slurm_train.models.loss import Loss
from slurm_train.models.mean_loss import MeanLoss
from slurm_train.models.model_call import ModelCall
from slurm_train.models.score_loss import ScoreLoss
from slurm_train.models.training_loss import TrainingLoss


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
        self.call = ModelCall(model)
        """How the model is called, and what its labels are."""
        self.scores = ScoreLoss(self.call)
        """How scores are compared with targets."""
        self._means = MeanLoss(self.call, self.scores)
        self._lists = ListLoss(model)
        self._own = TrainingLoss(model) if hasattr(model, "training_loss") else None

    def choose(self, batch: Batch) -> Loss:
        """Returns the loss that scores a batch; a collate function may give lists and tensors in turn."""
        if self._own is not None:
            return self._own
        if has_lists(batch):
            return self._lists
        may_have_mean = isinstance(batch, dict) or self.call.gives_loss_of_tuples
        return self._means if may_have_mean and not self.call.takes_targets else self.scores

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the float32 sum of the loss over the counted items, and their number (a scalar tensor)."""
        return self.choose(batch).sum_and_count(batch)

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over the items of a batch: "loss", "count", "correct" for a classifier, or the model's own.

        Called without gradients, on any number of batches per rank.
        """
        evaluation_sums = getattr(self.model, "evaluation_sums", None)
        if evaluation_sums is None:
            return self.choose(batch).sums(batch)
        sums = evaluation_sums(batch)
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
        return not has_own and not self.call.takes_targets and takes_two(self.model)

    def gives_held_out_loss(self, batch: Batch) -> bool:
        """Returns whether `evaluation_sums` can score such a batch, as far as lists are concerned.

        To be called in evaluation mode, without gradients.
        """
        return not has_lists(batch) or self._lists.scored(batch) is not None
