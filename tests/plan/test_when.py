"""When a run would start and end: sizes, time limits, jobs one after the other, and what is best."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import ConfigError
from slurm_train.plan.speed import Speed
from slurm_train.plan.when import (
    LEAST_STEP_S,
    START_S,
    Option,
    best_of,
    limits_of,
    option_of,
    pace_of,
    read_sizes,
    rows_of,
)
from tests.plan.test_cost import planned, write_run

HOUR = 3600.0


def test_sizes_are_numbers_and_ranges() -> None:
    assert read_sizes("8,1-3,2") == [1, 2, 3, 8]
    for text in ("0", "4-2", "x", "", "1-100000", "1,,2"):
        with pytest.raises(ConfigError, match="--when"):
            read_sizes(text)


def test_the_limit_and_parts_of_it_are_tried() -> None:
    assert limits_of(480) == [120, 240, 480]
    assert limits_of(1) == [1]
    assert limits_of(None) == [None]


def option(tmp_path: Path, *, limit_min: int | None, starts_in_s: float | None = HOUR, **sections: object) -> Option:
    """Returns what is known of two nodes with four GPUs each that take a thousand steps of 10 s."""
    return option_of(
        planned(tmp_path, **sections),
        left_steps=1000,
        limit_min=limit_min,
        starts_in_s=starts_in_s,
        pace=Speed(10.0, "a run"),
        warns_s=60.0,
    )


@pytest.mark.parametrize(
    ("limit_min", "jobs"),
    [
        pytest.param(None, 1, id="no limit"),
        # 10,000 s of work; a job trains for its limit less two minutes.
        pytest.param(169, 1, id="just long enough"),
        pytest.param(168, 2, id="a minute too short"),
        pytest.param(30, 6, id="half an hour"),
    ],
)
def test_each_job_waits_starts_and_trains(tmp_path: Path, limit_min: int | None, jobs: int) -> None:
    found = option(tmp_path, limit_min=limit_min)
    assert found.num_attempts == jobs
    assert found.ends_in_s == jobs * (HOUR + START_S) + 10_000
    assert found.device_h == pytest.approx(8 * (10_000 + jobs * START_S) / HOUR)


def test_a_run_that_cannot_end_so_says_why(tmp_path: Path) -> None:
    assert "before a step" in option(tmp_path, limit_min=2).problem
    once = option(tmp_path, limit_min=30, requeue={"enabled": False})
    assert once.problem == "6 jobs, and requeue.enabled=false" and once.ends_in_s is None


def test_without_an_answer_or_a_pace_nothing_is_made_up(tmp_path: Path) -> None:
    assert option(tmp_path, limit_min=60, starts_in_s=None).ends_in_s is None
    unknown = option_of(planned(tmp_path), left_steps=1000, limit_min=60, starts_in_s=0.0, pace=None, warns_s=60.0)
    assert (unknown.num_attempts, unknown.ends_in_s, unknown.device_h) == (None, None, None)
    assert rows_of([unknown])[0][3:] == ("now", "-", "-", "-", "starts first")


def test_the_first_to_end_is_marked_of_equal_ones_the_smaller() -> None:
    def ending(nodes: int, ends_in_s: float | None, **facts: float | str) -> Option:
        known = {"num_devices": nodes * 8, "limit_min": 60, "starts_in_s": 0.0, "work_s": 60.0, "num_attempts": 1}
        return Option(num_nodes=nodes, ends_in_s=ends_in_s, **{**known, **facts})  # type: ignore[arg-type]

    options = [ending(1, 7200.0), ending(4, 3600.0), ending(2, 3605.0), ending(8, None, problem="no")]
    assert best_of(options) is options[2]
    assert [row[-1] for row in rows_of(options)] == ["", "", "ends first", "no"]
    assert best_of([ending(8, None, problem="no")]) is None


def test_the_pace_of_another_size_falls_in_proportion(tmp_path: Path) -> None:
    four = planned(tmp_path, cluster={"nodes": 4, "gpus_per_node": 4}, batch={"global_size": 64})
    two = planned(tmp_path, batch={"global_size": 64})
    write_run(two, two.run, 3.0, 2.0, 2.0)
    assert pace_of(two, {}) == Speed(2.0, f"gpt-stdlib/{two.run.run_id}")
    assert pace_of(four, {}) == Speed(1.0, f"gpt-stdlib/{two.run.run_id} with 8 ranks")
    other = planned(tmp_path, batch={"global_size": 128})
    assert pace_of(other, {}) == Speed(LEAST_STEP_S, "a simple model of H100s"), "a step of it is another"
    on_cpus = planned(tmp_path, cluster={"nodes": 2, "gpus_per_node": 4, "gpu_flag": "none"}, seed=3, batch={})
    assert pace_of(on_cpus, {}) is None
