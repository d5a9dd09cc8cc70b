"""A program's training within a run: its `Saver`, and what the session does around its calls.

`Session.training` gives one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from slurm_train.checkpoint.saver import Saver
from slurm_train.rundir.timing import Spent
from slurm_train.session.checkpoints import SessionCheckpoints
from slurm_train.session.interface import Training, whole_step

if TYPE_CHECKING:
    from slurm_train.checkpoint.contents import State
    from slurm_train.checkpoint.saves import Content, Saves


class RunTraining(Saver, Training):
    """A training within a run.

    Args:
        state: what is saved.
        saves: makes the checkpoints.
        checkpoints: of the run.
        spent: the account of this rank.
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
        spent: Spent,
        saving: Callable[[int], AbstractContextManager[bool]],
        loading: Callable[[], AbstractContextManager[None]],
        say: Callable[..., None],
    ) -> None:
        super().__init__(state, saves, checkpoints, spent=spent, say=say)
        self._checkpoints = checkpoints
        self._saving = saving
        self._loading = loading
        self._finish_before_groups_end()

    def resume(self) -> int:
        """See `Training.resume`."""
        with self._loading():
            return super().resume()

    def save(self, step: int) -> None:
        """See `Training.save`."""
        step = whole_step(step)
        with self._saving(step) as waits:
            self.write(step, waits=waits)

    def end(self, *, is_done: bool) -> None:
        """Waits for the last save at the end of the program.

        Args:
            is_done: the training is over, on all ranks: nothing of it is left elsewhere.

        Raises:
            CheckpointError: as `finish`.
        """
        if not is_done:
            self.wait()
            return
        self.finish()
        self.saves.close()

    def check_first_step(self) -> None:
        """Checks after the first step that a save will have all that is trained, and prepares memory for it.

        Raises:
            ConfigError: it will not, or not which samples were used.
            CheckpointError: an optimizer keeps something that no checkpoint has, or an object has values that could
                not be loaded again.
        """
        watched = self.state.watched
        watched.has_order = bool(self._checkpoints.orders.present or self._checkpoints.replays)
        watched.has_pass = self._checkpoints.passes.has_seen
        super().check_first_step()
        self.prepare()

    def _content(self, step: int) -> Content:
        # The save before it has ended by now.
        if step == self.newest_step:
            # Something was done since, such as an evaluation or the end of an epoch.
            self.saves.save_again(step)
        return super()._content(step)

    def _finish_before_groups_end(self) -> None:
        """Has the program's end of its process groups wait for a save, which exchanges by one of them."""
        import torch.distributed as dist

        destroy = dist.destroy_process_group

        def wait_and_destroy(group: dist.ProcessGroup | None = None) -> None:
            # The other ranks are not here where this one has failed, or ends a group of some.
            if group is None and sys.exc_info()[0] is None:
                self.bring_home()
            else:
                self.wait()
            destroy(group)

        dist.destroy_process_group = wait_and_destroy
        # Programs have imported it by name, too, and call what they have.
        for module in list(sys.modules.values()):
            names = [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is destroy]
            for name in names:
                setattr(module, name, wait_and_destroy)
