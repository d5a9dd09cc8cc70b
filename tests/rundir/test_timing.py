from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import CAUSES, Spent, account_path, goodput, read_account


def test_sums_become_the_ledgers_seconds(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    spent = Spent(begin_unix_s=1010.0, first_step=4)
    spent.add_steps(6, seconds=13.0, data_wait_s=1.0)
    spent.add("evaluate_s", 2.0)
    spent.add("checkpoint_stall_s", 3.0)
    spent.add("", 100.0)
    spent.rendezvous_s, spent.load_s, spent.compile_s, spent.suspended_s = 1.0, 2.0, 0.5, 30.0
    spent.write(account_path(run, 1))
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
    Spent(begin_unix_s=0.0, first_step=4, steps=6, step_s=12.0).write(account_path(run, 0))
    found = read_account(run, 0, start_unix_s=0.0, end_unix_s=20.0, step_before=step_before)
    assert found["lost_work_s"] == lost_s


def test_steps_that_a_rollback_threw_away_are_lost_work(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    Spent(begin_unix_s=0.0, steps=10, step_s=20.0, rolled_back_steps=3).write(account_path(run, 0))
    assert read_account(run, 0, start_unix_s=0.0, end_unix_s=20.0, step_before=0)["lost_work_s"] == 6.0


def test_steps_on_record_since_the_sums_were_written_are_booked(tmp_path: Path) -> None:
    """A rank 0 that is killed wrote its sums up to ten seconds before."""
    run = RunDirectory(tmp_path)
    run.attempt_logs(2).mkdir(parents=True)
    Spent(begin_unix_s=0.0, first_step=10, steps=10, step_s=5.0, data_wait_s=1.0).write(account_path(run, 2))
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
