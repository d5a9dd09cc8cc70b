"""How often a run may come back: the campaigns storm and no-progress.

A preemption never uses a budget, however early it comes; what fails, or returns, again and again without a new
checkpoint is stopped, with a reason of one line.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally
from tests.campaigns.victims import PATIENCE_S, Fleet, Victim, figures_of, golden_run
from tests.support.cluster_faults import node_down, preempted_by_urgent, take_nodes
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work, job_state
from tests.support.waiting import wait_for

_STORM = ("+cluster=1x1", "train.max_steps=40", "checkpoint.every_steps=5")
_NO_GRACE = "campaign_storm"
_NODES = ("node1", "node2", "node3", "node4")
_COMES_BACK = ("preempted", "requeued")
_BUDGET = 3
_MODULES = """
import signal, time
from tiny import Tiny

class Broken(Tiny):
    def forward(self, x):
        # Another message each time: the same failure twice is not tried a third time.
        raise RuntimeError(f"this model has never worked ({time.time()})")

class Slow(Tiny):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # As before Python runs: it dies of the TERM at the limit, and the supervisor has KillWait for the requeue.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print("building")
        time.sleep(3600)
"""


def storm(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Preempts four runs at a time, two without a grace, `trials` - 1 times; then lets one fail without progress."""
    dice = random.Random(seed)
    places = [(f"cluster.nodelist={node}", *((f"cluster.qos={_NO_GRACE}",) * (node > "node2"))) for node in _NODES]
    with preempted_by_urgent({_NO_GRACE: "gracetime=0 preemptmode=requeue"}), at_work(folder) as person:
        golden = golden_run(person, "golden", *_STORM)
        fleet = Fleet(person=person, dice=dice, words=(*_STORM, "model.step_s=0.1"), places=places)
        struck: dict[int, int] = {}
        while sum(len(preemptions(victim)) for victim in fleet.all) < trials - 1:
            for victim in fleet.fill():
                victim.wait_for_attempt(after=struck.get(id(victim), -1))
                struck[id(victim)] = victim.attempt
            time.sleep(dice.uniform(0.0, 4.0))
            for victim in fleet.current.values():
                victim.note("preemption")
            take_nodes(_NODES)
        for victim in fleet.all:
            problems = [*victim.problems(golden), *storm_problems(victim.ledger)]
            if ends := preemptions(victim):
                tally.add(f"{victim.run.name}: {len(ends)} preemptions", problems, trials=len(ends))
        with tally.trial("a model that never worked") as problems:
            problems += _broken_problems(person)
        fruitless = sum(
            entry["last_step"] <= entry.get("first_step", 0) for one in fleet.all for entry in preemptions(one)
        )
        figures = figures_of([victim.history() for victim in fleet.all])
    return {**figures, "preempted before a new step": str(fruitless)}


def preemptions(victim: Victim) -> list[dict[str, Any]]:
    """Returns the attempts that a preemption ended."""
    return [entry for entry in victim.ledger if entry.get("reason") in _COMES_BACK]


def storm_problems(ledger: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the ends of a run's attempts that were no preemption and not its good end."""
    return [
        f"attempt {entry['attempt']} ended as {entry.get('reason')}, {entry.get('action')}: {entry.get('note')}"
        for entry in ledger
        if entry.get("reason") not in (*_COMES_BACK, "done")
    ]


def _broken_problems(person: Person) -> list[str]:
    (person.folder / "bad.py").write_text(_MODULES)
    job, run = _submit(person, "broken", "model._target_=bad.Broken", "cluster.nodelist=node1")
    return _stopped(job, run, _BUDGET, reason="failed", note=f"{_BUDGET} failures in a row without a new checkpoint: ")


def no_progress(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Tries two runs that never come to their first step, `trials` time limits being the budget of one of them.

    One has a limit shorter than its start, the other loses its node in each attempt, and Slurm requeues it by itself.
    """
    slow = ("model._target_=bad.Slow", "train.start_timeout_s=3600")
    with at_work(folder) as person:
        (person.folder / "bad.py").write_text(_MODULES)
        with tally.trial("a limit shorter than the start") as problems:
            words = ("cluster.time_limit_min=1", f"requeue.max_returns_without_progress={trials}")
            job, run = _submit(person, "too-short", *slow, *words)
            note = f"{trials} time limits in a row without a new checkpoint ("
            within_s = PATIENCE_S + 100.0 * trials
            problems += _stopped(job, run, trials, reason="time_limit", note=note, within_s=within_s)
        with tally.trial("a job that loses its node each time") as problems:
            job, run = _submit(person, "downs-its-node", *slow, "requeue.max_returns_without_progress=1")
            for attempt in range(2):
                # A step that has just been launched outlives the batch script: Slurm would find the job still running
                # on the node that it returns to, and hold it.
                log = run.rank_log(attempt, 0)
                wait_for(
                    lambda log=log: log.exists() and "building" in log.read_text(),
                    within_s=PATIENCE_S,
                    what=f"attempt {attempt}",
                )
                with node_down(ledger_lines(run)[-1]["nodes"][0]):
                    wait_for(lambda: job_state(job) != "RUNNING", within_s=60, what="the end of the job")
            note = "2 lost nodes in a row without a new checkpoint ("
            problems += _stopped(job, run, 2, reason="node_failure", note=note)
    return {"time limits until the stop": str(trials), "lost nodes until the stop": "2"}


def _submit(person: Person, name: str, *words: str) -> tuple[str, RunDirectory]:
    return person.types("+cluster=1x1", *TINY, "train.threads=1", f"run.name={name}", *words).job_and_run


def _stopped(
    job: str, run: RunDirectory, num_attempts: int, *, reason: str, note: str, within_s: float = PATIENCE_S
) -> list[str]:
    def has_stopped() -> bool:
        stopped = any(entry.get("action") == "stop" for entry in ledger_lines(run))
        return stopped and job_state(job) in ("FAILED", "TIMEOUT")

    wait_for(has_stopped, within_s=within_s, what=f"the end of {run.path}")
    return stop_problems(ledger_lines(run), num_attempts, reason=reason, note=note)


def stop_problems(ledger: Sequence[Mapping[str, Any]], num_attempts: int, *, reason: str, note: str) -> list[str]:
    """Returns what is wrong with how a run without progress was stopped: how many attempts, why, in which words."""
    problems = [] if len(ledger) == num_attempts else [f"{len(ledger)} attempts instead of {num_attempts}"]
    said = str(ledger[-1].get("note", ""))
    if ledger[-1].get("reason") != reason or note not in said or "\n" in said:
        problems.append(f"stopped as {ledger[-1].get('reason')}: {said!r}")
    return problems
