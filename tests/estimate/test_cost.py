from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.frozen import dump_config
from slurm_train.estimate.cost import Cost, Speed, WorstLoss, estimate_cost, measured_speed, worst_loss
from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import account_path
from slurm_train.slurm.preemption import Preemption
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


REQUEUES = Preemption(by="qos", mode="REQUEUE", grace_s=15.0, kill_wait_s=5.0)
NOBODY = Preemption(by="nobody", mode="OFF", grace_s=0.0, kill_wait_s=30.0)
SUSPENDS = Preemption(by="partition", mode="SUSPEND", grace_s=0.0, kill_wait_s=30.0)


def loss(
    tmp_path: Path,
    *,
    preemption: Preemption | None = REQUEUES,
    step_s: float | None = None,
    save_s: float | None = None,
    limit_min: int | None = 60,
    **checkpoint: Any,
) -> WorstLoss:
    plan = make_plan(tmp_path, cluster={"nodes": 2}, checkpoint={"every_steps": 100, **checkpoint})
    if save_s is not None:
        path = account_path(plan.run, 0)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"longest_save_s": save_s}))
        plan.run.epochs.mkdir()
        (plan.run.epochs / "attempt_0").touch()
    return worst_loss(plan, preemption=preemption, step_s=step_s, limit_min=limit_min)


def test_before_anything_is_measured(tmp_path: Path) -> None:
    assert loss(tmp_path).in_words == (
        "100 steps with a lost node; as much by preemption, or nothing if a save takes less than 20 s; nothing at the "
        "time limit (asked 120 s before)"
    )


def test_measured_times_make_it_certain(tmp_path: Path) -> None:
    assert loss(tmp_path, step_s=0.5, save_s=3.0).in_words.startswith(
        "106 steps (about 53 s) with a lost node; nothing by preemption: 20 s to save in, 3.0 s needed so far"
    )


def test_a_save_that_is_too_slow_loses_what_a_node_loses(tmp_path: Path) -> None:
    assert "as much by preemption: 20 s to save in, 33.0 s needed so far" in loss(tmp_path, save_s=33.0).in_words


@pytest.mark.parametrize("preemption", [NOBODY, SUSPENDS])
def test_where_nobody_ends_jobs_nothing_is_lost_by_it(preemption: Preemption, tmp_path: Path) -> None:
    assert "; nothing by preemption;" in loss(tmp_path, preemption=preemption).in_words


def test_what_slurm_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    found = loss(tmp_path, preemption=None)
    assert "a preemption depends on its grace, which is not known" in found.in_words
    assert (found.preemption, found.notice_s) == ("", None)


def test_a_nodes_own_disk_goes_with_the_node(tmp_path: Path) -> None:
    assert loss(tmp_path, local_dir="/tmp", copy_every=5).interval_steps == 500


def test_no_more_is_lost_than_there_is(tmp_path: Path) -> None:
    assert loss(tmp_path, every_steps=10**6).interval_steps == 1000


@pytest.mark.parametrize(
    ("every_steps", "text"),
    [("auto", "what was done since the last checkpoint with"), (None, "everything since the start with")],
)
def test_an_interval_that_is_no_number(every_steps: str | None, text: str, tmp_path: Path) -> None:
    found = loss(tmp_path, every_steps=every_steps, step_s=1.0, save_s=1.0)
    assert found.node_loss_steps is None and found.in_words.startswith(text)
