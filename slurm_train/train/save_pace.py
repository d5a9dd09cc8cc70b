"""When the next periodic save is due: every N steps, or as often as saves are cheap and interruptions frequent.

`auto` follows Young and Daly: with a save that holds the training up for C seconds and an interruption every M
seconds, sqrt(2 C M) seconds between saves lose the least. Rank 0 measures and decides, all ranks hear it at a save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from slurm_train.config.schema import CheckpointSection
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory

_FIRST_AFTER_STEPS = 10
# A measured cost of nothing would ask for a save at every step.
_LEAST_COST_S = 0.01
# The disk should be idle half of the time, or the next save waits for it.
_LEAST_SAVE_TIMES = 2.0


class SaveCosts(Protocol):
    """What saves have cost so far."""

    blocked_s: float
    """Seconds that they kept the training waiting, all together."""

    @property
    def last_save_s(self) -> float | None:
        """Seconds until the newest was on disk; None where that is not known."""


class SavePace:
    """Says at which steps to save; the same on every rank.

    Args:
        every: steps between saves, "auto", or None for never.
        start_step: step at which this attempt begins.
        failure_every_s: seconds between interruptions, for auto.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        *,
        start_step: int = 0,
        failure_every_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._failure_every_s = failure_every_s
        self._clock = clock
        self._next = start_step + _FIRST_AFTER_STEPS
        self._blocked_s = 0.0
        self._since: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether to save after this step."""
        if self._every == "auto":
            if self._since is None:  # the first step's time is start-up
                self._since = (step, self._clock())
            return step >= self._next
        return self._every is not None and step % self._every == 0

    def saved(self, step: int, costs: SaveCosts) -> str | None:
        """Takes note of a save that was just begun; returns what to tell a person, if anything. Collective for auto."""
        if self._every != "auto":
            return None
        now = self._clock()
        since_step, since = self._since or (step, now)
        cost_s, self._blocked_s = costs.blocked_s - self._blocked_s, costs.blocked_s
        steps = interval_steps(
            cost_s=cost_s,
            save_s=costs.last_save_s or 0.0,
            step_s=max(now - since - cost_s, 0.0) / max(step - since_step, 1),
            failure_every_s=self._failure_every_s,
        )
        steps = _of_rank_zero(steps)
        before, self._next, self._since = self._next - since_step, step + steps, (step, now)
        is_news = not 0.5 < steps / max(before, 1) < 2.0
        return (
            f"the next checkpoint is due in {steps} steps: a save takes {cost_s:.2f} s of training" if is_news else None
        )


def interval_steps(*, cost_s: float, save_s: float, step_s: float, failure_every_s: float) -> int:
    """Returns the steps between two saves that lose the least time, at least 1.

    Args:
        cost_s: seconds that a save holds the training up.
        save_s: seconds until it is on disk.
        step_s: seconds of a step.
        failure_every_s: seconds between interruptions.
    """
    best_s = math.sqrt(2.0 * max(cost_s, _LEAST_COST_S) * failure_every_s)
    return max(1, math.ceil(max(best_s, _LEAST_SAVE_TIMES * save_s) / max(step_s, 1e-6)))


def failure_every_s(attempts: Iterable[Mapping[str, Any]], *, expected_s: float) -> float:
    """Returns the seconds between interruptions: what was expected, corrected by what the run has seen.

    Args:
        attempts: the ledger, one mapping per attempt; those that ended (with "end_time_unix_s") were interrupted.
        expected_s: counts as one interruption after so many seconds.
    """
    spans = [
        max(float(entry["end_time_unix_s"]) - float(entry["time_unix_s"]) - float(entry.get("suspended_s", 0.0)), 0.0)
        for entry in attempts
        if "end_time_unix_s" in entry and "time_unix_s" in entry
    ]
    return (expected_s + sum(spans)) / (1 + len(spans))


def build_save_pace(
    settings: CheckpointSection, *, run: RunDirectory, start_step: int, clock: Callable[[], float] = time.monotonic
) -> SavePace:
    """Returns when a run saves.

    Args:
        settings: what a person asked for.
        run: its ledger says how often it was interrupted; only read for auto.
        start_step: step at which this attempt begins.
        clock: seconds that never run backwards.
    """
    attempts = read_ledger(run) if settings.every_steps == "auto" else []
    expected_s = 3600 * settings.failure_every_h
    return SavePace(
        settings.every_steps,
        start_step=start_step,
        failure_every_s=failure_every_s(attempts, expected_s=expected_s),
        clock=clock,
    )


def _of_rank_zero(number: int) -> int:
    box = torch.tensor(number, dtype=torch.int64)
    dist.broadcast(box, src=0)
    return int(box.item())
