"""Whether a run that has fewer nodes than it can use is to be requeued for more of them. Pure.

A requeue costs as much as a restart, and gives faster steps until the run, or this start of its job, ends. Costs and
step times come from the run's own ledger. A growth has failed if the job did not get the nodes, or lost them before
they had paid for the restart. Each failed growth in a row doubles the time until the next question. The count is read
from the ledger, so it survives a requeue. `job_judges` decides when to ask, and asks Slurm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_train.formatting import duration, number
from slurm_train.rundir.ledger import Action, Attempt, Reason

_UNMEASURED_WAIT_S = 30.0
"""Time in the queue and at the end of the ranks, if no requeue of the run was measured."""
_LEAST_RETURN = 2.0
"""A restart must gain this many times its cost, because gain and cost are estimates."""
_FARTHEST_S = 86400.0
"""Longest time ahead that counts: later it is not known which nodes a job will have."""
_FEWEST_STEPS = 3
"""Steps that an attempt must have for its step time to count: the first steps are slower."""
_NUM_RESTARTS = 3
_MOST_DOUBLINGS = 10
_STARTUP = ("start_s", "rendezvous_s", "load_s", "compile_s")
_ALLOWED_RETURNS = (Action.REQUEUE, Action.LEAVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
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
    step: Seconds
    """A step on what it has."""
    larger_step: Seconds
    """A step on the larger number."""
    restart: Seconds
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
        # At its time limit the job is requeued anyway, and gets the nodes that are free then.
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


def step_seconds(ledger: Sequence[Attempt], *, nodes: int, larger: int) -> tuple[Seconds, Seconds] | None:
    """Returns what a step takes on two numbers of nodes; None where the first was not measured.

    Args:
        ledger: the run's; the end of the running attempt has its last step and the seconds that it has spent so far.
        nodes: how many the run has.
        larger: how many it could have. If that was never measured, twice the nodes are assumed to need half the time.
    """
    step_s = _newest_step_s(ledger, nodes)
    if step_s is None:
        return None
    larger_step_s = _newest_step_s(ledger, larger)
    if larger_step_s is None:
        return Seconds(seconds=step_s), Seconds(seconds=step_s * nodes / larger, is_estimate=True)
    return Seconds(seconds=step_s), Seconds(seconds=larger_step_s)


def _newest_step_s(ledger: Sequence[Attempt], nodes: int) -> float | None:
    for attempt in reversed(ledger):
        steps = 0 if attempt.end is None else (attempt.end.last_step or 0) - (attempt.end.first_step or 0)
        seconds = attempt.spent_s("step_s", "data_wait_s")
        if len(attempt.start.nodes) == nodes and steps >= _FEWEST_STEPS and seconds > 0:
            return seconds / steps
    return None


def restart_seconds(ledger: Sequence[Attempt], *, delay_s: float, save_s: float) -> Seconds:
    """Returns what a requeue costs: the longest of the newest requeues that were measured.

    If none was measured, it is the sum of the newest start, a save, Slurm's own delay, and half a minute.

    Args:
        ledger: as for `step_seconds`.
        delay_s: how long Slurm itself lets a requeued job wait.
        save_s: the longest save so far.
    """
    restarts_s = []
    for earlier, later in pairwise(ledger):
        is_requeue = earlier.action in _ALLOWED_RETURNS and earlier.reason is not Reason.FILE_SYSTEM
        if not is_requeue or later.end is None or "start_s" not in later.end.seconds:
            continue
        waited_s = later.start.time_unix_s - earlier.last_unix_s
        # The time until a lost node is noticed is no part of a restart that is asked for.
        ended_s = 0.0 if earlier.reason is Reason.NODE_FAILURE else earlier.spent_s("end_s")
        restarts_s.append(ended_s + max(waited_s, 0.0) + later.spent_s(*_STARTUP))
    if restarts_s:
        return Seconds(seconds=save_s + max(restarts_s[-_NUM_RESTARTS:]))
    start_s = ledger[-1].spent_s(*_STARTUP) if ledger else 0.0
    return Seconds(seconds=save_s + delay_s + start_s + _UNMEASURED_WAIT_S, is_estimate=True)


def wait_seconds(ledger: Sequence[Attempt], *, every_s: float) -> float:
    """Returns how long a run waits between two questions: twice as long for each growth in a row that failed.

    Args:
        ledger: the run's.
        every_s: `requeue.grow_every_min` in seconds.
    """
    num_failed = 0
    for index, attempt in enumerate(ledger):
        end = attempt.end
        if end is None or end.reason is not Reason.GROWTH or end.grow_to is None:
            continue
        is_smaller = [len(later.start.nodes) < end.grow_to for later in ledger[index + 1 :]]
        num_large = is_smaller.index(True) if any(is_smaller) else len(is_smaller)
        node_time_s = sum(later.held_s for later in ledger[index + 1 : index + 1 + num_large])
        if node_time_s >= (end.pays_after_s or 0.0):
            num_failed = 0
        elif any(is_smaller):
            num_failed += 1
    return every_s * 2.0 ** min(num_failed, _MOST_DOUBLINGS)


def newest_growth_unix_s(ledger: Sequence[Attempt]) -> float:
    """Returns when the run was last requeued for more nodes, 0 if it never was."""
    return max((attempt.last_unix_s for attempt in ledger if attempt.reason is Reason.GROWTH), default=0.0)
