"""A planted bug for `kills_local`: a resumed run passes over one batch of samples."""

from __future__ import annotations

from typing import Any

from slurm_train.train.checkpointer import Checkpointer

resume = Checkpointer.resume


def forget(self: Checkpointer) -> tuple[Any, list[str]]:
    position, notes = resume(self)
    if position.step:
        position.samples += self.parts.rank.plan.global_size
    return position, notes


Checkpointer.resume = forget  # type: ignore[method-assign]
