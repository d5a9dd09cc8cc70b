"""Which checkpoint an attempt continues from, and the record of that.

The built-in trainer and a program with its own loop load checkpoints in different ways, but record it in the same way.
Nothing is recorded or moved before a step was taken: until then another attempt may still choose another checkpoint.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.commit import Place
from slurm_train.errors import RunError
from slurm_train.rundir.attempts import check_fence, hold_run
from slurm_train.rundir.lineage import Origin, record_origin
from slurm_train.rundir.paths import RunDirectory


def run_place(run: RunDirectory, attempt: int, *, keep: int, is_leader: bool) -> Place:
    """Returns a run's checkpoints as one of its attempts changes them, until a newer attempt has taken over.

    Args:
        run: the run.
        attempt: number of the attempt.
        keep: how many whole checkpoints stay.
        is_leader: whether this is rank 0.
    """
    hold_run(run)
    fence = partial(check_fence, run, attempt)
    return Place(root=run.checkpoints, attempt=attempt, keep=keep, fence=fence, is_leader=is_leader)


class Resumption:
    """What the training of an attempt was loaded from; the beginning of the run before anything was.

    Args:
        run: the run.
        place: its checkpoints.
    """

    def __init__(self, run: RunDirectory, place: Place) -> None:
        self._run = run
        self.place = place
        """The checkpoints of the run."""
        self._is_recorded = not place.is_leader
        self.origin = Origin()
        """The checkpoint; saves name it as their parent."""

    def begin_from(self, choice: Choice | None) -> None:
        """Begins anew from what all ranks have chosen, None: from the beginning."""
        self.place.passed_over[:] = [] if choice is None else [passed.path for passed in choice.passed_over]
        self.origin = Origin() if choice is None else choice.origin
        self._is_recorded = not self.place.is_leader

    def facts_of_save(self, *, world_size: int, host: str, env: Mapping[str, str]) -> dict[str, Any]:
        """Returns what the header of a checkpoint says about who writes it, and after which other one.

        Args:
            world_size: number of ranks.
            host: name of this rank's node.
            env: environment of this rank.
        """
        return {
            "world_size": world_size,
            "attempt": self.place.attempt,
            # Letters, digits and "_".
            "job": env.get("SLURM_JOB_ID", "local"),
            "written_by": f"{host} pid {os.getpid()}" if self.place.is_leader else "",
            "parent": self.origin.save_id,
        }

    def move_on(self) -> None:
        """Records that a step was taken from there; checkpoints that were passed over for it are moved aside.

        To be called after each step; not collective. Where the file system refuses, the next step tries again.
        """
        if self._is_recorded:
            return
        # A newer attempt that has taken over is found by the next save.
        with contextlib.suppress(OSError, RunError):
            self.place.move_aside()
            record_origin(self._run, self.place.attempt, self.origin)
            self._is_recorded = True
