"""Short versions of the campaigns that need no cluster, and proof that they can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.checkpoint import commit, local, manifest
from slurm_train.checkpoint.commit import Place
from slurm_train.data import prepare
from slurm_train.errors import CheckpointError
from slurm_train.session import saving
from slurm_train.status import activity
from slurm_train.supervise import evidence
from slurm_train.supervise.own_end import EndKind
from tests.campaigns import (
    abandoned_past,
    combinations,
    early_ends,
    kills_local,
    not_understood,
    same_outside,
    same_step,
    unasked_jobs,
    unequal,
)
from tests.campaigns.record import Tally
from tests.campaigns.victims import COUNTED_MODULE
from tests.support.run_ends import End

pytestmark = [pytest.mark.faults, pytest.mark.distributed, pytest.mark.full]


@pytest.mark.campaign
def test_ranks_killed_at_random_moments_cost_no_committed_step(tmp_path: Path) -> None:
    tally = Tally()
    kills_local.run(tally, seed=11, trials=5, folder=tmp_path, steps=40)
    assert tally.problems == []
    assert tally.trials == tally.held == 5


def test_a_past_that_was_left_does_not_come_back(tmp_path: Path) -> None:
    tally = Tally()
    abandoned_past.run(tally, seed=11, trials=5, folder=tmp_path)
    assert tally.problems == [] and tally.trials == 5


def test_what_is_not_understood_is_neither_passed_over_nor_pruned(tmp_path: Path) -> None:
    tally = Tally()
    not_understood.run(tally, seed=11, trials=40, folder=tmp_path)
    assert tally.problems == [] and tally.trials == 40


@pytest.mark.parametrize("planted", ["what cannot be read is damage", "what is not understood is pruned"])
def test_what_is_not_understood_and_gone_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    if planted == "what is not understood is pruned":
        monkeypatch.setattr(commit, "_is_understood", lambda _: True)
    else:
        monkeypatch.setattr(manifest, "UnknownCheckpointError", CheckpointError)
    tally = Tally()
    not_understood.run(tally, seed=11, trials=100, folder=tmp_path)
    assert any(text in problem for problem in tally.problems for text in ("is gone", "has changed"))


def test_a_job_that_nobody_can_ask_about_keeps_what_is_its(tmp_path: Path) -> None:
    tally = Tally()
    unasked_jobs.run(tally, seed=11, trials=10, folder=tmp_path)
    assert tally.problems == [] and tally.trials == 10


def test_a_job_that_counts_as_over_where_no_slurm_is_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_needs_no_job", lambda _: True)
    tally = Tally()
    unasked_jobs.run(tally, seed=11, trials=15, folder=tmp_path)
    for word in ("a follower has ended", "a wait has ended", "gc has removed", "cancel: "):
        assert any(word in problem for problem in tally.problems), word


def test_a_resume_that_is_not_equal_is_named(tmp_path: Path) -> None:
    tally = Tally()
    unequal.run(tally, seed=11, trials=8, folder=tmp_path)
    assert tally.problems == [] and tally.trials == 8


def test_a_resume_that_is_not_equal_and_not_named_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unequal, "_NAMES", ())
    assert unequal.verdict_of(tmp_path, "whole", "again", [3]) == "unequal"


@pytest.mark.parametrize("is_looked_for", [True, False])
def test_a_step_that_is_saved_again_and_again_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_looked_for: bool
) -> None:
    if not is_looked_for:
        monkeypatch.setattr(saving, "require_closed", lambda _: None)
    tally = Tally()
    same_step.run(tally, seed=11, trials=1, folder=tmp_path)
    assert tally.held == is_looked_for and tally.trials == 1


def test_no_program_is_finished_before_its_end(tmp_path: Path) -> None:
    tally = Tally()
    early_ends.run(tally, seed=11, trials=len(early_ends.PROGRAMS), folder=tmp_path)
    assert tally.problems == [] and tally.trials == len(early_ends.PROGRAMS)


@pytest.mark.parametrize("kind", [EndKind.FINISHED, EndKind.EARLY])
def test_an_end_that_is_judged_wrongly_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: EndKind) -> None:
    monkeypatch.setattr(evidence, "judge", lambda _: (kind, "x" if kind is EndKind.EARLY else ""))
    tally = Tally()
    early_ends.run(tally, seed=11, trials=len(early_ends.PROGRAMS), folder=tmp_path)
    word = "finished before its end" if kind is EndKind.FINISHED else "called early"
    assert any(word in problem for problem in tally.problems)


def test_what_looks_the_same_is_told_apart(tmp_path: Path) -> None:
    tally = Tally()
    same_outside.run(tally, seed=11, trials=20, folder=tmp_path)
    assert tally.problems == [] and tally.trials == 20


def test_what_looks_the_same_and_is_taken_for_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_input_digest", lambda _documents, outside: outside)
    tally = Tally()
    same_outside.run(tally, seed=11, trials=20, folder=tmp_path)
    assert any("the identity is the same" in problem for problem in tally.problems)


def test_features_work_in_combinations(tmp_path: Path) -> None:
    tally = Tally()
    combinations.run(tally, seed=11, trials=2, folder=tmp_path)
    assert tally.problems == [] and tally.trials == 2


def test_a_run_that_ends_otherwise_is_found() -> None:
    line = {"step": 1, "samples_digest": 7, "lr": 0.1, "loss": 2.0, "eval_loss": None}
    end = End({"model.weight": b"1"}, [{"rng": b"2", "callbacks": {}}], [line])
    other = End({"model.weight": b"0"}, [{"rng": b"3", "callbacks": {"best": 1}}], [line | {"loss": 2.1}])
    assert combinations.differences(end, end) == []
    assert combinations.differences(other, end) == ["losses differ", "tensors differ", "states of ranks differ"]
    assert combinations.far_apart(other, end, compares_losses=False) == []
    assert combinations.far_apart(other, end, compares_losses=True) == ["2.1 and 2.0 in step 1"]
    lost = End({}, [], [line | {"samples_digest": 8}])
    assert combinations.far_apart(lost, end, compares_losses=True) == ["samples_digest of step 1 differs"]


@pytest.mark.parametrize(
    ("planted", "text"),
    [("any local checkpoint", "of a past that the run has left"), ("none is moved aside", "of a past")],
)
@pytest.mark.campaign
def test_a_past_that_comes_back_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str, text: str
) -> None:
    if planted == "any local checkpoint":
        monkeypatch.setattr(local, "is_on_line", lambda _line, **_: True)
    else:
        monkeypatch.setattr(Place, "move_aside", lambda _: [])
    tally = Tally()
    abandoned_past.run(tally, seed=11, trials=25, folder=tmp_path)
    assert any(text in problem for problem in tally.problems)


@pytest.mark.campaign
def test_a_resume_that_forgets_a_batch_is_found(tmp_path: Path) -> None:
    tally, modules = Tally(), (COUNTED_MODULE, Path(__file__).with_name("forgetful.py"))
    kills_local.run(tally, seed=12, trials=5, folder=tmp_path, steps=40, modules=modules)
    assert not tally.is_kept
    assert any(" samples: " in problem for problem in tally.problems)
