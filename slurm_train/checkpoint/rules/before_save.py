"""What a save of this moment would not have: said before it, each thing once."""

from __future__ import annotations

from slurm_train.checkpoint.rules.watched import Watched
from slurm_train.checkpoint.state import plain_names
from slurm_train.formatting import shorten

_AHEAD = "a step ahead"


def note_strangers(watched: Watched) -> list[str]:
    """Notes optimizers that are not saved and took a step."""
    return watched.steps.notes()


def note_step_ahead(watched: Watched) -> list[str]:
    """Notes a save that says one step less than the optimizer has taken."""
    num_steps = watched.num_steps
    if num_steps is None or _AHEAD in watched.said or not watched.steps.is_one_ahead(num_steps):
        return []
    watched.said.add(_AHEAD)
    return [
        f"a save says that {num_steps} steps were taken since the start, and the optimizer has taken "
        f"{num_steps + 1}: a resume would take one of them again; `save` wants how many steps are done, so "
        "count them from 1: enumerate(loader, start=done + 1)"
    ]


def note_own_state(watched: Watched) -> list[str]:
    """Notes what optimizers keep for each rank apart."""
    names = sorted(watched.own_state - watched.said)
    watched.said |= watched.own_state
    if not names:
        return []
    return [
        f"the optimizer keeps another part of {shorten(names)} on each rank: each rank saves "
        "its own, and a resume needs as many ranks"
    ]


def note_unsaved_of_model(watched: Watched) -> list[str]:
    """Notes what training changes of the model and no checkpoint has."""
    if not watched.has_model_of_first_step:
        return []
    plain = plain_names(watched.model)
    unsaved = watched.unsaved
    changed = [plain(name) for name in (*unsaved.changed_buffers(), *unsaved.changed_attributes())]
    names = [name for name in changed if name not in watched.said]
    watched.said |= set(names)
    if not names:
        return []
    return [
        f"training changes {shorten(names)} of the model, which no checkpoint has: a resume begins with the first "
        "value; let it follow from the step, or save it by register_buffer or get_extra_state"
    ]


def note_unsaved_of_objects(watched: Watched) -> list[str]:
    """Notes what training changes of the objects and their states lack."""
    return watched.unsaved.notes_on_others()
