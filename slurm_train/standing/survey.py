"""Looks at runs: reads their files and asks Slurm, once, about all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_train.slurm.queue_view import Look, QueueView
from slurm_train.standing.facts import Standing, Subject, standing_of, wanted_of
from slurm_train.standing.files import FilesReader


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at some runs has found."""

    standings: tuple[Standing, ...]
    look: Look
    """What Slurm said, and how old that is."""

    @property
    def is_settled(self) -> bool:
        """Whether the files of all of them say that they have ended for good."""
        return all(one.is_settled and not one.is_active for one in self.standings)

    @property
    def is_over(self) -> bool:
        """Whether all of them have ended; while Slurm does not answer, a run that it may know counts as active."""
        if any(one.is_active for one in self.standings):
            return False
        return not self.look.problem or self.is_settled


class Surveyor:
    """Looks at runs again and again.

    Args:
        view: the queue.
        now: the time in seconds since 1970.
    """

    def __init__(self, view: QueueView, *, now: Callable[[], float] = time.time) -> None:
        self._view, self._now = view, now
        self._reader = FilesReader()

    def look(self, subjects: Sequence[Subject]) -> Survey:
        """Returns how runs stand now."""
        files = [self._reader.read(subject.run) for subject in subjects]
        look = self._view.look(wanted_of(files))
        now_unix_s = self._now()
        pairs = zip(subjects, files, strict=True)
        return Survey(tuple(standing_of(subject, one, look, now_unix_s=now_unix_s) for subject, one in pairs), look)
