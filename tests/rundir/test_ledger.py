"""The ledger as records: what is written is read again, and lines of every kind have their meaning."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slurm_train.rundir.cause import Cause
from slurm_train.rundir.ledger import (
    NOT_REQUEUED,
    Action,
    Attempt,
    End,
    Reason,
    Start,
    read_attempt,
    read_ledger,
    record_end,
    record_start,
)
from slurm_train.rundir.paths import RunDirectory
from tests.support.run_files import add_lines

START = Start(time_unix_s=10.0, job_id="12_3", restart_count=1, nodes=("node1", "node2"), world_size=16)
END = End(
    time_unix_s=70.0,
    exit_code=1,
    first_step=0,
    last_step=6,
    step_before=0,
    last_committed=4,
    seconds={"start_s": 3.5, "step_s": 40.0, "lost_work_s": 10.0},
    reason=Reason.FAILED,
    action=Action.RELAUNCH,
    note="rank 0 on node1: ValueError: no",
    cause=Cause.of("ValueError: no", ranks=(0,), node="node1"),
    failed_on=("node1", "node2"),
)


def written(run: RunDirectory) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.attempts.read_text().splitlines()]


def test_what_is_written_is_read_again(run: RunDirectory) -> None:
    record_start(run, 0, START)
    assert read_ledger(run) == [Attempt(0, START)]
    record_end(run, 0, END)
    later = replace(START, follows=0, changes=2, accepted=("optim.lr",), first_committed=-1)
    record_start(run, 1, later)
    assert read_ledger(run) == [Attempt(0, START, END), Attempt(1, later)]
    assert (read_attempt(run, 1), read_attempt(run, 2)) == (Attempt(1, later), None)


def test_lines_have_the_names_of_every_version_and_only_what_is_known(run: RunDirectory) -> None:
    record_start(run, 0, Start(time_unix_s=10.0, nodes=("a",), world_size=2))
    record_end(run, 0, End(time_unix_s=11.0, exit_code=0, seconds={"step_s": 1.0}, failed_on=("a", "b")))
    assert written(run) == [
        {
            "event": "start",
            "attempt": 0,
            "time_unix_s": 10.0,
            "job_id": None,
            "restart_count": 0,
            "nodes": ["a"],
            "world_size": 2,
            "first_committed": None,
        },
        {
            "event": "end",
            "attempt": 0,
            "time_unix_s": 11.0,
            "exit_code": 0,
            "reason": "unknown",
            "failed_on": "a,b",
            "step_s": 1.0,
        },
    ]


def test_what_becomes_known_later_replaces_what_was_decided(run: RunDirectory) -> None:
    record_start(run, 0, START)
    record_end(run, 0, replace(END, action=Action.REQUEUE))
    # Earlier versions wrote only what was new.
    add_lines(run.attempts, [{"event": "end", "attempt": 0, "time_unix_s": 71.0, "outcome": NOT_REQUEUED}])
    (attempt,) = read_ledger(run)
    assert attempt.end == replace(END, action=Action.REQUEUE, outcome=NOT_REQUEUED, time_unix_s=71.0)
    assert attempt.waits_for_person and not attempt.comes_back


def test_damaged_lines_cost_what_they_would_have_said(run: RunDirectory) -> None:
    add_lines(
        run.attempts,
        [
            {"event": "start", "attempt": "0", "time_unix_s": 1.0},
            {"event": "start", "attempt": 1, "time_unix_s": "early", "job_id": "12"},
            {"event": "end", "attempt": 1, "time_unix_s": 5.0, "reason": "abducted", "action": 7, "step_s": None},
            {"event": "start", "attempt": 2, "time_unix_s": 6.0, "nodes": "node1", "world_size": "many"},
        ],
    )
    with run.attempts.open("a") as file:
        file.write('{"event": "end", "attem')
    assert read_ledger(run) == [
        Attempt(1, Start(time_unix_s=5.0), End(time_unix_s=5.0)),
        Attempt(2, Start(time_unix_s=6.0)),
    ]
    assert read_ledger(RunDirectory(run.path / "gone")) == []


@pytest.mark.parametrize(
    ("first_committed", "facts", "has_progress"),
    [
        (-1, {"last_committed": 0}, True),
        (5, {"last_committed": 5, "first_step": 1, "last_step": 9}, False),
        # After a rollback.
        (5, {"last_committed": 3}, True),
        (5, {"first_step": 1, "last_step": 1}, False),
        (None, {"first_step": 2, "last_step": 3}, True),
        (None, {"first_step": 1, "last_step": 10, "step_before": 9}, True),
        (None, {"first_step": 2, "last_step": 3, "step_before": 3}, False),
        (None, {}, False),
    ],
)
def test_progress_is_a_new_commit_else_a_new_step(
    first_committed: int | None, facts: dict[str, int], has_progress: bool
) -> None:
    end = End(time_unix_s=1.0, **facts)  # type: ignore[arg-type]
    assert Attempt(0, Start(first_committed=first_committed), end).made_progress is has_progress


def test_words_are_texts(run: RunDirectory) -> None:
    assert f"{Reason.TIME_LIMIT} {Action.STOP}" == "time_limit stop"
    assert {"lost": 1}[Reason.LOST] == 1 and str(Action.LEAVE) == "leave"
