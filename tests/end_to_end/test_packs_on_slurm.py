"""Runs of a sweep that share jobs on a real Slurm (`sweep.pack`): what becomes of one disturbs no other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.campaigns.arrays import restarts
from tests.support.cluster_faults import take_nodes
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.light_training import speed_up, undisturbed_losses
from tests.support.packs import cpus_of, gpus_of, runs_of, submits_packs
from tests.support.slurm_runs import command, losses, wait_until_ended, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]
STEPS = 60
PATIENCE: dict[str, Any] = {"within_s": 150.0, "what": "the ledgers of the pack"}


def test_one_that_fails_and_one_that_is_cancelled_disturb_no_other(person: Person) -> None:
    table = submits_packs(person, runs=4, pack=4, steps=STEPS)
    job = str(table[0].job)
    assert [element.job for element in table] == [job] * 4 and job.endswith("_0")
    first, second, cancelled, failing = runs_of(table)
    wait_for(lambda: ledger_lines(failing)[-1:] and ledger_lines(failing)[-1].get("action") == "stop", **PATIENCE)
    wait_until_step(second, 6)
    assert len(set(gpus_of([first, second, cancelled, failing]))) == 4, "each run has a GPU of its own"
    assert "fails on purpose" in person.types("status", failing.run_id).out
    assert "3 running, 1 failed" in person.types("status", table_id := job.partition("_")[0]).out

    # The warning before the time limit: all save, and the job comes back once.
    command("scancel", "--signal=USR2", job)
    wait_for(
        lambda: len(ledger_lines(first)) == len(ledger_lines(second)) == len(ledger_lines(cancelled)) == 2, **PATIENCE
    )
    wait_until_step(cancelled, max(losses(cancelled)) + 2)
    assert person.types("cancel", table_id, "--where", "seed=3").code == 0
    assert wait_until_ended(cancelled)[-1]["reason"] == "stopped"

    speed_up(person)
    results = [wait_until_finished(run) for run in (first, second)]
    assert [result["step"] for result in results] == [STEPS, STEPS]
    assert set(restarts(job.partition("_")[0]).values()) == {1}, "requeued once, for all"
    reasons = [[entry["reason"] for entry in ledger_lines(run)] for run in (first, second, cancelled, failing)]
    assert reasons == [["time_limit", "done"], ["time_limit", "done"], ["time_limit", "stopped"], ["failed"] * 2]
    assert [losses(first), losses(second)] == [undisturbed_losses(STEPS, seed=seed) for seed in (1, 2)]
    assert "2 finished, 1 stopped, 1 failed" in person.types("status", table_id).out


def test_runs_that_share_a_gpu_have_cpus_of_their_own_and_disturb_no_other(person: Person) -> None:
    table = submits_packs(person, "sweep.runs_per_gpu=2", runs=4, pack=4, steps=STEPS)
    job = str(table[0].job)
    first, second, third, failing = runs_of(table)
    wait_for(lambda: ledger_lines(failing)[-1:] and ledger_lines(failing)[-1].get("action") == "stop", **PATIENCE)
    for run in (first, second, third):
        # All at the same time: a step that waited for the GPU of another would have no step yet.
        wait_until_step(run, 2)
    shown = command("scontrol", "show", "job", job)
    assert re.search(r"TresPerNode=\S*gpu:2\b", shown), "the job asks for half as many GPUs as runs"
    gpus = gpus_of(runs_of(table))
    cpus = cpus_of(runs_of(table))
    assert gpus[0] != gpus[1] and gpus == gpus[:2] * 2 and not any("," in gpu for gpu in gpus)
    num_cores = len(set.union(*cpus))
    assert num_cores < 2 or (cpus[0].isdisjoint(cpus[2]) and cpus[1].isdisjoint(cpus[3])), "on the same GPU"
    assert num_cores < 4 or sum(map(len, cpus)) == num_cores, "each CPU belongs to one run"

    assert person.types("cancel", third.run_id).code == 0
    assert wait_until_ended(third)[-1]["reason"] == "stopped"
    speed_up(person)
    results = [wait_until_finished(run) for run in (first, second)]
    assert [result["step"] for result in results] == [STEPS, STEPS]
    reasons = [[entry["reason"] for entry in ledger_lines(run)] for run in (first, second, third, failing)]
    assert reasons == [["done"], ["done"], ["stopped"], ["failed"] * 2]
    assert [losses(first), losses(second)] == [undisturbed_losses(STEPS, seed=seed) for seed in (1, 2)]
    stopped = losses(third)
    assert stopped == undisturbed_losses(len(stopped), seed=3), "as far as it came"


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_of_sixteen_runs_on_two_nodes_one_fails_and_one_pack_is_preempted(person: Person) -> None:
    table = submits_packs(person, runs=16, pack=8, steps=STEPS)
    job = str(table[0].job).partition("_")[0]
    assert [element.job for element in table] == [f"{job}_0"] * 8 + [f"{job}_1"] * 8
    runs = runs_of(table)
    wait_for(lambda: all(losses(run) for run in runs), within_s=600, what="a step of all 16 runs")
    failing = runs[-1]
    wait_for(lambda: (ledger_lines(failing) or [{}])[-1].get("action") == "stop", within_s=600, what="the failed run")
    (node,) = {node for run in runs[:8] for node in ledger_lines(run)[-1]["nodes"]}
    take_nodes([node])
    speed_up(person)
    results = [wait_until_finished(run, within_s=900) for run in runs[:-1]]
    assert {result["step"] for result in results} == {STEPS}
    reasons = [[entry["reason"] for entry in ledger_lines(run)] for run in runs]
    assert reasons == [["preempted", "done"]] * 8 + [["done"]] * 7 + [["failed"] * 2]
    assert restarts(job) == {0: 1, 1: 0}
    assert len(set(gpus_of(runs))) == 8, "each of a node's GPUs was used"
    assert [losses(run) for run in runs[:-1]] == [undisturbed_losses(STEPS, seed=seed) for seed in range(1, 16)]
