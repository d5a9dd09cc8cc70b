from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.frozen import dump_config
from slurm_train.estimate.estimate import Speed, WorstLoss, estimate_cost, measured_speed, worst_loss
from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.policy import Preemption
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


def test_spare_nodes_cost_as_much_as_the_others(tmp_path: Path) -> None:
    cluster = {"nodes": 2, "gpus_per_node": 4, "spare_nodes": 1}
    assert estimate_cost(planned(tmp_path, cluster=cluster), limit_min=90).per_attempt_h == 18.0


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
    other.run.config.write_text("{")
    assert measured_speed(plan) is None, "a run that cannot be read is passed over"


def test_runs_of_other_work_or_another_world_tell_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    wider = planned(tmp_path, model={"_target_": "slurm_train.models.gpt.GPT", "width": 320})
    write_run(wider, wider.run, 0.5)
    larger = planned(tmp_path, batch={"global_size": 128})
    write_run(larger, larger.run, 0.5)
    elsewhere = planned(tmp_path, seed=7)
    write_run(elsewhere, elsewhere.run, 0.5, world_size=4)
    assert measured_speed(plan) is None


def test_a_script_of_ones_own_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    cost = estimate_cost(planned(tmp_path, script=["train.py"]), limit_min=60)
    assert (cost.per_attempt_h, cost.left_steps, cost.left_h) == (8.0, None, None)


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
        path = plan.run.account(0)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"begin_unix_s": 0.0, "longest_save_s": save_s}))
        plan.run.epochs.mkdir()
        (plan.run.epochs / "attempt_0").touch()
    return worst_loss(plan, preemption=preemption, step_s=step_s, limit_min=limit_min)


AT_LIMIT = "nothing at the time limit (asked 120 s before)"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            {},
            "100 steps with a lost node; nothing by preemption if a save takes less than 20 s; " + AT_LIMIT,
        ),
        (
            {"step_s": 0.5, "save_s": 3.0},
            "106 steps (about 53 s) with a lost node; nothing by preemption if a save takes less than 20 s (so far 3.0",
        ),
        (
            {"save_s": 33.0},
            "100 steps with a lost node; nothing by preemption if a save takes less than 20 s (so far 33.0 s)",
        ),
        ({"step_s": 2.0}, "100 steps (about 3 min 20 s) with a lost node; "),
        ({"step_s": 90.0}, "100 steps (about 2 h 30 min) with a lost node; "),
        ({"preemption": NOBODY}, "100 steps with a lost node; nothing by preemption; "),
        ({"preemption": SUSPENDS}, "100 steps with a lost node; nothing by preemption; "),
        ({"preemption": None}, "100 steps with a lost node; a preemption depends on its grace, which is not known; "),
        (
            {"preemption": replace(REQUEUES, grace_s=None)},
            "100 steps with a lost node; a preemption depends on its grace, which is not known; ",
        ),
        # A node's own disk is lost with the node; no more is lost than there is.
        ({"local_dir": "/tmp", "copy_every": 5}, "500 steps with a lost node"),
        ({"every_steps": 10**6}, "1000 steps with a lost node"),
        ({"every_steps": "auto", "step_s": 1.0, "save_s": 1.0}, "what was done since the last checkpoint with a lost"),
        ({"every_steps": None, "step_s": 1.0, "save_s": 1.0}, "everything since the start with a lost node"),
    ],
)
def test_what_may_be_lost(case: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert loss(tmp_path, **case).in_words.startswith(text)
