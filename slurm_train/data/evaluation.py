"""Who evaluates what: every held-out sample on exactly one rank, none padded, none twice.

Ranks may get unequal numbers of batches, also none at all; sums and counts are reduced afterwards, so no collective may
sit inside the loop over these batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurm_train.data.even_cuts import cut_evenly
from slurm_train.data.permutation import Int64Array
from slurm_train.data.source import Lengths


def evaluation_indices(num_samples: int, *, rank: int, size: int, batch_size: int) -> Iterator[Int64Array]:
    """Yields the samples that one rank evaluates, as int64 arrays of at most `batch_size`.

    Args:
        num_samples: held-out samples over all ranks; 0 gives nothing.
        rank: this data-parallel rank, from 0.
        size: number of data-parallel ranks.
        batch_size: samples of a batch; the last one may be smaller.
    """
    first, last = rank * num_samples // size, (rank + 1) * num_samples // size
    for start in range(first, last, batch_size):
        yield np.arange(start, min(start + batch_size, last), dtype=np.int64)


def evaluation_by_length(lengths: Lengths, *, rank: int, size: int, batch_size: int) -> Iterator[Int64Array]:
    """Yields the samples that one rank evaluates, in batches of about equal length; all ranks get equal work.

    Args:
        lengths: what each held-out sample costs.
        rank: this data-parallel rank, from 0.
        size: number of data-parallel ranks.
        batch_size: samples of a batch on average.
    """
    num_parts = min(size * -(-len(lengths) // (size * batch_size)), len(lengths))
    if not num_parts:
        return
    ascending = np.argsort(lengths, kind="stable")
    borders = cut_evenly(lengths[ascending].astype(np.int64), num_parts)
    for part in range(rank, num_parts, size):
        yield ascending[borders[part] : borders[part + 1]]
