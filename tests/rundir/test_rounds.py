"""Rounds of a step: each is an attempt with its own fence, and the ledger reads as if a supervisor had opened it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.attempts import (
    AttemptStart,
    attempt_secret,
    begin_round,
    check_fence,
    first_round,
    newest_round,
    open_attempt,
    read_ledger,
    read_round,
    rendezvous_secret,
)
from slurm_train.rundir.events import FailureMark, leave_mark
from slurm_train.rundir.files import append_line
from slurm_train.rundir.layout import RunDirectory

SUPERVISOR = AttemptStart(job_id="77", restart_count=2, nodes=("node1", "node2"), world_size=6)
RANKS = AttemptStart(job_id=None, restart_count=0, nodes=("node2", "node1"), world_size=6)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    return run


def test_the_first_round_is_the_attempt_that_the_supervisor_has_opened(run: RunDirectory) -> None:
    attempt = open_attempt(run, SUPERVISOR)
    assert read_round(run, attempt) is None
    assert begin_round(run, RANKS, first=attempt) == attempt
    begun = read_round(run, attempt)
    assert begun is not None and (begun.world_size, begun.first_step) == (6, 0)
    assert (newest_round(run, attempt), first_round(run, attempt)) == (attempt, attempt)
    assert len(read_ledger(run)) == 1


def test_ranks_that_are_started_again_are_another_attempt_of_the_same_job(run: RunDirectory) -> None:
    begin_round(run, RANKS, first=open_attempt(run, SUPERVISOR))
    append_line(run.metrics, {"step": 7, "loss": 1.0})
    leave_mark(run, 0, FailureMark(rank=4, host="node2", exit_code=1, message="Boom: no"))
    assert begin_round(run, RANKS, first=0) == 1
    assert begin_round(run, RANKS, first=0) == 2
    assert (newest_round(run, 0), first_round(run, 2)) == (2, 0)
    old, newer, newest = read_ledger(run)
    assert (old["reason"], old["action"], old["first_step"], old["last_step"]) == ("failed", "relaunch", 0, 7)
    assert old["note"] == "rank 4 on node2: Boom: no; torchrun starts the ranks again"
    assert newer["note"] == "a rank was killed; torchrun starts the ranks again"
    assert (newest["job_id"], newest["restart_count"], newest["nodes"]) == ("77", 2, ["node2", "node1"])
    assert "end_time_unix_s" not in newest
    assert len({attempt_secret(run, attempt) for attempt in range(3)}) == 3
    check_fence(run, 2)
    with pytest.raises(RunError, match=r"attempt 1 .* was overtaken by attempt 2"):
        check_fence(run, 1)


def test_ranks_of_a_step_that_was_overtaken_begin_nothing(run: RunDirectory) -> None:
    begin_round(run, RANKS, first=open_attempt(run, SUPERVISOR))
    other = open_attempt(run, SUPERVISOR)
    with pytest.raises(RunError, match=r"attempt 0 .* was overtaken by attempt 1"):
        begin_round(run, RANKS, first=0)
    assert newest_round(run, 0) == 0 and newest_round(run, other) == other


def test_without_a_supervisor_rank_0_opens_and_closes_all(run: RunDirectory) -> None:
    assert [begin_round(run, RANKS, first=None) for _ in range(2)] == [0, 1]
    assert newest_round(run, 0) == 0, "nobody's step"
    first, second = read_ledger(run)
    assert first["reason"] == "failed" and "reason" not in second
    assert second["nodes"] == ["node2", "node1"]


def test_the_lobby_has_one_secret_and_says_where_it_is_not_seen(run: RunDirectory, tmp_path: Path) -> None:
    secret = rendezvous_secret(run, is_first=True, wait_s=0.0)
    assert len(secret) == 32
    assert (
        secret
        == rendezvous_secret(run, is_first=True, wait_s=0.0)
        == rendezvous_secret(run, is_first=False, wait_s=0.0)
    )
    assert (run.epochs / "lobby").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RunError, match="rank 0 does not write to this run directory"):
        rendezvous_secret(RunDirectory(tmp_path / "elsewhere"), is_first=False, wait_s=0.0)
