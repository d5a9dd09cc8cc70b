"""The hang watchdog on a real Slurm: a stopped rank is named, its step is ended, the ranks start again in the job."""

from __future__ import annotations

import os
import signal
import time

import pytest

from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import read_beats
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import rank_pid
from tests.support.slurm_runs import step_lines, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]
TIMEOUT_S = 8.0


@pytest.mark.campaign
def test_a_stopped_rank_is_ended_and_the_run_goes_on_in_the_same_job(person: Person) -> None:
    words = ("model.step_s=0.3", "train.max_steps=60", f"health.hang_timeout_s={TIMEOUT_S}")
    job, run = person.types("+cluster=2x2", *TINY, *words).job_and_run
    wait_until_step(run, 6)
    stopped_s = time.monotonic()
    os.kill(rank_pid(run, 3), signal.SIGSTOP)
    attempt = ledger_lines(run)[-1]["attempt"]
    wait_for(lambda: ledger_lines(run)[attempt].get("reason"), within_s=TIMEOUT_S + 10, what="the end of the attempt")
    print(f"ended {time.monotonic() - stopped_s:.1f} s after the stop, with a time-out of {TIMEOUT_S} s")
    (event,) = read_events(run, "hang")
    host = read_beats(run, attempt)[3].host
    assert event["sentence"].startswith(f"rank 3 on {host} does not run (stopped or lost), in "), event
    assert "; 3 ranks wait for it" in event["sentence"]
    wait_until_finished(run)
    hung, following = ledger_lines(run)[attempt : attempt + 2]
    assert (hung["reason"], hung["action"]) == ("failed", "relaunch") and event["sentence"] in hung["note"]
    assert following["job_id"] == hung["job_id"] == job
    assert [line["step"] for line in step_lines(run)] == list(range(1, 61))
