"""Evaluation over the held-out samples: sums and counts on each rank, put together once.

No sample is padded and none counts twice, so the number does not depend on how many ranks measured it. A rank without
a batch takes part in the exchange all the same; so does one that was asked to stop, and then nothing is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_train.data.source import Lengths, SampleSource
from slurm_train.data.stream import evaluation_batches
from slurm_train.distributed.place import RankPlace
from slurm_train.models.objective import Objective
from slurm_train.rundir.heartbeat import Heartbeat
from slurm_train.supervise.signals import StopFlag
from slurm_train.train.step import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures a model on the held-out samples."""

    objective: Objective
    source: SampleSource
    place: RankPlace
    device: torch.device
    batch_size: int
    autocast: torch.dtype | None
    stop: StopFlag
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    lengths: Lengths | None = None
    """What each sample costs, where all ranks shall have equal work."""

    def evaluate(self) -> dict[str, float] | None:
        """Returns "eval_loss" and what else the objective counts, the same on every rank. Collective.

        None if some rank was asked to stop meanwhile.
        """
        broadcast_buffers(self.objective)
        self.objective.eval()
        try:
            sums = self._sums(self._batches())
        finally:
            self.objective.train()
        self.heartbeat.mark("gather")
        of_ranks: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(of_ranks, sums)
        if any(of_rank is None for of_rank in of_ranks):
            return None
        return measures(of_ranks, bytes_per_item=getattr(self.source, "bytes_per_target", None))

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        place = self.place
        return evaluation_batches(
            self.source,
            rank=place.rank,
            size=place.world_size,
            batch_size=self.batch_size,
            lengths=self.lengths,
        )

    @torch.no_grad()
    def _sums(self, batches: Iterator[tuple[Tensor, ...]]) -> dict[str, float] | None:
        """Returns this rank's sums, {} without batches, None when asked to stop."""
        totals: dict[str, Tensor] = {}
        for batch in batches:
            self.heartbeat.mark("evaluate")
            if self.stop.requested:
                return None
            if self.device.type != "cpu":
                batch = to_device(batch, self.device)
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                sums = self.objective.evaluation_sums(batch)
            for name, value in sums.items():
                # float64 on the device: exact for counts, and nothing waits for the host.
                totals[name] = totals[name] + value.double() if name in totals else value.double()
        return {name: value.item() for name, value in totals.items()}


def measures(of_ranks: list[dict[str, float]], *, bytes_per_item: float | None) -> dict[str, float]:
    """Returns the measures of all ranks' sums; the order of summation is fixed, so the bits are too.

    Args:
        of_ranks: sums by name, one mapping per rank; a rank without batches gives {}.
        bytes_per_item: bytes of text per predicted token, None for other data.
    """
    names = sorted({name for sums in of_ranks for name in sums})
    total = {name: math.fsum(sums.get(name, 0.0) for sums in of_ranks) for name in names}
    count = total.pop("count", 0.0)
    if not count:
        return {}
    found = {"eval_loss": total.pop("loss") / count}
    if "correct" in total and bytes_per_item is None:
        found["eval_accuracy"] = total["correct"] / count
    if bytes_per_item is not None:
        found["eval_bits_per_byte"] = found["eval_loss"] / math.log(2) / bytes_per_item
    return found | {f"eval_{name}": value / count for name, value in total.items() if name != "correct"}


def broadcast_buffers(module: nn.Module) -> None:
    """Gives every rank rank 0's buffers (running statistics), as they are evaluated and saved. Collective."""
    saved = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in saved:
            dist.broadcast(buffer, src=0)
