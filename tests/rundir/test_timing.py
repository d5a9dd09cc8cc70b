"""Where an attempt's time goes, how far it is, and how much notice it gets."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.rundir.files import append_line, last_lines, write_record
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


@pytest.mark.parametrize(
    ("step_before", "rolled_back", "lost_s"), [(0, 0, 0.0), (4, 0, 0.0), (5, 0, 2.0), (99, 0, 12.0), (0, 3, 6.0)]
)
def test_lost_work_is_what_was_done_again(step_before: int, rolled_back: int, lost_s: float, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    sums = Spent(begin_unix_s=0.0, first_step=4, steps=6, rolled_back_steps=rolled_back, step_s=12.0)
    sums.write(run.account(0))
    found = read_account(run, 0, start_unix_s=0.0, end_unix_s=20.0, step_before=step_before)
    assert found["lost_work_s"] == lost_s


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
NOT_SAID = Notice(end_unix_s=END, limit_s=HOUR, kill_wait_s=5.0)
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
    ("preemption with a grace that is not known", ("TERM", 1.0), NOT_SAID, END - 100, 105.0),
    ("the same without a limit", ("TERM", 1.0), Notice(kill_wait_s=5.0), 0.0, None),
    ("the limit, the grace is not known", ("TERM", 1.0), NOT_SAID, END + 24, 4.0),
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


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def times_of(run: RunDirectory, *, rank: int = 0) -> StepTimes:
    return StepTimes(run, 2, rank=rank, host=f"node{rank}", clock=lambda: 0.0)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.95, 0.99])
def test_a_quantile_is_right_to_a_sixteenth_of_a_doubling(share: float, run: RunDirectory) -> None:
    draw = random.Random(7)
    durations = sorted(draw.lognormvariate(-3, 1.5) for _ in range(5000))
    times = times_of(run)
    for seconds in durations:
        times.add(seconds, seconds / 10)
    times.keep()
    (found,) = read_step_times(run, 2)
    assert found.step.quantile_s(1.0) <= durations[-1]
    exact = durations[int(share * len(durations)) - 1]
    assert found.step.quantile_s(share) == pytest.approx(exact, rel=0.025)
    assert found.data_wait.quantile_s(share) == pytest.approx(exact / 10, rel=0.025)
    assert (found.step.num, found.step.longest_s, found.host) == (5000, durations[-1], "node0")


def test_durations_beyond_the_buckets_count_as_the_nearest(run: RunDirectory) -> None:
    times = times_of(run)
    for seconds in (0.0, -1.0, 1e-9, 1e9):
        times.add(seconds, 0.0)
    times.keep()
    (found,) = read_step_times(run, 2)
    assert found.step.num == 4
    assert found.step.quantile_s(0.5) < 2e-6
    assert found.step.quantile_s(1.0) > 6e4


def test_ranks_come_in_order_and_files_that_are_none_are_passed_over(run: RunDirectory) -> None:
    for rank in (10, 2, 0):
        times = times_of(run, rank=rank)
        times.add(0.5, 0.1)
        times.keep()
    for name, text in (("step_times_3.json", "{"), ("step_times_4.json", '{"rank": 4}'), ("step_times_x.json", "{}")):
        (run.attempt_logs(2) / name).write_text(text)
    (run.attempt_logs(2) / "step_times_5.json").write_text(json.dumps({"rank": 5, "host": "n", "step": [], "data": 1}))
    assert [times.rank for times in read_step_times(run, 2)] == [0, 2, 10]
    assert read_step_times(run, 3) == []


def test_nothing_is_written_before_a_step(run: RunDirectory) -> None:
    times_of(run).keep()
    assert not run.logs.exists()
    assert Histogram().quantile_s(0.5) == 0.0


def test_it_is_written_seldomer_and_seldomer(run: RunDirectory) -> None:
    now = 0.0
    times = StepTimes(run, 0, rank=0, host="n", clock=lambda: now)
    times.add(0.1, 0.0)
    path, written = run.step_times(0, 0), []
    for second in range(300):
        now = float(second)
        times.keep_when_due()
        if path.exists():
            written.append(second)
            path.unlink()
    assert written == [5, 15, 35, 75, 135, 195, 255]


def test_a_disk_that_refuses_costs_nothing(run: RunDirectory) -> None:
    run.logs.write_text("no folder")
    times = times_of(run)
    times.add(0.1, 0.0)
    times.keep()
    assert read_step_times(run, 2) == []


FINDING = Slowdown(
    kind="straggler",
    ranks=(2,),
    hosts=("node2",),
    factor=1.5,
    lost_share=0.3,
    sentence="rank 2 on node2 is slow",
    advice="see what else runs there",
)
WINDOW = PaceWindow(
    attempt=1,
    begin_unix_s=10.0,
    end_unix_s=15.0,
    from_step=3,
    to_step=40,
    samples=9,
    ranks=tuple(
        RankPace(rank=rank, host=f"node{rank // 2 + 1}", own_s=0.1 + rank, wait_s=0.2, data_s=0.03, uneven_s=0.0)
        for rank in range(4)
    ),
)


def test_windows_come_back_as_they_were_written(run: RunDirectory) -> None:
    assert read_windows(run) == [] and newest_window(run) is None
    later = replace(WINDOW, from_step=40, to_step=80, findings=(FINDING,))
    append_window(run, WINDOW)
    append_window(run, later)
    assert read_windows(run) == [WINDOW, later]
    assert newest_window(run) == later


def test_lines_that_are_no_windows_are_passed_over(run: RunDirectory) -> None:
    append_window(run, WINDOW)
    with run.stragglers.open("a") as file:
        file.write('{"attempt": 1, "ranks": [[0, "node1", 1.0]]}\n')
        file.write(run.stragglers.read_text().splitlines()[0].replace("10.0", "Infinity") + "\n")
        file.write(run.stragglers.read_text().splitlines()[0].replace("0.1,", '"<b>",') + '\n{"torn')
    assert read_windows(run) == [WINDOW]
    assert newest_window(run) == WINDOW


def test_a_finding_is_told_once_with_its_first_window() -> None:
    first, again = replace(WINDOW, findings=(FINDING,)), replace(WINDOW, to_step=99, findings=(FINDING,))
    next_attempt = replace(first, attempt=2)
    assert all_findings([WINDOW, first, again, next_attempt]) == [(first, FINDING), (next_attempt, FINDING)]
