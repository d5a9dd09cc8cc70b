"""Where a run's periodic checkpoints go first, and how they come into the run directory: one interface.

`Tier` writes them there at once. `checkpoint.local` has the nodes' own disks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from slurm_train.checkpoint.agreement import Group
from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.filling import Saved
from slurm_train.checkpoint.manifest import Manifest


@dataclass(slots=True, kw_only=True)
class Tier:
    """The run directory itself. All ranks make the same calls in the same order."""

    place: Place
    """Where a checkpoint is written."""

    @property
    def places(self) -> list[Place]:
        """All that has checkpoints of the run, in the order in which they are to be discarded."""
        return [self.place]

    @property
    def protected(self) -> Collection[str]:
        """Names of checkpoints that stay, whatever their age."""
        return ()

    def add(self, saved: Saved, *, group: Group | None) -> None:
        """Takes note of a checkpoint that was written. Collective, in the thread that has written it."""

    def choose(
        self,
        choose_in_run: Callable[[Path | None], Choice | None],
        *,
        reason_against: Callable[[Manifest], str],  # noqa: ARG002  # all is in the run directory already
    ) -> tuple[Choice | None, list[str]]:
        """Returns the checkpoint that all ranks load, None where nothing was saved; and notes for the user. Collective.

        Args:
            choose_in_run: chooses among those in the run directory; is given one that was copied there just now.
            reason_against: says why training cannot go on from a checkpoint, "" where it can; the same on every rank.

        Raises:
            CheckpointError: as `choose_checkpoint`.
        """
        return choose_in_run(None), []

    def bring_home(self) -> None:
        """Returns when the newest checkpoint is in the run directory. Collective; no save is under way.

        Raises:
            CheckpointError: it could not be copied there.
        """

    def take_news(self) -> list[str]:
        """Returns notes for the user, each once."""
        return []

    def close(self) -> None:
        """Leaves nothing elsewhere: the run is finished, and all that counts is in the run directory."""
