"""A job that is suspended, and a time limit without a warning, on a real Slurm."""

from __future__ import annotations

import time

import pytest

from slurm_train.rundir.events import read_events
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.timing import CAUSES, read_notice
from tests.support import light_training
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import (
    command,
    losses,
    wait_for_state,
    wait_until_ended,
    wait_until_finished,
    wait_until_step,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]
HANG_S = 12.0
SUSPENDED_S = 25.0


@pytest.mark.campaign
def test_a_suspended_job_goes_on_as_if_nothing_had_happened(person: Person) -> None:
    """Longer than the watchdog's time-out and the collectives' own: one attempt, and the time is nobody's fault."""
    words = (f"health.hang_timeout_s={HANG_S}", "train.steady_timeout_s=10", "train.start_timeout_s=60")
    pace = ("train.max_steps=60", "model.step_s=0.2", "checkpoint.every_steps=auto", "run.name=suspended")
    job, run = person.types("+cluster=2x1", *TINY, *pace, *words).job_and_run
    wait_until_step(run, 10)
    end_before = wait_for(lambda: read_notice(run, 0).end_unix_s, within_s=60, what="a notice")
    command("scontrol", "suspend", job)
    wait_for_state(job, "SUSPENDED", within_s=20)
    time.sleep(2.5)  # TSTP, and 2 s later STOP
    step = max(losses(run))
    time.sleep(SUSPENDED_S - 2.5)
    assert max(losses(run)) == step, "it was not suspended"
    command("scontrol", "resume", job)
    wait_until_finished(run)
    (entry,) = wait_until_ended(run)
    assert entry["reason"] == "done" and read_events(run, "hang") == []
    assert entry["suspended_s"] == pytest.approx(SUSPENDED_S, abs=4.0)
    assert entry["step_s"] < 60 * 0.2 + 15
    wall_s = entry["end_time_unix_s"] - entry["time_unix_s"]
    assert sum(entry[cause] for cause in CAUSES) == pytest.approx(wall_s, rel=0.03)
    assert sorted(losses(run)) == list(range(1, 61))
    end_after = read_notice(run, 0).end_unix_s
    assert end_after is not None and end_after - end_before >= SUSPENDED_S - 5, "Slurm moves the limit"
    print({cause: entry[cause] for cause in CAUSES}, wall_s)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        (["scontrol", "suspend"], ["scontrol", "resume"]),
        # As the manual of scontrol advises: the job keeps its CPUs, and the batch script goes on.
        (["scancel", "--signal=STOP"], ["scancel", "--signal=CONT"]),
    ],
    ids=["suspend", "stop"],
)
def test_a_program_of_ones_own_that_was_stopped_goes_on_in_the_same_attempt(
    stop: list[str], go_on: list[str], person: Person
) -> None:
    light_training.add_program(person)
    limits = (f"health.hang_timeout_s={HANG_S}", "train.steady_timeout_s=10", "train.start_timeout_s=60")
    words = (*light_training.words(steps=40, save_every=20, step_s=0.3), *limits)
    job, run = person.types("+cluster=1x2", *words, "run.name=stopped").job_and_run
    wait_until_step(run, 5)
    command(*stop, job)
    wait_for_state(job, "SUSPENDED", "STOPPED", within_s=20)
    stopped_s = time.monotonic()
    wait_for(
        lambda: time.monotonic() - stopped_s > SUSPENDED_S, within_s=60, what="longer than the watchdog's time-out"
    )
    command(*go_on, job)
    wait_until_finished(run)
    (entry,) = wait_until_ended(run)
    assert entry["reason"] == "done" and read_events(run, "hang") == []
    assert entry["suspended_s"] == pytest.approx(SUSPENDED_S, abs=5.0)
    assert entry["step_s"] < 40 * 0.3 + 15
    assert losses(run) == light_training.undisturbed_losses(40)


def submit_without_warning(person: Person, held: str, run: RunDirectory) -> str:
    """Submits the script of a job that is held by hand, without the line that asks Slurm for a signal."""
    command("scancel", held)
    wait_for_state(held, "CANCELLED", within_s=20)
    lines = run.submit_script.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(("#SBATCH --signal", "#SBATCH --hold"))]
    assert len(kept) == len(lines) - 2
    run.submit_script.write_text("".join(kept))
    return person.runs("sbatch", "--parsable", str(run.submit_script)).out.strip()


@pytest.mark.campaign
def test_a_run_stops_itself_before_a_limit_that_nobody_warns_of(person: Person) -> None:
    words = ("cluster.time_limit_min=1", "train.max_steps=400", "model.step_s=0.3", "checkpoint.every_steps=20")
    held, run = person.types("+cluster=1x2", *TINY, *words, "run.name=clock", "cluster.sbatch.hold=true").job_and_run
    job = submit_without_warning(person, held, run)
    wait_for(lambda: len([e for e in ledger_lines(run) if "reason" in e]) >= 1, within_s=150, what="the first end")
    command("scancel", job)
    first = ledger_lines(run)[0]
    (stop,) = [event for event in read_events(run, "stop") if event["attempt"] == 0]
    assert (first["reason"], first["action"], first["asked_by"]) == ("time_limit", "requeue", "clock"), first
    assert stop["saved"] and stop["left_s"] > 5
    assert first["end_time_unix_s"] < read_notice(run, 0).end_unix_s, "all was over before the limit"
    assert stop["step"] in {name_of(path).step for path in list_checkpoints(run.checkpoints)}
    print(first, stop)
