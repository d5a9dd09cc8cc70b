from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.supervise.decision import (
    Action,
    Outcome,
    Reason,
    course_of,
    decide,
    fruitless_ends,
    is_fruitful,
    last_bad_node,
    node_of,
    starts_in_vain,
    used_up,
)

RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "Reason": "None", "Restarts": "0"}
PREEMPTED = {**RUNNING, "PreemptTime": "2026-01-31T09:41:24"}
TIME_LIMIT = {**RUNNING, "JobState": "COMPLETING", "Reason": "TimeLimit"}
CANCELLED = {**RUNNING, "JobState": "COMPLETING"}
REQUEUED = {**PREEMPTED, "JobState": "COMPLETING", "Restarts": "1"}

# A job whose ranks were asked to stop, saved, and said so.
SAVED = Outcome(
    exit_code=75,
    is_finished=False,
    stop_asked=False,
    requeue_enabled=True,
    has_slurm=True,
    job=RUNNING,
    restart_count=0,
    can_relaunch=True,
    fruitless_failures=0,
    max_fruitless_failures=3,
)
LOCAL = replace(SAVED, has_slurm=False, job=None, can_relaunch=False)

TABLE = [
    ("finished", replace(SAVED, exit_code=0, is_finished=True), "done", "finish"),
    (
        "finished while it was being preempted",
        replace(SAVED, exit_code=0, is_finished=True, job=PREEMPTED),
        "done",
        "finish",
    ),
    ("finished, and a rank aborted after it", replace(SAVED, exit_code=134, is_finished=True), "done", "finish"),
    ("preempted", replace(SAVED, job=PREEMPTED), "preempted", "requeue"),
    ("preempted, ranks killed before they saved", replace(SAVED, job=PREEMPTED, exit_code=137), "preempted", "requeue"),
    ("preempted, srun says 0", replace(SAVED, job=PREEMPTED, exit_code=0), "preempted", "requeue"),
    ("warned before the limit", SAVED, "time_limit", "requeue"),
    ("a script that dies of the warning", replace(SAVED, exit_code=140, can_relaunch=False), "time_limit", "requeue"),
    (
        "one rank dies of the warning, the others of its end",
        replace(SAVED, exit_code=143, can_relaunch=False, cause="rank 3 on node2: User defined signal 2"),
        "time_limit",
        "requeue",
    ),
    ("a script here that Ctrl-C ends", replace(LOCAL, exit_code=140), "stopped", "stop"),
    ("cancelled, and a rank dies of the warning", replace(SAVED, job=CANCELLED, exit_code=140), "cancelled", "stop"),
    ("over the limit", replace(SAVED, job=TIME_LIMIT, exit_code=143), "time_limit", "requeue"),
    ("cancelled, ranks saved", replace(SAVED, job=CANCELLED), "cancelled", "stop"),
    ("cancelled, ranks killed", replace(SAVED, job=CANCELLED, exit_code=143), "cancelled", "stop"),
    ("cancelled, srun says 0", replace(SAVED, job=CANCELLED, exit_code=0), "cancelled", "stop"),
    ("cancelled and already so called", replace(SAVED, job={**RUNNING, "JobState": "CANCELLED"}), "cancelled", "stop"),
    (
        "cancelled while it was being preempted",
        replace(SAVED, job={**PREEMPTED, "JobState": "CANCELLED"}),
        "cancelled",
        "stop",
    ),
    ("`cancel` leaves a STOP file, too", replace(SAVED, stop_asked=True, job=CANCELLED), "cancelled", "stop"),
    ("stopped by the STOP file", replace(SAVED, stop_asked=True), "stopped", "stop"),
    ("stopped by file while preempted", replace(SAVED, stop_asked=True, job=PREEMPTED), "stopped", "stop"),
    ("a rank died", replace(SAVED, exit_code=137), "failed", "relaunch"),
    ("it died before the first step, twice", replace(SAVED, exit_code=137, fruitless_failures=2), "failed", "relaunch"),
    (
        "twice in a row on the same node",
        replace(SAVED, exit_code=137, fruitless_failures=2, bad_node="node2"),
        "failed",
        "requeue",
    ),
    (
        "a bad node does not add to the budget",
        replace(SAVED, exit_code=137, fruitless_failures=3, bad_node="node2"),
        "failed",
        "stop",
    ),
    ("and once more", replace(SAVED, exit_code=137, fruitless_failures=3), "failed", "stop"),
    ("wrong use is not tried again", replace(SAVED, exit_code=2), "failed", "stop"),
    ("a user's own function failed", replace(SAVED, exit_code=1, can_relaunch=False), "failed", "stop"),
    ("0 without a result is no success", replace(SAVED, exit_code=0), "failed", "relaunch"),
    ("Slurm does not answer", replace(SAVED, job=None), "unknown", "stop"),
    ("Slurm does not answer and it failed", replace(SAVED, job=None, exit_code=1), "failed", "relaunch"),
    (
        "somebody requeued it by hand",
        replace(SAVED, job={**CANCELLED, "Restarts": "1"}, exit_code=143),
        "requeued",
        "leave",
    ),
    (
        "a node was lost and Slurm brought the job back",
        replace(SAVED, job={**CANCELLED, "Restarts": "1"}, exit_code=0, cause="node failure on node2"),
        "node_failure",
        "leave",
    ),
    ("requeue switched off", replace(SAVED, job=PREEMPTED, requeue_enabled=False), "preempted", "stop"),
    ("Slurm was quicker", replace(SAVED, job=REQUEUED), "preempted", "leave"),
    ("an earlier restart is not this one", replace(SAVED, job=REQUEUED, restart_count=1), "preempted", "requeue"),
    ("local, stopped by Ctrl-C", LOCAL, "stopped", "stop"),
    ("local, finished", replace(LOCAL, exit_code=0, is_finished=True), "done", "finish"),
    ("local, failed", replace(LOCAL, exit_code=1), "failed", "stop"),
    (
        "preemptions never use up the budget",
        replace(SAVED, job=PREEMPTED, fruitless_failures=50),
        "preempted",
        "requeue",
    ),
    ("nor do time limits", replace(SAVED, fruitless_failures=50), "time_limit", "requeue"),
    ("a second time limit in vain", replace(SAVED, fruitless_ends={"time_limit": 1}), "time_limit", "requeue"),
    ("a third one", replace(SAVED, fruitless_ends={"time_limit": 2}), "time_limit", "stop"),
    ("one that brought the run on", replace(SAVED, fruitless_ends=None), "time_limit", "requeue"),
    (
        "preemptions in vain",
        replace(SAVED, job=PREEMPTED, fruitless_ends={"preempted": 50, "time_limit": 9}),
        "preempted",
        "requeue",
    ),
    ("too many of them", replace(SAVED, job=PREEMPTED, fruitless_ends={"preempted": 89}), "preempted", "stop"),
    (
        "Slurm was quicker than the budget",
        replace(SAVED, job=REQUEUED, fruitless_ends={"preempted": 89}),
        "preempted",
        "leave",
    ),
]


