from __future__ import annotations

from slurm_train.data.evaluation import evaluation_indices


def test_shares_differ_by_at_most_one_and_none_is_padded() -> None:
    shares = [[batch.tolist() for batch in evaluation_indices(7, rank=rank, size=3, batch_size=2)] for rank in range(3)]
    assert shares == [[[0, 1]], [[2, 3]], [[4, 5], [6]]]


def test_a_rank_may_have_nothing_to_evaluate() -> None:
    assert [len(list(evaluation_indices(1, rank=rank, size=3, batch_size=4))) for rank in range(3)] == [0, 0, 1]
