from __future__ import annotations

import pytest

from slurm_train.cli.rank import place_of


def raised(err: BaseException) -> BaseException:
    try:
        raise err
    except BaseException as caught:  # whatever the table has
        return caught


@pytest.mark.parametrize(
    ("err", "is_known"),
    [
        (ValueError("no such layer"), True),
        (IndexError("index 300 is out of range"), True),
        (MemoryError(), True),
        # What may go well the next time has no place, and so is never the same twice.
        (OSError(116, "Stale file handle"), False),
        (ConnectionResetError("peer"), False),
        (TimeoutError("store"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("NCCL communicator was aborted"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), False),
        (RuntimeError("Caught OSError in DataLoader worker process 0."), False),
    ],
)
def test_only_an_exception_of_the_program_has_a_place(err: BaseException, is_known: bool) -> None:
    place = place_of(raised(err))
    assert (place.startswith("test_rank.py:") and place.endswith(" in raised")) == is_known
    assert is_known or place == ""
