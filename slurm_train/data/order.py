"""The order of samples of a whole run: epochs laid end to end, each its own keyed permutation.

Global position p is offset p % n of epoch p // n. Nothing is dropped and nothing padded at the end of an epoch, so a
batch may take its first samples from one epoch and its last from the next. Only numpy.
"""

from __future__ import annotations

import numpy as np

from slurm_train.data.permutation import Int64Array, KeyedPermutation, mix64
from slurm_train.errors import DataError

# 2**40 times 8192 ranks is still a whole number in float64, so digests can ride in any all-reduce.
DIGEST_MODULUS = 2**40


class SampleOrder:
    """Gives the sample at every global position; a function of (number of samples, seed) and nothing else.

    Args:
        num_samples: samples of one epoch.
        seed: the run's seed.

    Raises:
        DataError: there are no samples.
    """

    def __init__(self, num_samples: int, *, seed: int) -> None:
        if num_samples < 1:
            raise DataError("the training data has no samples", hint="check data.path and the split of the data set")
        self.num_samples = num_samples
        self.seed = seed
        self._last = (-1, KeyedPermutation(1, seed=seed, epoch=0))

    def indices(self, start: int, count: int) -> Int64Array:
        """Returns the samples at global positions [start, start + count), int64 (count,)."""
        return self.at(np.arange(start, start + count, dtype=np.int64))

    def at(self, positions: Int64Array) -> Int64Array:
        """Returns the sample at each global position.

        Args:
            positions: int64 (n,), not negative, in rising order.

        Returns:
            int64 (n,), each in [0, num_samples).
        """
        if not len(positions):
            return positions
        first, last = int(positions[0]) // self.num_samples, int(positions[-1]) // self.num_samples
        borders = np.arange(first + 1, last + 1, dtype=np.int64) * self.num_samples
        parts = np.split(positions, np.searchsorted(positions, borders))
        samples = [
            self._permutation(epoch)(part - epoch * self.num_samples) for epoch, part in enumerate(parts, start=first)
        ]
        return samples[0] if len(samples) == 1 else np.concatenate(samples)

    def _permutation(self, epoch: int) -> KeyedPermutation:
        if self._last[0] != epoch:
            self._last = (epoch, KeyedPermutation(self.num_samples, seed=self.seed, epoch=epoch))
        return self._last[1]


def samples_digest(indices: Int64Array) -> int:
    """Returns a number in [0, DIGEST_MODULUS) that tells a set of samples, whatever their order.

    The digest of a batch is the sum of the digests of its parts modulo DIGEST_MODULUS, so ranks may add theirs up in
    int64, or in float64 as long as there are at most 8192 of them.

    Args:
        indices: int64 (n,), sample ids; one that appears twice counts twice.
    """
    hashes = mix64(indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return int(hashes.sum(dtype=np.uint64)) % DIGEST_MODULUS
