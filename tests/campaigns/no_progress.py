"""Runs that come back again and again without a new checkpoint are stopped, with a reason.

One whose time limit is shorter than its start, and one that loses its node in each attempt, which Slurm requeues by
itself. Both have small budgets, given on the command line.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from tests.campaigns.on_slurm import PATIENCE_S, Tally, at_work, newest_attempt, submit
from tests.campaigns.result import Result
from tests.support.command_line import Person
from tests.support.slurm_runs import job_state
from tests.support.waiting import wait_for

_SLOW = """
import signal, time
from tiny import Tiny

class Slow(Tiny):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # As before Python runs: it dies of the TERM at the limit, and the supervisor has KillWait for the requeue.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3600)
"""
_WORDS = ("+cluster=1x1", "model._target_=slow.Slow", "train.start_timeout_s=3600")


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Tries the two runs, `trials` being their time limits in a row; 2 take five minutes."""
    del seed
    tally = Tally()
    with at_work(folder) as person:
        (person.folder / "slow.py").write_text(_SLOW)
        tally.add("a limit shorter than the start", too_short(person, trials))
        tally.add("a job that loses its node each time", loses_its_node(person))
    return tally.result({"time limits until the stop": str(trials), "lost nodes until the stop": "2"})


def too_short(person: Person, budget: int) -> list[str]:
    """Lets a run hit its limit before its first step until it is stopped; returns what is wrong."""
    words = ("cluster.time_limit_min=1", f"requeue.max_fruitless_returns={budget}")
    job, run = submit(person, "too-short", *_WORDS, *words)
    return stop_problems(job, run, budget, "time_limit", f"{budget} time limits in a row without a new checkpoint (")


def loses_its_node(person: Person) -> list[str]:
    """Declares the node of each attempt down until the run is stopped; returns what is wrong."""
    job, run = submit(person, "downs-its-node", *_WORDS, "requeue.max_fruitless_returns=1")
    for attempt in range(2):
        wait_for(lambda number=attempt: newest_attempt(run) == number, within_s=PATIENCE_S, what=f"attempt {attempt}")
        node = read_ledger(run)[-1]["nodes"][0]
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=no-progress"], check=True)
        try:
            wait_for(lambda: job_state(job) != "RUNNING", within_s=60, what=f"the end of the job on {node}")
        finally:
            # It comes back by itself as soon as it registers, and then there is nothing to resume.
            subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True, check=False)
    return stop_problems(job, run, 2, "node_failure", "2 lost nodes in a row without a new checkpoint (")


def stop_problems(job: str, run: RunDirectory, num_attempts: int, reason: str, words: str) -> list[str]:
    """Waits until a run is stopped; returns what is wrong with how it was."""

    def has_stopped() -> bool:
        return any(entry.get("action") == "stop" for entry in read_ledger(run)) and job_state(job) in (
            "FAILED",
            "TIMEOUT",
        )

    wait_for(has_stopped, within_s=PATIENCE_S + 100.0 * num_attempts, what=f"the end of {run.path}")
    ledger = read_ledger(run)
    problems = [] if len(ledger) == num_attempts else [f"{len(ledger)} attempts instead of {num_attempts}"]
    newest = ledger[-1]
    if newest.get("reason") != reason or words not in str(newest.get("note")):
        problems.append(f"stopped as {newest.get('reason')}: {newest.get('note')}")
    return problems
