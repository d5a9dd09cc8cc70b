"""What a program says to its run, and asks of it: alone in a run, outside of one, and several ranks without torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from slurm_train.checkpoint.agreement import Peers
from slurm_train.checkpoint.load import read_model
from slurm_train.checkpoint.verify import newest_verified
from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import CheckpointSection, RunConfig
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.metrics import read_metrics
from slurm_train.rundir.attempts import check_fence, open_attempt, was_saved
from slurm_train.rundir.events import read_events, read_saves
from slurm_train.rundir.heartbeat import Heartbeat, Limits, has_joined, limits_of, read_beats
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.lineage import first_step_of
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.rundir.timing import ProgramProgress, Spent, read_program, read_record
from slurm_train.session.interface import Session
from slurm_train.session.joined import JoinedSession
from slurm_train.session.signals import STOP_SIGNALS, StopFlag, install
from slurm_train.status.run_status import read_files
from slurm_train.supervise.hang import Observer
from tests.fakes.thread_peers import ThreadPeers, on_threads
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.sessions import ALONE, join_alone
from tests.support.waiting import wait_for


def new_run(folder: Path) -> RunDirectory:
    run = RunDirectory(folder / "runs" / "mine" / "0123456789ab")
    run.path.mkdir(parents=True)
    return run


_hearts: list[Heartbeat] = []


@pytest.fixture(autouse=True)
def _stop_hearts() -> Iterator[None]:
    """Else they write beside the tests that follow in this process, some of which count such calls."""
    yield
    while _hearts:
        _hearts.pop().stop()


def join(run: RunDirectory, stop: StopFlag | None = None) -> JoinedSession:
    _hearts.append(Heartbeat())
    return join_alone(run, heartbeat=_hearts[-1], stop=stop)


def test_outside_of_a_run_everything_works_and_nothing_is_left(tmp_path: Path) -> None:
    code = """
import sys
from slurm_train import session
run = session.join()
assert "torch" not in sys.modules and session.join() is run and not run.is_active
run.report(1, loss=0.5)
run.mark("evaluate")
assert run.should_stop() == "" and run.newest() is None
with run.save(1) as folder:
    (folder / "a").write_text("x")
assert not folder.exists() and run.run_directory is None
assert (run.rank, run.local_rank, run.world_size, run.attempt) == (1, 1, 2, 0)
assert len(run.batches(10, global_size=4, steps=3)) == 3
run.leave()
"""
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "")
    assert list(tmp_path.iterdir()) == []


def test_the_first_save_outside_of_a_run_says_once_that_nothing_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(ALONE, {})
    for step in (1, 2):
        with session.save(step):
            pass
        session.training({}, []).save(step)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slurm_train: this program is not part of a run, so what `save` is given is removed again")


STARTS_OTHERS = """
import json, multiprocessing, os, subprocess, sys
from slurm_train import session
from slurm_train.errors import ConfigError

def look():
    run = session.join()
    run.report(1, loss=0.5)
    refused = []
    for name, call in (
        ("should_stop", run.should_stop),
        ("save", lambda: run.save(1).__enter__()),
        ("training", lambda: run.training(None, None).save(1)),
    ):
        try:
            call()
        except (ConfigError, TypeError) as err:
            refused.append(name)
    print(json.dumps([run.is_active, refused]), flush=True)

def start(way):
    if way == "spawned":
        process = multiprocessing.get_context("spawn").Process(target=look)
        process.start()
        process.join()
    elif way == "program":
        subprocess.run([sys.executable, __file__, "look"])
    elif way == "submitted job":
        subprocess.run([sys.executable, __file__, "look"], env={**os.environ, "SLURM_JOB_ID": "95"})

if __name__ == "__main__":
    if sys.argv[1] == "look":
        look()
    else:
        if sys.argv[1] != "submitted job":
            assert session.join().is_active
        start(sys.argv[1])
