"""Scores and leases: one record per save, what counts of it, and what waits for its score stays."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.rundir import pins
from slurm_train.rundir.lineage import Origin, record_origin
from slurm_train.rundir.paths import CheckpointName, RunDirectory
from slurm_train.rundir.pins import LEASE_S, awaited_saves, pin_save, pinned_saves, release_pins, renew_lease
from slurm_train.rundir.scores import (
    Score,
    append_score,
    best_first,
    named,
    num_recorded,
    read_scores,
    scores_that_count,
    values_of,
)

SAVES = [CheckpointName(step, 0, f"{step:08x}") for step in (10, 20, 30, 40)]
FIRST = Score(save_id="0000000a", step=10, attempt=0, values={"eval_loss": 2.0})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "gpt" / "3f9a1c07")
    run.checkpoints.mkdir(parents=True)
    return run


@pytest.fixture
def follower(run: RunDirectory) -> RunDirectory:
    follower = RunDirectory(run.path / "evaluations" / "7d434a1ed8a2")
    follower.path.mkdir(parents=True)
    return follower


def test_the_first_line_with_numbers_about_a_save_counts(follower: RunDirectory) -> None:
    append_score(follower, Score(save_id="0000000a", step=10, attempt=0, problem="removed before it was scored"))
    append_score(follower, FIRST)
    append_score(follower, replace(FIRST, values={"eval_loss": 3.0}))
    with follower.scores.open("a") as file:
        file.write('{"save_id": "0000')
    append_score(follower, replace(FIRST, save_id="00000014", step=20))
    assert [(key, score.values) for key, score in read_scores(follower).items()] == [
        ("0000000a", {"eval_loss": 2.0}),
        ("00000014", {"eval_loss": 2.0}),
    ]
    assert num_recorded(follower) == 2


def test_a_number_that_is_not_finite_is_recorded_and_compared_with_nothing(
    run: RunDirectory, follower: RunDirectory
) -> None:
    append_score(follower, replace(FIRST, values={"eval_loss": math.nan, "eval_accuracy": 0.5}))
    assert read_scores(follower)["0000000a"].values == {"eval_loss": None, "eval_accuracy": 0.5}
    assert values_of(run, "eval_loss") == [] and [scored.value for scored in values_of(run, "eval_accuracy")] == [0.5]


def test_a_score_of_a_past_that_the_run_has_left_does_not_count(run: RunDirectory, follower: RunDirectory) -> None:
    record_origin(run, 0, Origin())
    for step in (10, 20, 30):
        append_score(follower, replace(FIRST, save_id=f"{step:08x}", step=step, values={"eval_loss": float(step)}))
    assert [score.step for score in scores_that_count(run)] == [10, 20, 30]
    # The checkpoint of step 30 was damaged: the run went back to 20.
    record_origin(run, 1, Origin(step=20, save_id="00000014", saved_in=0))
    again = replace(FIRST, save_id="000000ff", step=30, attempt=1, parent="00000014", values={"eval_loss": 5.0})
    append_score(follower, again)
    assert [(score.step, score.save_id) for score in scores_that_count(run)][-1] == (30, "000000ff")
    assert [scored.step for scored in best_first(run, measure="eval_loss", mode="min")] == [30, 10, 20]
    assert [scored.step for scored in best_first(run, measure="eval_loss", mode="max")] == [20, 10, 30]


def test_scores_with_a_name_have_it_in_their_measures() -> None:
    assert named({"eval_loss": 1.0}, "") == {"eval_loss": 1.0}
    assert named({"eval_loss": 1.0, "accuracy": 0.5}, "wiki") == {"eval_wiki_loss": 1.0, "eval_wiki_accuracy": 0.5}


def test_the_newest_of_those_that_wait_stay_while_the_lease_holds(
    run: RunDirectory, follower: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert awaited_saves(run.checkpoints, SAVES) == set()
    renew_lease(run.checkpoints, follower, most=2)
    assert awaited_saves(run.checkpoints, SAVES) == {"0000001e", "00000028"}
    append_score(follower, replace(FIRST, save_id="00000028", step=40))
    assert awaited_saves(run.checkpoints, SAVES) == {"00000014", "0000001e"}, "what has its score is let go"
    pin_save(run.checkpoints, "0000000a", follower)
    assert pinned_saves(run.checkpoints) == {"0000000a"}
    late = time.time() + LEASE_S + 1
    monkeypatch.setattr(pins.time, "time", lambda: late)
    assert awaited_saves(run.checkpoints, SAVES) == set(), "its follower has died without a word"
    assert pinned_saves(run.checkpoints) == {"0000000a"}, "a score may take longer"


def test_a_follower_lets_go_of_its_pin_before_its_lease(run: RunDirectory, follower: RunDirectory) -> None:
    renew_lease(run.checkpoints, follower, most=2)
    pin_save(run.checkpoints, "0000000a", follower)
    other = RunDirectory(follower.path.with_name("0123456789ab"))
    pin_save(run.checkpoints, "0000000a", other)
    release_pins(follower)
    assert [path.name for path in run.checkpoints.iterdir()] == ["pinned_0000000a_0123456789ab"]
