"""The main path on a real Slurm: one line submits, ranks on two nodes train, people stop and continue it."""

from __future__ import annotations

import pytest

from slurm_train.metrics import read_metrics
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.paths import name_of
from tests.support import light_training
from tests.support.cluster_faults import mounted_over, start_urgent_job
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.light_training import undisturbed_losses
from tests.support.slurm_runs import (
    command,
    job_state,
    losses,
    wait_for_state,
    wait_until_ended,
    wait_until_finished,
    wait_until_step,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _program(person: Person) -> None:
    light_training.add_program(person)


def test_one_line_trains_on_two_nodes_like_one_process(person: Person) -> None:
    submitted = person.types("+cluster=2x2", *TINY)
    job, run = submitted.job_and_run
    assert submitted.out == f"{job} {run.path}\n"
    result = wait_until_finished(run)
    assert result["step"] == 12 and result["world_size"] == 4
    assert sorted(path.name for path in run.attempt_logs(0).glob("rank_*.log")) == [f"rank_{r}.log" for r in range(4)]
    assert {line["world_size"] for line in read_metrics(run.metrics)} == {4}
    alone = person.types(*TINY, "run.processes=1", "run.name=alone")
    assert alone.code == 0, alone.err
    alone_losses = losses(find_run(person.folder / "runs", "alone"))
    assert losses(run) == pytest.approx(alone_losses, abs=1e-4)
    assert person.types("+cluster=2x2", *TINY).code == 0, "a finished run shows its result"


def test_scancel_ends_a_run_and_resume_continues_it(person: Person) -> None:
    words = ("+cluster=2x2", *light_training.words(steps=40, step_s=0.2))
    job, run = person.types(*words).job_and_run
    wait_until_step(run, 6)
    again = person.types(*words)
    assert again.code == 2 and "active already" in again.err and job in again.err
    command("scancel", job)
    wait_for_state(job, "CANCELLED")
    assert wait_until_ended(run)[-1]["reason"] == "cancelled"
    resumed_job, same_run = person.types("resume", run.run_id).job_and_run
    assert same_run == run and resumed_job != job
    wait_until_finished(run)
    assert job_state(job) == "CANCELLED", "a cancelled job is never brought back"
    assert int(ledger_lines(run)[1]["first_step"]) >= 6
    assert losses(run) == undisturbed_losses(40)


@pytest.mark.full
def test_cancel_ends_a_run_and_its_script_continues_it_by_hand_and_in_an_salloc(person: Person) -> None:
    words = ("+cluster=2x2", *light_training.words(steps=40, step_s=0.2))
    job, run = person.types(*words).job_and_run
    wait_until_step(run, 2)
    cancelled = person.types("cancel", run.run_id)
    assert cancelled.code == 0 and job in cancelled.err
    wait_for_state(job, "CANCELLED")
    by_hand = person.runs("sbatch", "--parsable", str(run.submit_script)).out.strip()
    wait_for(lambda: len(ledger_lines(run)) == 2, within_s=60, what="a second attempt")
    wait_until_step(run, max(losses(run)) + 2)
    command("scancel", by_hand)
    wait_for_state(by_hand, "CANCELLED")
    done = person.runs("salloc", "--nodes=2", "--ntasks-per-node=2", "bash", str(run.submit_script), timeout_s=180)
    assert done.code == 0, done.out + done.err
    wait_until_finished(run)
    assert [(entry["reason"], entry["world_size"]) for entry in ledger_lines(run)] == [
        ("cancelled", 4),
        ("cancelled", 4),
        ("done", 4),
    ]
    assert losses(run) == undisturbed_losses(40)
    assert person.types("cancel", run.run_id).code == 2, "nothing is left to cancel"


@pytest.mark.full
def test_a_polite_stop_saves_the_step_it_stops_at(person: Person) -> None:
    words = ("+cluster=1x2", *light_training.words(steps=30, step_s=0.2, save_every=100))
    _, run = person.types(*words).job_and_run
    wait_until_step(run, 5)
    run.stop_file.touch()
    assert wait_until_ended(run)[-1]["reason"] == "stopped"
    stopped_at = max(losses(run))
    assert [name_of(path).step for path in run.checkpoints.iterdir()] == [stopped_at]
    status = person.types("status", run.run_id)
    assert "stopped" in status.out
    assert person.types(*words).code == 0
    wait_until_finished(run)
    assert losses(run) == undisturbed_losses(30)


TRAINER = (*TINY, "train.threads=1", "model.step_s=1.0", "checkpoint.every_steps=null")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param("2x2", light_training.words(step_s=1.0, save_every=100), id="own program"),
        pytest.param("2x1", TRAINER, marks=pytest.mark.full, id="trainer"),
    ],
)
def test_preemption_brings_the_run_back_by_itself(person: Person, size: str, words: tuple[str, ...]) -> None:
    job, run = person.types(f"+cluster={size}", *words, "cluster.nodelist=node[3-4]").job_and_run
    wait_until_step(run, 3)
    start_urgent_job(["node3", "node4"])
    wait_for(lambda: len(ledger_lines(run)) == 2, within_s=120, what="a second attempt")
    wait_until_finished(run, within_s=300)
    first, second = ledger_lines(run)
    assert first["reason"] == "preempted" and first["job_id"] == second["job_id"] == job
    assert second["first_step"] == first["last_step"], "nothing is lost by a polite preemption"
    assert sorted(losses(run)) == list(range(1, 13))
    if words != TRAINER:
        assert losses(run) == undisturbed_losses(12)
        places = [light_training.place_line(run, rank).split(";")[0] for rank in range(4)]
        assert places == [f"rank {rank} of 4 (local rank {rank % 2}) on node{3 + rank // 2}" for rank in range(4)]


def test_a_node_that_does_not_see_the_run_is_named(person: Person) -> None:
    job, run = person.types("+cluster=2x1", *light_training.words(), "cluster.sbatch.hold=true").job_and_run
    with mounted_over("node2", person.folder, "-t", "tmpfs", "none"):
        command("scontrol", "release", job)
        log = run.logs / "batch.log"
        wait_for(lambda: log.exists() and "FS_MISSING" in log.read_text(), within_s=45, what="a line in batch.log")
    line = f"FS_MISSING node2: node node2 does not see the run directory {run.path}"
    assert line in log.read_text()
    wait_for_state(job, "FAILED")
