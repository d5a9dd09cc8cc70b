"""Decides at which steps a run saves: every N steps, or at the interval that loses the least time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

from torch.distributed import ProcessGroup

from slurm_train.checkpoint.agreement import on_rank_zero
from slurm_train.config.schema import CheckpointSection
from slurm_train.rundir.ledger import Attempt, read_ledger
from slurm_train.rundir.paths import RunDirectory

_FIRST_AFTER_STEPS = 10
# A measured cost of nothing would ask for a save at every step.
_LEAST_COST_S = 0.01
# The disk should be idle half of the time, or the next save waits for it.
_LEAST_SAVE_TIMES = 2.0


class SavePace:
    """Decides at which steps to save, the same on every rank.

    "auto" follows Young (1974) and Daly (2006): if a save delays the training by C seconds, and an interruption comes
    every M seconds, then sqrt(2 C M) seconds between saves lose the least time. Rank 0 measures and decides at each
    save, and all ranks get its decision.

    Args:
        every: steps between saves, "auto", or None for no saves.
        failure_every_s: seconds between interruptions, for auto.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        *,
        failure_every_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._failure_every_s = failure_every_s
        self._clock = clock
        self._next_step = 0
        self._blocked_s = 0.0
        # Step and time of the newest save; of the first step before there is one.
        self._since: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether to save after this step; to be asked after each step."""
        if self._every == "auto":
            if self._since is None:
                # The first step's time is start-up.
                self._since = (step, self._clock())
                self._next_step = step - 1 + _FIRST_AFTER_STEPS
            return step >= self._next_step
        return self._every is not None and step % self._every == 0

    def saved(
        self, step: int, *, blocked_s: float, save_s: float | None, group: ProcessGroup | None = None
    ) -> str | None:
        """Records a save that was just begun; returns a note for the user, if there is one. Collective for auto.

        Args:
            step: the saved step.
            blocked_s: seconds that all saves together have delayed the training.
            save_s: seconds until the newest checkpoint was on disk; None where that is not known.
            group: all ranks; None for one process.
        """
        if self._every != "auto":
            return None
        now = self._clock()
        since_step, since_s = self._since or (step, now)
        cost_s = blocked_s - self._blocked_s
        self._blocked_s = blocked_s
        steps = interval_steps(
            cost_s=cost_s,
            save_s=save_s or 0.0,
            step_s=max(now - since_s - cost_s, 0.0) / max(step - since_step, 1),
            failure_every_s=self._failure_every_s,
        )
        steps = on_rank_zero(group, partial(int, steps))
        steps_before = self._next_step - since_step
        self._next_step = step + steps
        self._since = (step, now)
        if 0.5 < steps / max(steps_before, 1) < 2.0:
            return None
        return f"the next checkpoint is due in {steps} steps: a save takes {cost_s:.2f} s of training"


def interval_steps(*, cost_s: float, save_s: float, step_s: float, failure_every_s: float) -> int:
    """Returns the number of steps between two saves that loses the least time, at least 1.

    Args:
        cost_s: seconds that a save delays the training.
        save_s: seconds until it is on disk.
        step_s: seconds of a step.
        failure_every_s: seconds between interruptions.
    """
    best_s = math.sqrt(2.0 * max(cost_s, _LEAST_COST_S) * failure_every_s)
    return max(1, math.ceil(max(best_s, _LEAST_SAVE_TIMES * save_s) / max(step_s, 1e-6)))


def failure_every_s(ledger: Iterable[Attempt], *, expected_s: float) -> float:
    """Returns the seconds between interruptions: what was expected, corrected by what the run has seen.

    Args:
        ledger: the attempts; those that ended were interrupted.
        expected_s: counts as one interruption after so many seconds.
    """
    ended = [attempt for attempt in ledger if attempt.end is not None]
    spans = [max(attempt.held_s - attempt.spent_s("suspended_s"), 0.0) for attempt in ended]
    return (expected_s + sum(spans)) / (1 + len(spans))


def build_save_pace(run: RunDirectory, *, settings: CheckpointSection, clock: Callable[[], float]) -> SavePace:
    """Returns when a run saves.

    Args:
        run: its ledger says how often it was interrupted, and is only read for auto.
        settings: of checkpoints.
        clock: seconds that never run backwards.
    """
    ledger = read_ledger(run) if settings.every_steps == "auto" else []
    every_s = failure_every_s(ledger, expected_s=3600 * settings.failure_every_h)
    return SavePace(settings.every_steps, failure_every_s=every_s, clock=clock)
