"""What preemptions and hard kills cost: steps that were done, and had to be done again.

Up to four runs on a node each are struck at the same time: preempted (every other one with a grace, which must lose
nothing), each with its rank killed, or each with its slurmd killed while the rank lives on. Without a grace Slurm
still sends TERM, KillWait before KILL.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.devcluster.cluster import start_node, stop_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
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
from tests.support.process_faults import kill, rank_pid, wait_until_gone
from tests.support.waiting import wait_for

INTERVAL_STEPS = 25
_WORDS = ("+cluster=1x1", "train.max_steps=1000000", "model.step_s=0.1", f"checkpoint.every_steps={INTERVAL_STEPS}")
_QOS = "campaign_lost_work"
_ROUNDS = (("preempted", 4), ("rank killed", 4), ("preempted", 4), ("slurmd killed", 2), ("preempted", 4))
"""What is done to how many runs at a time, round after round."""


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Strikes some runs at a time until there were `trials` trials."""
    dice, tally = random.Random(seed), Tally()
    lost: dict[str, list[int]] = defaultdict(list)
    rounds = itertools.cycle(_ROUNDS)
    with extra_qos({_QOS: "gracetime=0 preemptmode=requeue"}):
        for number in itertools.count():
            if tally.trials >= trials:
                break
            kind, num_runs = next(rounds)
            size = min(num_runs, trials - tally.trials)
            with at_work(folder / f"round-{number}") as person:
                try:
                    for what, one, attempt in strike(person, kind, size, dice):
                        judge(tally, what, lost_in(one, attempt), lost)
                except AssertionError as err:
                    tally.add(kind, [str(err).partition("\n")[0]], trials=size)
    return tally.result(figures(lost))


def strike(person: Person, kind: str, size: int, dice: random.Random) -> list[tuple[str, RunDirectory, int]]:
    """Submits some runs and strikes them while they train; returns what was done to each, and to which attempt."""
    names = [_name(kind, number) for number in range(size)]
    runs = [submit(person, f"lost-{number}", *_WORDS, *_place(kind, number))[1] for number in range(size)]
    for one in runs:
        wait_for(partial(trains, one), within_s=PATIENCE_S, what=f"steps of {one.path}")
    time.sleep(dice.uniform(0.0, 0.2 * INTERVAL_STEPS))
    struck = [newest_attempt(one) for one in runs]

    def wait_until_back() -> None:
        for one, attempt in zip(runs, struck, strict=True):
            back = partial(trains, one, after=attempt)
            wait_for(back, within_s=PATIENCE_S, what=f"steps of {one.path} after attempt {attempt}")

    _STRIKES[kind](person, runs, wait_until_back)
    wait_until_back()
    return list(zip(names, runs, struck, strict=True))


def _name(kind: str, number: int) -> str:
    return kind if kind != "preempted" else f"preempted, {'grace' if number % 2 == 0 else 'no grace'}"


def _place(kind: str, number: int) -> tuple[str, ...]:
    if kind == "slurmd killed":
        # A node each, whichever: Slurm is to start the run on another one.
        return ("cluster.sbatch.exclusive=true",)
    qos = () if _name(kind, number) == "preempted, grace" else (f"cluster.qos={_QOS}",)
    return (f"cluster.nodelist=node{number + 1}", *qos)


def bound(what: str) -> int:
    """Returns the steps that may be lost."""
    return 0 if what == "preempted, grace" else INTERVAL_STEPS


def trains(run: RunDirectory, after: int = -1) -> bool:
    """Returns whether the newest attempt, if it is a newer one than `after`, has done a step."""
    newest = newest_attempt(run)
    return newest > after and any(line["attempt"] == newest for line in lines_of(run)[-1:])


def preempt(person: Person, runs: Sequence[RunDirectory], wait_until_back: Callable[[], None]) -> None:
    """Takes the nodes of the runs."""
    take_nodes(person, ",".join(f"node{number + 1}" for number in range(len(runs))), num_nodes=len(runs))


def kill_ranks(person: Person, runs: Sequence[RunDirectory], wait_until_back: Callable[[], None]) -> None:
    """Kills the rank of each run."""
    for one in runs:
        kill(rank_pid(one, 0, attempt=newest_attempt(one)))


def kill_daemons(person: Person, runs: Sequence[RunDirectory], wait_until_back: Callable[[], None]) -> None:
    """Kills the slurmd of each run's node; the ranks live on there until others have taken over."""
    nodes = [str(read_ledger(one)[-1]["nodes"][0]) for one in runs]
    left = [rank_pid(one, 0, attempt=newest_attempt(one)) for one in runs]
    for node in nodes:
        stop_node(DEFAULT_STATE_DIR, node=node)
    try:
        wait_until_back()
        for pid in left:
            wait_until_gone(pid, within_s=15.0)
    finally:
        for node in nodes:
            start_node(DEFAULT_STATE_DIR, node=node)


_STRIKES: dict[str, Callable[[Person, Sequence[RunDirectory], Callable[[], None]], None]] = {
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


def judge(tally: Tally, what: str, steps: int, lost: dict[str, list[int]]) -> None:
    """Takes note of a trial."""
    lost[what].append(steps)
    problems = [f"at most {bound(what)} were promised"] if steps > bound(what) else []
    tally.add(f"{what}: {steps} steps lost", problems)


def figures(lost: Mapping[str, list[int]]) -> dict[str, str]:
    """Returns what each kind of end cost."""
    return {
        f"steps lost, {what}": f"{sum(steps) / len(steps):.1f}, at most {max(steps)} ({len(steps)} trials)"
        for what, steps in sorted(lost.items())
    }
