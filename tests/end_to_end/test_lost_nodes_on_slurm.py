"""A lost node, on a real Slurm: the ranks are started again on other nodes of the same job, without a requeue.

These are a spare one, or those that are left. With node-local checkpoints the run goes on from the copy of the lost
node's files that the next node has.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.growing import PACED_MODULE
from tests.campaigns.world_sizes import compare, in_double
from tests.support import light_training
from tests.support.cluster_faults import node_lost
from tests.support.command_line import TINY, TINY_MODULE, Person
from tests.support.ledgers import ledger_lines
from tests.support.light_training import undisturbed_losses
from tests.support.slurm_runs import (
    command,
    losses,
    step_lines,
    wait_until_ended,
    wait_until_finished,
    wait_until_step,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.campaign]

LONG_S = 300.0
SPARED = ("+cluster=3x1", *light_training.words(steps=60, step_s=0.5), "cluster.spare_nodes=1", "run.name=spared")


@pytest.fixture(autouse=True)
def _program(person: Person) -> None:
    light_training.add_program(person)


def wait_for_twin(person: Person, *words: str) -> RunDirectory:
    """Returns the finished run that nothing happened to."""
    _, twin = person.types(*words, "run.name=twin").job_and_run
    wait_until_finished(twin, within_s=LONG_S)
    return twin


def back_after_s(run: RunDirectory, killed_unix_s: float, attempt: int = 1) -> float:
    """Returns the seconds from a kill to the first step of the attempt that follows it."""
    return float(next(line["time_unix_s"] for line in step_lines(run) if line["attempt"] == attempt)) - killed_unix_s


def has_attempt(run: RunDirectory, attempt: int) -> bool:
    """Returns whether an attempt was opened."""
    return len(ledger_lines(run)) > attempt


def test_a_spare_node_takes_the_place_of_a_lost_one(person: Person) -> None:
    """Three nodes train and one waits; what runs on one of the three is killed at once, its slurmd included."""
    plan = person.types("plan", *SPARED)
    assert "1, used in place of a lost or bad node: 33% more node hours" in plan.err + plan.out
    job, run = person.types(*SPARED).job_and_run
    wait_until_step(run, 10, within_s=LONG_S)
    lost = ledger_lines(run)[0]["nodes"][1]
    killed_unix_s = time.time()
    with node_lost(lost):
        wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["reason"], first["action"], last["reason"]) == ("node_failure", "relaunch", "done"), first["note"]
    assert first["left_out"] == lost and first["note"].endswith(" of this allocation")
    assert lost not in last["nodes"] and len(last["nodes"]) == 3
    assert first["job_id"] == last["job_id"] == job and "restart_count" in last and last["restart_count"] == 0
    assert losses(run) == undisturbed_losses(60)
    print(f"from the kill of a node to the next step: {back_after_s(run, killed_unix_s):.1f} s")


def wait_until_idle(num_nodes: int) -> None:
    """Waits until so many nodes are free: Slurm starts a job with those that are free at that moment."""
    words = ("sinfo", "--noheader", "--states=idle", "--format=%D")
    wait_for(lambda: command(*words) == str(num_nodes), within_s=60, what=f"{num_nodes} nodes")


RANGE = ("+cluster=2-4x1", *TINY, "batch.global_size=18", "train.max_steps=90", "train.samples_digest=true")


def test_a_run_of_a_range_of_nodes_goes_on_with_those_that_are_left(person: Person) -> None:
    """Four nodes train; one is killed, and then another one. Nothing is requeued, and the samples stay the same."""
    (person.folder / "tiny.py").write_text(in_double(TINY_MODULE))
    plan = person.types("plan", *RANGE)
    assert "start again on those that are left, 2 at least, in the same job" in plan.err + plan.out
    twin = wait_for_twin(person, *RANGE)
    wait_until_idle(4)
    job, run = person.types(*RANGE, "model.step_s=0.5", "run.name=shrunk").job_and_run
    wait_until_step(run, 10, within_s=LONG_S)
    lost: list[str] = []
    with ExitStack() as faults:
        for count in (1, 2):
            lost.append(ledger_lines(run)[-1]["nodes"][-1])
            killed_unix_s = time.time()
            faults.enter_context(node_lost(lost[-1]))
            wait_for(partial(has_attempt, run, count), within_s=LONG_S, what="the next attempt")
            wait_until_step(run, max(losses(run)) + 8, within_s=LONG_S)
            print(f"from kill {count} to the next step: {back_after_s(run, killed_unix_s, count):.1f} s")
        wait_until_finished(run, within_s=LONG_S)
    ledger = wait_until_ended(run)
    assert [(entry["world_size"], entry["action"]) for entry in ledger] == [
        (4, "relaunch"),
        (3, "relaunch"),
        (2, "finish"),
    ], [entry["note"] for entry in ledger]
    assert [entry.get("left_out") for entry in ledger] == [*lost, None]
    assert {(entry["job_id"], entry["restart_count"]) for entry in ledger} == {(job, 0)}
    differences, worst = compare(step_lines(twin), step_lines(run))
    assert differences == []
    print(f"largest relative difference of loss and gradient norm: {worst:.1e}")


GROWING = (
    "+cluster=2-4x1",
    *TINY,
    "batch.global_size=12",
    "train.max_steps=500",
    "train.samples_digest=true",
    "checkpoint.every_steps=10",
    "requeue.grow_every_min=1",
)


@pytest.mark.timeout(600)
def test_a_run_that_has_lost_a_node_grows_back_when_the_node_returns(person: Person) -> None:
    """Four nodes train, one is killed; once it is back, a save is followed by a requeue onto four nodes."""
    (person.folder / "tiny.py").write_text(PACED_MODULE)
    plan = person.types("plan", *GROWING)
    assert "asked for at a save, at most every 1 min" in plan.err + plan.out
    twin = wait_for_twin(person, *GROWING)
    wait_until_idle(4)
    job, run = person.types(*GROWING, "model.step_s=0.5", "run.name=grown").job_and_run
    wait_until_step(run, 10, within_s=LONG_S)
    killed_unix_s = time.time()
    with node_lost(ledger_lines(run)[-1]["nodes"][-1]):
        wait_for(partial(has_attempt, run, 1), within_s=LONG_S, what="the next attempt")
        wait_until_step(run, max(losses(run)) + 8, within_s=LONG_S)
        print(f"from the kill to the next step on three nodes: {back_after_s(run, killed_unix_s):.1f} s")
    back_unix_s = time.time()
    wait_for(partial(has_attempt, run, 2), within_s=LONG_S, what="an attempt on four nodes")
    grown = ledger_lines(run)[1]
    wait_until_step(run, max(losses(run)) + 8, within_s=LONG_S)
    stop_unix_s = max(line["time_unix_s"] for line in step_lines(run) if line["attempt"] == 1)
    print(grown["note"])
    print(f"from the node's return to the next step on four: {back_after_s(run, back_unix_s, 2):.1f} s")
    print(f"from the last step on three nodes to the first on four: {back_after_s(run, stop_unix_s, 2):.1f} s")
    ledger = ledger_lines(run)
    assert [(entry["world_size"], entry.get("reason"), entry.get("action")) for entry in ledger] == [
        (4, "node_failure", "relaunch"),
        (3, "growth", "requeue"),
        (4, None, None),
    ], [entry.get("note") for entry in ledger]
    assert grown["grow_to"] == 4 and grown["note"].startswith("grows: 4 nodes instead of 3: a step takes ")
    assert {entry["job_id"] for entry in ledger} == {job}
    # What is left of the run would take minutes and show nothing more.
    steps = step_lines(run)
    # Each number of nodes adds up in another order, and the difference grows with the steps: 1.0e-9 after 39.
    differences, worst = compare(step_lines(twin)[: len(steps)], steps, tolerance=1e-8)
    assert differences == []
    print(f"largest relative difference of loss and gradient norm in {len(steps)} steps: {worst:.1e}")


def test_the_run_goes_on_from_the_copy_on_a_neighbour(person: Person, tmp_path: Path) -> None:
    """Nothing is in the run directory when a node is lost together with its disk."""
    trainer = ("+cluster=3x1", *TINY, "batch.global_size=18", "train.max_steps=60", "train.threads=1")
    twin, disks = wait_for_twin(person, *trainer), tmp_path / "disks"
    for number in range(1, 5):
        (disks / f"node{number}").mkdir(parents=True)
    local = (f"checkpoint.local_dir={disks}/$SLURMD_NODENAME", "checkpoint.every_steps=2", "checkpoint.copy_every=99")
    spared = ("model.step_s=0.5", "cluster.spare_nodes=1", "run.name=spared")
    job, run = person.types(*trainer, *spared, *local).job_and_run
    wait_until_step(run, 11, within_s=LONG_S)
    lost = ledger_lines(run)[0]["nodes"][2]
    assert not any(run.checkpoints.glob("checkpoint_*"))
    killed_unix_s = time.time()
    with node_lost(lost):
        shutil.rmtree(disks / lost)
        wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["left_out"], first["last_committed"]) == (lost, -1)
    assert last["job_id"] == job and last["restart_count"] == 0
    assert "was on the nodes only; copied into the run directory" in run.rank_log(1, 0).read_text()
    assert losses(run) == losses(twin)
    # Two steps lie between two checkpoints, and one may not have been durable yet.
    assert first["last_step"] - min(line["step"] for line in step_lines(run) if line["attempt"] == 1) <= 4
    print(f"from the kill of a node and its disk to the next step: {back_after_s(run, killed_unix_s):.1f} s")


def test_a_job_whose_first_node_is_lost_is_requeued(person: Person) -> None:
    """The supervisor ran there, and with --no-kill Slurm would let the job run until its time limit."""
    job, run = person.types(*SPARED).job_and_run
    wait_until_step(run, 10, within_s=LONG_S)
    steps = ("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%j")
    wait_for(lambda: "guard" in command(*steps).split(), within_s=60, what="the step of the guard")
    lost = ledger_lines(run)[0]["nodes"][0]
    with node_lost(lost):
        wait_for(lambda: "which is requeued" in (run.logs / "batch.log").read_text(), within_s=120, what="the guard")
    wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["reason"], last["reason"]) in ((reason, "done") for reason in ("node_failure", "requeued")), first
    assert last["job_id"] == job and last["restart_count"] == 1
    assert losses(run) == undisturbed_losses(60)
