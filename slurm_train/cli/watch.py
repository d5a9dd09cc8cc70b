"""`status -w`: the table again and again, until all runs in it have ended or Ctrl-C.

The files are read at every look; Slurm is asked at its own pace (slurm/pace.py), however short the interval. On a
terminal the table is redrawn in place; elsewhere it is printed anew when something has changed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TextIO

from slurm_train.cli.choice import Choice
from slurm_train.cli.display import note, table
from slurm_train.cli.status_table import build_view, summary
from slurm_train.cli.terminal import build_console, takes_escapes, width_of
from slurm_train.cli.timespan import span_in_words
from slurm_train.slurm.queue_view import Look
from slurm_train.standing.facts import Standing
from slurm_train.standing.schema import as_mapping
from slurm_train.standing.states import RunState
from slurm_train.standing.survey import Survey, Surveyor

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
    """What is to be seen at one moment."""

    standings: tuple[Standing, ...]
    look: Look
    now_unix_s: float
    of_sweep: bool


class Screen(Protocol):
    """Shows pictures, one after the other."""

    def show(self, picture: Picture) -> None:
        """Shows the newest."""

    def close(self) -> None:
        """Leaves the last one as it is."""


def watch(
    choice: Choice,
    surveyor: Surveyor,
    *,
    every_s: float | None,
    as_json: bool,
    env: Mapping[str, str],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Shows how the chosen runs stand until all have ended; returns 0, or 130 after Ctrl-C, which ends no run.

    Args:
        choice: which runs.
        surveyor: looks at them.
        every_s: seconds between two looks; None: after where it is shown.
        as_json: one line of JSON per look.
        env: environment of the caller.
        sleep: waits.
    """
    is_live = takes_escapes(sys.stdout, env) and not as_json
    every_s = every_s or (_ON_TERMINAL_S if is_live else _ELSEWHERE_S)
    screen: Screen = LiveScreen(sys.stdout, env) if is_live else JsonScreen() if as_json else LineScreen(sys.stdout)
    try:
        return _look_until_over(choice, surveyor, screen, every_s=every_s, sleep=sleep)
    except KeyboardInterrupt:
        screen.close()
        note("no longer watching; the runs go on")
        return _EXIT_INTERRUPTED
    finally:
        screen.close()


def _look_until_over(
    choice: Choice, surveyor: Surveyor, screen: Screen, *, every_s: float, sleep: Callable[[float], None]
) -> int:
    seems_over = False
    while True:
        start_s = time.monotonic()
        survey = surveyor.look(choice.subjects())
        kept = Survey(tuple(one for one in survey.standings if choice.keeps(one)), survey.look)
        if not kept.standings:
            note(choice.nothing_found(num_runs=len(survey.standings)))
            return 0
        of_sweep = choice.sweep() is not None
        screen.show(Picture(standings=kept.standings, look=kept.look, now_unix_s=time.time(), of_sweep=of_sweep))
        if kept.is_settled or (kept.is_over and seems_over):
            return 0
        # Between two runs of a sweep on this machine, and between two attempts, nothing is active for a moment.
        seems_over = kept.is_over
        sure_s = min(_LONGEST_DOUBT_S, max(_SURE_AFTER_S, kept.look.is_due_in_s))
        sleep(sure_s if seems_over else max(every_s, _REST * (time.monotonic() - start_s)))


class JsonScreen:
    """One line of JSON per look: a list of what `status --json` prints."""

    def show(self, picture: Picture) -> None:
        """Prints it."""
        print(json.dumps([as_mapping(one) for one in picture.standings]), flush=True)

    def close(self) -> None:
        """Does nothing."""


class LineScreen:
    """Plain tables under the time, each only if something in it has changed.

    Args:
        stream: where to print.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: list[object] = []

    def show(self, picture: Picture) -> None:
        """Prints it, unless it says what the last one said."""
        facts: list[object] = [(one.run, one.state, one.step, one.attempts, one.note) for one in picture.standings]
        facts.append(bool(picture.look.problem))
        if facts == self._shown:
            return
        self._shown = facts
        view = build_view(
            picture.standings,
            now_unix_s=picture.now_unix_s,
            width=width_of(self._stream),
            of_sweep=picture.of_sweep,
        )
        lines = [_headline(picture), table(view.header, view.rows)]
        lines += [f"  {name}: {text}" for name, text in view.notes_below]
        print("\n".join(lines), file=self._stream, flush=True)

    def close(self) -> None:
        """Does nothing."""


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
        from slurm_train.cli.status_screen import render

        num_rows = len(picture.standings)
        while True:
            kept = most_telling(picture.standings, num_rows)
            view = build_view(kept, now_unix_s=picture.now_unix_s, width=self._console.width, of_sweep=picture.of_sweep)
            hidden = len(picture.standings) - len(kept)
            more = [f"... and {hidden} more; a taller window shows them"] if hidden else []
            shown = render(view, lines_after=[*more, "", _headline(picture)])
            too_many = len(self._console.render_lines(shown)) - self._console.height
            if too_many < 0 or num_rows <= 1:
                return shown
            num_rows = max(1, num_rows - max(1, too_many))


# Left out first where there is no room.
_LEAST_TELLING = (RunState.FINISHED, RunState.NOT_STARTED, RunState.CANCELLED, RunState.QUEUED)


def most_telling(standings: Sequence[Standing], number: int) -> list[Standing]:
    """Returns so many standings, in their order; the finished ones are left out first, those that run last."""
    dullness = {state: len(_LEAST_TELLING) - place for place, state in enumerate(_LEAST_TELLING)}
    by_interest = sorted(range(len(standings)), key=lambda index: (dullness.get(standings[index].state, 0), index))
    return [standings[index] for index in sorted(by_interest[:number])]


def _headline(picture: Picture) -> str:
    moment = datetime.fromtimestamp(picture.now_unix_s)
    return f"{moment:%H:%M:%S}  {summary(picture.standings)}{_about_slurm(picture.look)}"


def _about_slurm(look: Look) -> str:
    """Returns how old Slurm's answer is where that matters."""
    if not look.problem:
        return ""
    last = "this is from the files alone"
    if look.age_s is not None:
        last = f"its last answer is {span_in_words(look.age_s)} old"
    return f"; Slurm does not answer, asked again in {span_in_words(look.is_due_in_s)}; {last}"
