"""Counts of step times and windows of the ranks' pace: right to two per cent, read back whatever lies there."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import (
    Histogram,
    PaceWindow,
    RankPace,
    Slowdown,
    StepTimes,
    all_findings,
    append_window,
    newest_window,
    read_step_times,
    read_windows,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def times_of(run: RunDirectory, *, rank: int = 0, clock: float = 0.0) -> StepTimes:
    return StepTimes(run, 2, rank=rank, host=f"node{rank}", clock=lambda: clock)


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
