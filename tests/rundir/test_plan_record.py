"""`plan.json` as a record: what is written is read again, and what is missing has its default."""

from __future__ import annotations

import json

from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlannedBatch, PlannedRate, PlannedWorld, PlanRecord

RECORD = PlanRecord(
    config_hash="3f9a1c07",
    directory="/home/me",
    path="/runs/gpt/3f9a1c07",
    world=PlannedWorld(size=6, ranks_per_node=(4, 2), num_nodes=(1, 2)),
    layout={"dp_replicate": 6},
    chosen="by memory",
    cpus_per_rank=4,
    batch=PlannedBatch(ranks=6, global_size=60, local_size=10, accumulation=1, shares=(12, 12, 9, 9, 9, 9)),
    lr=PlannedRate(planned=1e-3, configured=2e-3, retune="sqrt", tuned_for_global_size=120),
    max_steps=None,
    samples=600,
    requeue={"enabled": True},
)


def test_what_is_written_is_read_again(run: RunDirectory) -> None:
    run.plan.write_text(json.dumps(RECORD.as_json()))
    assert PlanRecord.read(run.plan) == RECORD


def test_what_few_plans_have_is_left_out_of_the_others() -> None:
    world, batch = PlannedWorld(size=1, ranks_per_node=(1,)), PlannedBatch(global_size=8, local_size=8)
    assert PlanRecord(world=world, batch=batch).as_json() == {
        "config_hash": "",
        "directory": "",
        "path": "",
        "world": {"size": 1, "ranks_per_node": [1]},
        "layout": {},
        "batch": {"ranks": 1, "global_size": 8, "local_size": 8, "accumulation": 1},
        "lr": None,
        "max_steps": None,
        "samples": None,
        "requeue": {},
    }


def test_a_plan_that_is_missing_or_torn_is_an_empty_one(run: RunDirectory) -> None:
    assert PlanRecord.read(run.plan) == PlanRecord()
    run.plan.write_text('{"config_hash": 7, "world": {"size": "2"}, "batch": [], "max_steps": 400, "later": 1}')
    assert PlanRecord.read(run.plan) == PlanRecord(max_steps=400)
    run.plan.write_text('{"config_ha')
    assert PlanRecord.read(run.plan).world.size == 1
