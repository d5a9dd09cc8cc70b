"""Every way to lose ranks, nodes and daemons, on a real Slurm: the run ends, and the ledger says what happened.

The runs of one test share the cluster, so that its timers (30 s for a time limit, 20 s for a lost node) run at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support import light_training
from tests.support.cluster_faults import (
    controller_away,
    controller_set_back,
    daemons_stopped,
    preempted_by_urgent,
    start_urgent_job,
)
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.light_training import undisturbed_losses
from tests.support.process_faults import (
    kill,
    rank_pid,
    srun_pid,
    stepd_pid,
    supervisor_pid,
    wait_until_gone,
)
from tests.support.slurm_runs import losses, wait_for_state, wait_until_ended, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

LONG_S = 300.0


@pytest.fixture(autouse=True)
def _program(person: Person) -> None:
    light_training.add_program(person)


def submits(
    person: Person, name: str, *words: str, steps: int = 40, step_s: float = 0.3, save_every: int = 4
) -> tuple[str, RunDirectory]:
    training = light_training.words(steps=steps, step_s=step_s, save_every=save_every)
    return person.types("+cluster=1x2", *training, f"run.name={name}", *words).job_and_run


def submits_trainer(person: Person, name: str, *, step_s: float) -> tuple[str, RunDirectory]:
    """Submits a run of the built-in trainer, whose ranks look for the end of slurmstepd by themselves."""
    words = (*TINY, "train.threads=1", "train.max_steps=40", f"model.step_s={step_s}", f"run.name={name}")
    return person.types("+cluster=1x2", *words).job_and_run


def story(run: RunDirectory) -> list[tuple[str, str]]:
    return [(entry["reason"], entry["action"]) for entry in wait_until_ended(run)]


KILLED: dict[str, tuple[Callable[[RunDirectory], int], str]] = {
    "rank1": (lambda run: rank_pid(run, 1), "rank 1 on "),
    "rank0": (lambda run: rank_pid(run, 0), "rank 0 on "),
    "srun": (srun_pid, "srun itself was killed by signal 9"),
}


def test_killed_processes_of_a_job_cost_no_run(person: Person) -> None:
    runs = {name: submits(person, name) for name in KILLED}
    for name, (_, run) in runs.items():
        wait_until_step(run, 6, within_s=LONG_S)
        kill(KILLED[name][0](run))
    for name, (job, run) in runs.items():
        wait_until_finished(run, within_s=LONG_S)
        first, last = wait_until_ended(run)
        assert (first["reason"], first["action"], last["reason"]) == ("failed", "relaunch", "done"), name
        assert KILLED[name][1] in first["note"]
        assert first["job_id"] == last["job_id"] == job
        assert losses(run) == undisturbed_losses(40)
        assert last["step_s"] > 0 and last["lost_work_s"] <= last["step_s"]


@pytest.mark.campaign
def test_ranks_without_a_slurmstepd_end_by_themselves_and_the_job_is_requeued(person: Person) -> None:
    job, run = submits_trainer(person, "orphans", step_s=0.3)
    wait_until_step(run, 6, within_s=LONG_S)
    pids = [rank_pid(run, rank) for rank in (0, 1)]
    kill(stepd_pid(run))
    for pid in pids:
        wait_until_gone(pid, within_s=60)
    wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["reason"], first["action"], last["reason"]) == ("failed", "requeue", "done")
    assert "the process that started it is gone (slurmstepd was killed?)" in first["note"]
    assert first["job_id"] == last["job_id"] == job
    assert sorted(losses(run)) == list(range(1, 41))


@pytest.mark.full
def test_a_killed_batch_script_is_told_and_resume_continues(person: Person) -> None:
    job, run = submits(person, "batch")
    wait_until_step(run, 6)
    kill(supervisor_pid(run))
    wait_for_state(job, "FAILED", within_s=90)
    status = person.types("status", run.name)
    assert (
        "failed" in status.out and f"the batch script was killed (Slurm: FAILED); `resume {run.run_id}`" in status.out
    )
    resumed, _ = person.types("resume", run.name).job_and_run
    wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert (first["reason"], first["action"]) == ("lost", "lost") and last["job_id"] == resumed
    assert losses(run) == undisturbed_losses(40)


@pytest.mark.campaign
def test_a_controller_that_is_away_costs_nothing(person: Person) -> None:
    """It is killed while one run trains, and while another has just failed and must ask it what next."""
    _, calm = submits(person, "calm")
    _, failing = submits(person, "failing")
    _, warned = submits(person, "warned", steps=60)
    for run in (calm, failing, warned):
        wait_until_step(run, 6, within_s=LONG_S)
    with controller_away():
        before = max(losses(calm))
        kill(rank_pid(failing, 1))
        for rank in (0, 1):
            # What the warning before the time limit does to the ranks.
            os.kill(rank_pid(warned, rank), signal.SIGUSR2)
        wait_until_step(calm, before + 5)
        wait_for(lambda: _awaits_controller(warned), within_s=60, what="a supervisor that awaits the controller")
    for run in (calm, failing, warned):
        wait_until_finished(run, within_s=LONG_S)
    assert story(calm) == [("done", "finish")]
    assert story(failing) == [("failed", "relaunch"), ("done", "finish")]
    assert story(warned) == [("time_limit", "requeue"), ("done", "finish")]
    first, second = ledger_lines(warned)
    assert second["first_step"] == first["last_step"]


@pytest.mark.campaign
def test_a_step_that_a_killed_controller_has_again_holds_nobody_up(person: Person) -> None:
    job, run = submits(person, "set-back", save_every=2, steps=60)
    wait_until_step(run, 6, within_s=LONG_S)
    with controller_set_back(job):
        kill(rank_pid(run, 1))
        wait_for(lambda: len(ledger_lines(run)) == 2, within_s=60, what="the second attempt")
        wait_until_step(run, max(losses(run)) + 6, within_s=LONG_S)
    kill(rank_pid(run, 0, attempt=1))
    wait_until_finished(run, within_s=LONG_S)
    failed = ("failed", "relaunch")
    assert story(run) == [failed, failed, ("failed", "requeue"), ("done", "finish")]
    assert f"{job}.0 of an earlier attempt" in ledger_lines(run)[2]["note"]
    assert losses(run) == undisturbed_losses(60)


def _awaits_controller(run: RunDirectory) -> bool:
    try:
        rank_pid(run, 0)
    except AssertionError:
        return "reason" not in ledger_lines(run)[-1]
    return False


QOS = {
    "nograce": "gracetime=0 preemptmode=requeue",
    "cancelled": "gracetime=15 preemptmode=cancel",
    "gone": "gracetime=0 preemptmode=cancel",
}


@pytest.mark.campaign
def test_preemption_without_grace_and_by_cancelling(person: Person) -> None:
    """With `gone` Slurm gives neither time nor the job back: another job takes over."""
    with preempted_by_urgent(QOS):
        runs = {}
        for node, name in enumerate(QOS, start=1):
            words = (f"cluster.qos={name}", f"cluster.nodelist=node{node}", "cluster.sbatch.exclusive=true")
            runs[name] = submits(person, name, *words)
        for _, run in runs.values():
            wait_until_step(run, 6, within_s=LONG_S)
        start_urgent_job(["node1", "node2", "node3"])
        for name, (job, run) in runs.items():
            wait_until_finished(run, within_s=LONG_S)
            first, last = wait_until_ended(run)
            assert first["reason"] in ("preempted", "requeued" if name == "nograce" else ""), first
            assert last["reason"] == "done" and first["job_id"] == job
            assert (last["job_id"] == job) is (name != "gone")
            assert losses(run) == undisturbed_losses(40)
        _, last = ledger_lines(runs["cancelled"][1])
        assert last["lost_work_s"] == 0.0, "with grace the ranks save where they stop"


@pytest.mark.campaign
def test_time_limits_with_a_warning_and_without(person: Person) -> None:
    words = ("cluster.time_limit_min=1", "cluster.nodelist=node3")
    pace: dict[str, Any] = {"steps": 90, "step_s": 1.0, "save_every": 20}
    warned_job, warned = submits(person, "warned", *words, "requeue.warn_before_limit_s=10", **pace)
    # A warning that comes after the end is none.
    job, plain = submits(person, "plain", *words, "cluster.sbatch.hold=true", **pace)
    person.runs("scancel", job)
    script = plain.submit_script.read_text()
    plain.submit_script.write_text(
        "\n".join(line for line in script.splitlines() if "--signal" not in line and "hold" not in line)
    )
    resumed, _ = person.types("resume", "plain").job_and_run
    for job, run in ((warned_job, warned), (resumed, plain)):
        wait_until_finished(run, within_s=600)
        entries = wait_until_ended(run)
        assert {entry["reason"] for entry in entries[:-1]} == {"time_limit"} and len(entries) >= 2
        assert {entry["job_id"] for entry in entries} == {job}
    assert all(entry["lost_work_s"] == 0 for entry in ledger_lines(warned))


@pytest.mark.campaign
def test_a_lost_node_costs_what_came_after_the_last_checkpoint(person: Person) -> None:
    """The node's daemon dies and its ranks live on: Slurm starts the job elsewhere, and the old ranks leave."""
    job, run = submits(person, "lost", "cluster.nodelist=null", steps=120, step_s=0.5)
    wait_until_step(run, 6)
    node = ledger_lines(run)[0]["nodes"][0]
    zombies = [rank_pid(run, rank) for rank in (0, 1)]
    with daemons_stopped([node]):
        wait_for(lambda: len(ledger_lines(run)) == 2, within_s=120, what="a second attempt")
        for pid in zombies:
            wait_until_gone(pid, within_s=60)
        wait_until_finished(run, within_s=LONG_S)
    first, last = wait_until_ended(run)
    assert first["reason"] == "node_failure" and last["job_id"] == job
    assert node not in last["nodes"]
    assert losses(run) == undisturbed_losses(120)
