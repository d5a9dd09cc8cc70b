"""Whether a run that has fewer nodes than it can use is to be requeued for more of them. Pure.

A requeue costs what a restart costs; what it brings is a faster pace until the run, or this start of its job, ends.
Costs and paces come from the run's own ledger. A growth that was not given the nodes, or lost them again before they
had paid for the restart, has failed: each of these in a row doubles the time until the next question, and since the
ledger has them, a requeue does not forget it. `srun` asks at the right moments, `scheduler` asks Slurm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slurm_train.formatting import duration, number
from slurm_train.rundir.timing import held_s

_UNMEASURED_WAIT_S = 30.0
"""In the queue and at the end of the ranks, where no requeue of the run was measured."""
_LEAST_RETURN = 2.0
"""How many times its cost a restart must bring: both sides are estimates."""
_FARTHEST_S = 86400.0
"""Longest time ahead that counts: which nodes a job has after it is not known."""
_FEWEST_STEPS = 3
"""Of an attempt whose pace counts: the first steps are slower."""
_NUM_RESTARTS = 3
_MOST_DOUBLINGS = 10
_STARTUP = ("start_s", "rendezvous_s", "load_s", "compile_s")
_ALLOWED_RETURNS = ("requeue", "leave")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number of seconds, and where it comes from."""

    seconds: float
    is_estimate: bool = False

    def __str__(self) -> str:
        return f"{duration(self.seconds)} ({'estimated' if self.is_estimate else 'measured'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a run has, and what it could have after a requeue."""

    nodes: int
    """Nodes that it trains on."""
    larger: int
    """Nodes that it could train on now."""
    step: Measured
    """A step on what it has."""
    larger_step: Measured
    """A step on the larger number."""
    restart: Measured
    """From the last step before a requeue to the first one after it."""
    steps_left: int | None
    """None where the run has no end that is known."""
    time_left_s: float | None
    """Until the time limit of the job; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Whether a requeue for more nodes is worth its cost."""

    nodes: int
    """Nodes that the run is to have then."""
    is_worth_it: bool
    pays_after_s: float
    """Seconds on the larger number after which the restart has been paid for."""
    sentence: str
    """The arithmetic, for a person."""
    exclude: tuple[str, ...] = ()
    """Nodes of the job that were found bad: the requeued job is to have others."""


def assess(prospect: Prospect) -> Growth:
    """Returns whether the steps gained until the run or the job's time limit ends outweigh the restart."""
    step_s = prospect.step.seconds
    larger_step_s = prospect.larger_step.seconds
    restart_s = prospect.restart.seconds
    ahead_s = _FARTHEST_S
    if prospect.steps_left is not None:
        ahead_s = min(ahead_s, prospect.steps_left * step_s)
    if prospect.time_left_s is not None:
        # The end of the limit is a requeue as well, which gives the run what is free then.
        ahead_s = min(ahead_s, max(prospect.time_left_s, 0.0))
    gained = ahead_s / larger_step_s - ahead_s / step_s
    lost = restart_s / larger_step_s
    is_faster = larger_step_s < step_s
    pays_after_s = restart_s * larger_step_s / (step_s - larger_step_s) if is_faster else math.inf
    arithmetic = (
        f"{prospect.larger} nodes instead of {prospect.nodes}: a step takes {prospect.larger_step} instead of "
        f"{duration(step_s)}, which in the next {duration(ahead_s)} are {number(gained)} steps more; a restart takes "
        f"{prospect.restart}, {number(lost)} steps"
    )
    return Growth(
        nodes=prospect.larger,
        is_worth_it=is_faster and gained >= _LEAST_RETURN * lost,
        pays_after_s=round(pays_after_s, 1) if is_faster else pays_after_s,
        sentence=arithmetic,
    )


