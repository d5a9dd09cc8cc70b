from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.layout import RunDirectory
from tests.campaigns.commit_watch import CommitWatch
from tests.campaigns.split_brain_trials import MODES, STEPS, Commit, History, plan_trials, what_is_wrong
from tests.support.small_checkpoints import make_checkpoint

OLD = Commit(name="checkpoint_0000008", attempt=0, time_unix_s=90.0, seen_for_s=30.0)
NEW = Commit(name="checkpoint_0000010", attempt=1, time_unix_s=110.0, seen_for_s=30.0)
LINES = [(0, step, 80.0) for step in range(1, 9)] + [(1, step, 105.0) for step in range(9, STEPS + 1)]
CLEAN = History(
    begin_unix_s=100.0,
    commits=[OLD, NEW],
    metrics=LINES,
    ledger=[("start", 0), ("end", 0), ("start", 1), ("end", 1)],
    result_attempt=1,
    gone_s=2.0,
    digest="a",
    golden="a",
)
PLANTED: list[tuple[dict[str, Any], str]] = [
    (
        {"commits": [replace(OLD, time_unix_s=106.5), NEW]},
        "checkpoint_0000008 got its name 1.50 s after attempt 1's first step",
    ),
    (
        {"metrics": [*LINES[:7], (0, 8, 106.0), *LINES[8:]]},
        "attempt 0's lines of steps [8] count, written after attempt 1's first",
    ),
    ({"ledger": [("start", 0), ("start", 1), ("end", 0)]}, "attempt 0 wrote to the ledger after attempt 1 had begun"),
    ({"result_attempt": 0}, "the result is attempt 0's"),
    ({"gone_s": 10.5}, "the old ranks were there for 10.5 s"),
    ({"metrics": LINES[:3]}, "its steps are [1, 2, 3]"),
    ({"digest": "b"}, "weights b, undisturbed a"),
]


def test_a_history_without_zombies_passes() -> None:
    assert what_is_wrong(CLEAN) == ""
    taken_back = replace(OLD, time_unix_s=106.0, seen_for_s=0.1)
    assert what_is_wrong(replace(CLEAN, commits=[OLD, taken_back, NEW])) == ""
    before_the_claim = replace(OLD, time_unix_s=101.0)
    assert what_is_wrong(replace(CLEAN, commits=[OLD, before_the_claim, NEW])) == ""


@pytest.mark.parametrize(("planted", "found"), PLANTED, ids=[found[:40] for _, found in PLANTED])
def test_every_planted_violation_is_found(planted: dict[str, Any], found: str) -> None:
    assert what_is_wrong(replace(CLEAN, **planted)) == found


def test_a_plan_is_repeatable_and_has_every_mode() -> None:
    planned = plan_trials(seed=1, trials=50)
    assert planned == plan_trials(seed=1, trials=50) != plan_trials(seed=2, trials=50)
    assert {trial.mode for trial in planned} == set(MODES)
    assert {trial.num_ranks for trial in planned} == {1, 2} and {trial.is_stopped for trial in planned} == {True, False}


def test_the_watch_sees_a_commit_and_the_second_one_of_its_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    watch = CommitWatch()
    watch.add(run)
    path = make_checkpoint(run.checkpoints, 3, attempt=0)
    watch.look()
    path.rename(tmp_path / "aside")
    watch.look()
    make_checkpoint(run.checkpoints, 3, attempt=1)
    watch.look()
    watch.look()
    commits = watch.commits(run)
    assert [(one.name[:18], one.attempt) for one in commits] == [("checkpoint_0000003", 0), ("checkpoint_0000003", 1)]
    assert commits[0].seen_for_s == 0.0 < commits[1].seen_for_s
