"""Programs that are part of their run by the session, on a real Slurm: preempted, brought back, and hung."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from tests.support import light_training
from tests.support.cluster_faults import start_urgent_job
from tests.support.command_line import REPOSITORY, Person
from tests.support.ledgers import ledger_lines
from tests.support.own_programs import PROGRAMS, Program
from tests.support.process_faults import rank_pid
from tests.support.slurm_runs import losses, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.mark.parametrize(
    "program",
    # On this machine all of them are stopped and come back in test_own_programs_here.py.
    [
        pytest.param(
            program, id=program.name, marks=pytest.mark.full if program.name == "session_ddp" else pytest.mark.campaign
        )
        for program in PROGRAMS
    ],
)
def test_a_preempted_program_has_the_losses_of_an_undisturbed_one(program: Program, person: Person) -> None:
    program.require()
    shutil.copy(REPOSITORY / "examples" / f"{program.name}.py", person.folder)
    # Two ranks: the sum of four depends on the order of DDP's buckets, which a resumed process begins with anew.
    where = ("+cluster=2x1", "cluster.nodelist=node[3-4]", "run.name=preempted")
    job, run = person.types(program.words(step_s=0.3), *where).job_and_run
    wait_until_step(run, 5, within_s=300)
    start_urgent_job(["node3", "node4"])
    wait_for(lambda: len(ledger_lines(run)) == 2, within_s=120, what="a second attempt")
    wait_until_finished(run, within_s=400)
    first, second = ledger_lines(run)
    assert first["reason"] == "preempted" and first["job_id"] == second["job_id"] == job
    assert second["first_step"] == first["last_step"], "nothing is lost by a polite preemption"
    calm = person.types(program.words(step_s=0.0), "run.processes=2", "run.name=calm", timeout_s=400)
    assert calm.code == 0, calm.err
    (other,) = (person.folder / "runs" / "calm").iterdir()
    undisturbed = losses(type(run)(other))
    assert losses(run) == undisturbed and max(undisturbed) == program.steps


@pytest.mark.full
def test_a_program_that_hangs_is_named_and_started_again(person: Person) -> None:
    light_training.add_program(person)
    words = light_training.words(steps=60, step_s=0.2, save_every=20)
    _, run = person.types("+cluster=1x2", *words, "health.hang_timeout_s=10").job_and_run
    # Some steps after the save of step 20, since the stopped rank's last heartbeat may be of earlier steps.
    wait_until_step(run, 25)
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    wait_until_finished(run, within_s=300)
    first, second = ledger_lines(run)
    assert (first["action"], second["reason"]) == ("relaunch", "done")
    assert "rank 1 on " in first["note"] and "does not run (stopped or lost), in step at step 2" in first["note"]
    assert second["first_step"] == 20
    assert losses(run) == light_training.undisturbed_losses(60)
