"""A callback of one's own: a progress line, and an end of the run when the training loss is low enough."""

from __future__ import annotations

from typing import Any

from slurm_train.train.callbacks import Callback
from slurm_train.train.trainer import Trainer


class Goal(Callback):
    """Prints the lowest training loss so far every few steps, and ends the run at a goal.

    Args:
        every: steps between two lines.
        goal: the loss at which the run ends.
    """

    def __init__(self, *, every: int = 20, goal: float = 0.01) -> None:
        self.every, self.goal, self.lowest = every, goal, float("inf")

    def on_step_end(self, trainer: Trainer) -> None:
        # None until the first result is read. All ranks have the same values, so all ask for the end at the same step.
        if trainer.newest is not None:
            self.lowest = min(self.lowest, trainer.newest.loss)
        if trainer.position.step % self.every == 0:
            trainer.say(f"step {trainer.position.step}: lowest loss so far {self.lowest:.4f}")  # on rank 0 only
        if self.lowest < self.goal:
            trainer.end_early(f"the loss is below {self.goal:g}")

    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self.lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest = state["lowest"]
