"""When a rank asks for a stop by itself, and whether the save of a stop is made."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from slurm_train.rundir.events import read_events
from slurm_train.rundir.timing import Notice, Spent
from slurm_train.session.signals import StopFlag
from slurm_train.session.stopping import Stopping
from tests.support.ranks import make_rank
from tests.support.run_facts import run_with_notice


def test_the_clock_asks_when_what_a_stop_takes_is_what_is_left(tmp_path: Path) -> None:
    run = run_with_notice(tmp_path, Notice(end_unix_s=2000.0, limit_s=3600.0, kill_wait_s=5.0))
    spent = Spent(begin_unix_s=0, longest_save_s=20.0, longest_step_s=5.0)  # 15 + 1.5 x (10 + 40) = 90
    now, flag = [1909.0], StopFlag()
    stopping = Stopping(make_rank(run.path, attempt=0, stop=flag), spent=spent, clock=lambda: now[0])
    stopping.check_clock()
    assert not flag.requested
    now[0] = 1911.0
    stopping.check_clock()
    assert flag.requested and flag.ask()[0] == "clock"


@pytest.mark.parametrize("notice", [Notice(), Notice(kill_wait_s=5.0)])
def test_without_a_limit_the_clock_asks_for_nothing(tmp_path: Path, notice: Notice) -> None:
    flag = StopFlag()
    run = run_with_notice(tmp_path, notice)
    Stopping(make_rank(run.path, stop=flag), spent=Spent(begin_unix_s=0), clock=lambda: 1e12).check_clock()
    assert not flag.requested


def test_a_stop_file_asks_as_well(tmp_path: Path) -> None:
    run, flag = run_with_notice(tmp_path, Notice(end_unix_s=1e12)), StopFlag()
    run.stop_file.touch()
    stopping = Stopping(make_rank(run.path, attempt=0, stop=flag), spent=Spent(begin_unix_s=0), clock=lambda: 1000.0)
    stopping.check_clock()
    assert flag.ask()[0] == "file"
    assert stopping.decide_save(step=7) == (None, "")
    (event,) = read_events(run, "stop")
    assert event["step"] == 7


def test_a_warning_that_is_followed_by_term_counts_from_the_term() -> None:
    flag = StopFlag()
    assert flag.ask()[0] == "another rank"
    flag.requested, flag.signal_number, flag.signal_at = 1, signal.SIGUSR2, time.monotonic() - 50
    assert flag.ask()[0] == "USR2" and flag.ask()[1] >= 50
    flag.signal_number, flag.signal_at = signal.SIGTERM, time.monotonic() - 1
    assert flag.ask()[0] == "TERM" and 1 <= flag.ask()[1] < 10


@pytest.mark.parametrize(
    ("previous_s", "longest_s", "saved"),
    [
        (0.0, 0.0, True),
        (0.0, 20.0, True),
        (0.0, 40.0, False),
        (40.0, 0.0, False),
        (40.0, 20.0, True),
        (20.0, 40.0, False),
    ],
)
def test_the_save_of_a_stop_is_made_unless_saves_take_longer_than_is_left(
    tmp_path: Path, previous_s: float, longest_s: float, saved: bool
) -> None:
    """What the attempt before has measured counts until this one has saved."""
    run = run_with_notice(tmp_path, Notice(), attempt=0)
    Spent(begin_unix_s=0, longest_save_s=previous_s).write(run.account(0))
    run_with_notice(tmp_path, Notice(kill_wait_s=5.0, grace_s=25.0), attempt=1)
    flag = StopFlag()
    flag.receive(signal.SIGTERM)
    stopping = Stopping(
        make_rank(run.path, attempt=1, stop=flag), spent=Spent(begin_unix_s=0, longest_save_s=longest_s)
    )
    left_s, reason = stopping.decide_save(step=7)
    assert left_s == pytest.approx(30.0, abs=5.0) and (not reason) is saved
    (event,) = read_events(run, "stop")
    assert (event["saved"], event["asked_by"]) == (saved, "TERM")


def test_the_time_that_is_left_is_read_anew_when_all_have_stopped(tmp_path: Path) -> None:
    run = run_with_notice(tmp_path, Notice(end_unix_s=1e6, kill_wait_s=5.0))
    flag = StopFlag()
    stopping = Stopping(make_rank(run.path, attempt=0, stop=flag), spent=Spent(begin_unix_s=0), clock=lambda: 1000.0)
    stopping.check_clock()
    run_with_notice(tmp_path, Notice(end_unix_s=1100.0, kill_wait_s=5.0))
    assert stopping.announce(step=7) == ("another rank", 105.0)
