"""Asked by the clock, and too late to save: on two real gloo ranks, with a disk that is really slow."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.directory import verify
from slurm_train.rundir.events import read_events
from slurm_train.rundir.layout import RunDirectory, list_checkpoints
from slurm_train.rundir.timing import Notice, Spent, read_measured, write_notice
from slurm_train.supervise.signals import StopFlag
from slurm_train.train.loop import Stopping
from tests.support.ranks import make_rank
from tests.train.test_background_saving import config_of, digest_of, lines_of, train

SAVE_S = 1.0


def run_with(folder: Path, notice: Notice, *, attempt: int = 0) -> RunDirectory:
    run = RunDirectory(folder)
    run.attempt_logs(attempt).mkdir(parents=True)
    run.epochs.mkdir(exist_ok=True)
    (run.epochs / f"attempt_{attempt}").touch()
    write_notice(run, attempt, notice)
    return run


def stop_of(run: RunDirectory) -> dict[str, Any]:
    (event,) = read_events(run, "stop")
    return event


@pytest.mark.distributed
def test_a_run_stops_itself_before_its_limit_without_any_signal(tmp_path: Path) -> None:
    """The limit is 6 s away; a stop is given a margin, so the clock asks at the first look."""
    run = run_with(tmp_path / "run", Notice(end_unix_s=time.time() + 6, limit_s=3600, kill_wait_s=5))
    config = config_of(model={"step_s": 0.05}, every_steps=None)
    codes, text = train(run.path, config)
    assert codes == [75, 75], text
    event = stop_of(run)
    assert event["asked_by"] == "clock" and event["saved"] and 0 < event["left_s"] <= 11
    step = event["step"]
    assert verify(list_checkpoints(run.checkpoints)[0]).step == step < 24
    measured = read_measured(run)
    assert measured is not None and measured.save_s > 0 and measured.step_s >= 0.05
    codes, text = train(run.path, config, attempt=1)
    assert codes == [0, 0], text
    assert [line[0] for line in lines_of(run.path)] == list(range(1, 25))


TOO_SHORT, LONG_ENOUGH = Notice(kill_wait_s=0.5, grace_s=0.0), Notice(kill_wait_s=0.5, grace_s=30.0)


@pytest.mark.distributed
@pytest.mark.parametrize(("notice", "saved"), [(TOO_SHORT, False), (LONG_ENOUGH, True)], ids=["short", "long"])
def test_a_grace_shorter_than_a_save_is_not_spent_on_one(tmp_path: Path, notice: Notice, saved: bool) -> None:
    run = run_with(tmp_path / "run", notice)
    model = {"step_s": 0.2, "signal_at": 14, "only_in": str(tmp_path / "sent")}
    start = time.monotonic()
    codes, text = train(run.path, config_of(model=model, every_steps=5), fault={"slow_s": SAVE_S})
    assert codes == [75, 75], f"{time.monotonic() - start}\n{text}"
    event = stop_of(run)
    assert (event["asked_by"], event["saved"]) == ("TERM", saved)
    assert event["save_s"] >= SAVE_S and (event["left_s"] <= 0.5) is not saved
    newest = verify(list_checkpoints(run.checkpoints)[0]).step
    assert newest == (event["step"] if saved else 10 if newest == 10 else 5)
    assert ("without a save: 0 s are left and a save takes" in text) is not saved
    # Nothing is lost but steps: the next attempt ends with the bits of a run that was left alone.
    codes, text = train(run.path, config_of(model=model, every_steps=5), attempt=1)
    assert codes == [0, 0], text
    codes, text = train(tmp_path / "whole", config_of(every_steps=None))
    assert codes == [0, 0], text
    assert digest_of(run.path) == digest_of(tmp_path / "whole")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stopping(run: RunDirectory, *, now: Clock, spent: Spent | None = None) -> tuple[Stopping, StopFlag]:
    flag = StopFlag()
    return Stopping(make_rank(run.path, stop=flag), spent=spent or Spent(begin_unix_s=0), now=now), flag


def test_the_clock_asks_when_what_a_stop_takes_is_what_is_left(tmp_path: Path) -> None:
    run = run_with(tmp_path, Notice(end_unix_s=2000.0, limit_s=3600.0, kill_wait_s=5.0))
    spent = Spent(begin_unix_s=0, longest_save_s=20.0, longest_step_s=5.0)  # 15 + 1.5 x (10 + 40) = 90
    now = Clock()
    part, flag = stopping(run, now=now, spent=spent)
    now.now = 1909.0
    part.look()
    assert not flag.requested
    now.now = 1911.0
    part.look()
    assert flag.requested and flag.ask().by == "clock"


def test_without_a_limit_nobody_is_asked(tmp_path: Path) -> None:
    now = Clock()
    for number, notice in enumerate((Notice(), Notice(kill_wait_s=5.0))):
        run = run_with(tmp_path / str(number), notice)
        part, flag = stopping(run, now=now)
        now.now = 1e12
        part.look()
        assert not flag.requested


def test_a_stop_file_asks_as_well(tmp_path: Path) -> None:
    run = run_with(tmp_path, Notice(end_unix_s=1e12))
    run.stop_file.touch()
    part, flag = stopping(run, now=Clock())
    part.look()
    assert flag.ask().by == "file"
    assert part.decide(step=7).is_made and stop_of(run)["step"] == 7


def test_a_warning_that_is_followed_by_term_counts_from_the_term() -> None:
    flag = StopFlag()
    assert flag.ask().by == "another rank"
    flag.requested, flag.signal_number, flag.signal_at = 1, signal.SIGUSR2, time.monotonic() - 50
    assert flag.ask().by == "USR2" and flag.ask().since_s >= 50
    flag.signal_number, flag.signal_at = signal.SIGTERM, time.monotonic() - 1
    assert flag.ask().by == "TERM" and 1 <= flag.ask().since_s < 10