"""


def variables_of(run: RunDirectory) -> dict[str, str]:
    """Returns the environment of a rank of a new attempt of the run, in step 94.0."""
    run.config.write_text(dump_config(RunConfig()))
    open_attempt(run, Start(job_id=None, restart_count=0, nodes=("here",), world_size=1))
    step = {"SLURM_JOB_ID": "94", "SLURM_STEP_ID": "0", "SLURM_TRAIN_STEP": "94.0"}
    return {"PYTHONPATH": ":".join(sys.path), "SLURM_TRAIN_RUN_DIR": str(run.path), "SLURM_TRAIN_ATTEMPT": "0", **step}


@pytest.mark.parametrize("way", ["spawned", "program", "submitted job"])
def test_what_a_rank_has_started_is_no_rank_and_may_not_save_or_stop(way: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    program = tmp_path / "own.py"
    program.write_text(STARTS_OTHERS)
    env = variables_of(run)
    done = subprocess.run([sys.executable, program, way], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == '[false, ["should_stop", "save", "training"]]\n', done.stderr
    assert ("own.py look) is no rank of mine/" in done.stderr) == (way != "spawned")
    assert read_metrics(run.metrics) == [] and list_checkpoints(run.checkpoints) == []


def test_a_program_that_follows_the_rank_in_its_attempt_is_the_rank(tmp_path: Path) -> None:
    """A shell script that starts its program again goes on."""
    env = variables_of(new_run(tmp_path))
    command = [sys.executable, "-c", "from slurm_train import session; print(session.join().is_active)"]
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "True\n", done.stderr


def test_reports_are_lines_of_metrics_and_heartbeats(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    assert has_joined(run, 0) and not has_joined(run, 1)
    mine.report(1, loss=2.0, lr=0.1, max_steps=3)
    mine.report(2, loss=float("nan"))
    mine.report(3)
    mine.report(3, eval_loss=1.5, eval_accuracy=0.25)
    mine.report(4, reward=7)
    mine.close()
    lines = read_metrics(run.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    first, second, evaluation, last = lines
    assert (first["loss"], first["lr"], first["max_steps"]) == (2.0, 0.1, 3) and "step_time_s" not in first
    assert second["loss"] is None and second["step_time_s"] > 0
    assert "loss" not in evaluation and evaluation["eval_accuracy"] == 0.25
    assert last["reward"] == 7 and last["loss"] is None
    assert all((line["attempt"], line["world_size"]) == (0, 1) for line in lines)
    spent = read_record(run.account(0), Spent)
    assert spent is not None and (spent.first_step, spent.steps) == (0, 4)
    wait_for(lambda: read_beats(run, 0)[0].phase == "end", within_s=60, what="the last heartbeat")
    assert read_beats(run, 0)[0].step == 4
    assert read_files(run).line["step"] == 4


def test_a_program_is_watched_from_its_first_report_on(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    observer = Observer(Limits(start_s=0.0, steady_s=2.0), world_size=1)

    def stands_still() -> bool:
        now = time.monotonic()
        observer.look(read_beats(run, 0), began_s=now, ended_s=now)
        return observer.is_hung()

    # So long it says nothing but that it is there.
    for seconds in range(3):
        observer.look(read_beats(run, 0), began_s=-1e3 + 100 * seconds, ended_s=-1e3 + 100 * seconds)
    assert limits_of(RunConfig()) is not None
    assert not observer.is_hung()
    observer = Observer(Limits(start_s=0.0, steady_s=2.0), world_size=1)
    mine.report(5)
    wait_for(lambda: read_beats(run, 0)[0].step == 5, within_s=60, what="the heartbeat of step 5")
    # The process runs, and its step stays: that is a hang.
    wait_for(stands_still, within_s=60, what="the hang")
    assert str(observer.explain({})).startswith("rank 0 on here is in step at step 5")
    mine.close()


def test_a_save_is_durable_with_its_metrics_and_is_resumed_from(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    assert mine.newest() is None
    mine.report(1, loss=1.0)
    with mine.save(1) as folder:
        (folder / "model.txt").write_text("one")
    assert [line["step"] for line in read_metrics(run.metrics)] == [1]
    with pytest.raises(ZeroDivisionError), mine.save(2) as folder:
        (folder / "model.txt").write_text(str(1 // 0))
    assert [(line["step"], "error" in line) for line in read_saves(run)] == [(1, False), (2, True)]
    mine.close()
    later = join(run)
    checkpoint = later.newest()
    assert checkpoint is not None and (checkpoint.step, checkpoint.world_size) == (1, 1)
    assert (checkpoint.path / "model.txt").read_text() == "one"
    later.report(2, loss=0.5)
    assert first_step_of(run, 1, default=-1) == 1
    with later.save(2) as folder:
        (folder / "model.txt").write_text("two")
    found = newest_verified(run.checkpoints).newest
    assert found is not None and found[1].parent and found[1].attempt == 1
    # The attempt before it can save nothing any more.
    with pytest.raises(Exception, match="was overtaken by attempt 1"), mine.save(3) as folder:
        (folder / "model.txt").write_text("three")
    later.close()


def test_random_numbers_go_on_where_the_checkpoint_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)

    def train(*, restores: bool, last: int) -> list[float]:
        mine = join(run)
        torch.manual_seed(1)
        checkpoint = mine.newest()
        if restores:
            mine.restore_random()
        drawn = []
        for step in range(checkpoint.step + 1 if checkpoint is not None else 1, last + 1):
            drawn.append(float(torch.rand(())))
            mine.report(step, loss=1.0)
        with mine.save(last) as folder:
            (folder / "model.txt").touch()
        mine.close()
        return drawn

    state = torch.get_rng_state()
    first = train(restores=True, last=3)
    assert "the first steps again" not in capsys.readouterr().err
    second = train(restores=True, last=6)
    assert "the first steps again" not in capsys.readouterr().err
    torch.manual_seed(1)
    assert first + second == [float(torch.rand(())) for _ in range(6)]
    assert train(restores=False, last=9) == first
    said = capsys.readouterr().err
    assert "since the resume, rank 0 draws the random numbers of the first steps again (torch): call `restore_r" in said
    torch.set_rng_state(state)


def test_a_second_save_of_a_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    for content in ("first", "second"):
        with mine.save(3) as folder:
            (folder / "model.txt").write_text(content)
    mine.close()
    checkpoint = join(run).newest()
    assert checkpoint is not None and (checkpoint.path / "model.txt").read_text() == "second"
    assert len(list(run.checkpoints.iterdir())) == 1


def test_a_save_without_a_file_of_the_program_is_refused(tmp_path: Path) -> None:
    mine = join(new_run(tmp_path))
    with pytest.raises(CheckpointError, match="nothing was saved"), mine.save(1):
        pass
    mine.close()


def test_files_of_a_program_are_not_exported_as_weights(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    save_files(mine, 3)
    mine.close()
    (checkpoint,) = list_checkpoints(run.checkpoints)
    with pytest.raises(CheckpointError, match=r"has the files that the program has written: model\.txt"):
        read_model(checkpoint)


def test_a_save_that_no_resume_would_choose_is_refused(tmp_path: Path) -> None:
    mine = join(new_run(tmp_path))

    def save(step: int) -> None:
        with mine.save(step) as folder:
            (folder / "model.txt").touch()

    mine.report(4)
    save(4)
    # At a stop after the last step.
    save(4)
    mine.report(1)
    for step in (1, 4):
        with pytest.raises(
            ConfigError, match=rf"step {step} is to be saved, and step 4 was before: a resume begins at"
        ):
            save(step)
    mine.report(5)
    save(5)
    mine.report(3)
    # It goes back to what it has saved.
    assert mine.newest().step == 5  # type: ignore[union-attr]
    save(5)
    mine.close()


def test_a_save_below_an_earlier_one_is_refused_whatever_was_reported(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    save_files(mine, 3)
    with pytest.raises(ConfigError, match="step 1 is to be saved, and step 3 was before"):
        save_files(mine, 1)
    mine.close()
    forgetful = join(run)
    with pytest.raises(ConfigError, match="the run has a checkpoint of step 3, for which this start has not asked"):
        save_files(forgetful, 1)
    # It continues by itself, or asks.
    save_files(forgetful, 4)
    forgetful.close()
    again = join(run)
    assert again.newest().step == 4  # type: ignore[union-attr]
    save_files(again, 5)
    again.close()


def test_a_training_after_another_one_is_refused(tmp_path: Path) -> None:
    mine = join(new_run(tmp_path))
    mine.begin_training()
    mine.report(4)
    mine.mark("end")
    with pytest.raises(ConfigError, match="a training of this program is over, at step 4, and another begins"):
        mine.begin_training()
    mine.close()
    Session(ALONE, {}).begin_training()


@pytest.mark.parametrize("before", [{"eval_loss": 9.0}, {"test_f1": 0.1}], ids=["evaluation", "test"])
def test_an_evaluation_before_a_resume_supersedes_nothing(before: dict[str, float], tmp_path: Path) -> None:
    """A program evaluates its model at each start, before it loads a checkpoint."""
    run = new_run(tmp_path)
    for first in (1, 3):
        mine = join(run)
        mine.report(0, **before)
        assert mine._progress.heartbeat.phase == "joined"
        mine.newest()
        for step in (first, first + 1):
            mine.report(step, loss=1.0)
            mine.report(step, eval_loss=2.0)
        with mine.save(first + 1) as folder:
            (folder / "model.txt").touch()
        mine.close()
    lines = read_metrics(run.metrics)
    assert [line["step"] for line in lines] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    spent = read_record(run.account(1), Spent)
    assert spent is not None and (spent.first_step, spent.steps) == (2, 2)


def test_more_numbers_of_a_step_are_added_to_it(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    mine.report(1, loss=1.0)
    mine.report(1, eval_loss=2.0)
    mine.report(1, test_loss=3.0)
    mine.report(2)
    # One that took long.
    mine.report(1, eval_late_loss=4.0)
    assert mine._progress.heartbeat.step == 2
    mine.close()
    counted = [key for line in read_metrics(run.metrics) for key in line if key.endswith("loss")]
    assert counted == ["loss", "eval_loss", "test_loss", "eval_late_loss"]


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (1, 1),
        (True, 1.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (math.nan, None),
        (10**309, None),
        (-(10**309), None),
        (Fraction(10**309), None),
        (Decimal("1e400"), None),
    ],
)
def test_a_loss_of_any_type_of_number_is_recorded(value: Any, recorded: float | None, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    mine.report(1, loss=value)
    mine.close()
    assert [line["loss"] for line in read_metrics(run.metrics)] == [recorded]


def test_batches_go_on_after_the_steps_of_the_checkpoint_in_the_same_order(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    whole = list(mine.batches(100, global_size=8, steps=30, seed=5))
    assert len(whole) == 30
    with mine.save(13) as folder:
        (folder / "model.txt").write_text("one")
    mine.close()
    newest = newest_verified(run.checkpoints).newest
    assert newest is not None and (newest[1].samples, newest[1].epoch) == (104, 1)
    for changed in ({"global_size": 16}, {"seed": 6}):
        later = join(run)
        assert later.newest() is not None
        with pytest.raises(ConfigError, match="step 13 was saved with another order of samples") as refused:
            later.batches(100, **{"global_size": 8, "steps": 30, "seed": 5, **changed})
        assert all(f"{name} " in refused.value.message for name in changed)
        with pytest.raises(ConfigError, match="num_samples 100 -> 99"):
            later.batches(99, global_size=8, steps=30, seed=5)
        later.close()
    later = join(run)
    assert later.newest() is not None
    assert list(later.batches(100, global_size=8, steps=40, seed=5))[:17] == whole[13:]
    # A second order is compared with the second one of the checkpoint, which has none.
    assert list(later.batches(10, global_size=2, steps=1, done=0, seed=5))
    later.close()


def save_files(mine: JoinedSession, step: int) -> None:
    with mine.save(step) as folder:
        (folder / "model.txt").write_text("one")


def test_batches_that_are_fewer_than_the_steps_are_refused_at_a_save(tmp_path: Path) -> None:
    mine = join(new_run(tmp_path))
    assert mine.newest() is None
    loader = DataLoader(range(100), batch_sampler=mine.batches(100, global_size=8, steps=30, accumulation=4))  # type: ignore[arg-type]  # numbers will do
    with pytest.raises(ConfigError, match="step 6 is to be saved, and `batches` has given the samples of 1 steps"):
        # Each batch is counted, and four of them are a step.
        for step, _ in enumerate(loader, start=1):
            mine.report(step, loss=1.0)
            if step == 6:
                save_files(mine, step)
    mine.close()


@pytest.mark.parametrize("kind", ["four a step", "cut off", "in turns", "as they are", "in epochs", "read at once"])
def test_batches_that_do_not_keep_pace_with_the_steps_are_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = join(new_run(tmp_path))
    assert mine.newest() is None
    per_epoch = 10 if kind in ("cut off", "in epochs") else None
    batches = mine.batches(800, global_size=8, steps=100, steps_per_epoch=per_epoch)
    others = mine.batches(800, global_size=8, steps=100) if kind == "in turns" else None
    step = 0
    if per_epoch is not None:
        for epoch in range(4):
            batches.set_epoch(epoch)
            for number, _ in enumerate(batches):
                if kind == "cut off" and number == 4:
                    break
                step += 1
                mine.report(step, loss=1.0)
            save_files(mine, step)
    else:
        reader, other = iter(batches), iter(others or [])
        if kind == "read at once":
            reader = iter(list(reader))
        for step in range(1, 21):
            for _ in range(4 if kind == "four a step" else 1):
                next(other if others and step % 2 else reader)
            mine.report(step, loss=1.0)
            if step % 10 == 0:
                save_files(mine, step)
    mine.close()
    said = capsys.readouterr().err
    assert said.count("steps more than were reported") == (kind in ("four a step", "cut off"))
    assert said.count("say for each loader how many of its steps are done") == (kind == "in turns")


def test_batches_of_an_evaluation_that_begin_after_the_checkpoint_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    first = join(run)
    save_files(first, 20)
    first.close()
    mine = join(run)
    assert mine.newest() is not None
    assert list(mine.batches(40, global_size=8, steps=5)) == []
    assert "these batches have 5 steps, and step 20 is done, so none is left" in capsys.readouterr().err
    assert len(mine.batches(40, global_size=8, steps=5, done=0)) == 5 and len(mine.batches(40, global_size=8, steps=30))
    mine.close()
    assert "none is left" not in capsys.readouterr().err


def test_batches_that_are_made_before_the_checkpoint_is_known_are_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    mine.batches(100, global_size=8, steps=30)
    assert mine.newest() is None
    with mine.save(3) as folder:
        (folder / "model.txt").write_text("one")
    # It may go back to what it has saved.
    assert mine.newest() is not None and len(mine.batches(100, global_size=8, steps=30)) == 27
    mine.close()
    later = join(run)
    later.batches(100, global_size=8, steps=30)
    with pytest.raises(ConfigError, match="before `newest`"):
        later.newest()
    later.close()


def test_damage_means_the_checkpoint_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    for step in (1, 2):
        with mine.save(step) as folder:
            (folder / "model.txt").write_text("x" * step)
    mine.close()
    newest = newest_verified(run.checkpoints).newest
    assert newest is not None
    (newest[0] / "model.txt").write_text("xy")
    checkpoint = join(run).newest()
    assert checkpoint is not None and checkpoint.step == 1
    said = capsys.readouterr().err
    name = newest[0].name
    assert f"slurm_train: passed over {name}: " in said
    assert f"it becomes passed_over_{name} when training goes on" in said
    assert f"slurm_train: resuming from {checkpoint.path.name} (step 1)" in said
    (checkpoint.path / "model.txt").write_text("y")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        join(run).newest()


def test_a_stop_says_who_asked_and_leaves_an_event(tmp_path: Path) -> None:
    run, stop = new_run(tmp_path), StopFlag()
    mine = join(run, stop)
    mine.report(3)
    assert mine.should_stop() == ""
    stop.request("clock")
    assert mine.should_stop() == "clock" and mine.should_stop() == "clock"
    (event,) = read_events(run, "stop")
    assert (event["step"], event["asked_by"], event["saved"]) == (3, "clock", True)
    with pytest.raises(SystemExit) as end:
        mine.leave()
    assert end.value.code == 75
    check_fence(run, 0)


def test_a_program_that_catches_its_leave_has_left(tmp_path: Path) -> None:
    run, stop = new_run(tmp_path), StopFlag()
    mine = join(run, stop)
    stop.request("clock")
    assert mine.should_stop() == "clock"
    assert not was_saved(run, 0)
    with contextlib.suppress(SystemExit):
        mine.leave()
    # What follows a `break` is no end of the training.
    mine.mark("end")
    told = read_program(run, 0)
    assert was_saved(run, 0) and told is not None and not told.is_at_end


def test_a_program_tells_its_end_its_last_step_and_its_saves_at_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)

    def told() -> ProgramProgress:
        record = read_program(run, 0)
        assert record is not None
        return record

    mine.newest()
    mine.report(9, loss=1.0, max_steps=10)
    save_files(mine, 9)
    assert (told().save_step, told().is_at_end) == (9, False)
    mine.report(10)
    assert (told().step, told().max_steps, told().is_at_end, told().has_told_end) == (10, 10, True, False)
    mine.report(11, max_steps=float("inf"))
    mine.mark("end")
    assert (told().step, told().max_steps, told().is_at_end) == (11, None, True)
    mine.close()


def test_a_stop_signal_that_the_program_did_not_ask_for_is_on_record(tmp_path: Path) -> None:
    run, stop = new_run(tmp_path), StopFlag()
    mine = join(run, stop)
    stop.receive(signal.SIGTERM)
    mine.close()
    assert [event["asked_by"] for event in read_events(run, "signal")] == ["TERM"]


def test_the_stop_file_asks(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = join(run)
    run.stop_file.touch()
    assert mine.should_stop() == "file"
    mine.close()


def test_the_end_of_a_forked_child_is_not_that_of_the_program(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    stop = StopFlag()
    session = join(run, stop)
    session.report(1, loss=0.5)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(ConfigError):
            session.should_stop()
            os._exit(1)
        session.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert session._progress.heartbeat.phase == "step"
    assert stop._seen_by_children[0] == 0
    session.close()
    assert [line["step"] for line in read_metrics(run.metrics)] == [1]
    assert stop._seen_by_children[0] != 0


def test_another_handler_of_a_stop_signal_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopFlag()
    install(stop)
    session = join(new_run(tmp_path), stop)
    assert session.should_stop() == ""
    assert capsys.readouterr().err == ""
    signal.signal(signal.SIGTERM, lambda *_: None)
    session.should_stop()
    session.should_stop()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slurm_train: SIGTERM got another handler after `join()`, so `should_stop` does not see it")
    session.take_signals()
    assert stop.replaced() == []
    # A C++ library calls the kernel itself, as jax.distributed.initialize does.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGTERM, ctypes.cast(libc.abs, ctypes.c_void_p))
    assert signal.getsignal(signal.SIGTERM) is stop.handlers[signal.SIGTERM] and stop.replaced() == ["SIGTERM"]
    session.take_signals()
    assert stop.replaced() == []
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.full
@NEEDS_TRANSFORMERS
def test_a_save_between_the_batches_of_a_step_of_accelerate_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.state import GradientState

    session = join(new_run(tmp_path))
    gradients = GradientState()
    for step, is_whole in ((1, True), (2, False)):
        gradients._set_sync_gradients(is_whole)
        with session.save(step) as folder:
            (folder / "model.pt").touch()
    gradients._set_sync_gradients(True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slurm_train: step 2 is saved while accelerate adds up gradients")


def test_progress_is_shown_with_the_time_left_once_in_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = join(new_run(tmp_path))
    display = session._rank.display
    for step in range(1, 6):
        # Lines of a program's own stand between; the first comes after a while.
        display.due_s = 0.0 if step in (1, 4) else math.inf
        time.sleep(0.01)
        session.report(step, loss=0.5 * step, max_steps=40)
    display.due_s = 0.0
    session.report(6, max_steps=40)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"slurm_train: step 4/40  loss 2\.0000  [\d.]+ steps/s  00:00:\d\d left", line), line


def test_a_program_is_told_that_files_of_its_own_go_into_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(checkpoint=CheckpointSection(local_dir="/tmp"))
    _hearts.append(Heartbeat())
    run = new_run(tmp_path)
    session = join_alone(run, heartbeat=_hearts[-1], config=config)
    for step in (1, 2):
        with session.save(step) as folder:
            (folder / "model.pt").touch()
    assert capsys.readouterr().err.count("checkpoint.local_dir=/tmp is for those of a `training`") == 1
    assert session.saved is not None and session.saved.step == 2
    assert session.saved.path == list_checkpoints(run.checkpoints)[0]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("signal.signal(signal.SIGTERM, print)", "`join()` takes the place of the program's handler of SIGTERM"),
        ("pass", ""),
    ],
)
def test_what_keeps_a_program_from_a_stop_is_told(before: str, said: str, tmp_path: Path) -> None:
    code = f"import signal; {before}; from slurm_train import session; session.join()"
    env = variables_of(new_run(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert said in done.stderr and bool(said) == bool(done.stderr)


def test_a_thread_does_not_join(tmp_path: Path) -> None:
    code = """
