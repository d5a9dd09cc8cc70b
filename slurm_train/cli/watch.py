"""`status -w`: the table again and again, until all runs in it have ended or Ctrl-C.

The files are read at every look; Slurm is asked at its own pace, however short the interval. On a terminal the table is
redrawn in place; elsewhere it is printed anew when something has changed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TextIO

from slurm_train.cli.selection import Selection
from slurm_train.cli.status_table import build_view, render, summary
from slurm_train.cli.terminal import build_console, note, takes_escapes, width_of
from slurm_train.formatting import duration, table
from slurm_train.status.run_status import RunState, RunStatus, Survey, Surveyor

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

_ON_TERMINAL_S, _ELSEWHERE_S = 5.0, 30.0
# Where reading the files takes long, the file system gets as much rest as this times over.
_REST = 4.0
# Where nothing is active any more it is looked once more, with a new answer of Slurm's if that comes soon.
_SURE_AFTER_S, _LONGEST_DOUBT_S = 3.0, 30.0
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is shown at one moment."""

    survey: Survey
    now_unix_s: float
    of_sweep: bool

    def headline(self) -> str:
        """Returns the time, the number of runs in each state, and how old Slurm's answer is where that matters."""
        text = f"{datetime.fromtimestamp(self.now_unix_s):%H:%M:%S}  {summary(self.survey.statuses)}"
        look = self.survey.look
        if not look.problem:
            return text
        age = "this is from the files alone"
        if look.age_s is not None:
            age = f"its last answer is {duration(int(look.age_s))} old"
        return f"{text}; Slurm does not answer, asked again in {duration(int(look.is_due_in_s))}; {age}"


class Screen(Protocol):
    """Shows pictures, one after the other."""

    def show(self, picture: Picture) -> None:
        """Shows the newest."""

    def close(self) -> None:
        """Leaves the last one as it is."""


def watch(
    selection: Selection,
    surveyor: Surveyor,
    *,
    every_s: float | None,
    as_json: bool,
    env: Mapping[str, str],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Shows the status of the chosen runs until all have ended; returns 0, or 130 after Ctrl-C, which ends no run.

    Args:
        selection: which runs.
        surveyor: reads their status.
        every_s: seconds between two looks; None: depends on where it is shown.
        as_json: one line of JSON per look.
        env: environment of the caller.
        sleep: waits.
    """
    is_live = takes_escapes(sys.stdout, env) and not as_json
    every_s = every_s or (_ON_TERMINAL_S if is_live else _ELSEWHERE_S)
    screen: Screen = LiveScreen(sys.stdout, env) if is_live else LineScreen(sys.stdout, as_json=as_json)
    seems_over = False
    try:
        while True:
            start_s = time.monotonic()
            survey = surveyor.look(selection.subjects())
            kept = Survey(tuple(one for one in survey.statuses if selection.keeps(one)), survey.look)
            if not kept.statuses:
                note(selection.nothing_found(num_runs=len(survey.statuses)))
                return 0
            screen.show(Picture(survey=kept, now_unix_s=time.time(), of_sweep=selection.sweep() is not None))
            if kept.is_settled or (kept.is_over and seems_over):
                return 0
            # Between two runs of a sweep on this machine, and between two attempts, nothing is active for a moment.
            seems_over = kept.is_over
            sure_s = min(_LONGEST_DOUBT_S, max(_SURE_AFTER_S, kept.look.is_due_in_s))
            sleep(sure_s if seems_over else max(every_s, _REST * (time.monotonic() - start_s)))
    except KeyboardInterrupt:
        screen.close()
        note("no longer watching; the runs go on")
        return _EXIT_INTERRUPTED
    finally:
        screen.close()


class LineScreen:
    """Plain tables under the time, each only if something in it has changed; or one line of JSON per look.

    Args:
        stream: where to print.
        as_json: a list of what `status --json` prints, in one line.
    """

    def __init__(self, stream: TextIO, *, as_json: bool = False) -> None:
        self._stream, self._as_json = stream, as_json
        self._shown: list[object] = []

    def show(self, picture: Picture) -> None:
        """Prints it; a table only if it differs from the last one."""
        statuses = picture.survey.statuses
        if self._as_json:
            print(json.dumps([one.as_json() for one in statuses]), file=self._stream, flush=True)
            return
        facts: list[object] = [(one.run, one.state, one.step, one.attempts, one.note) for one in statuses]
        facts.append(bool(picture.survey.look.problem))
        if facts == self._shown:
            return
        self._shown = facts
        width = width_of(self._stream)
        view = build_view(statuses, now_unix_s=picture.now_unix_s, width=width, of_sweep=picture.of_sweep)
        lines = [picture.headline(), table(view.header, view.rows)]
        lines += [f"  {name}: {text}" for name, text in view.notes_below]
        print("\n".join(lines), file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves what was printed."""


class LiveScreen:
    """A table that is redrawn in place.

    Args:
        stream: a terminal.
        env: environment of the caller.
    """

    def __init__(self, stream: TextIO, env: Mapping[str, str]) -> None:
        self._console = build_console(stream, env)
        self._live: Live | None = None

    def show(self, picture: Picture) -> None:
        """Redraws it."""
        from rich.live import Live

        shown = self._fitted(picture)
        if self._live is None:
            self._live = Live(shown, console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start(refresh=True)
        else:
            self._live.update(shown, refresh=True)

    def close(self) -> None:
        """Gives the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _fitted(self, picture: Picture) -> Group:
        """Returns as many rows as the height takes; those that have ended well go first."""
        statuses, width = picture.survey.statuses, self._console.width
        num_rows = len(statuses)
        while True:
            kept = most_interesting(statuses, num_rows)
            view = build_view(kept, now_unix_s=picture.now_unix_s, width=width, of_sweep=picture.of_sweep)
            hidden = len(statuses) - len(kept)
            more = [f"... and {hidden} more; a taller window shows them"] if hidden else []
            shown = render(view, lines_after=[*more, "", picture.headline()])
            too_many = len(self._console.render_lines(shown)) - self._console.height
            if too_many < 0 or num_rows <= 1:
                return shown
            num_rows = max(1, num_rows - max(1, too_many))


# Left out first where there is no room.
_LEAST_INTERESTING = (RunState.FINISHED, RunState.NOT_STARTED, RunState.CANCELLED, RunState.QUEUED)


def most_interesting(statuses: Sequence[RunStatus], number: int) -> list[RunStatus]:
    """Returns so many runs, in their order; the finished ones are left out first, those that run last."""
    rank = {state: len(_LEAST_INTERESTING) - place for place, state in enumerate(_LEAST_INTERESTING)}
    order = sorted(range(len(statuses)), key=lambda index: (rank.get(statuses[index].state, 0), index))
    return [statuses[index] for index in sorted(order[:number])]
