"""What a person sees while a run trains: a bar on a terminal, one line now and then in a log. Rank 0 only.

Everything goes to stderr. rich is imported on a terminal alone and not before the first step is shown, so a job's
start never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from slurm_train.formatting import clock as countdown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_BAR_EVERY_S = 0.5
_FIRST_LINE_AFTER_S = 2.0
_LINE_EVERY_S = 10.0


class Display:
    """Shows a run: a rich progress bar, drawn by the calling thread, or lines; the first comes after two seconds.

    Args:
        stream: where to write; a terminal for a bar.
        max_steps: steps of the whole run; may be set until the first `show`.
        has_bar: draw a bar.
        no_color: draw it without colours.
        every_s: seconds between lines, or between two drawings of the bar.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        max_steps: int,
        has_bar: bool = False,
        no_color: bool = False,
        every_s: float = _LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_steps = max_steps
        self.due_s = clock() + (0.0 if has_bar else _FIRST_LINE_AFTER_S)
        """The time (of `clock`) from which the next `show` is welcome."""
        self._stream, self._has_bar, self._no_color = stream, has_bar, no_color
        self._every_s, self._clock = every_s, clock
        self._bar: tuple[Progress, TaskID] | None = None

    def show(self, step: int, *, loss: float, rate: float, unit: str, step_time_s: float) -> None:
        """Moves the bar, or writes a line, e.g. "step 120/400  loss 2.3134  41,210 tokens/s  00:01:12 left".

        Args:
            step: the last one that is done.
            loss: its loss.
            rate: tokens or samples per second over all ranks.
            unit: what `rate` counts: "tokens" or "samples".
            step_time_s: seconds per step, for the time that is left.
        """
        self.due_s = self._clock() + self._every_s
        left = countdown((self.max_steps - step) * step_time_s)
        words = f"loss {loss:.4f}  {rate:,.0f} {unit}/s  {left} left"
        if self._has_bar:
            bar, task = self._bar = self._bar or self._open()
            bar.update(task, completed=step, words=words)
            bar.refresh()
        else:
            self.say(f"step {step}/{self.max_steps}  {words}")

    def say(self, text: str) -> None:
        """Writes a line that stays, above the bar if there is one."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar[0].console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stops drawing and leaves the last state on the screen."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _open(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(file=self._stream, no_color=self._no_color)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
        # No refresh thread: it would take the interpreter away from a step at any moment.
        bar = Progress(*columns, console=console, auto_refresh=False)
        bar.start()
        return bar, bar.add_task("training", total=self.max_steps, words="")


def open_display(stream: TextIO, *, max_steps: int, env: Mapping[str, str]) -> Display:
    """Returns a bar for a terminal and plain lines for anything else.

    Args:
        stream: stderr.
        max_steps: steps of the whole run.
        env: NO_COLOR (any value but "") takes the colours away, TERM=dumb the bar.
    """
    if stream.isatty() and env.get("TERM") != "dumb":
        no_color = bool(env.get("NO_COLOR"))
        return Display(stream, max_steps=max_steps, has_bar=True, no_color=no_color, every_s=_BAR_EVERY_S)
    return Display(stream, max_steps=max_steps)
