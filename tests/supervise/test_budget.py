"""What the ledger says of progress, and when a run has come back often enough."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_train.supervise.decision import course_of, fruitless_ends, is_fruitful, starts_in_vain, used_up


def end(reason: str, **facts: Any) -> dict[str, Any]:
    return {"reason": reason, "action": "requeue", "end_time_unix_s": 90.0, "time_unix_s": 10.0, **facts}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"first_committed": -1, "last_committed": 0}, True),
        ({"first_committed": 5, "last_committed": 5, "first_step": 1, "last_step": 9}, False),
        ({"first_committed": 5, "last_committed": 3}, True),
        ({"first_step": 1, "last_step": 9}, True),
        ({"first_committed": 5, "first_step": 1, "last_step": 1}, False),
        ({}, False),
    ],
)
def test_an_attempt_brought_a_run_on_by_a_commit_else_by_a_step(facts: dict[str, int], expected: bool) -> None:
    assert is_fruitful(facts) is expected


def test_ends_count_since_the_newest_that_brought_the_run_on_or_stopped_it() -> None:
    vain = [end("failed"), end("preempted"), end("lost"), end("requeued"), {"attempt": 9}]
    assert fruitless_ends(vain) == {"failed": 1, "preempted": 2, "node_failure": 1}
    assert fruitless_ends([*vain, end("preempted", first_step=1, last_step=2), *vain]) == fruitless_ends(vain)
    assert fruitless_ends([*vain, end("time_limit", action="stop"), end("time_limit")]) == {"time_limit": 1}


@pytest.mark.parametrize(
    ("reason", "count", "most"),
    [("time_limit", 3, 3), ("lost", 6, 3), ("requeued", 90, 3), ("time_limit", 1, 1), ("node_failure", 2, 1)],
)
def test_each_kind_has_a_budget(reason: str, count: int, most: int) -> None:
    kind = {"lost": "node_failure", "requeued": "preempted"}.get(reason, reason)
    assert not used_up({kind: count - 1, "failed": 99}, reason=reason, max_returns=most, course="")
    assert used_up({kind: count}, reason=reason, max_returns=most, course="")


def test_the_reason_says_what_happened_how_often_and_what_to_do() -> None:
    course = course_of(end("time_limit", start_s=40.0, rendezvous_s=1.2))
    assert used_up({"time_limit": 3}, reason="time_limit", max_returns=3, course=course) == (
        "3 time limits in a row without a new checkpoint (the last attempt ran 80 s, 41 s of it before its first step)"
        ": the limit is shorter than the start and the way to a checkpoint: raise cluster.time_limit_min, or lower "
        "checkpoint.every_steps; `resume` tries again"
    )


@pytest.mark.parametrize(
    ("ledger", "restart_count", "expected"),
    [
        ([], 0, 1),
        ([], 3, 4),
        ([end("preempted", job_id="7", restart_count=2)], 3, 1),
        ([end("preempted", job_id="6", restart_count=9)], 0, 1),
        ([end("file_system", job_id="7", restart_count=0), end("file_system", job_id="7", restart_count=1)], 1, 2),
        ([end("file_system", job_id="7", restart_count=0)], 3, 4),
    ],
)
def test_starts_that_left_no_trace_are_counted_by_slurm(
    ledger: list[dict[str, Any]], restart_count: int, expected: int
) -> None:
    assert starts_in_vain(ledger, job_id="7", restart_count=restart_count) == expected
