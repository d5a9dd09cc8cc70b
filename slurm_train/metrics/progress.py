"""What a person sees while a run trains: a bar on a terminal, one line now and then in a log. Rank 0 only.

Everything goes to stderr. rich is imported on a terminal alone and not before the first step is shown, so a job's
start never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

from slurm_train.formatting import clock
from slurm_train.frozen_class import frozen

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_BAR_EVERY_S = 0.5
_FIRST_LINE_AFTER_S = 2.0
_LINE_EVERY_S = 10.0


@frozen
class Glance:
    """One moment of a run."""

    step: int
    loss: float
    rate: float
    """Tokens or samples per second over all ranks."""
    unit: str
    """What `rate` counts: "tokens" or "samples"."""
    step_time_s: float
    """Seconds per step, for the time that is left."""


class Display(Protocol):
    """Shows a run; `due_s` is the time (of `time.monotonic`) from which the next glance is welcome.

    `max_steps` may be set until the first glance.
    """

    due_s: float
    max_steps: int

    def show(self, glance: Glance) -> None:
        """Shows one moment."""

    def say(self, text: str) -> None:
        """Shows a line that stays."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class LineDisplay:
    """Plain lines, for logs: one after two seconds, then one every `every_s` seconds.

    Args:
        stream: where to write.
        max_steps: steps of the whole run.
        every_s: seconds between lines.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        max_steps: int,
        every_s: float = _LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due_s = clock() + _FIRST_LINE_AFTER_S
        self._stream, self.max_steps, self._every_s, self._clock = stream, max_steps, every_s, clock

    def show(self, glance: Glance) -> None:
        """Writes one line, e.g. "step 120/400  loss 2.3134  41,210 tokens/s  00:01:12 left"."""
        self.due_s = self._clock() + self._every_s
        self.say(f"step {glance.step}/{self.max_steps}  {words_of(glance, max_steps=self.max_steps)}")

    def say(self, text: str) -> None:
        """Writes a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Does nothing."""


class BarDisplay:
    """A rich progress bar, redrawn at most twice a second, by the calling thread.

    Args:
        stream: a terminal.
        max_steps: steps of the whole run.
        no_color: draw without colours (NO_COLOR).
    """

    def __init__(self, stream: TextIO, *, max_steps: int, no_color: bool) -> None:
        self.due_s = 0.0
        self._stream, self.max_steps, self._no_color = stream, max_steps, no_color
        self._bar: tuple[RichProgress, TaskID] | None = None

    def show(self, glance: Glance) -> None:
        """Moves the bar."""
        self.due_s = time.monotonic() + _BAR_EVERY_S
        bar, task = self._bar or self._open()
        bar.update(task, completed=glance.step, words=words_of(glance, max_steps=self.max_steps))
        bar.refresh()

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        if self._bar is None:
            self._stream.write(text + "\n")
            self._stream.flush()
        else:
            self._bar[0].console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stops drawing and leaves the last state on the screen."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _open(self) -> tuple[RichProgress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(file=self._stream, no_color=self._no_color)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
        # No refresh thread: it would take the interpreter away from a step at any moment.
        bar = Progress(*columns, console=console, auto_refresh=False)
        bar.start()
        self._bar = (bar, bar.add_task("training", total=self.max_steps, words=""))
        return self._bar


def words_of(glance: Glance, *, max_steps: int) -> str:
    """Returns loss, speed and time left, e.g. "loss 2.3134  41,210 tokens/s  00:01:12 left"."""
    left = f"{clock((max_steps - glance.step) * glance.step_time_s)} left"
    return f"loss {glance.loss:.4f}  {glance.rate:,.0f} {glance.unit}/s  {left}"


def open_display(stream: TextIO, *, max_steps: int, env: Mapping[str, str]) -> Display:
    """Returns a bar for a terminal and plain lines for anything else.

    Args:
        stream: stderr.
        max_steps: steps of the whole run.
        env: NO_COLOR (any value but "") takes the colours away, TERM=dumb the bar.
    """
    if stream.isatty() and env.get("TERM") != "dumb":
        return BarDisplay(stream, max_steps=max_steps, no_color=bool(env.get("NO_COLOR")))
    return LineDisplay(stream, max_steps=max_steps)
