"""A planted bug for `kills_local`: a resumed run passes over one batch of samples."""

from __future__ import annotations

from slurm_train.train.saver import TrainerSaver

resume = TrainerSaver.resume


def forget(self: TrainerSaver) -> list[str]:
    notes = resume(self)
    if self.position.step:
        self.position.samples += self.parts.rank.plan.global_size
    return notes


TrainerSaver.resume = forget  # type: ignore[method-assign]  # the fault of this program
