"""Which saves a run has come from, so that a past that it has left cannot come back.

A run goes back when its newest checkpoint is damaged, when a rollback asks for it, or when files were on a node that is
not there. What was saved beyond that point is of an abandoned past, whatever its step. It may still lie on some node's
disk, see `checkpoint.local`.

Each save names its `parent` in its manifest: the save id of the checkpoint that its training was loaded from, "" where
it began anew. So all saves of one attempt with one parent are of one stretch of training. An attempt records what it
goes on from when it has taken a step; until then it has left nothing behind. The stretches that the newest record leads
back to are the line of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.paths import RunDirectory

_EVENT = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The checkpoint in the run directory that training was loaded from."""

    step: int = 0
    save_id: str = ""
    """That of its directory's name; "" where training began anew."""
    saved_in: int = 0
    """The attempt that saved it; another one may own its name by now."""
    parent: str = ""
    """Its own parent."""


class Stretch(NamedTuple):
    """A piece of training between two loads, as far as the run went on from it.

    Args:
        attempt: the attempt that trained it.
        parent: what it was loaded from.
        last_step: up to this step it belongs to the run; infinity for the newest stretch.
    """

    attempt: int
    parent: str
    last_step: float = math.inf

    def has(self, *, attempt: int, parent: str, step: int) -> bool:
        """Returns whether a save belongs to this stretch."""
        return (attempt, parent) == (self.attempt, self.parent) and step <= self.last_step


def record_origin(run: RunDirectory, attempt: int, origin: Origin) -> None:
    """Records that an attempt has taken a step from here; durable when this returns.

    Raises:
        OSError: the file system refuses.
    """
    append_event(run, _EVENT, attempt=attempt, **asdict(origin))


def read_origins(run: RunDirectory) -> list[tuple[int, Origin]]:
    """Returns what the attempts went on from, oldest attempt first, each with the number of the attempt."""
    names = Origin.__dataclass_fields__
    origins = []
    for line in read_events(run, _EVENT):
        if line.keys() >= {"attempt", *names}:
            origin = Origin(**{name: line[name] for name in names})
            origins.append((int(line["attempt"]), origin))
    # By attempt, not by clock: an overtaken one may write late. Within an attempt the order of the file counts.
    return sorted(origins, key=lambda pair: pair[0])


def first_step_of(run: RunDirectory, attempt: int, *, default: int) -> int:
    """Returns the step that an attempt resumed from; `default` where it has taken none, or has left no record."""
    return next((origin.step for number, origin in read_origins(run) if number == attempt), default)


def read_line(run: RunDirectory) -> list[Stretch]:
    """Returns the stretches that the run has come from, newest first; [] where no attempt has recorded a step."""
    origins = read_origins(run)
    if not origins:
        return []
    by_save = {origin.save_id: origin for _, origin in origins}
    attempt, newest = origins[-1]
    line = [Stretch(attempt, newest.save_id)]
    origin: Origin | None = newest
    while origin is not None and origin.save_id and len(line) <= len(origins):
        line.append(Stretch(origin.saved_in, origin.parent, origin.step))
        origin = by_save.get(origin.parent)
    return line


def is_on_line(line: Sequence[Stretch], *, attempt: int, parent: str, step: int) -> bool:
    """Returns whether a save is one that the run has come from, or goes on from its newest stretch."""
    return any(stretch.has(attempt=attempt, parent=parent, step=step) for stretch in line)
