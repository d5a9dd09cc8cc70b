"""The table of `status`: its columns, which of them fit a terminal, and how it is drawn there.

Columns without a value in any row are left out. Where the width is limited the least important ones go first, and the
notes, which are long, move below the table before the numbers that people look for are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from slurm_train.formatting import clock, count, duration
from slurm_train.status.run_status import SILENT_AFTER_S, RunState, RunStatus

if TYPE_CHECKING:
    from rich.console import Group

NOTHING = "-"
_GAP = 2
# So many characters of a note are worth a column; else it goes below the table.
_NOTE_LEAST = 32
# Columns up to this importance stay before notes get a column.
_NUMBERS = 4
_STYLES = {
    RunState.RUNNING: "green",
    RunState.FINISHING: "green",
    RunState.FINISHED: "bold green",
    RunState.QUEUED: "yellow",
    RunState.REQUEUED: "yellow",
    RunState.PREEMPTED: "yellow",
    RunState.NOT_STARTED: "dim",
    RunState.CANCELLED: "magenta",
    RunState.STOPPED: "magenta",
}
# All other states need a person.
_TROUBLE = "bold red"


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    cell: Callable[[RunStatus], str | None]
    importance: int
    """Columns of 0 stay however narrow the terminal is; the others go from the largest on."""
    is_optional: bool = False
    """Left out where no row has a value."""


@dataclass(frozen=True, slots=True)
class View:
    """A table that fits."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    states: tuple[RunState, ...]
    """Of the rows, for their colour."""
    notes_below: tuple[tuple[str, str], ...] = ()
    """Run and note, where there is no column for them."""


def build_view(statuses: Sequence[RunStatus], *, now_unix_s: float, width: int | None, of_sweep: bool = False) -> View:
    """Returns the table.

    Args:
        statuses: its rows.
        now_unix_s: the time, for what is relative to it.
        width: characters of a line; None: as wide as it gets, e.g. in a file.
        of_sweep: the runs are those of one sweep: with their numbers and values in front.
    """
    cells: dict[str, list[str]] = {}
    columns: list[Column] = []
    for column in _columns(statuses, of_sweep=of_sweep):
        texts = [column.cell(one) or NOTHING for one in statuses]
        if not column.is_optional or any(text != NOTHING for text in texts):
            cells[column.name] = texts
            columns.append(column)
    notes = [note_of(one, now_unix_s=now_unix_s) for one in statuses]
    widths = {name: max(map(len, (name, *texts))) for name, texts in cells.items()}
    has_column, shown = _fit(columns, widths, note_width=max(map(len, notes), default=0), width=width)
    header = [one.name for one in shown]
    rows = [[cells[name][row] for name in header] for row in range(len(statuses))]
    below: list[tuple[str, str]] = []
    if has_column:
        header.append("NOTE")
        rows = [[*row, text] for row, text in zip(rows, notes, strict=True)]
    else:
        named = [f"run {one.subject.index}" if of_sweep else one.label for one in statuses]
        below = [(name, text) for name, text in zip(named, notes, strict=True) if text]
    return View(tuple(header), tuple(map(tuple, rows)), tuple(one.state for one in statuses), tuple(below))


def _columns(statuses: Sequence[RunStatus], *, of_sweep: bool) -> list[Column]:
    keys = dict.fromkeys(key for one in statuses for key in one.subject.overrides)
    front = [
        Column("#", lambda one: str(one.subject.index), 0),
        *(Column(key, lambda one, key=key: one.subject.overrides.get(key), 1) for key in keys),  # type: ignore[misc]  # a default binds it
        Column("RUN", lambda one: one.run.run_id, 5),
    ]
    return [
        *(front if of_sweep else [Column("RUN", lambda one: one.label, 0)]),
        Column("JOB", lambda one: one.job_id, 6),
        Column("STATE", lambda one: one.state.label, 0),
        Column("STEP", lambda one: f"{one.step}/{one.max_steps}" if one.max_steps else None, 0),
        Column("LOSS", lambda one: None if one.loss is None else f"{one.loss:.4f}", 3),
        Column("SPEED", _speed, 4),
        Column("MFU", lambda one: None if one.mfu is None else f"{one.mfu:.1%}", 9, is_optional=True),
        Column("ETA", lambda one: None if one.time_left_s is None else clock(one.time_left_s), 2),
        Column("ATTEMPTS", lambda one: str(one.attempts), 10),
        Column("HEARTBEAT", lambda one: _ago(one.heartbeat_age_s), 8, is_optional=True),
        Column("NODES", lambda one: one.nodelist, 7, is_optional=True),
    ]


