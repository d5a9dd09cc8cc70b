"""The rules in their order, by the moment at which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from slurm_train.checkpoint.rules.before_save import (
    note_own_state,
    note_step_ahead,
    note_strangers,
    note_unsaved_of_model,
    note_unsaved_of_objects,
)
from slurm_train.checkpoint.rules.handed_over import (
    refuse_packed_weights,
    refuse_repeated,
    refuse_stateless,
    refuse_strangers,
    refuse_unknown_state,
    refuse_unloadable,
    refuse_wrappers,
)
from slurm_train.checkpoint.rules.readers import note_readers, note_schedules, refuse_lost_samples, refuse_unmoved
from slurm_train.checkpoint.rules.watched import Watched

Rule: TypeAlias = Callable[[Watched], list[str]]
"""Raises an error, or returns notes for the user; asks this rank alone."""

WHO_HAS_WHAT: Sequence[Rule] = (refuse_wrappers, refuse_strangers, refuse_repeated)
"""At a save in which the model or a group of an optimizer is made of other objects than before."""
EACH_SAVE: Sequence[Rule] = (refuse_stateless, refuse_lost_samples, refuse_unknown_state)
ALWAYS: Sequence[Rule] = (*WHO_HAS_WHAT, *EACH_SAVE)
"""Where a training is handed over, and after its first step."""
HANDED_OVER: Sequence[Rule] = (*ALWAYS, refuse_packed_weights)
BEFORE_SAVE: Sequence[Rule] = (
    note_strangers,
    note_step_ahead,
    note_own_state,
    note_unsaved_of_model,
    note_unsaved_of_objects,
)
AFTER_FIRST_STEP: Sequence[Rule] = (
    *ALWAYS,
    refuse_unloadable,
    refuse_unmoved,
    *BEFORE_SAVE,
    note_schedules,
    note_readers,
)


def ask(rules: Sequence[Rule], watched: Watched) -> list[str]:
    """Returns what the rules note.

    Raises:
        ConfigError: a save would lack something that is trained, or where the samples are.
        CheckpointError: a resume could not read what a save would have.
    """
    return [note for rule in rules for note in rule(watched)]