@pytest.mark.parametrize(("outcome", "reason", "action"), [case[1:] for case in TABLE], ids=[case[0] for case in TABLE])
def test_what_follows_from_what_is_known(outcome: Outcome, reason: Reason, action: Action) -> None:
    decision = decide(outcome)
    assert (decision.reason, decision.action) == (reason, action)
    assert decision.note and "\n" not in decision.note


def test_the_note_of_a_failure_names_its_cause() -> None:
    outcome = replace(SAVED, exit_code=1, fruitless_failures=3, cause="rank 3 on node2: ValueError: odd")
    assert decide(outcome).note == "3 failures in a row without a new checkpoint: rank 3 on node2: ValueError: odd"


@pytest.mark.parametrize("word", ["Unknown", ""])
def test_a_preemption_time_that_says_nothing_is_none(word: str) -> None:
    assert decide(replace(SAVED, job={**CANCELLED, "PreemptTime": word})).reason == "cancelled"


@pytest.mark.parametrize(("job", "is_over"), [(TIME_LIMIT, True), (RUNNING, False), (PREEMPTED, False)])
def test_only_a_job_over_its_limit_needs_the_plain_form_of_requeue(job: dict[str, str], is_over: bool) -> None:
    assert decide(replace(SAVED, job=job)).is_over is is_over


outcomes = st.builds(
    Outcome,
    exit_code=st.sampled_from([0, 1, 2, 75, 137, 143]),
    is_finished=st.booleans(),
    stop_asked=st.booleans(),
    requeue_enabled=st.booleans(),
    has_slurm=st.booleans(),
    job=st.sampled_from([None, RUNNING, PREEMPTED, TIME_LIMIT, CANCELLED, REQUEUED, {}]),
    restart_count=st.integers(0, 2),
    can_relaunch=st.booleans(),
    bad_node=st.sampled_from(["", "node2"]),
    fruitless_failures=st.integers(0, 9),
    max_fruitless_failures=st.integers(1, 5),
)


@settings(deadline=None)
@given(outcomes)
def test_a_job_comes_back_only_where_slurm_said_why(outcome: Outcome) -> None:
    decision = decide(outcome)
    assert decision.reason in get_args(Reason) and decision.action in get_args(Action)
    assert bool(decision.exclude) <= (decision.action == "requeue" and bool(outcome.bad_node))
    if decision.action in ("requeue", "leave") and not decision.exclude:
        assert outcome.job is not None and not outcome.stop_asked
        assert decision.reason in ("preempted", "time_limit", "requeued", "node_failure")
    if decision.action == "requeue":
        assert outcome.requeue_enabled
    if decision.action == "relaunch":
        assert outcome.can_relaunch and decision.reason == "failed"
    if outcome.job is CANCELLED:
        assert decision.action in ("stop", "finish"), "a cancelled job is never brought back"
    if decision.action == "finish":
        assert outcome.is_finished


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


@pytest.mark.parametrize(
    ("cause", "node"),
    [
        ("rank 3 on node2: Killed", "node2"),
        ("ranks 0-3 on node2: Killed", "node2"),
        ("node failure on node2", "node2"),
        ("node failure on node[2-3]", ""),
        ("no answer from node2 within 25 s", "node2"),
        ("no answer from node2, node3 within 25 s", ""),
        ("srun itself was killed by signal 9", ""),
        ("", ""),
    ],
)
def test_the_node_of_a_cause(cause: str, node: str) -> None:
    assert node_of(cause) == node


FAILED = {"reason": "failed", "failed_on": "node2", "first_step": 4, "last_step": 4}


@pytest.mark.parametrize(
    ("ledger", "node"),
    [
        ([], ""),
        ([FAILED], "node2"),
        ([{**FAILED, "last_step": 5}], ""),
        ([{**FAILED, "reason": "preempted"}], ""),
        ([FAILED, {"attempt": 1}], ""),
        ([{**FAILED, "failed_on": "node1"}, FAILED], "node2"),
    ],
)
def test_a_node_is_suspected_after_a_fruitless_failure_on_it(ledger: list[dict[str, object]], node: str) -> None:
    assert last_bad_node(ledger) == node