def _speed(one: RunStatus) -> str | None:
    for value, unit in ((one.tokens_per_s, "tok/s"), (one.samples_per_s, "samples/s")):
        if value is not None:
            return f"{value:,.0f} {unit}"
    return None


def _ago(seconds: float | None) -> str | None:
    return None if seconds is None else f"{duration(int(seconds))} ago"


def _fit(
    columns: Sequence[Column], widths: dict[str, int], *, note_width: int, width: int | None
) -> tuple[bool, list[Column]]:
    """Returns whether the notes have a column, and the others that are shown."""

    def total(shown: Sequence[Column]) -> int:
        return sum(widths[one.name] + _GAP for one in shown) - _GAP

    def drop(*, room: int, keeps: int) -> list[Column]:
        # Without the least important ones, until they fit or only those up to `keeps` are left.
        shown = list(columns)
        while total(shown) > room:
            least = max(shown, key=lambda one: one.importance)
            if least.importance <= keeps:
                break
            shown.remove(least)
        return shown

    if width is None:
        return True, list(columns)
    needed = _GAP + max(min(note_width, _NOTE_LEAST), len("NOTE")) if note_width else 0
    shown = drop(room=width - needed, keeps=_NUMBERS)
    if total(shown) + needed <= width:
        return bool(note_width), shown
    return False, drop(room=width, keeps=0)


def note_of(one: RunStatus, *, now_unix_s: float) -> str:
    """Returns why a run waits or ended, its place in the queue, and which rank is silent; "" for none of these."""
    parts = [one.note] if one.note else []
    if one.jobs_ahead is not None:
        parts.append(f"{count(one.jobs_ahead, 'job')} ahead" if one.jobs_ahead else "next in line")
    if one.expected_start_unix_s is not None:
        left_s = one.expected_start_unix_s - now_unix_s
        form = "%H:%M" if left_s < 43200 else "%a %d %b %H:%M"
        in_time = f", in {duration(int(left_s))}" if left_s > 0 else ""
        parts.append(f"expected start {datetime.fromtimestamp(one.expected_start_unix_s):{form}}{in_time}")
    if one.heartbeat_age_s is not None and one.heartbeat_age_s > SILENT_AFTER_S:
        age = duration(int(one.heartbeat_age_s))
        parts.append(f"no heartbeat of rank {one.heartbeat_rank} on {one.heartbeat_host} for {age}")
    return "; ".join(parts)


def summary(statuses: Sequence[RunStatus]) -> str:
    """Returns how many runs there are of each state, e.g. "24 runs: 20 finished, 3 running, 1 failed"."""
    counts = Counter(one.state.label for one in statuses).most_common()
    states = ", ".join(f"{num} {label}" for label, num in counts)
    return f"{count(len(statuses), 'run')}: {states}" if statuses else "no runs"


def render(view: View, *, lines_after: Sequence[str] = ()) -> Group:
    """Returns the table, the notes that have no column, and lines after them, for a console of rich's."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in view.header:
        is_note = name == "NOTE"
        table.add_column(name, no_wrap=not is_note, overflow="fold" if is_note else "ellipsis")
    for row, state in zip(view.rows, view.states, strict=True):
        style = _STYLES.get(state, _TROUBLE)
        cells = zip(row, view.header, strict=True)
        table.add_row(*(Text(text, style=style if name == "STATE" else "") for text, name in cells))
    below = [Text(f"  {name}: {text}") for name, text in view.notes_below]
    return Group(table, *below, *map(Text, lines_after))