import threading
from slurm_train import session
def join():
    try:
        session.join()
    except Exception as err:
        print(type(err).__name__, err)
thread = threading.Thread(target=join, name="trainer")
thread.start()
thread.join()
"""
    env = {"PYTHONPATH": ":".join(sys.path), "SLURM_TRAIN_RUN_DIR": str(tmp_path), "SLURM_TRAIN_ATTEMPT": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("ConfigError `join()` was called in the thread trainer: Python installs"), done.stderr


RANK = """
import json, os, sys
from slurm_train import session
run = session.join()
before = run.newest()
stops = []
for step in range(1, 4):
    run.report(step, loss=float(step))
    stops.append(run.should_stop())
with run.save(3) as folder:
    (folder / f"{run.rank}.txt").write_text(str(run.rank))
after = run.newest()
assert "torch" not in sys.modules
print(json.dumps([before, stops, after.step, sorted(os.listdir(after.path))]))
"""


@pytest.mark.distributed
def test_ranks_without_torch_save_and_resume_and_exchange_by_sockets(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.config.write_text(dump_config(RunConfig()))
    run.plan.write_text("{}")
    open_attempt(run, Start(job_id=None, restart_count=0, nodes=("here",), world_size=3))
    run.stop_file.touch()
    (tmp_path / "own.py").write_text(RANK)

    def start(rank: int) -> subprocess.Popen[str]:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
        env = {name: str(value) for name, value in ranks.items()} | {
            "PYTHONPATH": ":".join(sys.path),
            "SLURM_TRAIN_RUN_DIR": str(run.path),
            "SLURM_TRAIN_ATTEMPT": "0",
            "MASTER_ADDR": "127.0.0.1",
        }
        argv = [sys.executable, "own.py"]
        return subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    ranks = [start(rank) for rank in range(3)]
    said = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    names = ["0.txt", "1.txt", "2.txt", "COMPLETE", "manifest.json"]
    assert said == [[None, ["file"] * 3, 3, names]] * 3


@pytest.mark.parametrize("others", ["should_stop", "newest"])
def test_a_call_that_other_ranks_do_not_make_is_named(others: str, tmp_path: Path) -> None:
    """Mostly it is `save`, within `if run.rank == 0`."""
    sessions = [join(new_run(tmp_path / name)) for name in ("first", "second")]

    def call(peers: ThreadPeers) -> None:
        session = sessions[peers.rank()]
        session._calls.group = lambda: peers
        if peers.rank() == 1:
            getattr(session, others)()
        else:
            with session.save(1):
                pass

    first, second = on_threads(2, call)
    assert isinstance(first, ConfigError) and isinstance(second, ConfigError)
    assert f"has called save, and another rank {others}: all ranks have to call them alike" in first.message
    assert f"has called {others}, and another rank save" in second.message


def test_ranks_that_save_different_steps_are_named(tmp_path: Path) -> None:
    sessions = [join(new_run(tmp_path / name)) for name in ("first", "second")]

    def call(peers: ThreadPeers) -> None:
        session = sessions[peers.rank()]
        session._calls.group = lambda: peers
        with session.save(3 + peers.rank()):
            pass

    first, second = on_threads(2, call)
    assert isinstance(first, ConfigError) and "called save for step 3, and another rank for step 4" in first.message
    assert isinstance(second, ConfigError) and "called save for step 4, and another rank for step 3" in second.message


def test_a_rank_that_waits_for_one_that_has_gone_says_in_which_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 saves, and the program of the others has ended."""

    class Gone(Peers):
        def rank(self) -> int:
            return 0

        def gather_values(self, value: Any) -> list[Any]:
            raise RuntimeError("Connection closed by peer")

    session = join(new_run(tmp_path))
    session._calls.group = lambda: Gone()
    with pytest.raises(RuntimeError, match="closed by peer"), session.save(1):
        pass
    assert capsys.readouterr().err.startswith(
        "slurm_train: rank 0 waited in `save`, which all ranks call together, and another rank did not come: it failed"
    )
    session.close()


def test_a_session_outside_gives_a_device() -> None:
    assert Session(ALONE, {}).device.type in ("cpu", "cuda")


@pytest.mark.parametrize("kind", [int, float, np.int64, np.float32])
def test_a_step_of_any_type_is_a_number_of_steps(kind: Callable[[int], Any], tmp_path: Path) -> None:
    """Under another type its heartbeats would not be read, and the rank be taken for one that hangs."""
    run = new_run(tmp_path)
    mine = join(run)
    mine.report(kind(3), loss=2.0, step=3.5)
    with mine.save(kind(3)) as folder:
        (folder / "x").touch()
    wait_for(lambda: read_beats(run, 0)[0].step == 3, within_s=60, what="the heartbeat of step 3")
    mine.close()
    assert [line["step"] for line in read_metrics(run.metrics)] == [3]
    with pytest.raises(ConfigError, match=r"2\.5 was given as a step"):
        mine.report(2.5)  # type: ignore[arg-type]
