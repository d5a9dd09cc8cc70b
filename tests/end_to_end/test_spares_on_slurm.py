"""Spare nodes, on a real Slurm: a lost node's place is taken inside the allocation, without a requeue.

With node-local checkpoints the run goes on from the copy of the lost node's files that the next node has.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.paths import RunDirectory
from tests.support.cluster_faults import node_lost
from tests.support.command_line import TINY, Person
from tests.support.slurm_runs import (
    losses,
    step_lines,
    wait_until_ended,
    wait_until_finished,
    wait_until_step,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign]

LONG_S = 300.0
RUN = ("+cluster=3x1", *TINY, "batch.global_size=18", "train.max_steps=60")
SPARED = (*RUN, "model.step_s=0.5", "cluster.spare_nodes=1", "run.name=spared")


def wait_for_twin(person: Person) -> RunDirectory:
    """Returns the finished run that nothing happened to."""
    _, twin = person.types(*RUN, "run.name=twin").job_and_run
    wait_until_finished(twin, within_s=LONG_S)
    return twin


def back_after_s(run: RunDirectory, killed_unix_s: float) -> float:
    """Returns the seconds from a kill to the first step of the second attempt."""
    return float(next(line["time_unix_s"] for line in step_lines(run) if line["attempt"] == 1)) - killed_unix_s


def test_a_spare_node_takes_the_place_of_a_lost_one(person: Person) -> None:
    """Three nodes train and one waits; what runs on one of the three is killed at once, its slurmd included."""
    plan = person.types("plan", *SPARED)
    assert "1, which wait for a lost or bad node's place: 33% more node hours" in plan.err + plan.out
    twin = wait_for_twin(person)
    job, run = person.types(*SPARED).job_and_run
    wait_until_step(run, 10, within_s=LONG_S)
    lost = read_ledger(run)[0]["nodes"][1]
    killed_unix_s = time.time()
    with node_lost(lost):
        wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["reason"], first["action"], last["reason"]) == ("node_failure", "relaunch", "done"), first["note"]
    assert first["replaced"] == lost and first["note"].endswith(f"takes the place of {lost} in this allocation")
    assert lost not in last["nodes"] and len(last["nodes"]) == 3
    assert first["job_id"] == last["job_id"] == job and "restart_count" in last and last["restart_count"] == 0
    assert losses(run) == losses(twin)
    print(f"from the kill of a node to the next step: {back_after_s(run, killed_unix_s):.1f} s")


def test_the_run_goes_on_from_the_copy_on_a_neighbour(person: Person, tmp_path: Path) -> None:
    """Nothing is in the run directory when a node is lost together with its disk."""
    twin, disks = wait_for_twin(person), tmp_path / "disks"
    for number in range(1, 5):
        (disks / f"node{number}").mkdir(parents=True)
    local = (f"checkpoint.local_dir={disks}/$SLURMD_NODENAME", "checkpoint.every_steps=2", "checkpoint.copy_every=99")
    job, run = person.types(*SPARED, *local).job_and_run
    wait_until_step(run, 11, within_s=LONG_S)
    lost = read_ledger(run)[0]["nodes"][2]
    assert not any(run.checkpoints.glob("checkpoint_*"))
    killed_unix_s = time.time()
    with node_lost(lost):
        shutil.rmtree(disks / lost)
        wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["replaced"], first["last_committed"]) == (lost, -1)
    assert last["job_id"] == job and last["restart_count"] == 0
    assert "was on the nodes only; copied into the run directory" in run.rank_log(1, 0).read_text()
    assert losses(run) == losses(twin)
    # Two steps lie between two checkpoints, and one may not have been durable yet.
    assert first["last_step"] - min(line["step"] for line in step_lines(run) if line["attempt"] == 1) <= 4
    print(f"from the kill of a node and its disk to the next step: {back_after_s(run, killed_unix_s):.1f} s")


def test_a_job_whose_first_node_is_lost_is_requeued(person: Person) -> None:
    """The supervisor ran there, and with --no-kill Slurm would let the job run until its time limit."""
    twin = wait_for_twin(person)
    job, run = person.types(*SPARED).job_and_run
    wait_until_step(run, 10, within_s=LONG_S)
    lost = read_ledger(run)[0]["nodes"][0]
    with node_lost(lost):
        wait_for(lambda: "which is requeued" in (run.logs / "batch.log").read_text(), within_s=120, what="the guard")
    wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["reason"], last["reason"]) in ((reason, "done") for reason in ("node_failure", "requeued")), first
    assert last["job_id"] == job and last["restart_count"] == 1
    assert losses(run) == losses(twin)
