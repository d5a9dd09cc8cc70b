from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import AttemptStart, begin_round, open_attempt
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import Notice, notice_path, read_notice
from slurm_train.supervise import monitor as timekeeper
from slurm_train.supervise.monitor import Monitor, next_look_s, notice_keeper
from tests.support.waiting import wait_for


@pytest.mark.parametrize(("left_s", "expected"), [(None, 600.0), (7200.0, 600.0), (1100.0, 60.0), (-30.0, 60.0)])
def test_slurm_is_asked_more_often_when_the_end_is_near(left_s: float | None, expected: float) -> None:
    notice = Notice(end_unix_s=None if left_s is None else 1000.0 + left_s)
    assert next_look_s(notice, now_unix_s=1000.0) == expected


class Slurm:
    """Answers with the newest of some limits; ClusterError for None."""

    def __init__(self, *ends: float | None) -> None:
        self.ends, self.asked = list(ends), 0

    def __call__(self) -> Notice:
        end = self.ends[min(self.asked, len(self.ends) - 1)]
        self.asked += 1
        if end is None:
            raise ClusterError("away")
        return Notice(end_unix_s=end)


@contextlib.contextmanager
def keeping_time(run: RunDirectory, slurm: Slurm) -> Iterator[None]:
    monitor = Monitor()
    monitor.add(notice_keeper(run, 0, read=slurm))
    with monitor.running():
        yield


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(timekeeper, "_NOTICE_EVERY_S", 0.01)
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    return run


def test_an_extended_limit_reaches_the_ranks(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timekeeper, "_NEAR_S", 0.02)
    slurm = Slurm(time.time() + 100, time.time() + 100, time.time() + 900)
    with keeping_time(run, slurm):
        wait_for(lambda: read_notice(run, 0).end_unix_s == slurm.ends[0], within_s=5, what="a notice", poll_s=0.001)
        wait_for(lambda: read_notice(run, 0).end_unix_s == slurm.ends[2], within_s=5, what="the new one", poll_s=0.01)
    asked = slurm.asked
    assert asked >= 3


def test_a_controller_that_is_away_is_asked_again(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timekeeper, "_ASK_AGAIN_S", 0.02)
    slurm = Slurm(None, None, 5e9)
    with keeping_time(run, slurm):
        wait_for(lambda: read_notice(run, 0).end_unix_s == 5e9, within_s=5, what="a notice", poll_s=0.01)
    assert slurm.asked == 3


def test_a_run_directory_that_is_gone_is_no_second_failure(run: RunDirectory) -> None:
    notice_path(run, 0).parent.rmdir()
    slurm = Slurm(5e9)
    with keeping_time(run, slurm):
        wait_for(lambda: slurm.asked, within_s=5, what="a look", poll_s=0.01)


def test_ranks_that_torchrun_starts_again_are_told_as_well(run: RunDirectory) -> None:
    start = AttemptStart(job_id="7", restart_count=0, nodes=("here",), world_size=1)
    begin_round(run, start, first=open_attempt(run, start))
    with keeping_time(run, Slurm(5e9)):
        wait_for(lambda: read_notice(run, 0).end_unix_s == 5e9, within_s=5, what="a notice", poll_s=0.01)
        assert begin_round(run, start, first=0) == 1
        wait_for(lambda: read_notice(run, 1).end_unix_s == 5e9, within_s=5, what="the next round's", poll_s=0.01)
