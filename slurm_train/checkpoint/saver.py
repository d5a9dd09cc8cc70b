"""The checkpoints of a training, in the one order of calls by which it is resumed and saved.

The built-in trainer has a `Saver`, and so has a program with its own loop (`session.training`). What only they know, a
`TrainingFacts` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from slurm_train.checkpoint.choice import Choice
from slurm_train.checkpoint.manifest import CheckpointHeader, Manifest
from slurm_train.rundir.timing import Spent

if TYPE_CHECKING:
    from slurm_train.checkpoint.contents import State
    from slurm_train.checkpoint.saves import Content, Copied, Saves


class TrainingFacts(Protocol):
    """What a training's owner knows of its checkpoints. All ranks call the same methods in the same order."""

    def header(self, step: int) -> CheckpointHeader:
        """Returns the facts of a save for its manifest; `State` adds what follows from the state."""
        ...

    def reason_against(self, manifest: Manifest) -> str:
        """Says why a checkpoint on the nodes' disks is not to be loaded, "" where it may be."""
        ...

    def begin_from(self, choice: Choice | None) -> list[str]:
        """Checks the choice of all ranks before its state is restored; returns notes for the user.

        Args:
            choice: None at the beginning of a run.

        Raises:
            SlurmTrainError: it is not a checkpoint of this training.
        """
        ...

    def continue_from(self, choice: Choice | None) -> list[str]:
        """Takes over what else a checkpoint has, once its state is restored; returns notes for the user."""
        ...

    def steps_until(self, step: int) -> int | None:
        """Returns the steps of this attempt up to one that is saved; None where no rule is to compare them."""
        ...


class Saver:
    """Resumes and saves one training. All ranks call the same methods in the same order.

    Args:
        state: all that is saved.
        saves: writes the checkpoints.
        facts: what its owner knows.
        spent: the account, which gets the longest save.
        say: prints notes on rank 0.
    """

    def __init__(
        self, state: State, saves: Saves, facts: TrainingFacts, *, spent: Spent, say: Callable[..., None]
    ) -> None:
        self.state = state
        self.saves = saves
        self._facts = facts
        self._spent = spent
        self._say = say
        self.resumed_from: Manifest | None = None
        """Of the checkpoint that the training was loaded from; None at the beginning of a run."""
        self.newest_step = 0
        """Step of the newest checkpoint that this attempt has saved or loaded."""
        self._has_saved = False

    def resume(self) -> int:
        """Restores the newest verified checkpoint; returns how many steps are done, 0 without one. Collective.

        Raises:
            CheckpointError: checkpoints exist, but none can be loaded.
            SlurmTrainError: the checkpoint is another training's, or does not fit this one.
        """
        self.wait()
        choice, notes = self.saves.choose(reason_against=self._facts.reason_against)
        notes += self._facts.begin_from(choice)
        if choice is not None:
            notes += [*choice.warnings, *self.state.restore(choice)]
        notes += self._facts.continue_from(choice)
        self._say(*notes, "" if choice is None else choice.resuming)
        self.resumed_from = None if choice is None else choice.manifest
        self.newest_step = 0 if self.resumed_from is None else self.resumed_from.step
        return self.newest_step

    def check_first_step(self) -> None:
        """Checks after the first step that a save will have all that was trained. See `State.check_after_first_step`.

        Raises:
            SlurmTrainError: it will not, or it could not be loaded.
        """
        self._say(*self.state.check_after_first_step())

    def prepare(self) -> None:
        """Makes the first save as cheap as the later ones; not collective. See `Saves.prepare`."""
        if not self._has_saved:
            self.saves.prepare(self.state.own_tensors())

    def is_due(self, step: int) -> bool:
        """Returns whether to save after this step by `checkpoint.every_steps`; to be asked once for each step."""
        is_due = self.saves.pace.is_due(step)
        # A program may ask before its step, and so right after a resume, or at step 0.
        return is_due and step != self.newest_step

    def copy(self, step: int) -> Copied:
        """Copies the training as it is, for `write`; the facts count as they are when that is called. Collective."""
        return self.saves.copy(partial(self._content, step))

    def write(self, step: int, *, copied: Copied | None = None, waits: bool = False) -> None:
        """Makes a checkpoint of this moment. Collective.

        Args:
            step: number of optimizer steps done.
            copied: the newest copy, of this step; None to copy now.
            waits: until it is durable in the run directory; else the writing begins, and `say_news` tells if it fails.

        Raises:
            SlurmTrainError: on every rank: this moment cannot be saved, or the save before it ended in a way that ends
                the run.
        """
        self._has_saved = True
        self._say(*self.state.check_before_save(self._facts.steps_until(step)))
        if waits:
            self.saves.save(partial(self._content, step), step=step)
        else:
            self._say(self.saves.save_soon(copied or self.copy(step), step=step))
        self.newest_step = step
        self.say_news()

    def finish(self) -> None:
        """Returns when the newest checkpoint is in the run directory, after the last save. Collective.

        Raises:
            CheckpointError: the newest save has failed.
        """
        self.bring_home()
        if self.saves.times.newest_error is not None:
            raise self.saves.times.newest_error

    def bring_home(self) -> None:
        """See `Saves.bring_home`."""
        try:
            self.saves.bring_home()
        finally:
            self.say_news()

    def wait(self) -> None:
        """Waits for a save that is running. See `Saves.finish`."""
        try:
            self.saves.finish()
        finally:
            self.say_news()

    def say_news(self) -> None:
        """Tells the user what became of saves in the background; cheap enough for every step."""
        self._say(*self.saves.news())
        self._spent.add_save(self.saves.times.longest_s)

    def _content(self, step: int) -> Content:
        return self.state.content(partial(self._facts.header, step))
