"""What a follower does next: oldest first, each checkpoint once, whoever is killed meanwhile; and when it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_train.checkpoint.commit import Place
from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import RunError
from slurm_train.evaluation import follower as follower_module
from slurm_train.evaluation.follower import Follower, Waiting
from slurm_train.rundir import pins
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import SaveLog
from slurm_train.rundir.jobs import record_job, take_lock, this_process
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory, find_save, list_checkpoints, name_of
from slurm_train.rundir.pins import list_pins, renew_lease
from slurm_train.rundir.scores import REMOVED, read_scores
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.following import summaries_of, summary_of
from tests.support.ledgers import close_attempt
from tests.support.small_checkpoints import make_checkpoint, steps_in

START = Start(job_id=None, restart_count=0, nodes=("n1",), world_size=1)


class Killed(BaseException):
    """In place of a SIGKILL."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "gpt" / "3f9a1c07")
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(RunConfig()))
    open_attempt(run, START)
    return run


class Evaluator:
    """A follower that may be killed and started again; its scores are the steps."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.own = RunDirectory(run.path / "evaluations" / "7d434a1ed8a2")
        self.own.path.mkdir(parents=True)
        self.clock_s = 0.0
        self.start()

    def start(self) -> Follower:
        attempt = open_attempt(self.own, START)
        commands = SlurmCommands({"PATH": "/nonexistent"})
        self.follower = Follower(self.own, attempt, commands, clock=lambda: self.clock_s)
        return self.follower

    def score(self, waiting: Waiting) -> bool:
        score = waiting.scored({"eval_loss": float(waiting.step)}, attempt=1, parent="", start_s=0.0)
        return self.follower.record(score)

    def score_all(self) -> list[int]:
        steps = []
        while (waiting := self.follower.next()) is not None:
            self.score(waiting)
            steps.append(waiting.step)
        return steps

    def lines(self) -> list[int]:
        return [json.loads(line)["step"] for line in self.own.scores.read_text().splitlines()]


@pytest.fixture
def evaluator(run: RunDirectory) -> Evaluator:
    return Evaluator(run)


def test_the_oldest_comes_first_and_each_once(run: RunDirectory, evaluator: Evaluator) -> None:
    assert evaluator.follower.next() is None
    for step in (2, 1):
        make_checkpoint(run.checkpoints, step)
    assert evaluator.score_all() == [1, 2]
    make_checkpoint(run.checkpoints, 3)
    assert evaluator.score_all() == [3] and evaluator.score_all() == []
    assert list_pins(run.checkpoints) == []


def test_what_waits_is_not_removed_and_what_is_scored_is(run: RunDirectory, evaluator: Evaluator) -> None:
    for step in (1, 2, 3, 4):
        newest = make_checkpoint(run.checkpoints, step)
    renew_lease(run.checkpoints, evaluator.own, most=2)
    waiting = evaluator.follower.next()
    assert waiting is not None and waiting.step == 1
    place = Place(root=run.checkpoints, attempt=1)
    place.prune(newest)
    assert steps_in(run.checkpoints) == [4, 3, 1], "one is being scored, two wait; step 2 is beyond --keep"
    evaluator.score(waiting)
    place.prune(newest)
    assert steps_in(run.checkpoints) == [4, 3]


def test_a_checkpoint_that_changes_its_name_meanwhile_is_scored_once(run: RunDirectory, evaluator: Evaluator) -> None:
    make_checkpoint(run.checkpoints, 1)
    waiting = evaluator.follower.next()
    assert waiting is not None
    Place(root=run.checkpoints, attempt=2).claim()
    assert name_of(find_save(waiting.save)).attempt == 2
    assert evaluator.score(waiting)
    assert evaluator.score_all() == []


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("pin_save", False),
        ("pin_save", True),
        ("check_fence", False),
        ("append_score", False),
        ("append_score", True),
        ("release_pin", False),
        ("release_pin", True),
        ("renew_lease", False),
        ("renew_lease", True),
    ],
)
def test_killed_at_any_point_it_goes_on_and_records_each_once(
    run: RunDirectory, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    for step in (1, 2, 3):
        make_checkpoint(run.checkpoints, step)
    real: Callable[..., object] = getattr(follower_module, name)

    def dies(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(follower_module, name, real)
        if after:
            real(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(follower_module, name, dies)
    with pytest.raises(Killed):
        evaluator.score_all()
    evaluator.start()
    evaluator.score_all()
    assert sorted(evaluator.lines()) == [1, 2, 3]
    assert list_pins(run.checkpoints) == [], "what a dead attempt had pinned is let go"


def test_one_that_was_overtaken_records_nothing(run: RunDirectory, evaluator: Evaluator) -> None:
    make_checkpoint(run.checkpoints, 1)
    old = evaluator.follower
    waiting = old.next()
    assert waiting is not None
    evaluator.start()
    with pytest.raises(RunError, match="was overtaken by attempt"):
        old.record(waiting.scored({"eval_loss": 9.0}, attempt=1, parent="", start_s=0.0))
    assert evaluator.score_all() == [1]
    assert read_scores(evaluator.own)[waiting.save_id].values == {"eval_loss": 1.0}


def test_what_was_removed_is_recorded_as_missed_once(run: RunDirectory, evaluator: Evaluator) -> None:
    log = SaveLog(run, 1)
    for step in (1, 2, 3):
        newest = make_checkpoint(run.checkpoints, step)
        log.ended(step, num_bytes=1, save_s=0.1)
    log.ended(4, num_bytes=0, save_s=0.1, error="disk full")
    Place(root=run.checkpoints, attempt=1).prune(newest)
    assert evaluator.score_all() == [3]
    assert evaluator.lines() == [3], "a listing may lack what is renamed at that moment"
    evaluator.clock_s += 100.0
    assert evaluator.score_all() == []
    evaluator.start().finish()
    assert evaluator.lines() == [3, 1, 2]
    summary = summary_of(evaluator.own)
    assert (summary.num_scored, summary.num_missed, summary.problems) == (1, 2, ())
    assert summary.words == f"1 scored, newest step 3: eval_loss 3.0000; 2 missed ({REMOVED})"
    assert summaries_of(run) == [summary]


def test_what_only_nodes_had_is_not_missed(run: RunDirectory) -> None:
    config = RunConfig()
    text = dump_config(config).replace("local_dir: null", "local_dir: /tmp")
    run.config.write_text(text)
    SaveLog(run, 1).ended(1, num_bytes=1, save_s=0.1)
    evaluator = Evaluator(run)
    assert evaluator.follower.finish() == []


def test_one_that_is_back_after_all_gets_its_score(run: RunDirectory, evaluator: Evaluator) -> None:
    path = make_checkpoint(run.checkpoints, 1)
    SaveLog(run, 1).ended(1, num_bytes=1, save_s=0.1)
    evaluator.follower.next()
    aside = path.rename(run.path / "aside")
    evaluator.follower.finish()
    assert summary_of(evaluator.own).num_missed == 1
    aside.rename(path)
    assert evaluator.score_all() == [1]
    assert (summary_of(evaluator.own).num_scored, summary_of(evaluator.own).num_missed) == (1, 0)


def test_a_damaged_checkpoint_has_its_reason_and_is_not_tried_again(run: RunDirectory, evaluator: Evaluator) -> None:
    make_checkpoint(run.checkpoints, 1)
    waiting = evaluator.follower.next()
    assert waiting is not None
    evaluator.follower.record(waiting.not_scored("__0_0.distcp: wrong hash"))
    assert evaluator.score_all() == []
    assert summary_of(evaluator.own).problems == ("step 1: __0_0.distcp: wrong hash",)
    make_checkpoint(run.checkpoints, 2)
    waiting = evaluator.follower.next()
    assert waiting is not None
    list_checkpoints(run.checkpoints)[0].rename(run.path / "aside")
    assert not evaluator.follower.record(waiting.not_scored("missing")), "it is gone, and that is another reason"
    assert len(evaluator.lines()) == 1


def test_it_ends_with_the_run(run: RunDirectory, evaluator: Evaluator) -> None:
    take_lock(run.lock, this_process(), is_alive=lambda _: False)
    for _ in range(3):
        evaluator.clock_s += 100.0
        assert not evaluator.follower.is_over(), "its process lives"
    run.result.write_text("{}")
    assert evaluator.follower.is_over()
    run.result.unlink()
    close_attempt(run, 0, {"reason": "failed", "action": "requeue"})
    assert not evaluator.follower.is_over(), "it comes back"
    open_attempt(run, START)
    close_attempt(run, 1, {"reason": "stopped", "action": "stop"})
    evaluator.clock_s += 10.0
    assert not evaluator.follower.is_over(), "a person may type `resume`"
    evaluator.clock_s += 70.0
    assert evaluator.follower.is_over()


def test_a_job_that_nobody_can_ask_about_counts_as_alive(run: RunDirectory, evaluator: Evaluator) -> None:
    record_job(run, "77")
    for _ in range(5):
        evaluator.clock_s += 100.0
        assert not evaluator.follower.is_over(), "there is no Slurm on this machine"


def test_it_ends_when_nothing_of_the_run_is_left_for_a_while(run: RunDirectory, evaluator: Evaluator) -> None:
    assert not evaluator.follower.is_over(), "between two attempts nothing is active for a moment"
    evaluator.clock_s += 50.0
    assert not evaluator.follower.is_over()
    evaluator.clock_s += 20.0
    assert evaluator.follower.is_over()


def test_the_lease_is_renewed_while_it_lives_and_keeps_what_was_asked(
    run: RunDirectory, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(run.checkpoints, 1)
    renew_lease(run.checkpoints, evaluator.own, most=3)
    (before,) = pins.read_leases(run.checkpoints)
    monkeypatch.setattr(pins.time, "time", lambda: before.until_unix_s)
    evaluator.follower.next()
    (after,) = pins.read_leases(run.checkpoints)
    assert after.most == 3 and after.until_unix_s == before.until_unix_s + pins.LEASE_S
