"""A model as this rank holds it in the run's layout: how a batch gets to it, and the sums that it is evaluated by.

An evaluation needs no more than this; `passes` adds what trains a model. So there is one place that knows how each
layout computes, and the way of a held-out batch to the model is that of a batch that is trained.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slurm_train.data.source import Batch, map_tensors
from slurm_train.distributed.pipeline import Pipeline
from slurm_train.models.batch_parts import has_lists
from slurm_train.models.objective import Objective
from slurm_train.train.context import Parts, Rank
from slurm_train.train.inputs import ModelInputs

_NUM_COMPARED = 2
"""Samples that are tried before the first step and before an evaluation."""


class HeldModel:
    """What a rank computes with: the loss around its model, and how batches get there.

    Args:
        rank: this rank.
        inputs: how batches get to its model.
        objective: the loss around it.
        pipeline: its stages; None where every rank computes all layers.
    """

    def __init__(
        self, rank: Rank, *, inputs: ModelInputs, objective: Objective, pipeline: Pipeline | None = None
    ) -> None:
        self.objective = objective
        self._rank = rank
        self._inputs = inputs
        self._pipeline = pipeline

    @property
    def is_replica(self) -> bool:
        """Whether this rank computes by itself; else each pass is an exchange, so all ranks make as many."""
        return self._rank.layout.is_replicated

    @property
    def counts_items(self) -> bool:
        """Whether this rank's items count; else another rank has the same ones."""
        return self._rank.layout.owns_items(self._rank.place.rank)

    @property
    def is_cut(self) -> bool:
        """Whether a rank has some of the layers or of a sequence's positions, so that it has no scores of its own."""
        return self._pipeline is not None or self._inputs.sequence_part is not None

    def on_device(self, batch: Batch) -> Batch:
        """Returns this rank's part of a batch on the device; the shards get float inputs as they are."""
        self._inputs.keep_floats(self.objective.model, batch)
        return self._inputs.on_device(batch)

    def few_of(self, batch: Batch) -> Batch:
        """Returns some samples of a batch on the device; one with lists as it is."""
        few = batch if has_lists(batch) else map_tensors(lambda tensor: tensor[:_NUM_COMPARED], batch)
        return self.on_device(few)

    def evaluate(self, batch: Any) -> dict[str, Tensor]:
        """Returns the objective's sums of a batch on the device, {} on all stages but the last.

        Collective unless `is_replica`. In evaluation mode and without gradients, which is the caller's matter.
        """
        with self._inputs.in_precision():
            if self._pipeline is None:
                return self.objective.evaluation_sums(batch)
            inputs, targets, *positions = batch
            scores = self.objective.scores
            words = {"targets": targets} if self.objective.call.takes_targets else {}
            if positions:
                words["position_ids"] = positions[0]
            outputs = self._pipeline.forward(inputs, **words)
            return {} if outputs is None else scores.sums_of(outputs, targets)

    @property
    def may_lack_loss(self) -> bool:
        """Whether the model may give no loss in evaluation mode, as detectors do."""
        return not self.is_cut and self.objective.may_lack_held_out_loss

    def gives_loss_of(self, sample: Batch) -> bool:
        """Returns whether the model gives a loss of such a sample in evaluation mode; lists are tried."""
        if not has_lists(sample):
            return True
        batch = self.on_device(sample)
        with self._inputs.in_precision():
            return self.objective.gives_held_out_loss(batch)

    def check_held_out(self, batch: Batch, labels: Tensor | None) -> str | None:
        """Checks held-out labels and scores, as the first step checks its own; returns a line if they are odd."""
        if self.is_cut or has_lists(batch) or hasattr(self.objective.model, "evaluation_sums"):
            return None
        few = self.few_of(batch)
        with self._inputs.in_precision():
            return self.objective.choose(few).check_scores(few, labels)


def hold(parts: Parts, objective: Objective) -> HeldModel:
    """Returns the parts of a model with the loss around it, to be evaluated."""
    return HeldModel(parts.rank, inputs=parts.inputs, objective=objective, pipeline=parts.pipeline)
