"""Saving beside the training: what is handed to the saving thread, and what becomes of it.

Failures that all ranks agreed on, a full disk say, cost one checkpoint and are told. Others end the run: they are kept
until all ranks have stopped at the same step and are raised there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_train.distributed.group import open_side_group
from slurm_train.errors import CheckpointError, SlurmTrainError

if TYPE_CHECKING:
    from slurm_train.checkpoint.background import BackgroundSaver, Outcome
    from slurm_train.checkpoint.save import Saved
    from slurm_train.checkpoint.staging import StagingBuffers


class SavingBeside:
    """One rank's saves in the background; all ranks make the same calls in the same order.

    Args:
        saver: the thread.
        buffers: where states are copied to.
        group: a gloo group of all ranks, used by the thread alone.
    """

    def __init__(self, saver: BackgroundSaver, *, buffers: StagingBuffers, group: dist.ProcessGroup) -> None:
        self.group = group
        self.fatal: Exception | None = None
        """Why the run has to end."""
        self.last_save_s: float | None = None
        """Seconds from the hand-over of the newest good save to its end on disk."""
        self._saver, self._buffers = saver, buffers
        self._news: list[str] = []
        self._ended: list[Outcome] = []

    def prepare(self, tensors: list[Tensor]) -> None:
        """Makes the first save as cheap as the later ones: memory and imports, beside the training."""
        from slurm_train.checkpoint.tensors import load_writer

        def work() -> None:
            load_writer()
            self._buffers.prepare(tensors)

        self._saver.prepare(work)

    @property
    def must_copy(self) -> bool:
        """The thread cannot read the tensors themselves, not even while training waits: they are on a GPU."""
        return self._buffers.is_remote

    def copy(self, state: dict[str, Any], *, changes_at_once: bool) -> dict[str, Any]:
        """Returns a copy of a state, in the memory of the copy before; `finish` must have been called.

        Args:
            state: what to copy.
            changes_at_once: parts of it change before `hold_changes` is called.
        """
        staged: dict[str, Any] = self._buffers.stage(state)
        if changes_at_once:
            self._buffers.hold_changes()
        return staged

    def start(self, work: Callable[[], Saved], *, step: int) -> None:
        """Begins to save a copy."""
        self._saver.start(lambda: self._when_copied(work), step=step)

    def run(self, work: Callable[[], Saved], *, step: int) -> None:
        """Saves and waits for it.

        Raises:
            SlurmTrainError: it failed.
        """
        self.start(work, step=step)
        outcome = self._saver.wait()
        assert outcome is not None
        if isinstance(outcome.result, Exception):
            self._ended.append(outcome)
            raise _error_of(outcome) from outcome.result
        self._take(outcome)

    def finish(self) -> None:
        """Waits for a save under way.

        Raises:
            SlurmTrainError: it, or one before it, failed in a way that ends the run.
        """
        if (outcome := self._saver.wait()) is not None:
            self._take(outcome)
        if self.fatal is not None:
            raise self.fatal

    def is_done_within(self, limit_s: float) -> bool:
        """Waits for a save under way, but not longer, and returns whether none is left."""
        return self._saver.is_done_within(limit_s)

    def news(self) -> list[str]:
        """Returns what a person should know, each line once; does not wait."""
        if (outcome := self._saver.poll()) is not None:
            self._take(outcome)
        news, self._news = self._news, []
        return news

    def ended(self) -> list[Outcome]:
        """Returns the saves that have been taken note of, each once."""
        ended, self._ended = self._ended, []
        return ended

    def hold_changes(self) -> None:
        """Makes the next change of the tensors wait until they are copied; costs the host nothing."""
        self._buffers.hold_changes()

    def _when_copied(self, work: Callable[[], Saved]) -> Saved:
        self._buffers.wait_for_copy()
        return work()

    def _take(self, outcome: Outcome) -> None:
        result = outcome.result
        self._ended.append(outcome)
        if not isinstance(result, Exception):
            self.last_save_s = outcome.duration_s
            self._news += result.problems
        elif outcome.is_fatal:
            self.fatal = _error_of(outcome)
        else:
            self._news.append(
                f"the checkpoint of step {outcome.step} failed, training goes on; the one before is untouched: {result}"
            )


def build_saving_beside(
    device: torch.device, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> SavingBeside:
    """Returns what saves in the background. Collective over all ranks.

    Args:
        device: where the training's tensors live.
        timeout_s: seconds that the ranks wait for each other in a save.
        clock: seconds that never run backwards.
    """
    from slurm_train.checkpoint.background import BackgroundSaver
    from slurm_train.checkpoint.staging import StagingBuffers

    saver = BackgroundSaver(clock=clock)
    return SavingBeside(saver, buffers=StagingBuffers(device), group=open_side_group(timeout_s))


def _error_of(outcome: Outcome) -> Exception:
    """Returns the error to raise in the training thread for a save that failed."""
    assert isinstance(outcome.result, Exception)
    if isinstance(outcome.result, SlurmTrainError):
        return outcome.result
    return CheckpointError(
        f"the ranks lost each other while saving step {outcome.step}: {outcome.result}",
        hint="another rank died or hangs; if its disk is that slow, raise checkpoint.save_timeout_s",
    )
