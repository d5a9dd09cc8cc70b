"""What is quoted of a start that failed."""

from __future__ import annotations

import pytest

from slurm_train.tools.rehearsal.case import error_line


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("  File x.py\nKeyError: 'a'\n", "KeyError: 'a'"),
        (
            "RuntimeError: internal error\nslurm_train: attempt 1: rank 0 on node-2: RuntimeError: internal error\n",
            "RuntimeError: internal error",
        ),
        ("slurm_train.errors.RunError: each of the 2 ranks\n", "each of the 2 ranks"),
        ("torch.OutOfMemoryError: CUDA\nslurm_train: ended\n", "torch.OutOfMemoryError: CUDA"),
        ("step 3 loss 0.5\n", ""),
    ],
)
def test_an_error_is_quoted_by_its_own_words(log: str, expected: str) -> None:
    assert error_line(log) == expected
