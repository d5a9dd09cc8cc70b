"""A callback of one's own: a progress line, and an end of the run when the training loss is low enough."""

from __future__ import annotations

from typing import Any

from slurm_train.train.callbacks import Callback
from slurm_train.train.trainer import Trainer


class Goal(Callback):
    """Prints a running mean of the training loss every few steps, and ends the run when it is below a goal.

    Args:
        every: steps between two lines.
        goal: the mean at which the run ends.
    """

    def __init__(self, *, every: int = 20, goal: float = 0.01) -> None:
        self.every, self.goal = every, goal
        self.mean, self.last_step = float("inf"), 0

    def on_step_end(self, trainer: Trainer) -> None:
        self.read_loss(trainer)
        if trainer.position.step % self.every == 0:
            trainer.say(f"step {trainer.position.step}: mean loss {self.mean:.4f}")  # on rank 0 only
        # All ranks have the same values, so all ask for the end at the same step.
        if self.mean < self.goal:
            trainer.end_early(f"the mean loss is below {self.goal:g}")

    def on_save(self, trainer: Trainer) -> None:
        # On a GPU the loss of the saved step was not known yet in on_step_end, and the next attempt does not see it.
        self.read_loss(trainer)

    def read_loss(self, trainer: Trainer) -> None:
        """Adds the newest loss to the mean, once: it may be that of an earlier step, and is None before the first."""
        newest = trainer.newest
        if newest is not None and newest.applied and newest.facts.step > self.last_step:
            self.mean = newest.loss if self.last_step == 0 else 0.9 * self.mean + 0.1 * newest.loss
            self.last_step = newest.facts.step

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.last_step = state["mean"], state["last_step"]