def step_seconds(ledger: Sequence[Mapping[str, Any]], *, nodes: int, larger: int) -> tuple[Measured, Measured] | None:
    """Returns what a step takes on two numbers of nodes; None where the first was not measured.

    Args:
        ledger: the run's; of the attempt that runs with "last_step" and the seconds that it has spent so far.
        nodes: as the run has.
        larger: as it could have; where none was measured, twice the nodes are taken to need half the time.
    """
    here = _newest_step_s(ledger, nodes)
    if here is None:
        return None
    there = _newest_step_s(ledger, larger)
    if there is None:
        return Measured(seconds=here), Measured(seconds=here * nodes / larger, is_estimate=True)
    return Measured(seconds=here), Measured(seconds=there)


def _newest_step_s(ledger: Iterable[Mapping[str, Any]], nodes: int) -> float | None:
    for entry in reversed(list(ledger)):
        steps = int(entry.get("last_step") or 0) - int(entry.get("first_step") or 0)
        seconds = float(entry.get("step_s") or 0.0) + float(entry.get("data_wait_s") or 0.0)
        if len(entry.get("nodes") or ()) == nodes and steps >= _FEWEST_STEPS and seconds > 0:
            return seconds / steps
    return None


def restart_seconds(ledger: Sequence[Mapping[str, Any]], *, delay_s: float, save_s: float) -> Measured:
    """Returns what a requeue costs: the longest of the newest that were measured.

    Where none was, what the newest start took, a save, Slurm's own delay, and half a minute.

    Args:
        ledger: as for `step_seconds`.
        delay_s: how long Slurm itself lets a requeued job wait.
        save_s: the longest save so far.
    """
    found = []
    for before, after in pairwise(ledger):
        is_requeue = before.get("action") in _ALLOWED_RETURNS and before.get("reason") != "file_system"
        if not is_requeue or "end_time_unix_s" not in before or "start_s" not in after:
            continue
        waited_s = float(after["time_unix_s"]) - float(before["end_time_unix_s"])
        # What passes until a lost node is found is no part of a restart that is asked for.
        ended_s = 0.0 if before.get("reason") == "node_failure" else float(before.get("end_s") or 0.0)
        found.append(ended_s + max(waited_s, 0.0) + _startup_s(after))
    if found:
        return Measured(seconds=save_s + max(found[-_NUM_RESTARTS:]))
    start_s = _startup_s(ledger[-1]) if ledger else 0.0
    return Measured(seconds=save_s + delay_s + start_s + _UNMEASURED_WAIT_S, is_estimate=True)


def _startup_s(entry: Mapping[str, Any]) -> float:
    return sum(float(entry.get(cause) or 0.0) for cause in _STARTUP)


def wait_seconds(ledger: Sequence[Mapping[str, Any]], *, every_s: float) -> float:
    """Returns how long a run waits between two questions: twice as long for each growth in a row that failed.

    Args:
        ledger: the run's.
        every_s: `requeue.grow_every_min` in seconds.
    """
    num_failed = 0
    for index, entry in enumerate(ledger):
        if entry.get("reason") != "growth" or "grow_to" not in entry:
            continue
        after = ledger[index + 1 :]
        held = 0.0
        for later in after:
            if len(later.get("nodes") or ()) < int(entry["grow_to"]):
                break
            held += held_s(later)
        has_paid = held >= float(entry.get("pays_after_s") or 0.0)
        has_ended = any(len(later.get("nodes") or ()) < int(entry["grow_to"]) for later in after)
        if has_paid:
            num_failed = 0
        elif has_ended:
            num_failed += 1
    return every_s * 2.0 ** min(num_failed, _MOST_DOUBLINGS)


def newest_growth_unix_s(ledger: Sequence[Mapping[str, Any]]) -> float:
    """Returns when the run was last requeued for more nodes, 0 if it never was."""
    ends = [float(entry.get("end_time_unix_s", 0.0)) for entry in ledger if entry.get("reason") == "growth"]
    return max(ends, default=0.0)
