"""Whether a program saves while it adds up gradients for its next step: no checkpoint has them.

A rule for each way to see it: accelerate says so of the process, whatever writes the files; of a `training` the model's
own gradients show it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_train.checkpoint.saver import Saver


def note_of_gradients(step: int, training: Saver | None) -> str:
    """Returns what is to be said of a save while gradients are added up, "" for nothing.

    Args:
        step: that is saved.
        training: of the program, None without one.
    """
    lost = "those since the last step are in no checkpoint, and a resume does not train on their samples"
    if _accelerate_adds_up():
        return (
            f"step {step} is saved while accelerate adds up gradients: {lost}; call `should_stop` and `save` only "
            "where `accelerator.sync_gradients` is true"
        )
    name = "" if training is None else training.state.pending_gradient()
    if name:
        return (
            f"step {step} is saved while gradients are added up ({name}): {lost}; call `should_stop` and `save` only "
            "after `optimizer.step()`"
        )
    return ""


def _accelerate_adds_up() -> bool:
    # Imported by the program, or not in use. Each of its objects has the state of the process.
    accelerate: Any = sys.modules.get("accelerate.state")
    return accelerate is not None and not accelerate.GradientState().sync_gradients
