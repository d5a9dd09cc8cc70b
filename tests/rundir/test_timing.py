"""Where an attempt's time goes, how far it is, and how much notice it gets."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from slurm_train.rundir.files import append_line, last_lines, write_record
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import (
    CAUSES,
    Notice,
    Spent,
    goodput,
    lead_s,
    read_account,
    read_measured,
    read_notice,
    time_left_s,
    warning_lead_s,
)


def test_sums_become_the_ledgers_seconds(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    spent = Spent(begin_unix_s=1010.0, first_step=4)
    spent.add_steps(6, seconds=13.0, data_wait_s=1.0)
    spent.add("evaluate_s", 2.0)
    spent.add("checkpoint_stall_s", 3.0)
    spent.add("", 100.0)
    spent.rendezvous_s, spent.load_s, spent.compile_s, spent.suspended_s = 1.0, 2.0, 0.5, 30.0
    spent.write(run.account(1))
    found = read_account(run, 1, start_unix_s=1000.0, end_unix_s=1070.0, step_before=7)
    assert sum(found[cause] for cause in CAUSES) == 70.0
    assert found == {
        "start_s": 10.0,
        "rendezvous_s": 1.0,
        "load_s": 2.0,
        "compile_s": 0.5,
        "suspended_s": 30.0,
        "end_s": 8.5,
        "step_s": 12.0,
        "data_wait_s": 1.0,
        "checkpoint_stall_s": 3.0,
        "evaluate_s": 2.0,
        "lost_work_s": 6.0,
    }


@pytest.mark.parametrize(("step_before", "lost_s"), [(0, 0.0), (4, 0.0), (5, 2.0), (99, 12.0)])
def test_lost_work_is_what_was_done_again(step_before: int, lost_s: float, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    Spent(begin_unix_s=0.0, first_step=4, steps=6, step_s=12.0).write(run.account(0))
    found = read_account(run, 0, start_unix_s=0.0, end_unix_s=20.0, step_before=step_before)
    assert found["lost_work_s"] == lost_s


def test_steps_that_a_rollback_threw_away_are_lost_work(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    Spent(begin_unix_s=0.0, steps=10, step_s=20.0, rolled_back_steps=3).write(run.account(0))
    assert read_account(run, 0, start_unix_s=0.0, end_unix_s=20.0, step_before=0)["lost_work_s"] == 6.0


def test_steps_on_record_since_the_sums_were_written_are_booked(tmp_path: Path) -> None:
    """A rank 0 that is killed wrote its sums up to ten seconds before."""
    run = RunDirectory(tmp_path)
    run.attempt_logs(2).mkdir(parents=True)
    Spent(begin_unix_s=0.0, first_step=10, steps=10, step_s=5.0, data_wait_s=1.0).write(run.account(2))
    later = time.time() + 1
    step = {"attempt": 2, "step_time_s": 0.5, "data_time_s": 0.1, "time_unix_s": later}
    lines = [
        step | {"step": 20, "time_unix_s": later - 10},
        step | {"step": 25},
        {"step": 25, "attempt": 2, "eval_loss": 1.0, "time_unix_s": later},
        step | {"step": 30},
        step | {"step": 31, "attempt": 1},
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    account = read_account(run, 2, start_unix_s=0.0, end_unix_s=20.0, step_before=15)
    assert account["step_s"] == pytest.approx(5.0 + 10 * 0.4)
    assert account["data_wait_s"] == pytest.approx(1.0 + 10 * 0.1)
    assert account["lost_work_s"] == pytest.approx(account["step_s"] * 5 / 20)


def test_an_attempt_that_never_trained_has_no_account(tmp_path: Path) -> None:
    assert read_account(RunDirectory(tmp_path), 0, start_unix_s=0.0, end_unix_s=1.0, step_before=0) == {}


def test_goodput_is_productive_over_allocated_time() -> None:
    ledger = [
        {"time_unix_s": 0.0, "end_time_unix_s": 10.0, "step_s": 6.0, "start_s": 3.0},
        {"time_unix_s": 20.0, "end_time_unix_s": 30.0, "step_s": 8.0, "lost_work_s": 1.0, "evaluate_s": 1.5},
        {"time_unix_s": 40.0},
    ]
    found = goodput(ledger)
    assert (found.productive_s, found.allocated_s, found.share) == (13.0, 20.0, 0.65)
    assert list(found.losses_s.items())[:3] == [("start_s", 3.0), ("evaluate_s", 1.5), ("lost_work_s", 1.0)]
    assert goodput([]).share == 0.0


def test_suspended_seconds_are_neither_productive_nor_lost() -> None:
    found = goodput([{"time_unix_s": 0.0, "end_time_unix_s": 100.0, "step_s": 8.0, "suspended_s": 90.0}])
    assert found.share == 0.8 and "suspended_s" not in found.losses_s


HOUR = 3600.0


def spent(**measured: float) -> Spent:
    return Spent(begin_unix_s=0.0, **measured)


LEADS = [
    ("nothing measured, no limit", None, None, 120.0),
    ("nothing measured", None, HOUR, 120.0),
    ("nothing measured, a limit of two minutes", None, 120.0, 30.0),
    ("nothing measured, the shortest limit", None, 60.0, 15.0),
    ("no save yet", spent(longest_save_s=0.0, longest_step_s=9.0), HOUR, 120.0),
    ("quick", spent(longest_save_s=0.1, longest_step_s=0.1), HOUR, 15.0 + 1.5 * 0.4),
    ("slow saves", spent(longest_save_s=100.0, longest_step_s=2.0), HOUR, 15.0 + 1.5 * 204),
    ("slow steps", spent(longest_save_s=1.0, longest_step_s=60.0), HOUR, 15.0 + 1.5 * 122),
    (
        "an evaluation may have begun",
        spent(longest_save_s=1.0, longest_evaluation_s=40.0),
        HOUR,
        15.0 + 1.5 * 42,
    ),
    ("more than half of the limit", spent(longest_save_s=900.0), HOUR, HOUR / 2),
]


@pytest.mark.parametrize(("measured", "limit_s", "expected"), [case[1:] for case in LEADS], ids=[c[0] for c in LEADS])
def test_the_lead_is_what_a_stop_takes(measured: Spent | None, limit_s: float | None, expected: float) -> None:
    assert lead_s(measured, limit_s=limit_s) == pytest.approx(expected)


END = 10_000.0
# Ends in an hour; 5 s after a TERM comes the KILL, after a preemption's first TERM there are 15 s more.
NOTICE = Notice(end_unix_s=END, limit_s=HOUR, kill_wait_s=5.0, grace_s=15.0)
NO_LIMIT = Notice(kill_wait_s=5.0, grace_s=15.0)
NO_GRACE = Notice(end_unix_s=END, limit_s=HOUR, kill_wait_s=5.0, grace_s=0.0)
LEFT = [
    ("without Slurm", ("USR2", 0.0), Notice(), 0.0, None),
    ("a file, no limit", ("file", 0.0), NO_LIMIT, 0.0, None),
    ("a file", ("file", 0.0), NOTICE, END - 100, 105.0),
    ("the warning", ("USR2", 2.0), NOTICE, END - 60, 65.0),
    ("the clock", ("clock", 0.0), NOTICE, END - 20, 25.0),
    ("another rank was asked", ("another rank", 0.0), NOTICE, END - 20, 25.0),
    ("preemption", ("TERM", 2.0), NOTICE, 0.0, 18.0),
    ("preemption, seen late", ("TERM", 19.0), NOTICE, 0.0, 1.0),
    ("preemption, seen too late", ("TERM", 60.0), NOTICE, 0.0, 0.0),
    ("preemption near the limit", ("TERM", 1.0), NOTICE, END - 4, 9.0),
    ("preemption without grace, scancel", ("TERM", 1.0), NO_GRACE, 0.0, 4.0),
    ("preemption without a limit", ("TERM", 1.0), NO_LIMIT, 0.0, 19.0),
    ("the limit without a warning", ("TERM", 1.0), NOTICE, END + 24, 4.0),
    ("the limit after a warning", ("TERM", 0.5), NOTICE, END + 1, 4.5),
]


@pytest.mark.parametrize(("ask", "notice", "now", "expected"), [case[1:] for case in LEFT], ids=[c[0] for c in LEFT])
def test_time_left_until_the_ranks_are_killed(
    ask: tuple[str, float], notice: Notice, now: float, expected: float | None
) -> None:
    left = time_left_s(notice, asked_by=ask[0], since_s=ask[1], now_unix_s=now)
    assert left == (None if expected is None else pytest.approx(expected))


def test_what_slurm_said_comes_back_and_nothing_is_known_otherwise(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_notice(run, 0) == Notice()
    run.attempt_logs(0).mkdir(parents=True)
    write_record(run.notice(0), NOTICE)
    assert read_notice(run, 0) == NOTICE
    run.notice(0).write_text("{")
    assert read_notice(run, 0) == Notice()


def attempt(run: RunDirectory, number: int, **measured: float) -> None:
    run.epochs.mkdir(exist_ok=True)
    (run.epochs / f"attempt_{number}").touch()
    run.attempt_logs(number).mkdir(parents=True)
    if measured:
        Spent(begin_unix_s=0.0, **measured).write(run.account(number))


def test_the_newest_attempt_that_saved_tells_how_long_a_stop_takes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_measured(run) is None
    attempt(run, 0, longest_save_s=50.0, longest_step_s=1.0)
    attempt(run, 1, longest_save_s=100.0, longest_step_s=2.0, longest_evaluation_s=3.0)
    attempt(run, 2, longest_step_s=9.0)
    attempt(run, 3)
    measured = read_measured(run)
    assert measured is not None and (measured.longest_save_s, measured.longest_evaluation_s) == (100.0, 3.0)
    assert warning_lead_s("auto", run, limit_s=HOUR) == math.ceil(15 + 1.5 * (4 + 3 + 200))
    assert warning_lead_s(77, run, limit_s=HOUR) == 77
    assert warning_lead_s("auto", RunDirectory(tmp_path / "other"), limit_s=None) == 120


@pytest.mark.parametrize("tail_bytes", [1, 30, 31, 60, 10_000])
def test_only_whole_lines_of_the_tail_are_read(tail_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(10, 20):
        append_line(path, {"step": step, "loss": 0.25, "note": "x"})
    lines = last_lines(path, tail_bytes=tail_bytes)
    assert [line["step"] for line in lines] == list(range(20 - len(lines), 20))
    assert len(lines) <= max(0, tail_bytes // 20)
