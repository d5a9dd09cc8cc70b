"""A requeued job goes on in the same run of its tracker."""

from __future__ import annotations

import json

import pytest

from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory
from tests.support import light_training
from tests.support.command_line import Person
from tests.support.extras import NEEDS_WANDB
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import command, wait_for_state, wait_until_ended, wait_until_finished, wait_until_step
from tests.support.tracked_runs import wandb_points
from tests.support.waiting import wait_for

pytestmark = [NEEDS_WANDB, pytest.mark.slurm, pytest.mark.slow]
WANDB = ("track.wandb.project=p", "track.wandb.mode=offline")


@pytest.fixture(autouse=True)
def _program(person: Person) -> None:
    light_training.add_program(person)


def tracker_id(run: RunDirectory) -> str | None:
    """Returns the id that wandb has given, None as long as there is none."""
    state = read_json(run.trackers / "wandb.json") or {}
    identity: str | None = state.get("tracker_id")
    return identity


@pytest.mark.campaign
def test_a_requeued_job_is_one_run_of_its_tracker(person: Person) -> None:
    words = ("+cluster=2x1", *light_training.words(steps=60, step_s=0.5, save_every=2))
    job, run = person.types(*words, *WANDB).job_and_run
    wait_until_step(run, 5)
    first_id = wait_for(lambda: tracker_id(run), within_s=60, what="the tracker's id")
    command("scontrol", "requeue", job)
    wait_until_finished(run, within_s=240)
    wait_for_state(job, "COMPLETED")
    assert len(ledger_lines(run)) == 2
    state = json.loads((run.trackers / "wandb.json").read_text())
    assert tracker_id(run) == first_id and state["sure_bytes"] == run.metrics.stat().st_size
    logged = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    points = wandb_points(run.trackers)
    # What the first attempt could not hand over before Slurm killed it is sent by the second one, some of it twice.
    assert set(points) == {(line["step"], line["loss"]) for line in logged if "loss" in line}
    assert {step for step, _ in points} == set(range(1, 61))
    assert f"wandb: offline; to upload: wandb sync {run.trackers}" in (run.logs / "batch.log").read_text()


@pytest.mark.campaign
def test_after_a_cancel_the_tracker_gets_every_line(person: Person) -> None:
    words = ("+cluster=2x1", *light_training.words(steps=60, step_s=0.5, save_every=2))
    job, run = person.types(*words, *WANDB).job_and_run
    wait_until_step(run, 4)
    wait_for(lambda: (run.trackers / "wandb.json").exists(), within_s=60, what="the tracker")
    assert person.types("cancel", run.run_id).code == 0
    assert wait_until_ended(run)[-1]["reason"] == "cancelled"
    wait_for_state(job, "CANCELLED")
    state = json.loads((run.trackers / "wandb.json").read_text())
    if state["sure_bytes"] != run.metrics.stat().st_size:
        # On a busy machine Slurm's KillWait (5 s here) is over before wandb is imported once more.
        done = person.types("track", run.run_id)
        assert done.code == 0, done.err
    logged = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    # Slurm's signal has ended wandb's own helper, so the last lines came from another process, and some came twice.
    assert set(wandb_points(run.trackers)) == {(line["step"], line["loss"]) for line in logged if "loss" in line}
