"""Evaluation where ranks hold parts of the model: every pass is an exchange, so all ranks make equally many.

A rank that has no batch left takes part with one that does not count, and a stop is agreed upon before each pass. As
with whole replicas no sample counts twice, so the measure does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.config.layout import ParallelLayout
from slurm_train.data.evaluation import evaluation_indices
from slurm_train.data.permutation import Int64Array
from slurm_train.data.source import Draw, SampleSource, StreamingSource
from slurm_train.distributed.context import SequencePart
from slurm_train.distributed.pipeline import Pipeline
from slurm_train.models.objective import Objective, default_sums
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.supervise.signals import StopFlag
from slurm_train.train.evaluate import broadcast_buffers, measures
from slurm_train.train.step import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEvaluator:
    """Measures a model on the held-out samples."""

    objective: Objective
    source: SampleSource
    layout: ParallelLayout
    rank: int
    device: torch.device
    batch_size: int
    autocast: torch.dtype | None
    stop: StopFlag
    pipeline: Pipeline | None = None
    """This rank's stage; None where every rank computes all layers."""
    part: SequencePart | None = None
    """This rank's positions of each sequence; None for all."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def evaluate(self) -> dict[str, float] | None:
        """Returns "eval_loss" and what else the objective counts, the same on every rank. Collective.

        None if some rank was asked to stop meanwhile.
        """
        broadcast_buffers(self.objective)
        self.objective.eval()
        try:
            sums = self._sums()
        finally:
            self.objective.train()
        if sums is None:
            return None
        self.heartbeat.mark("gather")
        of_ranks: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(of_ranks, sums if self.layout.owns_items(self.rank) else {})
        return measures(of_ranks, bytes_per_item=getattr(self.source, "bytes_per_target", None))

    @torch.no_grad()
    def _sums(self) -> dict[str, float] | None:
        """Returns the sums of this rank's samples, None when some rank was asked to stop."""
        totals: dict[str, Tensor] = {}
        num_own = _num_batches(self._indices())
        for number, batch in enumerate(self._batches(num_own)):
            self.heartbeat.mark("evaluate")
            if any_asks(self.stop):
                return None
            if self.part is not None:
                batch = self.part.cut(batch)
            if self.device.type != "cpu":
                batch = to_device(batch, self.device)
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                sums = self._sums_of(batch)
            for name, value in sums.items() if number < num_own else ():
                totals[name] = totals[name] + value.double() if name in totals else value.double()
        return {name: value.item() for name, value in totals.items()}

    def _sums_of(self, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Returns the sums of one batch, {} on all stages but the last."""
        if self.pipeline is None:
            return self.objective.evaluation_sums(batch)
        outputs = self.pipeline.forward(batch[0])
        return {} if outputs is None else default_sums(outputs, batch[1])

    def _indices(self) -> Iterator[Int64Array]:
        index = self.layout.data_parallel_index(self.rank)
        size = self.layout.data_parallel_size
        return evaluation_indices(len(self.source), rank=index, size=size, batch_size=self.batch_size)

    def _batches(self, num_own: int) -> Iterator[tuple[Tensor, ...]]:
        """Yields this rank's batches, then the first sample until every rank has had its own."""
        largest_share = -(-len(self.source) // self.layout.data_parallel_size)
        num_passes = -(-largest_share // self.batch_size)
        fill = (np.zeros(1, dtype=np.int64) for _ in range(num_passes - num_own))
        indices = chain(self._indices(), fill)
        if isinstance(self.source, StreamingSource):
            return self.source.stream(Draw(batch, batch) for batch in indices)
        return (self.source.batch(batch) for batch in indices)


def any_asks(stop: StopFlag) -> bool:
    """Returns whether any rank was asked to stop. Collective over all ranks, on the host."""
    asked = torch.tensor(int(bool(stop.requested)), dtype=torch.int64)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return bool(asked.item())


def _num_batches(indices: Iterator[Int64Array]) -> int:
    return sum(1 for _ in indices)
