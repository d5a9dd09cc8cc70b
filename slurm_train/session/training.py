"""A program's training as its checkpoints have it: model, optimizers, and what else it names.

`Session.training` gives one. Saves are written in the background, restored on any number of ranks, and may go to the
nodes' own disks first, by the same parts as the built-in trainer's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.session.random_streams import RANDOM, RandomStreams

if TYPE_CHECKING:
    from slurm_train.checkpoint.load import Choice
    from slurm_train.checkpoint.manifest import CheckpointHeader
    from slurm_train.checkpoint.program import ProgramState
    from slurm_train.checkpoint.saves import Content, Saves


class Training:
    """A training outside of a run: nothing is saved, and it always begins."""

    def resume(self) -> int:
        """Restores the newest checkpoint that verifies, and returns how many steps are done, 0 for none. Collective.

        Raises:
            CheckpointError: there are checkpoints, but none can be loaded.
            RunError: the model, the optimizer or another object do not fit the checkpoint.
        """
        return 0

    def is_due(self, step: int) -> bool:  # noqa: ARG002  # there is no checkpoint outside of a run
        """Returns whether to save after this step by `checkpoint.every_steps`; to be asked once for each step.

        The same on all ranks, without an exchange.
        """
        return False

    def save(self, step: int) -> None:
        """Makes a checkpoint of this moment; returns when it is copied, after a stop when it is on disk. Collective.

        A periodic save that fails costs that checkpoint: rank 0 says so in its log, and the one before is intact.

        Args:
            step: how many optimizer steps are done.

        Raises:
            SlurmTrainError: on every rank: this moment cannot be saved, or the save before it ended in a way that ends
                the run.
        """

    def finish(self) -> None:
        """Waits until a save that is under way is on disk; `leave` and the end of the program do so, too.

        Raises:
            CheckpointError: the newest save has failed; after a program has ended, its exit code is 1.
        """


class ChildTraining(Training):
    """A training in a process that a rank has started, which is no rank."""

    def save(self, step: int) -> None:  # noqa: ARG002  # it refuses any step
        """Refuses; nothing would be saved."""
        raise no_rank_error("save")


def no_rank_error(call: str) -> ConfigError:
    """Returns the error for a call of the session in a process that is no rank."""
    return ConfigError(
        f"{call} was called in a process that a rank has started (multiprocessing, torch.multiprocessing.spawn): it is "
        "no rank of the run, so nothing would be saved and no stop would reach it",
        hint="let the launcher start the processes, e.g. +cluster=1x8, each with its RANK and LOCAL_RANK; or call the "
        "session in the process that the launcher has started",
    )


def whole_step(step: Any) -> int:
    """Returns a number of steps as an int, which numpy, a tensor or a division may have made of another type.

    Raises:
        ConfigError: it is no whole number.
    """
    whole = int(step)
    if whole != step:
        raise ConfigError(f"{step!r} was given as a step", hint="a step is a whole number: how many steps are done")
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPart:
    """What the session does in the calls of its training."""

    is_first: bool
    """Whether this is rank 0."""
    saving: Callable[[int], AbstractContextManager[bool]]
    """Around a save of a step; gives whether to wait until it is on disk."""
    loading: Callable[[], AbstractContextManager[None]]
    """Around the choice and the loading of a checkpoint."""
    header: Callable[[int], CheckpointHeader]
    """Gives the facts of a save."""
    take: Callable[[Choice | None], None]
    """Takes the checkpoint that the training continues from, None for its beginning."""
    newest_step: Callable[[], int]
    """Gives the step of the newest checkpoint that was saved or loaded, 0 for none."""
    random: RandomStreams
    """This rank's random generators."""


class RunTraining(Training):
    """A training within a run.

    Args:
        state: what is saved.
        saves: makes the checkpoints.
        part: what the session does.
    """

    def __init__(self, state: ProgramState, saves: Saves, part: SessionPart) -> None:
        self._state = state
        self._saves = saves
        self._part = part
        self._has_saved = False
        self._finish_before_groups_end()

    def resume(self) -> int:
        """See `Training.resume`."""
        with self._part.loading():
            self._wait()
            choice, notes = self._saves.choose(reason_against=lambda _: "")
            if choice is not None and not choice.manifest.is_program:
                raise CheckpointError(
                    f"{choice.path} was not saved by a `training` of a session",
                    hint="load it with `newest()`, or start the program under another run.name",
                )
            if choice is not None:
                notes += self._state.restore(choice)
            self._part.take(choice)
        self._say(notes)
        return 0 if choice is None else choice.manifest.step

    def is_due(self, step: int) -> bool:
        """See `Training.is_due`."""
        is_due = self._saves.pace.is_due(step)
        # A loop may ask before its step, and so right after a resume, or at step 0.
        return is_due and step != self._part.newest_step()

    def save(self, step: int) -> None:
        """See `Training.save`."""
        step = whole_step(step)
        content = partial(self._content, step)
        self._has_saved = True
        with self._part.saving(step) as waits:
            if waits:
                self._saves.save(content, step=step)
            else:
                note = self._saves.save_soon(content, step=step)
                self._say([note] if note else [])
        self._say(self._saves.news())

    def finish(self) -> None:
        """See `Training.finish`."""
        self._wait()
        if self._saves.times.newest_error is not None:
            raise self._saves.times.newest_error

    def _wait(self) -> None:
        try:
            self._saves.finish()
        finally:
            self._say(self._saves.news())

    def _finish_before_groups_end(self) -> None:
        """Has the program's end of its process groups wait for a save, which exchanges by one of them."""
        import torch.distributed as dist

        destroy = dist.destroy_process_group

        def wait_and_destroy(group: dist.ProcessGroup | None = None) -> None:
            self._wait()
            destroy(group)

        dist.destroy_process_group = wait_and_destroy
        # Programs have imported it by name, too, and call what they have.
        for module in list(sys.modules.values()):
            names = [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is destroy]
            for name in names:
                setattr(module, name, wait_and_destroy)

    def look(self) -> None:
        """Checks after the first step that a save will have all that is trained, and prepares memory for it.

        Raises:
            ConfigError: it will not.
            CheckpointError: an optimizer keeps something that no checkpoint has.
        """
        self._state.require_savable()
        if not self._has_saved:
            self._saves.prepare(self._state.own_tensors())

    @property
    def longest_save_s(self) -> float:
        """Longest time from the begin of a save until it was on disk."""
        return self._saves.times.longest_s

    def _content(self, step: int) -> Content:
        # The save before it has ended by now.
        if step == self._part.newest_step():
            # Something was done since, such as an evaluation or the end of an epoch.
            self._saves.save_again(step)
        return self._state.content(self._part.header(step), more={RANDOM: self._part.random.state()})

    def _say(self, notes: Iterable[str]) -> None:
        if self._part.is_first:
            for note in notes:
                print(f"slurm_train: {note}", file=sys.stderr, flush=True)
