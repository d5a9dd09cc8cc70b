"""The micro-batches of one data-parallel rank, in order, from any position on; here all are of the same size.

Optimizer step s of a run consumes the global positions [c, c + G), c being the samples consumed before it and G the
global batch. The slice of rank r is contiguous, and so is each of its micro-batches within it; hence every split of G
into ranks x local x accumulation reads the same global batches, equal or not, and resuming is a seek. The trainer
counts what the optimizer consumed; the stream only runs ahead of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from slurm_train.data.evaluation import evaluation_by_length, evaluation_indices
from slurm_train.data.global_batches import Split
from slurm_train.data.order import SampleOrder
from slurm_train.data.permutation import Int64Array
from slurm_train.data.source import Draw, Lengths, SampleSource, StreamingSource

# Indices permuted in one call. One step at a time would cost 30 us a step; this many cost 0.1 ms once in many steps.
_LOOKAHEAD_INDICES = 4096


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Which part of each global batch one data-parallel rank reads.

    Attributes:
        global_size: samples of one optimizer step over all ranks.
        local_size: samples of one micro-batch on this rank.
        accumulation: micro-batches of one optimizer step.
        data_parallel_rank: place of this rank among the data-parallel ranks, from 0.
        first: where in the global batch the slice begins; None: all ranks have equal slices.
    """

    global_size: int
    local_size: int
    accumulation: int
    data_parallel_rank: int
    first: int | None = None

    def __post_init__(self) -> None:
        assert self.share > 0, f"an empty slice: {self}"
        assert self.first is not None or self.global_size % self.share == 0, f"unequal slices: {self}"
        assert 0 <= self.begin <= self.global_size - self.share, f"no such rank: {self}"

    @property
    def begin(self) -> int:
        """Where in the global batch the slice begins."""
        return self.data_parallel_rank * self.share if self.first is None else self.first

    @property
    def share(self) -> int:
        """Samples of one optimizer step on this rank."""
        return self.local_size * self.accumulation


class MicroBatch(NamedTuple):
    """One micro-batch on this rank.

    Attributes:
        indices: int64 (local_size,), the samples it is made of.
        tensors: what the model's objective takes, most often (inputs, targets).
    """

    indices: Int64Array
    tensors: tuple[Tensor, ...]


class BatchStream:
    """An endless iterator over this rank's micro-batches.

    Args:
        source: where samples come from.
        draws: which ones each micro-batch is made of.
    """

    def __init__(self, source: SampleSource, draws: Iterator[Draw]) -> None:
        self._source = source
        self._draws = draws
        self._waiting: deque[Int64Array] = deque()
        self._batches = (
            source.stream(_remember(self._draws, self._waiting)) if isinstance(source, StreamingSource) else None
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if self._batches is None:
            indices = next(self._draws).indices
            return MicroBatch(indices, self._source.batch(indices))
        tensors = next(self._batches)
        return MicroBatch(self._waiting.popleft(), tensors)


def _remember(draws: Iterator[Draw], waiting: deque[Int64Array]) -> Iterator[Draw]:
    """Keeps the samples of batches that a streaming source has asked for and not given back yet."""
    for draw in draws:
        waiting.append(draw.indices)
        yield draw


class EvenBatches:
    """Global batches of the same number of samples, in the run's order.

    Args:
        order: the run's order of samples.
        global_size: samples of a global batch.
    """

    def __init__(self, order: SampleOrder, *, global_size: int) -> None:
        self._order, self._global_size = order, global_size

    def size_at(self, _samples: int) -> int:
        """Returns the number of samples of any global batch."""
        return self._global_size

    def size_before(self, _samples: int) -> int:
        """Returns the number of samples of any global batch."""
        return self._global_size

    def align(self, samples: int) -> int:
        """Returns the position itself: a global batch may begin anywhere."""
        return samples

    def sample_ids(self, first: int, count: int) -> Int64Array:
        """Returns the samples at consecutive positions, int64 (count,)."""
        return self._order.indices(first, count)

    def draws(self, split: Split, *, start_samples: int) -> Iterator[Draw]:
        """Yields a rank's micro-batches from a position on, without end."""
        sizes = split.sizes or (self._global_size // split.num_parts,) * split.ranks
        assert sum(sizes) * split.accumulation == self._global_size, f"not the whole global batch: {split}"
        first = sum(sizes[: split.rank]) * split.accumulation
        part = BatchSlice(self._global_size, sizes[split.rank], split.accumulation, split.rank, first)
        return draws(self._order, slice=part, start_samples=start_samples)


def draws(order: SampleOrder, *, slice: BatchSlice, start_samples: int) -> Iterator[Draw]:
    """Yields the samples of one micro-batch after another, many steps permuted in one call."""
    # No further ahead than one epoch, or a few samples would need the permutations of thousands of epochs at once.
    num_steps = max(1, min(_LOOKAHEAD_INDICES // slice.share, order.num_samples // slice.global_size))
    within = np.arange(slice.share, dtype=np.int64) + slice.begin
    offsets = (np.arange(num_steps, dtype=np.int64)[:, None] * slice.global_size + within).reshape(-1)
    consumed = start_samples
    while True:
        positions = offsets + consumed
        indices = order.at(positions)
        for start in range(0, len(offsets), slice.local_size):
            stop = start + slice.local_size
            yield Draw(indices[start:stop], positions[start:stop])
        consumed += num_steps * slice.global_size


def evaluation_batches(
    source: SampleSource, *, rank: int, size: int, batch_size: int, lengths: Lengths | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Yields the micro-batches that one data-parallel rank evaluates: over all ranks each sample exactly once.

    Ranks may get unequal numbers of batches. Randomness of a sample is keyed by its number: every evaluation is alike.

    Args:
        source: the held-out samples.
        rank: this data-parallel rank, from 0.
        size: number of data-parallel ranks.
        batch_size: samples of a batch; the last may be smaller.
        lengths: what each sample costs, to give all ranks equal work; None: equal numbers of samples.
    """
    if lengths is None:
        indices = evaluation_indices(len(source), rank=rank, size=size, batch_size=batch_size)
    else:
        indices = evaluation_by_length(lengths, rank=rank, size=size, batch_size=batch_size)
    if isinstance(source, StreamingSource):
        return source.stream(Draw(batch, batch) for batch in indices)
    return (source.batch(batch) for batch in indices)
