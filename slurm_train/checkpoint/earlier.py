"""What a rank has saved, in the form of this version, also from checkpoints of earlier ones."""

from __future__ import annotations

from typing import Any

from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.division import OTHERS
from slurm_train.checkpoint.load import load_rank_state

VALUES = "others"
"""Key of the values of named objects."""
EXTRA = "extra"
"""Key of what modules give by `get_extra_state`."""
MODES = "in_evaluation"
"""Key of the names of all modules in evaluation mode; now those that have changed are among the switches."""
_OF_THE_LOOP = ("bucket_order", "loss_scale", "recent_losses")
"""State of parts of the trainer that was in the manifest."""


def read_states(choice: Choice, rank: int) -> dict[str, Any]:
    """Returns the states that a rank has saved, by key; {} where there was no such rank.

    Raises:
        CheckpointError: they cannot be read.
    """
    saved = load_rank_state(choice.path, rank)
    if saved is None:
        return {}
    of_loop = {name: {"values": values} for name in _OF_THE_LOOP if (values := choice.manifest.extra.get(name))}
    return of_loop | as_now(saved)


def as_now(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the states of a rank's file by the keys of this version."""
    states = dict(saved)
    # The trainer had these keys of its own.
    states |= states.pop("modules", None) or {}
    if OTHERS in states:
        states[VALUES] = states.pop(OTHERS)
    return states
