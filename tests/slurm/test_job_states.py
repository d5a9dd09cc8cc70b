from __future__ import annotations

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.states import Phase, expand_array_id, phase_of


@pytest.mark.parametrize(
    ("word", "phase"),
    [
        ("PENDING", Phase.QUEUED),
        ("CONFIGURING", Phase.QUEUED),
        ("REQUEUED", Phase.QUEUED),
        ("REQUEUE_HOLD", Phase.QUEUED),
        ("RUNNING", Phase.RUNNING),
        ("RUNNING+", Phase.RUNNING),
        ("SUSPENDED", Phase.RUNNING),
        ("COMPLETING", Phase.FINISHING),
        ("COMPLETED", Phase.COMPLETED),
        ("FAILED", Phase.FAILED),
        ("CANCELLED", Phase.CANCELLED),
        ("CANCELLED+", Phase.CANCELLED),
        ("CANCELLED by 1001", Phase.CANCELLED),
        ("TIMEOUT", Phase.TIMEOUT),
        ("DEADLINE", Phase.TIMEOUT),
        ("NODE_FAIL", Phase.NODE_FAIL),
        ("BOOT_FAIL", Phase.NODE_FAIL),
        ("PREEMPTED", Phase.PREEMPTED),
        ("OUT_OF_MEMORY", Phase.OUT_OF_MEMORY),
        ("running", Phase.RUNNING),
        (" RUNNING ", Phase.RUNNING),
        ("", Phase.UNKNOWN),
        ("BRAND_NEW", Phase.UNKNOWN),
    ],
)
def test_words_of_slurm(word: str, phase: Phase) -> None:
    assert phase_of(word) is phase


def test_only_jobs_that_hold_or_wait_for_nodes_are_active() -> None:
    assert {phase for phase in Phase if phase.is_active} == {Phase.QUEUED, Phase.RUNNING, Phase.FINISHING}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("123", ["123"]),
        ("123_4", ["123_4"]),
        ("123_[4]", ["123_4"]),
        ("123_[4-7%2]", ["123_4", "123_5", "123_6", "123_7"]),
        ("38_[4,6,8%2]", ["38_4", "38_6", "38_8"]),
        ("12_[0-2,9]", ["12_0", "12_1", "12_2", "12_9"]),
        ("12_[0-6:3]", ["12_0", "12_3", "12_6"]),
    ],
)
def test_array_ids_are_written_out(text: str, ids: list[str]) -> None:
    assert expand_array_id(text) == ids


@pytest.mark.parametrize(
    "text", ["12_[0-2,...]", "12_[]", "12_[x]", "12_[1-2", "x_[1]", "12_[1-2:0]", "12_[0-99999999]"]
)
def test_other_brackets_are_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="is not a"):
        expand_array_id(text)
