"""Four runs are preempted again and again, many times before their first step: that never uses a budget.

One urgent job takes all four nodes; two of the runs have a grace, two are killed at once. Then a run whose model fails
before its first step: three times, and it is held with a reason of one line.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from tests.campaigns.on_slurm import PATIENCE_S, Tally, at_work, end_problems, submit, take_nodes, weights
from tests.campaigns.result import Result
from tests.support.command_line import Person
from tests.support.controller_faults import extra_qos
from tests.support.waiting import wait_for

_WORDS = ("+cluster=1x1", "train.max_steps=40", "model.step_s=0.1", "checkpoint.every_steps=5")
_QOS = "campaign_storm"
_NODES = 4
_BUDGET = 3
_COMES_BACK = ("preempted", "requeued")
_BROKEN = """
from tiny import Tiny

class Broken(Tiny):
    def forward(self, x):
        raise RuntimeError("this model has never worked")
"""


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Preempts `trials` - 1 times and lets one run fail without progress."""
    dice, tally = random.Random(seed), Tally()
    with extra_qos({_QOS: "gracetime=0 preemptmode=requeue"}), at_work(folder) as person:
        golden = weights(submit(person, "golden", *_WORDS)[1])
        runs = storm(person, dice, num_preemptions=trials - 1)
        for one in runs:
            ends = preemptions(one)
            problems = [*end_problems(one, golden), *storm_problems(read_ledger(one))]
            if ends or problems:
                fruitless = sum(entry["last_step"] <= entry.get("first_step", 0) for entry in ends)
                tally.add(f"{one.name}: preempted, {fruitless} without a step", problems, trials=len(ends) or 1)
        tally.add("a model that never worked", broken_problems(person))
        return tally.result(figures(runs))


def storm(person: Person, dice: random.Random, *, num_preemptions: int) -> list[RunDirectory]:
    """Preempts four runs at a time until so many preemptions are on record; a finished one gives way to another."""
    all_runs: list[RunDirectory] = []
    current: dict[int, RunDirectory] = {}
    struck: dict[RunDirectory, int] = {}
    while (so_far := sum(len(preemptions(one)) for one in all_runs)) < num_preemptions:
        for node in range(1, _NODES + 1):
            if node not in current or current[node].result.exists():
                current[node] = submitted(person, f"storm-{len(all_runs)}", node)
                all_runs.append(current[node])
        for one in current.values():
            before = struck.get(one, 0)
            wait_for(partial(is_new, one, before), within_s=PATIENCE_S, what=f"attempt {before} of {one.path}")
            struck[one] = len(read_ledger(one))
        time.sleep(dice.uniform(0.0, 4.0))
        began = time.monotonic()
        take_nodes(person, f"node[1-{_NODES}]", num_nodes=_NODES)
        print(f"   {so_far} preemptions so far; this one took {time.monotonic() - began:.1f} s", flush=True)
    return all_runs


def submitted(person: Person, name: str, node: int) -> RunDirectory:
    """Submits a run to a node of its own, with a grace on the first two nodes."""
    words = (f"cluster.nodelist=node{node}", *((f"cluster.qos={_QOS}",) if node > _NODES // 2 else ()))
    return submit(person, name, *_WORDS, *words)[1]


def is_new(run: RunDirectory, num_attempts: int) -> bool:
    """Returns whether a run has begun another attempt, or is finished."""
    return len(read_ledger(run)) > num_attempts or run.result.exists()


def preemptions(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns the attempts that a preemption ended."""
    return [entry for entry in read_ledger(run) if entry.get("reason") in _COMES_BACK]


def storm_problems(ledger: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the ends of a run's attempts that were no preemption and not its good end."""
    return [
        f"attempt {entry['attempt']} ended as {entry.get('reason')}, {entry.get('action')}: {entry.get('note')}"
        for entry in ledger
        if entry.get("reason") not in (*_COMES_BACK, "done")
    ]


def broken_problems(person: Person) -> list[str]:
    """Lets a run fail without progress until it is held; returns what is wrong with how it was."""
    (person.folder / "broken.py").write_text(_BROKEN)
    _, run = submit(person, "broken", *_WORDS, "model._target_=broken.Broken", "cluster.nodelist=node1")
    wait_for(
        lambda: any(entry.get("action") == "stop" for entry in read_ledger(run)),
        within_s=PATIENCE_S,
        what=f"the end of {run.path}",
    )
    return held_problems(read_ledger(run))


def held_problems(ledger: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what is wrong with the ledger of a run that failed without progress."""
    problems = []
    if len(ledger) != _BUDGET:
        problems.append(f"held after {len(ledger)} ends without progress, promised {_BUDGET}")
    note = str(ledger[-1].get("note", ""))
    if not note or "\n" in note or not note.startswith(f"{_BUDGET} failures in a row without a new checkpoint: "):
        problems.append(f"held with {note!r}")
    return problems


def figures(runs: Sequence[RunDirectory]) -> dict[str, str]:
    """Returns how many were preempted, and how long they were away."""
    ledgers = [read_ledger(one) for one in runs]
    away = [
        after["time_unix_s"] - entry["end_time_unix_s"]
        for ledger in ledgers
        for entry, after in itertools.pairwise(ledger)
        if "end_time_unix_s" in entry
    ]
    ends = [entry for one in runs for entry in preemptions(one)]
    fruitless = sum(entry["last_step"] <= entry.get("first_step", 0) for entry in ends)
    return {
        "preemptions": f"{len(ends)}, {fruitless} of them before a new step",
        "named preempted in the ledger": str(sum(entry["reason"] == "preempted" for entry in ends)),
        "away per preemption, median": f"{statistics.median(away):.1f} s" if away else "none",
    }
