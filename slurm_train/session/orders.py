"""What the orders of a program's samples follow from, compared with those of the checkpoint that it continues.

A resume begins behind the samples of as many steps as are saved. So at each save the batches that were given are
compared with the steps: a program that takes four batches for a step, or counts each of them as one, would go on with
other samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_train.errors import ConfigError

if TYPE_CHECKING:
    from slurm_train.data.batches import RankBatches

ORDERS = "orders"
"""Key of a checkpoint's header: what the orders follow from, in the order of the calls."""
# Loaders and queues read some batches ahead, and begin to at any time.
_READ_AHEAD = 8


@dataclass(slots=True)
class _Reading:
    """How a program reads the batches of one call."""

    batches: RankBatches
    lead: int | None = None
    """Steps by which they were ahead at the first reported step, by what a loader has read ahead; None before it."""
    since: int = 0
    """That step."""


@dataclass(slots=True)
class Orders:
    """What the orders of a program's samples follow from, by the calls of `batches`."""

    done: int = 0
    """Steps of the checkpoint that the program continues, 0 without one."""
    saved: list[dict[str, int]] = field(default_factory=list)
    """Those of that checkpoint."""
    present: list[dict[str, int]] = field(default_factory=list)
    num_calls: int = 0
    """Calls of `batches` since the program has asked for that checkpoint."""
    knows_checkpoint: bool = False
    """Whether the program has asked for the newest checkpoint."""
    _readings: dict[int, _Reading] = field(default_factory=dict)
    """By the number of the call, of those that follow the steps of the checkpoint."""
    _has_noted: bool = False

    def continue_from(self, step: int, saved: list[dict[str, int]]) -> None:
        """Takes over the step and the orders of a checkpoint from which the program begins, or to which it goes back.

        Raises:
            ConfigError: there are batches already, of the steps that are done.
        """
        is_first = not self.knows_checkpoint
        self.knows_checkpoint = True
        self.num_calls = 0
        if is_first and step and self.present:
            raise ConfigError(
                f"`batches` was called before `newest`, and step {step} is done: its samples would be used again",
                hint="call newest() first",
            )
        self.done = step
        self.saved = saved
        self._readings.clear()

    def add(self, order: dict[str, int], batches: RankBatches | None = None, *, done: int) -> str:
        """Adds an order, and returns what is to be said of its batches, "" for nothing.

        Args:
            order: what it follows from.
            batches: that begin after the steps of the checkpoint; None where the program has said after which.
            done: that number of steps.

        Raises:
            ConfigError: it is not that of the checkpoint.
        """
        number = self.num_calls
        if done and number < len(self.saved) and self.saved[number] != order:
            changes = (f"{name} {self.saved[number].get(name)} -> {value}" for name, value in order.items())
            raise ConfigError(
                f"step {self.done} was saved with another order of samples ({', '.join(changes)}): some would be used "
                "twice, others not",
                hint="keep the data set, global_size and seed; or start anew under another run.name",
            )
        self.num_calls += 1
        self.present[number : number + 1] = [order]
        self._readings.pop(number, None)
        if batches is None:
            return ""
        self._readings[number] = _Reading(batches)
        if done <= batches.steps:
            return ""
        return (
            f"these batches have {batches.steps} steps, and step {done} is done, so none is left; where they do not "
            "follow the steps of the training, as those of an evaluation, say so: done=0"
        )

    def begin(self, step: int) -> None:
        """Takes note of how far the batches are ahead at the first of the reported steps; called at each."""
        for reading in self._readings.values():
            if reading.lead is None and reading.batches.steps_given is not None:
                reading.lead = reading.batches.steps_given - step
                reading.since = step

    def check_behind(self, step: int) -> str:
        """Returns what is to be said at a save of batches that do not keep pace with the steps, "" for nothing.

        Raises:
            ConfigError: samples of fewer steps were given than are saved.
        """
        self.begin(step)
        for reading in self._readings.values():
            given = reading.batches.steps_given
            if given is None or reading.lead is None or given == reading.batches.steps:
                continue  # none was read, or all
            note = ""
            if given < step:
                note = (
                    f"step {step} is to be saved, and `batches` has given the samples of {given} steps: a resume would "
                    "begin after those of as many steps as are saved, and leave some out"
                )
                if len(self._readings) == 1:
                    raise ConfigError(note, hint="count as a step what the optimizer does with global_size samples")
                note += "; say for each loader how many of its steps are done: done=N"
            ahead = given - step - reading.lead
            if ahead > _READ_AHEAD and 2 * ahead > step - reading.since:
                note = (
                    f"since step {reading.since} `batches` has given the samples of {ahead} steps more than were "
                    f"reported: a resume would begin after those of {step} steps, and use some again; say with "
                    "accumulation=N how many batches a step takes, or with done=N how many of their steps are done"
                )
            if note and not self._has_noted:
                self._has_noted = True
                return note
        return ""
