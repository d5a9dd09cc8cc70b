from __future__ import annotations

import math
from pathlib import Path

import pytest

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import (
    Ask,
    Measured,
    Notice,
    Spent,
    account_path,
    is_worth_saving,
    lead_s,
    notice_path,
    read_measured,
    read_notice,
    time_left_s,
    warning_lead_s,
    write_notice,
)

HOUR = 3600.0
LEADS = [
    ("nothing measured, no limit", None, None, 120.0),
    ("nothing measured", None, HOUR, 120.0),
    ("nothing measured, a limit of two minutes", None, 120.0, 30.0),
    ("nothing measured, the shortest limit", None, 60.0, 15.0),
    ("no save yet", Measured(save_s=0.0, step_s=9.0), HOUR, 120.0),
    ("quick", Measured(save_s=0.1, step_s=0.1), HOUR, 15.0 + 1.5 * 0.4),
    ("slow saves", Measured(save_s=100.0, step_s=2.0), HOUR, 15.0 + 1.5 * 204),
    ("slow steps", Measured(save_s=1.0, step_s=60.0), HOUR, 15.0 + 1.5 * 122),
    ("an evaluation may have begun", Measured(save_s=1.0, evaluation_s=40.0), HOUR, 15.0 + 1.5 * 42),
    ("more than half of the limit", Measured(save_s=900.0), HOUR, HOUR / 2),
]


@pytest.mark.parametrize(("measured", "limit_s", "expected"), [case[1:] for case in LEADS], ids=[c[0] for c in LEADS])
def test_the_lead_is_what_a_stop_takes(measured: Measured | None, limit_s: float | None, expected: float) -> None:
    assert lead_s(measured, limit_s=limit_s) == pytest.approx(expected)


END = 10_000.0
# Ends in an hour; 5 s after a TERM comes the KILL, after a preemption's first TERM there are 15 s more.
NOTICE = Notice(end_unix_s=END, limit_s=HOUR, kill_wait_s=5.0, grace_s=15.0)
NO_LIMIT = Notice(kill_wait_s=5.0, grace_s=15.0)
NO_GRACE = Notice(end_unix_s=END, limit_s=HOUR, kill_wait_s=5.0, grace_s=0.0)
LEFT = [
    ("without Slurm", Ask(by="USR2", since_s=0.0), Notice(), 0.0, None),
    ("a file, no limit", Ask(by="file", since_s=0.0), NO_LIMIT, 0.0, None),
    ("a file", Ask(by="file", since_s=0.0), NOTICE, END - 100, 105.0),
    ("the warning", Ask(by="USR2", since_s=2.0), NOTICE, END - 60, 65.0),
    ("the clock", Ask(by="clock", since_s=0.0), NOTICE, END - 20, 25.0),
    ("another rank was asked", Ask(by="another rank", since_s=0.0), NOTICE, END - 20, 25.0),
    ("preemption", Ask(by="TERM", since_s=2.0), NOTICE, 0.0, 18.0),
    ("preemption, seen late", Ask(by="TERM", since_s=19.0), NOTICE, 0.0, 1.0),
    ("preemption, seen too late", Ask(by="TERM", since_s=60.0), NOTICE, 0.0, 0.0),
    ("preemption near the limit", Ask(by="TERM", since_s=1.0), NOTICE, END - 4, 9.0),
    ("preemption without grace, scancel", Ask(by="TERM", since_s=1.0), NO_GRACE, 0.0, 4.0),
    ("preemption without a limit", Ask(by="TERM", since_s=1.0), NO_LIMIT, 0.0, 19.0),
    ("the limit without a warning", Ask(by="TERM", since_s=1.0), NOTICE, END + 24, 4.0),
    ("the limit after a warning", Ask(by="TERM", since_s=0.5), NOTICE, END + 1, 4.5),
]


@pytest.mark.parametrize(("ask", "notice", "now", "expected"), [case[1:] for case in LEFT], ids=[c[0] for c in LEFT])
def test_time_left_until_the_ranks_are_killed(ask: Ask, notice: Notice, now: float, expected: float | None) -> None:
    left = time_left_s(ask, notice, now_unix_s=now)
    assert left == (None if expected is None else pytest.approx(expected))


WORTH = [
    (None, 100.0, True),
    (5.0, None, True),
    (5.0, 0.0, True),
    (5.0, 5.0, True),
    (5.0, 5.1, False),
    (0.0, 0.1, False),
    (math.inf, 1e9, True),
]


@pytest.mark.parametrize(("left_s", "save_s", "expected"), WORTH)
def test_a_save_is_made_where_it_can_be_durable_in_time(
    left_s: float | None, save_s: float | None, expected: bool
) -> None:
    assert is_worth_saving(left_s, save_s=save_s) is expected


def test_what_slurm_said_comes_back_and_nothing_is_known_otherwise(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_notice(run, 0) == Notice()
    run.attempt_logs(0).mkdir(parents=True)
    write_notice(run, 0, NOTICE)
    assert read_notice(run, 0) == NOTICE
    notice_path(run, 0).write_text("{")
    assert read_notice(run, 0) == Notice()


def attempt(run: RunDirectory, number: int, **measured: float) -> None:
    run.epochs.mkdir(exist_ok=True)
    (run.epochs / f"attempt_{number}").touch()
    run.attempt_logs(number).mkdir(parents=True)
    if measured:
        Spent(begin_unix_s=0.0, **measured).write(account_path(run, number))


def test_the_newest_attempt_that_saved_tells_how_long_a_stop_takes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_measured(run) is None
    attempt(run, 0, longest_save_s=50.0, longest_step_s=1.0)
    attempt(run, 1, longest_save_s=100.0, longest_step_s=2.0, longest_evaluation_s=3.0)
    attempt(run, 2, longest_step_s=9.0)
    attempt(run, 3)
    assert read_measured(run) == Measured(save_s=100.0, step_s=2.0, evaluation_s=3.0)
    assert warning_lead_s("auto", run, limit_s=HOUR) == math.ceil(15 + 1.5 * (4 + 3 + 200))
    assert warning_lead_s(77, run, limit_s=HOUR) == 77
    assert warning_lead_s("auto", RunDirectory(tmp_path / "other"), limit_s=None) == 120
