"""Which samples each optimizer step takes, whatever the number of ranks: equal numbers of them, or equal work.

Both kinds are functions of seed and epoch (and of the samples' lengths). A position is the number of global samples
consumed, so resuming is a seek and every split into ranks and micro-batches reads the same global batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from slurm_train.config.batch import LEAST_SHARE
from slurm_train.data.even_cuts import cut_evenly
from slurm_train.data.order import SampleOrder
from slurm_train.data.permutation import Int64Array, KeyedPermutation
from slurm_train.data.source import Draw, Lengths
from slurm_train.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one data-parallel rank shares the global batches."""

    rank: int
    """Place of this rank among the data-parallel ranks, from 0."""
    ranks: int
    accumulation: int
    """Micro-batches of one optimizer step."""
    sizes: tuple[int, ...] | None = None
    """Samples of a micro-batch, rank by rank, where they are not equal; not for batches by length."""

    @property
    def num_parts(self) -> int:
        """Micro-batches that a global batch is cut into over all ranks."""
        return self.ranks * self.accumulation


class GlobalBatches(Protocol):
    """The global batches of a run, by position."""

    def size_at(self, samples: int, /) -> int:
        """Returns the number of samples of the global batch that begins at a position."""
        ...

    def size_before(self, samples: int, /) -> int:
        """Returns the number of samples of the global batch that ends at a position."""
        ...

    def align(self, samples: int, /) -> int:
        """Returns the first position from here on at which a global batch begins."""
        ...

    def sample_ids(self, first: int, count: int) -> Int64Array:
        """Returns the samples at consecutive positions, int64 (count,)."""
        ...

    def draws(self, split: Split, *, start_samples: int) -> Iterator[Draw]:
        """Yields a rank's micro-batches from a position on, without end."""
        ...


class LengthBatches:
    """Global batches of about equal padded size, each of samples of about equal length.

    Samples are taken in the run's order, so many batches at a time (a pool), sorted by length, cut into as many batches
    of equal cost, and these are shuffled. So a pool of P samples is P samples of the plain order, each used once.

    Args:
        order: the run's order of samples.
        lengths: whole numbers (num_samples,), what each sample costs, at least 1; only looked up, never copied whole.
        global_size: samples of a global batch on average.
        pool_batches: batches that are cut out of one pool.
        first: position at which the first pool begins: that at which the global batch got its size.

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
        self._order, self._lengths = order, lengths
        self._global_size, self._num_batches, self._first = global_size, pool_batches, first
        self._pools: dict[int, _Pool] = {}

    def size_at(self, samples: int) -> int:
        """Returns the samples of the global batch that begins at a position."""
        pool, offset = self._find(samples)
        return int(pool.borders[np.searchsorted(pool.borders, offset, side="right")]) - offset

    def size_before(self, samples: int) -> int:
        """Returns the samples of the global batch that ends at a position."""
        pool, offset = self._find(samples - 1)
        return offset + 1 - int(pool.borders[np.searchsorted(pool.borders, offset, side="right") - 1])

    def align(self, samples: int) -> int:
        """Returns the first position from here on at which a global batch begins.

        Anywhere else is only where other lengths or another pool were used before.
        """
        if samples <= self._first:
            return self._first
        return samples - 1 + self.size_at(samples - 1)

    def sample_ids(self, first: int, count: int) -> Int64Array:
        """Returns the samples at consecutive positions, in the order of the batches."""
        found = []
        while count > 0:
            pool, offset = self._find(first)
            taken = pool.ids[offset : offset + count]
            found.append(taken)
            first, count = first + len(taken), count - len(taken)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def draws(self, split: Split, *, start_samples: int) -> Iterator[Draw]:
        """Yields a rank's micro-batches: parts of about equal cost, neighbours in length."""
        assert split.sizes is None, "batches by length are shared out by length"
        samples = start_samples
        while True:
            pool, offset = self._find(samples)
            size = self.size_at(samples)
            ids, positions = pool.ids[offset : offset + size], pool.positions[offset : offset + size]
            borders = cut_evenly(self._lengths_of(ids), split.num_parts)
            for micro in range(split.accumulation):
                part = micro * split.ranks + split.rank
                chosen = slice(borders[part], borders[part + 1])
                yield Draw(ids[chosen], positions[chosen])
            samples += size

    def _find(self, samples: int) -> tuple[_Pool, int]:
        """Returns the pool that a position lies in, and where in it."""
        size = self._num_batches * self._global_size
        number, offset = divmod(samples - self._first, size)
        if number not in self._pools:
            # The loop looks at its own position while the reader is ahead of it, seldom by more than a pool.
            for old in [other for other in self._pools if abs(other - number) > 2]:
                del self._pools[old]
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
        shuffled = _shuffle(self._num_batches, seed=self._order.seed, pool=number)
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
    """Of the same samples in the run's plain order: what keys the randomness of reading them."""
    borders: Int64Array
    """Where the batches begin and end, from 0 to the size of the pool."""


def _shuffle(size: int, *, seed: int, pool: int) -> Int64Array:
    # Any key that no epoch of this run has will do; the sign tells pools and epochs apart.
    return KeyedPermutation(size, seed=seed, epoch=-1 - pool)(np.arange(size, dtype=np.int64))
