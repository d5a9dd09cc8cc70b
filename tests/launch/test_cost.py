from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import dump_config
from slurm_train.launch.cost import Cost, Speed, estimate_cost, measured_speed
from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.layout import RunDirectory
from tests.support.plans import make_plan


def planned(tmp_path: Path, **sections: Any) -> RunPlan:
    sections = {"cluster": {"nodes": 2, "gpus_per_node": 4}, "train": {"max_steps": 1000}, **sections}
    return make_plan(tmp_path, **sections)


def write_run(plan: RunPlan, run: RunDirectory, *times: float, world_size: int = 8, step: int = 10) -> None:
    """Puts a run on disk that was planned like `plan` and has taken so long for its steps."""
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(plan.config))
    run.plan.write_text(json.dumps(plan.as_json()))
    lines = [{"step": step, "loss": 1.0, "step_time_s": time, "world_size": world_size} for time in times]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_time_limit_bounds_an_attempt(tmp_path: Path) -> None:
    cost = estimate_cost(planned(tmp_path), limit_min=90)
    assert (cost.per_attempt_h, cost.left_h, cost.left_steps) == (12.0, None, 1000)
    assert cost.in_words == "at most 12 per attempt (90 min)"


def test_what_is_left_of_a_run_is_estimated_by_its_own_speed(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    write_run(plan, plan.run, 9.0, 0.9, 0.9, step=100)
    cost = estimate_cost(plan, limit_min=None)
    assert cost.speed == Speed(0.9, f"gpt-stdlib/{plan.run.run_id}")
    assert cost.left_steps == 900 and cost.left_h == 900 * 0.9 * 8 / 3600
    assert cost.in_words == f"about 1.8 for 900 steps (estimate: 0.9 s a step in gpt-stdlib/{plan.run.run_id})"


def test_another_run_of_the_same_work_tells_the_speed(tmp_path: Path) -> None:
    plan, other = planned(tmp_path), planned(tmp_path, seed=7)
    write_run(other, other.run, 0.5)
    assert measured_speed(plan) == Speed(0.5, f"gpt-stdlib/{other.run.run_id}")


def test_runs_of_other_work_or_another_world_tell_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    wider = planned(tmp_path, model={"_target_": "slurm_train.models.gpt.GPT", "width": 320})
    write_run(wider, wider.run, 0.5)
    larger = planned(tmp_path, batch={"global_size": 128})
    write_run(larger, larger.run, 0.5)
    elsewhere = planned(tmp_path, seed=7)
    write_run(elsewhere, elsewhere.run, 0.5, world_size=4)
    assert measured_speed(plan) is None


def test_a_run_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    plan, other = planned(tmp_path), planned(tmp_path, seed=7)
    write_run(other, other.run, 0.5)
    other.run.config.write_text("{")
    assert measured_speed(plan) is None


def test_a_script_of_ones_own_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    cost = estimate_cost(planned(tmp_path, script=["train.py"]), limit_min=60)
    assert (cost.per_attempt_h, cost.left_steps, cost.left_h) == (8.0, None, None)


def test_without_a_limit_and_a_speed_nothing_is_said() -> None:
    cost = Cost(per_attempt_h=None, limit_min=None, left_h=None, left_steps=9, speed=None)
    assert cost.in_words == "not known: no time limit is set, and no run like it was measured"
