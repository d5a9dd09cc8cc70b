"""Global batches of samples of about equal length: less padding, and equal work for all ranks (`batch.by_length`)."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slurm_train.config.batch import LEAST_SHARE, BatchShare
from slurm_train.data.batches import GlobalBatches
from slurm_train.data.order import Int64Array, KeyedPermutation, SampleOrder
from slurm_train.data.source import Draw, Lengths
from slurm_train.errors import DataError

# Relative precision of the search for the cost that no part exceeds; a higher one makes no difference.
_PRECISION = 0.005


class LengthBatches(GlobalBatches):
    """Global batches of about equal padded size, each of samples of about equal length.

    The run's order is cut into pools of `pool_batches` x `global_size` samples. Each pool is sorted by length and cut
    into `pool_batches` batches of about equal cost, which are shuffled. So a pool uses the same samples as the plain
    order, each once.

    Args:
        order: the run's order of samples.
        lengths: integers (num_samples,), the cost of each sample, at least 1; a memory map is not read as a whole.
        global_size: samples of a global batch on average.
        pool_batches: batches that are cut out of one pool.
        first: position at which the first pool begins: where the global batch got its present size.

    Raises:
        DataError: the lengths are not one per sample.
    """

    def __init__(
        self, order: SampleOrder, lengths: Lengths, *, global_size: int, pool_batches: int, first: int = 0
    ) -> None:
        if lengths.shape != (order.num_samples,):
            raise DataError(
                f"the data set has {order.num_samples} samples and lengths of shape {lengths.shape}",
                hint="`lengths` of the data set is one whole number per sample",
            )
        super().__init__(order, global_size=global_size)
        self._lengths = lengths
        self._num_batches = pool_batches
        self._first = first
        self._pools: dict[int, _Pool] = {}

    def size_at(self, samples: int) -> int:
        """Returns the samples of the global batch that begins at a position."""
        pool, offset = self._find(samples)
        return int(pool.borders[np.searchsorted(pool.borders, offset, side="right")]) - offset

    def align(self, samples: int) -> int:
        """Returns the first position from here on at which a global batch begins.

        A run is at another position only after a change of the lengths or of the pool.
        """
        if samples <= self._first:
            return self._first
        return samples - 1 + self.size_at(samples - 1)

    def sample_ids(self, first: int, count: int) -> Int64Array:
        """Returns the samples at consecutive positions, in the order of the batches."""
        parts = []
        while count > 0:
            pool, offset = self._find(first)
            taken = pool.ids[offset : offset + count]
            parts.append(taken)
            first = first + len(taken)
            count = count - len(taken)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def draws(self, share: BatchShare, *, start_samples: int) -> Iterator[Draw]:
        """Yields a rank's micro-batches: parts of about equal cost, neighbours in length."""
        samples = start_samples
        while True:
            pool, offset = self._find(samples)
            size = self.size_at(samples)
            ids = pool.ids[offset : offset + size]
            positions = pool.positions[offset : offset + size]
            borders = cut_evenly(self._lengths_of(ids), share.num_parts)
            for micro in range(share.accumulation):
                part = micro * share.ranks + share.rank
                chosen = slice(borders[part], borders[part + 1])
                yield Draw(ids[chosen], positions[chosen])
            samples += size

    def _find(self, samples: int) -> tuple[_Pool, int]:
        """Returns the pool that a position lies in, and where in it."""
        size = self._num_batches * self._global_size
        number, offset = divmod(samples - self._first, size)
        if number not in self._pools:
            # The training loop asks for its own position, and the reader for one ahead, rarely by more than a pool.
            for distant in [other for other in self._pools if abs(other - number) > 2]:
                del self._pools[distant]
            self._pools[number] = self._make_pool(number, size)
        return self._pools[number], offset

    def _lengths_of(self, ids: Int64Array) -> Int64Array:
        lengths = self._lengths[ids].astype(np.int64)
        if int(lengths.min()) < 1:
            wrong = int(ids[lengths.argmin()])
            raise DataError(f"sample {wrong} has a length of {int(lengths.min())}", hint="lengths are 1 or more")
        return lengths

    def _make_pool(self, number: int, size: int) -> _Pool:
        start = self._first + number * size
        ids = self._order.indices(start, size)
        lengths = self._lengths_of(ids)
        by_length = np.argsort(lengths, kind="stable")
        least = max(1, self._global_size // LEAST_SHARE)
        borders = cut_evenly(lengths[by_length], self._num_batches, least=least)
        # A negative epoch, since its key must differ from those of the run's epochs.
        shuffle = KeyedPermutation(self._num_batches, seed=self._order.seed, epoch=-1 - number)
        shuffled = shuffle(np.arange(self._num_batches, dtype=np.int64))
        places = np.concatenate([np.arange(borders[batch], borders[batch + 1]) for batch in shuffled])
        sizes = np.diff(borders)[shuffled]
        return _Pool(
            ids=ids[by_length[places]],
            positions=start + by_length[places],
            borders=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        )


class _Pool(NamedTuple):
    """One pool, batch after batch; within a batch the samples are sorted by length."""

    ids: Int64Array
    positions: Int64Array
    """Positions of the same samples in the run's plain order; they key the randomness of reading."""
    borders: Int64Array
    """Where the batches begin and end, from 0 to the size of the pool."""


def cut_evenly(lengths: Int64Array, num_parts: int, *, least: int = 1) -> Int64Array:
    """Returns the borders of consecutive parts; their largest padded cost is minimal, to half a percent.

    A part is padded to its longest sample, so it costs (number of samples) x (longest length). Samples of similar
    length need little padding, and parts of equal cost take equal time. The cost is found by bisection.

    Args:
        lengths: int64 (n,), ascending, each at least 1.
        num_parts: number of parts; n is at least `num_parts`, and where `least` is above 1 at least twice `least` for
            each part.
        least: samples that every part gets, even if it then exceeds that cost.

    Returns:
        int64 (num_parts + 1,): part p holds [borders[p], borders[p + 1]).
    """
    enough = num_parts if least == 1 else 2 * least * num_parts
    assert len(lengths) >= enough > 0, f"{len(lengths)} samples for {num_parts} parts of {least}"
    longest = lengths.tolist()
    low = max(int(lengths.sum()) // num_parts, 1)
    high = low
    borders = _fill(longest, high, num_parts, least)
    while borders is None:
        low = high
        high = 2 * high
        borders = _fill(longest, high, num_parts, least)
    while high - low > max(1.0, _PRECISION * high):
        middle = (low + high) // 2
        tried = _fill(longest, middle, num_parts, least)
        if tried is None:
            low = middle
        else:
            high = middle
            borders = tried
    return np.array(_split_until(borders, longest, num_parts, least), dtype=np.int64)


def _fill(lengths: list[int], limit: int, num_parts: int, least: int) -> list[int] | None:
    """Returns borders of at most `num_parts` parts, each within the limit or of the least size; None if that fails.

    Parts are filled from the longest sample down: the longest sample of a part determines how many fit into it.
    """
    borders = [len(lengths)]
    while borders[-1] > 0:
        if len(borders) > num_parts:
            return None
        end = borders[-1]
        borders.append(max(end - max(limit // lengths[end - 1], least), 0))
    if len(borders) > 2 and borders[-2] < least:
        # Too few of the shortest samples are left for a part: the next part gives up some of its own.
        borders[-2] = least
        if borders[-3] - least < least:
            return None
    return borders[::-1]


def _split_until(borders: list[int], lengths: list[int], num_parts: int, least: int) -> list[int]:
    """Halves the costliest parts until there are enough of them."""
    while len(borders) <= num_parts:
        parts = [
            ((stop - start) * lengths[stop - 1], -start, start, stop)
            for start, stop in itertools.pairwise(borders)
            if stop - start >= 2 * least
        ]
        _, _, start, stop = max(parts)
        bisect.insort(borders, (start + stop) // 2)
    return borders


def evaluation_by_length(
    lengths: Lengths, chosen: Int64Array | None, *, rank: int, size: int, batch_size: int
) -> Iterator[Int64Array]:
    """Yields the samples that one rank evaluates, in batches of about equal length; all ranks get equal work.

    Args:
        lengths: what each held-out sample costs.
        chosen: the samples to be evaluated; None for all. What is yielded are places among these.
        rank: this data-parallel rank, from 0.
        size: number of data-parallel ranks.
        batch_size: samples of a batch on average.
    """
    if chosen is not None:
        lengths = lengths[chosen]
    num_parts = min(size * -(-len(lengths) // (size * batch_size)), len(lengths))
    if not num_parts:
        return
    ascending = np.argsort(lengths, kind="stable")
    borders = cut_evenly(lengths[ascending].astype(np.int64), num_parts)
    for part in range(rank, num_parts, size):
        yield ascending[borders[part] : borders[part + 1]]
