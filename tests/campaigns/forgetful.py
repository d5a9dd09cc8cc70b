"""A planted bug for `kills_local`: a resumed run passes over one batch of samples."""

from __future__ import annotations

from slurm_train.checkpoint.choice import Choice
from slurm_train.train.facts import TrainerFacts

begin_from = TrainerFacts.begin_from


def forget(self: TrainerFacts, choice: Choice | None) -> list[str]:
    notes = begin_from(self, choice)
    if choice is not None:
        self.position.samples += self.parts.rank.plan.global_size
    return notes


TrainerFacts.begin_from = forget  # type: ignore[method-assign]  # the fault of this program
