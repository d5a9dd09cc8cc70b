"""Where an attempt's time goes, how far it is, and how much notice it gets."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest

from slurm_train.rundir.files import append_line, write_record
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import (
    CAUSES,
    Histogram,
    Notice,
    PaceWindow,
    RankPace,
    Slowdown,
    Spent,
    StepTimes,
    all_findings,
    append_window,
    goodput,
    lead_s,
    newest_window,
    read_account,
    read_measured,
    read_notice,
    read_step_times,
    read_windows,
    time_left_s,
    warning_lead_s,
)
from tests.support.ledgers import attempt_of


@pytest.fixture(autouse=True)
def _folders_of_attempts(run: RunDirectory) -> None:
    for number in range(4):
        run.attempt_logs(number).mkdir(parents=True)


def test_sums_become_the_ledgers_seconds(run: RunDirectory) -> None:
    spent = Spent(begin_unix_s=1010.0, first_step=4)
    spent.add_steps(6, seconds=13.0, data_wait_s=1.0)
    spent.add("evaluate_s", 2.0)
    spent.add("checkpoint_stall_s", 3.0)
    spent.add("", 100.0)
    spent.rolled_back_steps = 1
    spent.rendezvous_s, spent.load_s, spent.compile_s, spent.suspended_s = 1.0, 2.0, 0.5, 30.0
    spent.write(run.account(1))
    found = read_account(run, 1, start_unix_s=1000.0, end_unix_s=1070.0, step_before=7)
    assert sum(found[cause] for cause in CAUSES) == 70.0
    facts = {"start_s": 10.0, "step_s": 12.0, "data_wait_s": 1.0, "evaluate_s": 2.0, "lost_work_s": 8.0, "end_s": 8.5}
    assert found | facts == found
    never_trained = read_account(run, 0, start_unix_s=0.0, end_unix_s=1.0, step_before=0)
    assert never_trained == {}


def test_steps_on_record_since_the_sums_were_written_are_booked(run: RunDirectory) -> None:
    """A rank 0 that is killed wrote its sums up to ten seconds before."""
    Spent(begin_unix_s=0.0, first_step=10, steps=10, step_s=5.0, data_wait_s=1.0).write(run.account(2))
    later = time.time() + 1
    step = {"attempt": 2, "step_time_s": 0.5, "data_time_s": 0.1, "time_unix_s": later}
    append_line(run.metrics, step | {"step": 20, "time_unix_s": later - 10})
    append_line(run.metrics, {"step": 25, "attempt": 2, "eval_loss": 1.0, "time_unix_s": later})
    append_line(run.metrics, step | {"step": 30})
    append_line(run.metrics, step | {"step": 31, "attempt": 1})
    account = read_account(run, 2, start_unix_s=0.0, end_unix_s=20.0, step_before=15)
    assert account["step_s"] == pytest.approx(5.0 + 10 * 0.4)
    assert account["data_wait_s"] == pytest.approx(1.0 + 10 * 0.1)
    assert account["lost_work_s"] == pytest.approx(account["step_s"] * 5 / 20)


def test_goodput_is_productive_over_allocated_time() -> None:
    ledger = [
        attempt_of(time_unix_s=0.0, end_time_unix_s=100.0, step_s=6.0, start_s=3.0, suspended_s=90.0),
        attempt_of(time_unix_s=200.0, end_time_unix_s=210.0, step_s=8.0, lost_work_s=1.0, evaluate_s=1.5),
        attempt_of(time_unix_s=400.0),
    ]
    found = goodput(ledger)
    assert (found.productive_s, found.allocated_s, found.share) == (13.0, 20.0, 0.65)
    assert list(found.losses_s.items())[:3] == [("start_s", 3.0), ("evaluate_s", 1.5), ("lost_work_s", 1.0)]
    assert "suspended_s" not in found.losses_s and goodput([]).share == 0.0


HOUR = 3600.0


@pytest.mark.parametrize(
    ("measured", "limit_s", "expected"),
    [
        pytest.param(None, None, 120.0, id="nothing measured, no limit"),
        pytest.param(None, 120.0, 30.0, id="nothing measured, a limit of two minutes"),
        pytest.param({"longest_save_s": 0.0, "longest_step_s": 9.0}, HOUR, 120.0, id="no save yet"),
        pytest.param({"longest_save_s": 100.0, "longest_step_s": 2.0}, HOUR, 15.0 + 1.5 * 204, id="saves and steps"),
        pytest.param({"longest_save_s": 1.0, "longest_evaluation_s": 40.0}, HOUR, 15.0 + 1.5 * 42, id="an evaluation"),
        pytest.param({"longest_save_s": 900.0}, HOUR, HOUR / 2, id="more than half of the limit"),
    ],
)
def test_the_lead_is_what_a_stop_takes(
    measured: dict[str, float] | None, limit_s: float | None, expected: float
) -> None:
    spent = None if measured is None else Spent(begin_unix_s=0.0, **measured)
    assert lead_s(spent, limit_s=limit_s) == pytest.approx(expected)


def test_the_newest_attempt_that_saved_tells_how_long_a_stop_takes(run: RunDirectory) -> None:
    assert read_measured(run) is None and warning_lead_s("auto", run, limit_s=None) == 120
    run.epochs.mkdir()
    for number, save_s in enumerate((50.0, 100.0, 0.0)):
        (run.epochs / f"attempt_{number}").touch()
        Spent(begin_unix_s=0.0, longest_save_s=save_s, longest_step_s=2.5).write(run.account(number))
    (run.epochs / "attempt_3").touch()
    assert warning_lead_s("auto", run, limit_s=HOUR) == math.ceil(15 + 1.5 * (2 * 2.5 + 2 * 100))
    assert warning_lead_s(77, run, limit_s=HOUR) == 77


END = 10_000.0
# Ends in an hour; 5 s after a TERM comes the KILL, after a preemption's first TERM there are 15 s more.
NOTICE = Notice(end_unix_s=END, limit_s=HOUR, kill_wait_s=5.0, grace_s=15.0)
NO_LIMIT, NOT_SAID = replace(NOTICE, end_unix_s=None, limit_s=None), replace(NOTICE, grace_s=None)


@pytest.mark.parametrize(
    ("asked_by", "since_s", "notice", "now", "expected"),
    [
        pytest.param("USR2", 0.0, Notice(), 0.0, None, id="without Slurm"),
        pytest.param("USR2", 2.0, NOTICE, END - 60, 65.0, id="the warning"),
        pytest.param("TERM", 2.0, NOTICE, 0.0, 18.0, id="preemption"),
        pytest.param("TERM", 60.0, NOTICE, 0.0, 0.0, id="preemption, seen too late"),
        pytest.param("TERM", 1.0, NOTICE, END - 4, 9.0, id="preemption near the limit"),
        pytest.param("TERM", 1.0, replace(NOTICE, grace_s=0.0), 0.0, 4.0, id="preemption without grace, scancel"),
        pytest.param("TERM", 1.0, NOT_SAID, END - 100, 105.0, id="preemption with a grace that is not known"),
        pytest.param("TERM", 1.0, replace(NO_LIMIT, grace_s=None), 0.0, None, id="the same without a limit"),
        pytest.param("TERM", 0.5, NOTICE, END + 1, 4.5, id="the limit after a warning"),
    ],
)
def test_time_left_until_the_ranks_are_killed(
    asked_by: str, since_s: float, notice: Notice, now: float, expected: float | None
) -> None:
    assert time_left_s(notice, asked_by=asked_by, since_s=since_s, now_unix_s=now) == expected


def test_what_slurm_said_comes_back_and_nothing_is_known_otherwise(run: RunDirectory) -> None:
    write_record(run.notice(0), NOTICE)
    run.notice(1).write_text("{")
    assert [read_notice(run, number) for number in range(3)] == [NOTICE, Notice(), Notice()]


def test_quantiles_are_right_to_a_sixteenth_of_a_doubling(run: RunDirectory) -> None:
    draw = random.Random(7)
    durations = sorted(draw.lognormvariate(-3, 1.5) for _ in range(5000))
    times = StepTimes(run, 2, rank=0, host="node0")
    for seconds in durations:
        times.add(seconds, seconds / 10)
    times.keep()
    (found,) = read_step_times(run, 2)
    for share in (0.01, 0.5, 0.99):
        exact = durations[int(share * len(durations)) - 1]
        assert found.step.quantile_s(share) == pytest.approx(exact, rel=0.025)
        assert found.data_wait.quantile_s(share) == pytest.approx(exact / 10, rel=0.025)
    assert (found.step.num, found.step.longest_s) == (5000, durations[-1])
    assert found.step.quantile_s(1.0) <= durations[-1]
    beyond = Histogram()
    for seconds in (-1.0, 0.0, 1e-9, 1e9):
        beyond.add(seconds)
    assert beyond.quantile_s(0.5) < 2e-6 and beyond.quantile_s(1.0) > 6e4, "those beyond count as the nearest"


def test_step_times_come_by_rank_and_what_is_none_is_passed_over(run: RunDirectory) -> None:
    for rank in (10, 2):
        times = StepTimes(run, 2, rank=rank, host="n", clock=iter((0.0, 4.9, 5.0)).__next__)
        times.add(0.5, 0.1)
        times.keep_when_due()
        assert not run.step_times(2, rank).exists(), "it is not due yet"
        times.keep_when_due()
    (run.attempt_logs(2) / "step_times_4.json").write_text('{"rank": 4}')
    assert [times.rank for times in read_step_times(run, 2)] == [2, 10]


def test_windows_come_back_as_they_were_written_and_other_lines_are_passed_over(run: RunDirectory) -> None:
    slow = Slowdown(kind="straggler", ranks=(2,), hosts=("node2",), lost_share=0.3, sentence="slow", advice="look")
    pace = RankPace(rank=0, host="node1", own_s=0.1, wait_s=0.2, data_s=0.03, uneven_s=0.0)
    facts = {"begin_unix_s": 10.0, "end_unix_s": 15.0, "from_step": 3, "to_step": 40, "samples": 9}
    first = PaceWindow(attempt=1, ranks=(pace,), **facts)
    told = replace(first, findings=(slow,))
    assert newest_window(run) is None
    windows = [first, told, replace(told, to_step=99), replace(told, attempt=2)]
    for window in windows:
        append_window(run, window)
    lines = run.stragglers.read_text()
    with run.stragglers.open("a") as file:
        file.write('{"attempt": 1, "ranks": [[0, "node1", 1.0]]}\n')
        file.write(lines.splitlines()[0].replace("10.0", "Infinity") + "\n")
        file.write(lines.splitlines()[0].replace("0.1,", '"<b>",') + '\n{"torn')
    assert read_windows(run) == windows and newest_window(run) == windows[-1]
    assert all_findings(windows) == [(told, slow), (windows[-1], slow)], "once in each attempt, with its first window"
