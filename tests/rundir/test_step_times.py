"""Counts of step times: right to two per cent, whole on disk, nothing where nothing was added."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.step_times import Histogram, StepTimes, read_step_times


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


def test_no_quantile_is_above_the_longest(run: RunDirectory) -> None:
    times = times_of(run)
    times.add(0.1, 0.0)
    times.keep()
    assert read_step_times(run, 2)[0].step.quantile_s(1.0) <= 0.1


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
    assert Histogram({}).quantile_s(0.5) == 0.0


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
