from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_train.assets import read_asset
from slurm_train.config.frozen import dump_config
from slurm_train.plan.plan import RunPlan
from slurm_train.plan.speed import Speed, estimate_cost, estimate_run, measured_speed, worst_loss
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.policy import Preemption
from tests.support.plans import make_plan

NODES = {"nodes": 2, "gpus_per_node": 4}


def planned(tmp_path: Path, **sections: Any) -> RunPlan:
    return make_plan(tmp_path, **{"cluster": NODES, "train": {"max_steps": 1000}, **sections})


def write_run(plan: RunPlan, run: RunDirectory, *times: float, world_size: int = 8, step: int = 10) -> None:
    """Puts a run on disk that was planned like `plan` and has taken so long for its steps."""
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(plan.config))
    run.plan.write_text(json.dumps(plan.record.as_json()))
    lines = [{"step": step, "loss": 1.0, "step_time_s": time, "world_size": world_size} for time in times]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("sections", "per_attempt_h", "left_steps"),
    [
        ({}, 12.0, 1000),
        ({"cluster": {**NODES, "spare_nodes": 1}}, 18.0, 1000),
        ({"script": ["train.py"]}, 12.0, None),
    ],
    ids=["steps", "spare nodes cost as much", "a script has no steps"],
)
def test_a_time_limit_bounds_an_attempt(
    tmp_path: Path, sections: dict[str, Any], per_attempt_h: float, left_steps: int | None
) -> None:
    (tmp_path / "train.py").touch()
    cost = estimate_cost(planned(tmp_path, **sections), limit_min=90)
    assert (cost.per_attempt_h, cost.left_h, cost.left_steps) == (per_attempt_h, None, left_steps)


def test_what_is_left_of_a_run_is_estimated_by_its_own_speed(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    write_run(plan, plan.run, 9.0, 0.9, 0.9, step=100)
    cost = estimate_cost(plan, limit_min=None)
    assert (cost.speed, cost.left_steps) == (Speed(0.9, f"gpt-stdlib/{plan.run.run_id}"), 900)
    assert cost.left_h == 900 * 0.9 * 8 / 3600
    assert cost.in_words.startswith("about 1.8 for 900 steps (estimate: 0.9 s a step in gpt-stdlib/")


def test_only_another_run_of_the_same_work_in_the_same_world_tells_the_speed(tmp_path: Path) -> None:
    plan, other = planned(tmp_path), planned(tmp_path, seed=7)
    for sections, world_size in (
        ({"model": {"_target_": "slurm_train.models.gpt.GPT", "width": 320}}, 8),
        ({"batch": {"global_size": 128}}, 8),
        ({"seed": 8}, 4),
    ):
        stranger = planned(tmp_path, **sections)
        write_run(stranger, stranger.run, 0.1, world_size=world_size)
    assert measured_speed(plan) is None
    write_run(other, other.run, 0.5)
    assert measured_speed(plan) == Speed(0.5, f"gpt-stdlib/{other.run.run_id}")
    other.run.config.write_text("{")
    assert measured_speed(plan) is None, "a run that cannot be read is passed over"


SHORT = Preemption(by="qos", mode="REQUEUE", grace_s=15.0, kill_wait_s=5.0)
NOBODY = Preemption(by="nobody", mode="OFF", grace_s=0.0, kill_wait_s=30.0)


def loss(
    tmp_path: Path, *, preemption: Preemption | None = NOBODY, step_s: float | None = None, **checkpoint: Any
) -> str:
    plan = make_plan(tmp_path, cluster={"nodes": 2}, checkpoint={"every_steps": 100, **checkpoint})
    return worst_loss(plan, preemption=preemption, step_s=step_s, limit_min=60).in_words


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        ({}, "100 steps with a lost node; nothing by preemption; nothing at the time limit (asked 120 s before)"),
        # A node's own disk is lost with the node; no more is lost than there is.
        ({"local_dir": "/tmp", "copy_every": 5}, "500 steps with a lost node"),
        ({"every_steps": 10**6}, "1000 steps with a lost node"),
        ({"every_steps": "auto"}, "what was done since the last checkpoint with a lost node"),
        ({"every_steps": None}, "everything since the start with a lost node"),
    ],
)
def test_what_is_lost_with_a_node(checkpoint: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert loss(tmp_path, **checkpoint).startswith(text)


def test_what_is_lost_by_preemption_depends_on_the_grace_and_the_longest_save(tmp_path: Path) -> None:
    assert "; nothing by preemption if a save takes less than 20 s; " in loss(tmp_path, preemption=SHORT)
    for unknown in (None, replace(SHORT, grace_s=None)):
        assert "; a preemption depends on its grace, which is not known; " in loss(tmp_path, preemption=unknown)
    run = planned(tmp_path).run
    run.epochs.mkdir(parents=True)
    (run.epochs / "attempt_0").touch()
    run.account(0).parent.mkdir(parents=True)
    run.account(0).write_text(json.dumps({"begin_unix_s": 0.0, "longest_save_s": 3.0}))
    # Steps that are taken during a save are lost with a node as well.
    found = loss(tmp_path, preemption=SHORT, step_s=0.5)
    assert found.startswith("106 steps (about 53 s) with a lost node; nothing by") and "20 s (so far 3.0 s)" in found


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({}, "if the partition gives less, ask for cluster.memory_gb_per_node=144"),
        ({"memory_gb_per_node": 64}, "too much for the 64 GiB of the job: ask for cluster.memory_gb_per_node=144"),
        ({"memory_gb_per_gpu": 32}, "of the 256 GiB of the job"),
        ({"memory_gb_per_node": 0}, "for the copy that saves are written from"),
    ],
)
def test_speed_and_host_memory_are_said_of_a_run_that_was_never_made(
    tmp_path: Path, cluster: dict[str, int], said: str
) -> None:
    plan = make_plan(
        tmp_path,
        model=yaml.safe_load(read_asset("conf/model", "llama3-8b.yaml")),
        data={"_target_": "slurm_train.data.text.build", "context": 8192, "path": "text"},
        batch={"global_size": 32, "local_size": 1},
        parallel={"dp_shard": 8},
        cluster={"nodes": 1, "gpus_per_node": 8, "gpu_type": "h100", **cluster},
    )
    rows = dict(estimate_run(plan, facts=None, env={}).rows())
    assert rows["host memory"].startswith("89.8 GiB per node") and rows["host memory"].endswith(said)
    assert rows["speed"] == "about 7,000 tokens/s a GPU, 0.41 of the peak; not measured here"
    assert "by a formula, not measured" in rows["GPU-hours"]
    write_run(plan, plan.run, 5.0)
    assert "speed" not in dict(estimate_run(plan, facts=None, env={}).rows())
