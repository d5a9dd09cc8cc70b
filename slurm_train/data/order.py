"""The order of samples of a whole run: epochs laid end to end, each its own keyed permutation.

Global position p is offset p % n of epoch p // n. Nothing is dropped and nothing padded at the end of an epoch, so a
batch may take its first samples from one epoch and its last from the next.

`KeyedPermutation(size, seed=s, epoch=e)` is a bijection that anyone can evaluate at any position: no list, no state, no
draw order. So every rank knows every sample of every step, and resume is arithmetic. Large sizes go through a Feistel
network over two radices (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); small ones through a table.
Only numpy; the values are the same on every machine and numpy version.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from slurm_train.errors import DataError

# 2**40 times 8192 ranks is still a whole number in float64, so digests can ride in any all-reduce.
DIGEST_MODULUS = 2**40
_NUM_HALF_ROUNDS = 6
# A table of this many entries takes under 0.5 ms to make; a Feistel network over so few values would mix worse.
_TABLE_SIZE = 4096
# Five 32-bit arrays and two 64-bit ones of a block stay within a core's second-level cache.
_BLOCK = 16384
# Both radices must stay below 2**31 for the wrap-around trick in _add_modulo.
_MAX_SIZE = 2**60
# Constants are arrays without dimensions: a Python integer would be converted anew in each of the fifty small array
# operations of a call, which is most of what a call for a few samples costs.
_ODD_A = np.array(0x7FEB352D, dtype=np.uint32)
_ODD_B = np.array(0x846CA68B, dtype=np.uint32)
_SHIFT = np.array(15, dtype=np.uint32)
_HALF = np.array(32, dtype=np.uint64)

Int64Array = NDArray[np.int64]
_Word = NDArray[np.uint32]
_Bound = tuple[_Word, NDArray[np.uint64]]


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns well mixed 64-bit hashes of 64-bit integers (the finaliser of splitmix64)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashes


class KeyedPermutation:
    """A bijection of `[0, size)`, fixed by (seed, epoch) and nothing else.

    Args:
        size: number of samples, from 1 to 2**60.
        seed: the run's seed, any integer.
        epoch: which pass over the data, from 0.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        assert 1 <= size <= _MAX_SIZE, f"a permutation of {size} positions"
        self.size = size
        self._keys = _round_keys(seed, epoch)
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._num_rows = _bounds(self._rows)
        self._num_columns = _bounds(self._columns)
        self._table = _shuffled_table(size, self._keys) if size <= _TABLE_SIZE else None

    def __call__(self, positions: Int64Array) -> Int64Array:
        """Returns the sample at each position.

        Args:
            positions: int64 (n,), each in [0, size).

        Returns:
            int64 (n,), each in [0, size); different positions give different samples.
        """
        if self._table is not None:
            return self._table[positions]
        if len(positions) <= _BLOCK:
            return self._walk(positions)
        samples = np.empty(len(positions), dtype=np.int64)
        for start in range(0, len(positions), _BLOCK):
            samples[start : start + _BLOCK] = self._walk(positions[start : start + _BLOCK])
        return samples

    def _walk(self, positions: Int64Array) -> Int64Array:
        """Encrypts until every value is inside [0, size); fewer than 1 in sqrt(size) need a second turn."""
        samples = self._encrypt(positions)
        while samples.max(initial=0) >= self.size:
            outside = samples >= self.size
            samples[outside] = self._encrypt(samples[outside])
        return samples

    def _encrypt(self, positions: Int64Array) -> Int64Array:
        """A bijection of [0, rows x columns), which is at least size and less than size + rows."""
        row_64 = positions // self._columns
        column = (positions - row_64 * self._columns).astype(np.uint32)
        row = row_64.astype(np.uint32)
        for row_key, column_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            _add_modulo(row, _hash_below(column, row_key, self._num_rows), self._num_rows)
            _add_modulo(column, _hash_below(row, column_key, self._num_columns), self._num_columns)
        samples = row.astype(np.int64)
        samples *= self._columns
        samples += column
        return samples


def _bounds(bound: int) -> _Bound:
    return np.array(bound, dtype=np.uint32), np.array(bound, dtype=np.uint64)


def _round_keys(seed: int, epoch: int) -> list[_Word]:
    """Returns 32 key bits for each half round."""
    digest = hashlib.blake2b(f"slurm_train permutation {seed} {epoch}".encode(), digest_size=4 * _NUM_HALF_ROUNDS)
    return [np.array(key, dtype=np.uint32) for key in np.frombuffer(digest.digest(), dtype="<u4")]


def _shuffled_table(size: int, keys: list[_Word]) -> Int64Array:
    """Returns the positions in the order of their hashes: uniform, and free of numpy's own generators."""
    first, second = (key.astype(np.uint64).reshape(1) for key in keys[:2])
    hashes = mix64(mix64(np.arange(size, dtype=np.uint64) + mix64(first)) ^ mix64(second))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _hash_below(values: _Word, key: _Word, bound: _Bound) -> _Word:
    """Returns a keyed hash of each value in [0, bound): the high half of hash x bound."""
    mixed = values * _ODD_A
    mixed += key
    mixed ^= mixed >> _SHIFT
    mixed *= _ODD_B
    wide = mixed.astype(np.uint64)
    wide *= bound[1]
    wide >>= _HALF
    return wide.astype(np.uint32)


def _add_modulo(left: _Word, right: _Word, bound: _Bound) -> None:
    """Adds in place modulo the bound: below it the subtraction wraps to a huge value, which the minimum drops."""
    left += right
    np.minimum(left, left - bound[0], out=left)


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
        first = int(positions[0]) // self.num_samples
        last = int(positions[-1]) // self.num_samples
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
