"""What preemptions and hard kills cost: steps that were done, and had to be done again.

Four runs on a node each are struck at the same time: preempted (two of them with a grace, which must lose nothing; two
killed at once), each with its rank killed, or each with its node's slurmd killed while the ranks live on.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slurm_train.devcluster.cluster import start_node, stop_node
from slurm_train.devcluster.plan import DEFAULT_STATE_DIR
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from tests.campaigns.on_slurm import (
    PATIENCE_S,
    Tally,
    at_work,
    lines_of,
    lost_steps,
    newest_attempt,
    spans,
    submit,
    take_nodes,
)
from tests.campaigns.result import Result
from tests.support.command_line import Person
from tests.support.controller_faults import extra_qos
from tests.support.process_faults import kill, rank_pid
from tests.support.waiting import wait_for

INTERVAL_STEPS = 25
_WORDS = ("+cluster=1x1", "train.max_steps=1000000", "model.step_s=0.1", f"checkpoint.every_steps={INTERVAL_STEPS}")
_QOS = "campaign_lost_work"
_NODES = 4
_KINDS = ("preempted", "rank killed", "preempted", "slurmd killed", "preempted")
"""What is done to all four runs, round after round."""


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Strikes four runs at a time until there were `trials` trials."""
    dice, tally = random.Random(seed), Tally()
    lost: dict[str, list[int]] = defaultdict(list)
    with extra_qos({_QOS: "gracetime=0 preemptmode=requeue"}), at_work(folder) as person:
        runs = {node: submitted(person, node) for node in range(1, _NODES + 1)}
        while tally.trials < trials:
            kind = _KINDS[tally.trials // _NODES % len(_KINDS)]
            nodes = list(runs)[: trials - tally.trials]
            for node, attempt in strike(person, runs, nodes, kind, dice).items():
                what = f"{kind}, {'grace' if has_grace(node) else 'no grace'}" if kind == "preempted" else kind
                judge(tally, what, lost_in(runs[node], attempt), bound(kind, node), lost)
    return tally.result(figures(lost))


def submitted(person: Person, node: int) -> RunDirectory:
    """Submits a run to a node of its own."""
    words = (f"cluster.nodelist=node{node}", *(() if has_grace(node) else (f"cluster.qos={_QOS}",)))
    return submit(person, f"lost-{node}", *_WORDS, *words)[1]


def has_grace(node: int) -> bool:
    """Returns whether the run on a node is given time when it is preempted."""
    return node <= _NODES // 2


def bound(kind: str, node: int) -> int:
    """Returns the steps that may be lost."""
    return 0 if kind == "preempted" and has_grace(node) else INTERVAL_STEPS


def strike(
    person: Person, runs: Mapping[int, RunDirectory], nodes: list[int], kind: str, dice: random.Random
) -> dict[int, int]:
    """Strikes the runs on some nodes while they train; returns the attempts that were struck, by node."""
    for node in nodes:
        wait_for(partial(trains, runs[node]), within_s=PATIENCE_S, what=f"steps of {runs[node].path}")
    time.sleep(dice.uniform(0.0, 0.1 * INTERVAL_STEPS))
    struck = {node: newest_attempt(runs[node]) for node in nodes}
    _STRIKES[kind](person, {node: runs[node] for node in nodes})
    for node in nodes:
        back = partial(trains, runs[node], after=struck[node])
        wait_for(back, within_s=PATIENCE_S, what=f"steps of {runs[node].path} after attempt {struck[node]}")
    return struck


def trains(run: RunDirectory, after: int = -1) -> bool:
    """Returns whether the newest attempt, if it is a newer one than `after`, has done a step."""
    newest = newest_attempt(run)
    return newest > after and any(line["attempt"] == newest for line in lines_of(run)[-1:])


def preempt(person: Person, runs: Mapping[int, RunDirectory]) -> None:
    """Takes the nodes of some runs."""
    take_nodes(person, ",".join(f"node{node}" for node in runs), num_nodes=len(runs))


def kill_ranks(person: Person, runs: Mapping[int, RunDirectory]) -> None:
    """Kills the rank of each run."""
    for one in runs.values():
        kill(rank_pid(one, 0, attempt=newest_attempt(one)))


def kill_daemons(person: Person, runs: Mapping[int, RunDirectory]) -> None:
    """Kills the slurmd of each run's node until Slurm has given the nodes up; the ranks live on meanwhile."""
    for node in runs:
        stop_node(DEFAULT_STATE_DIR, node=f"node{node}")
    try:
        for node in runs:
            wait_for(
                partial(is_given_up, person, f"node{node}"), within_s=90.0, what=f"node{node} given up", poll_s=1.0
            )
    finally:
        for node in runs:
            start_node(DEFAULT_STATE_DIR, node=f"node{node}")


def is_given_up(person: Person, node: str) -> bool:
    """Returns whether Slurm calls a node down."""
    return person.runs("sinfo", "-h", "-n", node, "-o", "%T").out.strip().startswith("down")


_STRIKES: dict[str, Callable[[Person, Mapping[int, RunDirectory]], None]] = {
    "preempted": preempt,
    "rank killed": kill_ranks,
    "slurmd killed": kill_daemons,
}


def lost_in(run: RunDirectory, attempt: int) -> int:
    """Returns how many steps of an attempt were done again; what it did after its successor began is not its loss."""
    until = next(entry["time_unix_s"] for entry in read_ledger(run) if entry["attempt"] > attempt)
    return lost_before(lines_of(run), attempt, until_unix_s=until)


def lost_before(lines: Iterable[Mapping[str, Any]], attempt: int, *, until_unix_s: float) -> int:
    """Returns how many steps that an attempt did before some time were done again."""
    counted = [line for line in lines if line["attempt"] != attempt or line["time_unix_s"] < until_unix_s]
    found = lost_steps(spans(counted), attempt)
    assert found is not None, f"nothing followed attempt {attempt}"
    return found


def judge(tally: Tally, what: str, steps: int, at_most: int, lost: dict[str, list[int]]) -> None:
    """Takes note of a trial."""
    lost[what].append(steps)
    tally.add(f"{what}: {steps} steps lost", [f"at most {at_most} were promised"] if steps > at_most else [])


def figures(lost: Mapping[str, list[int]]) -> dict[str, str]:
    """Returns what each kind of end cost."""
    return {
        f"steps lost, {what}": f"{sum(steps) / len(steps):.1f}, at most {max(steps)} ({len(steps)} trials)"
        for what, steps in sorted(lost.items())
    }
