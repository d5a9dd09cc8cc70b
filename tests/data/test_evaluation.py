from __future__ import annotations

import numpy as np
import pytest

from slurm_train.data.evaluation import evaluation_by_length, evaluation_indices


def test_shares_differ_by_at_most_one_and_none_is_padded() -> None:
    shares = [[batch.tolist() for batch in evaluation_indices(7, rank=rank, size=3, batch_size=2)] for rank in range(3)]
    assert shares == [[[0, 1]], [[2, 3]], [[4, 5], [6]]]


def test_a_rank_may_have_nothing_to_evaluate() -> None:
    assert [len(list(evaluation_indices(1, rank=rank, size=3, batch_size=4))) for rank in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("num_samples", "size", "batch_size"), [(0, 2, 4), (1, 3, 4), (7, 2, 2), (64, 4, 4), (1000, 3, 8)]
)
def test_by_length_each_sample_is_evaluated_once_and_all_ranks_have_as_much_to_do(
    num_samples: int, size: int, batch_size: int
) -> None:
    lengths = np.random.default_rng(4).integers(1, 300, num_samples)
    per_rank = [
        list(evaluation_by_length(lengths, rank=rank, size=size, batch_size=batch_size)) for rank in range(size)
    ]
    everything = [int(sample) for batches in per_rank for batch in batches for sample in batch]
    assert sorted(everything) == list(range(num_samples))
    if num_samples >= 1000:
        work = [sum(len(batch) * lengths[batch].max() for batch in batches) for batches in per_rank]
        assert max(work) < 1.1 * min(work)
