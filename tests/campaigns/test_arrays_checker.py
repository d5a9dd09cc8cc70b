"""The checker of the array campaign finds what it is there to find."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.campaigns.arrays import Seen, check

CALM = Seen(index=0, restarts=0, requeued=0, preempted=0, is_finished=True, steps=400, expected_steps=400)
KEPT = [
    CALM,
    replace(CALM, index=1, restarts=1, preempted=1),
    replace(CALM, index=2, restarts=2, preempted=1, requeued=1),
    replace(CALM, index=3, restarts=1, requeued=1),
    replace(CALM, index=4, restarts=1, preempted=1),
]


def test_a_promise_that_was_kept_has_no_problems() -> None:
    assert check(KEPT) == []


PLANTED = [
    (0, {"restarts": 1}, "was restarted 1 times by 0 requeues and 0 preemptions of its own"),
    (1, {"restarts": 2}, "was restarted 2 times by 0 requeues and 1 preemptions of its own"),
    (3, {"restarts": 0}, "was restarted 0 times by 1 requeues and 0 preemptions of its own"),
    (2, {"is_finished": False}, "has no result"),
    (4, {"steps": 399}, "has 399 of 400 steps on record"),
]


@pytest.mark.parametrize(("index", "change", "problem"), PLANTED, ids=[problem for _, _, problem in PLANTED])
def test_a_planted_violation_is_found(index: int, change: dict[str, object], problem: str) -> None:
    seen = [replace(one, **change) if one.index == index else one for one in KEPT]  # type: ignore[arg-type]
    assert check(seen) == [(index, problem)]


def test_a_campaign_that_disturbed_nobody_proves_nothing() -> None:
    assert check([CALM, replace(CALM, index=1)])[0][0] == -1
    only_requeued = [replace(CALM, index=index, restarts=1, requeued=1) for index in range(3)]
    assert "it proves nothing" in check(only_requeued)[0][1]
