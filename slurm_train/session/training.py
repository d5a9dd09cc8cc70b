"""A program's training within a run, as its checkpoints have it: model, optimizers, and what else it names.

`Session.training` gives one. Saves are written in the background and restored on any number of ranks, by the same parts
as the built-in trainer's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from slurm_train.checkpoint.manifest import PROGRAM
from slurm_train.errors import CheckpointError
from slurm_train.session.checkpoints import SessionCheckpoints
from slurm_train.session.interface import Training, whole_step

if TYPE_CHECKING:
    from slurm_train.checkpoint.contents import State
    from slurm_train.checkpoint.saves import Content, Saves


class RunTraining(Training):
    """A training within a run.

    Args:
        state: what is saved.
        saves: makes the checkpoints.
        checkpoints: of the run.
        saving: what the session does around a save of a step; gives whether to wait until the save is on disk.
        loading: what the session does around the choice and the loading of a checkpoint.
        say: prints notes on rank 0.
    """

    def __init__(
        self,
        state: State,
        saves: Saves,
        checkpoints: SessionCheckpoints,
        *,
        saving: Callable[[int], AbstractContextManager[bool]],
        loading: Callable[[], AbstractContextManager[None]],
        say: Callable[..., None],
    ) -> None:
        self._state = state
        self._saves = saves
        self._checkpoints = checkpoints
        self._saving = saving
        self._loading = loading
        self._say = say
        self._has_saved = False
        self._finish_before_groups_end()

    def resume(self) -> int:
        """See `Training.resume`."""
        with self._loading():
            self._wait()
            choice, notes = self._saves.choose(reason_against=lambda _: "")
            if choice is not None and not choice.manifest.is_program:
                raise CheckpointError(
                    f"{choice.path} was not saved by a `training` of a session",
                    hint="load it with `newest()`, or start the program under another run.name",
                )
            if choice is not None:
                notes += self._state.restore(choice)
            self._checkpoints.continue_from(choice)
        self._say(*notes)
        return 0 if choice is None else choice.manifest.step

    def is_due(self, step: int) -> bool:
        """See `Training.is_due`."""
        is_due = self._saves.pace.is_due(step)
        # A loop may ask before its step, and so right after a resume, or at step 0.
        return is_due and step != self._checkpoints.newest_step

    def save(self, step: int) -> None:
        """See `Training.save`."""
        step = whole_step(step)
        content = partial(self._content, step)
        self._has_saved = True
        self._say(*self._state.check_before_save(step - self._checkpoints.resumed_step))
        with self._saving(step) as waits:
            if waits:
                self._saves.save(content, step=step)
            else:
                self._say(self._saves.save_soon(self._saves.copy(content), step=step))
        self._say(*self._saves.news())

    def finish(self) -> None:
        """See `Training.finish`."""
        self._bring_home()
        if self._saves.times.newest_error is not None:
            raise self._saves.times.newest_error

    def end(self, *, is_done: bool) -> None:
        """Waits for the last save at the end of the program.

        Args:
            is_done: the training is over, on all ranks: nothing of it is left elsewhere.

        Raises:
            CheckpointError: as `finish`.
        """
        if not is_done:
            self._wait()
            return
        self.finish()
        self._saves.close()

    def _wait(self) -> None:
        try:
            self._saves.finish()
        finally:
            self._say(*self._saves.news())

    def _bring_home(self) -> None:
        try:
            self._saves.bring_home()
        finally:
            self._say(*self._saves.news())

    def _finish_before_groups_end(self) -> None:
        """Has the program's end of its process groups wait for a save, which exchanges by one of them."""
        import torch.distributed as dist

        destroy = dist.destroy_process_group

        def wait_and_destroy(group: dist.ProcessGroup | None = None) -> None:
            # The other ranks are not here where this one has failed, or ends a group of some.
            if group is None and sys.exc_info()[0] is None:
                self._bring_home()
            else:
                self._wait()
            destroy(group)

        dist.destroy_process_group = wait_and_destroy
        # Programs have imported it by name, too, and call what they have.
        for module in list(sys.modules.values()):
            names = [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is destroy]
            for name in names:
                setattr(module, name, wait_and_destroy)

    def check_first_step(self) -> None:
        """Checks after the first step that a save will have all that is trained, and prepares memory for it.

        Raises:
            ConfigError: it will not, or not which samples were used.
            CheckpointError: an optimizer keeps something that no checkpoint has, or an object has values that could
                not be loaded again.
        """
        self._state.watched.has_order = bool(self._checkpoints.orders.present or self._checkpoints.replays)
        self._state.watched.has_pass = self._checkpoints.passes.has_seen
        self._say(*self._state.check_after_first_step())
        if not self._has_saved:
            self._saves.prepare(self._state.own_tensors())

    def pending_gradient(self) -> str:
        """Returns the name of a parameter whose gradient is being added up for the next step, "" for none."""
        return self._state.watched.steps.pending()

    @property
    def longest_save_s(self) -> float:
        """Longest time from the begin of a save until it was on disk."""
        return self._saves.times.longest_s

    def _content(self, step: int) -> Content:
        # The save before it has ended by now.
        if step == self._checkpoints.newest_step:
            # Something was done since, such as an evaluation or the end of an epoch.
            self._saves.save_again(step)
        return self._state.content(partial(self._checkpoints.header, step, kind=PROGRAM))
