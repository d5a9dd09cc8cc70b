"""Two runs side by side that could both use more nodes than there are; a node is lost and comes back, again and again.

Each node that comes back can be had by either run. What is to be shown: it is used, by one of them; neither run is
requeued in circles for it; and the samples and losses are those of a run that nothing happened to.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally
from tests.campaigns.world_sizes import compare, in_double
from tests.support.cluster_faults import node_lost
from tests.support.command_line import TINY, TINY_MODULE, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import (
    at_work,
    command,
    losses,
    step_lines,
    wait_for_state,
    wait_until_finished,
    wait_until_step,
)
from tests.support.waiting import wait_for

# A step takes longer on fewer nodes, as where the GPUs are what takes time.
PACED_MODULE = in_double(TINY_MODULE).replace("time.sleep(self.step_s)", "time.sleep(self.step_s * len(x))")
_NUM_NODES = 4
_EVERY_MIN = 1
_ROUND_S = 180.0
_AWAY_S = 25.0
"""Longer than SlurmdTimeout of the one-machine cluster: Slurm has taken the node from its job when it comes back."""
_PATIENCE_S = 240.0
_MOST_GROWTHS = 2
"""In a round: both runs may ask at the same moment, and then one gets nothing."""
_WORDS = (
    "+cluster=1-3x1",
    *TINY,
    "batch.global_size=12",
    "train.samples_digest=true",
    "checkpoint.every_steps=10",
    # The learning rate does not depend on the number of steps, of which a twin makes fewer.
    "optim.schedule=constant",
    "optim.warmup_samples=0",
    "cluster.time_limit_min=720",
    # Else both would have a GPU each of the same nodes.
    "cluster.sbatch.exclusive=true",
    f"requeue.grow_every_min={_EVERY_MIN}",
)
# Days: how much is left, and so whether it pays, does not change while the campaign runs.
_ENDLESS = "train.max_steps=200000"
_TOLERANCE = 1e-7
"""Relative, in double precision: each size has another order of additions, and the differences grow with the steps.
After 42 starts in an hour and 789 steps it was 2.7e-8."""


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Has so many nodes lost and come back beside two runs, three minutes for each."""
    numbers = random.Random(seed)
    used_after_s: list[float] = []
    with at_work(folder) as person:
        (person.folder / "tiny.py").write_text(PACED_MODULE)
        words = (*_WORDS, _ENDLESS, "model.step_s=0.5")
        submitted = [person.types(*words, f"run.name={name}").job_and_run for name in "ab"]
        runs = [each for _, each in submitted]
        for each in runs:
            wait_until_step(each, 5, within_s=_PATIENCE_S)
        began_s = time.monotonic()
        for number in range(trials):
            with tally.trial(f"round {number}") as problems, _round():
                problems += _lose_and_return(runs, numbers, used_after_s)
        minutes = (time.monotonic() - began_s) / 60
        for job, _ in submitted:
            command("scancel", job)
            wait_for_state(job, "CANCELLED", within_s=_PATIENCE_S)
        tally.spoil(_differences(person, runs), trials=trials)
    ledgers = [ledger_lines(each) for each in runs]
    grown = [entry for ledger in ledgers for entry in ledger if entry.get("reason") == "growth"]
    starts = sum(len(ledger) for ledger in ledgers)
    return {
        "time with both runs": f"{minutes:.0f} min, a question every {_EVERY_MIN} min at most",
        "nodes lost and returned": str(trials),
        "starts of ranks": f"{starts}, {len(grown)} of them for more nodes, {_num_failed(ledgers)} of these failed",
        "from a node's return to the next step on it": _in_words(used_after_s),
        "steps": ", ".join(str(max(losses(each))) for each in runs),
    }


@contextmanager
def _round() -> Iterator[None]:
    """Takes as long as a round does."""
    deadline_s = time.monotonic() + _ROUND_S
    yield
    wait_for(lambda: time.monotonic() > deadline_s, within_s=_ROUND_S + 1.0, what="the end of the round", poll_s=1.0)


