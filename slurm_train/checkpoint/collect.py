"""Discards what a run has beyond its retention while none of its attempts is at work."""

from __future__ import annotations

import contextlib
import time

from slurm_train.checkpoint.commit import Place, Pruned
from slurm_train.config.frozen import load_config
from slurm_train.errors import CheckpointError, ClusterError, RunError, SlurmTrainError
from slurm_train.rundir.jobs import release_lock, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import clear_dead_pins, holder_lives

_ENDS_WITHIN_S = 30.0
_LOOK_S = 1.0


def collect_checkpoints(run: RunDirectory, commands: SlurmCommands, *, keep: int) -> Pruned:
    """Discards checkpoints beyond the newest that verify, but for those that something needs; see `Place.prune`.

    Args:
        run: its attempts are over; it is locked meanwhile.
        commands: Slurm, to be asked whose evaluations are over.
        keep: how many whole checkpoints stay.

    Raises:
        RunError: the run is at work.
        CheckpointError: there are checkpoints and none of them verifies.
    """
    holder = this_process()
    take_lock(run.lock, holder, is_alive=lambda current: holder_lives(current, commands))
    try:
        # What stays gets the number of the next attempt, so none of those that are over can remove it any more.
        attempt = max(existing_attempts(run), default=-1) + 1
        place = Place(root=run.checkpoints, attempt=attempt, keep=keep)
        # Where Slurm does not answer, what is pinned stays.
        with contextlib.suppress(ClusterError):
            clear_dead_pins(run, commands)
        search = place.claim()
        if search.newest is not None:
            return place.prune(search.newest[0])
        if search.passed_over:
            raise CheckpointError(
                f"no checkpoint in {run.checkpoints} verifies, so none is removed", hint="look with `checkpoint verify`"
            )
        return place.prune_leftovers()
    finally:
        release_lock(run.lock, holder)


def discard_kept(run: RunDirectory, commands: SlurmCommands) -> None:
    """Discards checkpoints that were kept for an evaluator only, where the run is finished and prunes no more.

    Nothing is done where the run has no result or is at work again: then it prunes at its next save.
    """
    until_s = time.monotonic() + _ENDS_WITHIN_S
    while run.result.exists():
        try:
            collect_checkpoints(run, commands, keep=load_config(run.config).checkpoint.keep)
            return
        except RunError:
            # The job of a run ends a moment after its result is written.
            if time.monotonic() >= until_s:
                return
        except (SlurmTrainError, OSError):
            return
        time.sleep(_LOOK_S)
