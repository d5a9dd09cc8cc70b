"""What the hours went to: the causes of an attempt add up to it, and goodput is the one that `status` gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.report.record import Verdict, read_attempts
from slurm_train.report.timeline import CAUSES, bars_of, device_s, goodput, totals
from slurm_train.rundir import timing
from slurm_train.rundir.attempts import read_ledger
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, run_in

ENDED = Verdict("finished")


def bars_in(folder: Path, ledger: list[dict[str, object]], verdict: Verdict = ENDED, **files: object) -> list:
    run = RunFiles(ledger=ledger, **files).write(run_in(folder))  # type: ignore[arg-type]
    return bars_of(read_attempts(run, verdict, now_unix_s=BEGAN_UNIX_S + 1000))


def test_the_causes_of_an_attempt_add_up_to_its_queue_and_its_hold(tmp_path: Path) -> None:
    (bar,) = bars_in(tmp_path, ended(0, queue_s=30.0, lost_work_s=20.0))
    assert sum(bar.seconds.values()) == pytest.approx(bar.queue_s + bar.held_s) == pytest.approx(130)
    assert (bar.seconds["productive_s"], bar.seconds["lost_work_s"], bar.held_s) == (40.0, 20.0, 100.0)
    assert set(bar.seconds) <= set(CAUSES)


def test_goodput_is_that_of_status(tmp_path: Path) -> None:
    ledger = [*ended(0, lost_work_s=20.0), *ended(1, suspended_s=20.0, step_s=40.0)]
    bars = bars_in(tmp_path, ledger)
    assert goodput(bars) == pytest.approx(timing.goodput(read_ledger(run_in(tmp_path))).share)
    assert totals(bars)["suspended_s"] == 20.0
    assert device_s(bars) == 400.0


def test_time_that_nobody_booked_is_shown_as_such(tmp_path: Path) -> None:
    (bar,) = bars_in(tmp_path, ended(0, step_s=20.0))
    assert bar.seconds["unknown_s"] == pytest.approx(40.0)


def test_code_of_ones_own_has_no_causes(tmp_path: Path) -> None:
    lines = ended(0)
    lines[1] = {key: value for key, value in lines[1].items() if not key.endswith("_s") or key == "time_unix_s"}
    (bar,) = bars_in(tmp_path, lines)
    assert bar.seconds == {"unknown_s": 100.0}
    assert goodput([bar]) is None


def test_a_running_attempt_lasts_until_now(tmp_path: Path) -> None:
    (bar,) = bars_in(tmp_path, ended(0)[:1], Verdict("running"))
    assert (bar.is_open, bar.held_s, bar.reason) == (True, 1000.0, "running")


def test_only_the_newest_attempt_can_be_the_one_that_runs(tmp_path: Path) -> None:
    first, second = bars_in(tmp_path, [*ended(0)[:1], *ended(1)[:1]], Verdict("running"))
    assert (first.reason, first.held_s) == ("no end on record", 0.0)
    assert (second.reason, second.held_s) == ("running", 780.0)


def test_an_attempt_that_nobody_closed_lasts_until_it_was_last_heard_of(tmp_path: Path) -> None:
    line = {"step": 3, "attempt": 0, "loss": 1.0, "time_unix_s": BEGAN_UNIX_S + 17}
    (bar,) = bars_in(tmp_path, ended(0)[:1], Verdict("interrupted"), metrics=[line])
    assert (bar.is_open, bar.held_s, bar.reason) == (True, 17.0, "no end on record")


def test_an_end_before_the_begin_is_no_negative_time(tmp_path: Path) -> None:
    lines = ended(0)
    lines[1]["time_unix_s"] = BEGAN_UNIX_S - 50
    (bar,) = bars_in(tmp_path, lines)
    assert bar.held_s == 0.0
    assert goodput([bar]) is None