def _lose_and_return(runs: Sequence[RunDirectory], numbers: random.Random, used_after_s: list[float]) -> list[str]:
    """Returns what went wrong while a node was lost and came back."""
    began_unix_s = time.time()
    steps = [max(losses(each)) for each in runs]
    large = [each for each in runs if len(_nodes_of(each)) > 1]
    if not large:
        return ["both runs are on one node"]
    struck = numbers.choice(large)
    # The supervisor runs on the first one; its loss is another scene.
    lost = numbers.choice(_nodes_of(struck)[1:])
    attempts = len(ledger_lines(struck))
    with node_lost(lost):
        wait_for(partial(_has_more_than, struck, attempts), within_s=_PATIENCE_S, what=f"{struck.path} without {lost}")
        back_at_s = time.monotonic() + _AWAY_S
        wait_for(lambda: time.monotonic() > back_at_s, within_s=_AWAY_S + 1.0, what=f"the return of {lost}")
    returned_unix_s = time.time()
    sizes = [len(_nodes_of(each)) for each in runs]
    deadline_s = time.monotonic() + _ROUND_S - (returned_unix_s - began_unix_s) - 5.0
    while time.monotonic() < deadline_s:
        line = next((line for each in runs for line in _steps_on(each, lost, after_unix_s=returned_unix_s)), None)
        if line is not None:
            used_after_s.append(line - returned_unix_s)
            break
        time.sleep(1.0)
    grown = _num_growths(runs, after_unix_s=began_unix_s)
    problems = [] if grown <= _MOST_GROWTHS else [f"{grown} requeues for one node"]
    now = [len(_nodes_of(each)) for each in runs]
    print(f"{lost} of {struck.name} lost; nodes {sizes} at its return, now {now}; {grown} requeues for more")
    return problems + [
        f"no step of {each.path} since {step}"
        for each, step in zip(runs, steps, strict=True)
        if max(losses(each)) <= step
    ]


def _nodes_of(run: RunDirectory) -> list[str]:
    return list(ledger_lines(run)[-1]["nodes"])


def _has_more_than(run: RunDirectory, attempts: int) -> bool:
    return len(ledger_lines(run)) > attempts


def _steps_on(run: RunDirectory, node: str, *, after_unix_s: float) -> list[float]:
    """Returns when steps were done with a node since a moment."""
    attempts = {
        entry["attempt"]
        for entry in ledger_lines(run)
        if node in entry["nodes"] and entry["time_unix_s"] > after_unix_s
    }
    return [float(line["time_unix_s"]) for line in step_lines(run) if line["attempt"] in attempts]


def _num_growths(runs: Sequence[RunDirectory], *, after_unix_s: float) -> int:
    ends = [entry for each in runs for entry in ledger_lines(each) if entry.get("reason") == "growth"]
    return sum(float(entry["end_time_unix_s"]) > after_unix_s for entry in ends)


def _num_failed(ledgers: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """Returns how often a run was requeued for more nodes and had no more after it."""
    pairs = [pair for ledger in ledgers for pair in pairwise(ledger)]
    return sum(
        before.get("reason") == "growth" and len(after["nodes"]) <= len(before["nodes"]) for before, after in pairs
    )


def _differences(person: Person, runs: Sequence[RunDirectory]) -> list[str]:
    """Returns where samples or losses of the runs differ from those of one that nothing happened to."""
    steps = max(max(losses(each)) for each in runs)
    _, twin = person.types(*_WORDS, f"train.max_steps={steps + 1}", "run.name=twin").job_and_run
    wait_until_finished(twin, within_s=_PATIENCE_S)
    problems = []
    for each in runs:
        lines = step_lines(each)
        differences, _ = compare(step_lines(twin)[: len(lines)], lines, tolerance=_TOLERANCE)
        problems += [f"{each.name}: {difference}" for difference in differences[:3]]
    return problems


def _in_words(seconds: Sequence[float]) -> str:
    if not seconds:
        return "never"
    return f"{statistics.median(seconds):.0f} s (median of {len(seconds)}), at most {max(seconds):.0f} s"
