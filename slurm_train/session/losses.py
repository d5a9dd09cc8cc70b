"""Whether the losses that a program reports are finite, and which checkpoint to keep where they are not.

The weights after step n compute the loss of step n + 1. So a finite loss shows that the checkpoints of earlier steps
have sound weights. While the losses are not finite, the newest of these checkpoints is kept whatever its age: a few
saves would replace all sound checkpoints otherwise. Training goes on; whether to stop is up to the program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slurm_train.checkpoint.verify import LAST_FINITE
from slurm_train.session.rank_run import RankRun

# A loss that is finite at every second step would fill the disk.
_MOST_EVENTS = 50


class LossWatch:
    """Rank 0's record of the losses and saves of one attempt.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: RankRun) -> None:
        self._rank = rank
        self._num_events = 0
        self._is_finite = True
        self._unproven: list[int] = []
        """Steps of checkpoints after which no finite loss was reported yet."""
        self._sound: tuple[int, float] | None = None
        """Step of the newest checkpoint that is known to be sound, and the loss that has shown it."""

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Begins anew from a checkpoint.

        Args:
            step: its step.
            facts: its manifest's `extra`; {} at the beginning of the run.
        """
        self._is_finite = True
        self._unproven = [step]
        self._sound = None
        for rule in facts.get("kept", ()):
            if rule.get("name") == LAST_FINITE:
                sound_step, loss = rule["steps"][0]
                self._sound = (int(sound_step), float(loss))

    def add_save(self, step: int) -> None:
        """Takes note of a checkpoint."""
        self._unproven.append(step)

    def add(self, step: int, loss: float) -> None:
        """Takes note of the loss of a step."""
        was_finite = self._is_finite
        self._is_finite = math.isfinite(loss)
        if self._is_finite:
            earlier_saves = [saved for saved in self._unproven if saved < step]
            if earlier_saves:
                self._sound = (max(earlier_saves), loss)
                self._unproven = [saved for saved in self._unproven if saved >= step]
            if not was_finite:
                self._write_event("finite", step, loss)
        elif was_finite:
            kept = "no checkpoint is known to be from before it"
            if self._sound is not None and self._sound[0] > 0:
                kept = f"the checkpoint of step {self._sound[0]}, from before it, is kept"
            self._rank.say(f"the loss of step {step} is {loss}; training goes on, and {kept}")
            self._write_event("non_finite", step, loss)

    def kept(self) -> list[dict[str, Any]]:
        """Returns the rule for a checkpoint's header by which the sound checkpoint stays, [] where none is needed."""
        if self._is_finite or self._sound is None:
            return []
        return [{"name": LAST_FINITE, "keep": 1, "steps": [list(self._sound)]}]

    def _write_event(self, event: str, step: int, loss: float) -> None:
        self._num_events += 1
        if self._num_events <= _MOST_EVENTS:
            self._rank.append_event(event, step=step, value=loss, action="none")
