"""The table of `status`: which columns there are, what stands in their cells, and which of them fit a terminal.

Nothing is printed here. Columns without a value in any row are left out. Where the width is limited the least important
ones go first, and the reasons, which are long, move below the table before the numbers that people look for are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from slurm_train.cli.timespan import as_clock, span_in_words
from slurm_train.standing.facts import Standing
from slurm_train.standing.states import RunState
from slurm_train.standing.verdict import SILENT_AFTER_S

NOTHING = "-"
_GAP = 2
# So many characters of a reason are worth a column; else it goes below the table.
_NOTE_LEAST = 32
# Columns up to this importance stay before reasons get a column.
_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    cell: Callable[[Standing], str]
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
    """Run and reason, where there is no column for them."""


def build_view(standings: Sequence[Standing], *, now_unix_s: float, width: int | None, of_sweep: bool = False) -> View:
    """Returns the table.

    Args:
        standings: its rows.
        now_unix_s: the time, for what is said relative to it.
        width: characters of a line; None: as wide as it gets, e.g. in a file.
        of_sweep: the runs are those of one sweep: with their numbers and values in front.
    """
    columns = [one for one in _columns(standings, of_sweep=of_sweep) if _is_wanted(one, standings)]
    cells = {one.name: [one.cell(standing) for standing in standings] for one in columns}
    notes = [note_of(standing, now_unix_s=now_unix_s) for standing in standings]
    widths = {name: max(map(len, (name, *texts))) for name, texts in cells.items()}
    has_column, shown = _fit(columns, widths, note_width=max(map(len, notes), default=0), width=width)
    header = [one.name for one in shown]
    rows = [[cells[name][row] for name in header] for row in range(len(standings))]
    below: list[tuple[str, str]] = []
    if has_column:
        header.append("NOTE")
        rows = [[*row, note] for row, note in zip(rows, notes, strict=True)]
    else:
        named = [f"run {one.subject.index}" if of_sweep else _name(one) for one in standings]
        below = [(name, note) for name, note in zip(named, notes, strict=True) if note]
    states = tuple(one.state for one in standings)
    return View(tuple(header), tuple(map(tuple, rows)), states, tuple(below))


def _columns(standings: Sequence[Standing], *, of_sweep: bool) -> list[Column]:
    keys = dict.fromkeys(key for one in standings for key in one.subject.overrides) if of_sweep else {}
    front = [
        Column("#", lambda one: str(one.subject.index), 0),
        *(Column(key, _value_given(key), 1) for key in keys),
        Column("RUN", lambda one: one.run.run_id, 5),
    ]
    return [
        *(front if of_sweep else [Column("RUN", _name, 0)]),
        Column("JOB", lambda one: one.job_id or NOTHING, 6),
        Column("STATE", lambda one: one.state.label, 0),
        Column("STEP", _step, 0),
        Column("LOSS", lambda one: NOTHING if one.loss is None else f"{one.loss:.4f}", 3),
        Column("SPEED", _speed, 4),
        Column("MFU", lambda one: NOTHING if one.mfu is None else f"{one.mfu:.1%}", 9, is_optional=True),
        Column("ETA", lambda one: NOTHING if one.time_left_s is None else as_clock(one.time_left_s), 2),
        Column("ATTEMPTS", lambda one: str(one.attempts), 10),
        Column("HEARTBEAT", _heartbeat, 8, is_optional=True),
        Column("NODES", lambda one: one.nodelist or NOTHING, 7, is_optional=True),
    ]


def _name(one: Standing) -> str:
    return f"{one.run.name}/{one.run.run_id}"


def _value_given(key: str) -> Callable[[Standing], str]:
    return lambda one: one.subject.overrides.get(key, "")


def _is_wanted(column: Column, standings: Sequence[Standing]) -> bool:
    return not column.is_optional or any(column.cell(one) != NOTHING for one in standings)


def _fit(
    columns: Sequence[Column], widths: dict[str, int], *, note_width: int, width: int | None
) -> tuple[bool, list[Column]]:
    """Returns whether the reasons have a column, and the others that are shown."""
    if width is None:
        return True, list(columns)
    least = min(note_width, _NOTE_LEAST)
    needed = _GAP + max(least, len("NOTE")) if note_width else 0
    shown = _drop(columns, widths, room=width - needed, keeps=_NUMBERS)
    if _total(shown, widths) + needed <= width:
        return bool(note_width), shown
    return False, _drop(columns, widths, room=width, keeps=0)


def _drop(columns: Sequence[Column], widths: dict[str, int], *, room: int, keeps: int) -> list[Column]:
    """Returns the columns without the least important ones, until they fit or only those up to `keeps` are left."""
    shown = list(columns)
    while _total(shown, widths) > room:
        least = max(shown, key=lambda one: one.importance)
        if least.importance <= keeps:
            break
        shown.remove(least)
    return shown


def _total(columns: Sequence[Column], widths: dict[str, int]) -> int:
    return sum(widths[one.name] + _GAP for one in columns) - _GAP


def _step(one: Standing) -> str:
    return f"{one.step}/{one.max_steps}" if one.max_steps else NOTHING


def _speed(one: Standing) -> str:
    for value, unit in ((one.tokens_per_s, "tok/s"), (one.samples_per_s, "samples/s")):
        if value is not None:
            return f"{value:,.0f} {unit}"
    return NOTHING


def _heartbeat(one: Standing) -> str:
    return NOTHING if one.beat_age_s is None else f"{span_in_words(one.beat_age_s)} ago"


def note_of(one: Standing, *, now_unix_s: float) -> str:
    """Returns why a run waits or ended, its place in the queue, and which rank is silent; "" for none of these."""
    parts = [one.note] if one.note else []
    if one.jobs_ahead is not None:
        parts.append(_place(one.jobs_ahead))
    if one.expected_start_unix_s is not None:
        parts.append(_expected(one.expected_start_unix_s, now_unix_s))
    if one.beat_age_s is not None and one.beat_age_s > SILENT_AFTER_S:
        parts.append(f"rank {one.beat_rank} on {one.beat_host} silent for {span_in_words(one.beat_age_s)}")
    return "; ".join(parts)


def _place(jobs_ahead: int) -> str:
    if not jobs_ahead:
        return "next in line"
    return f"{jobs_ahead} job{'' if jobs_ahead == 1 else 's'} ahead"


def _expected(start_unix_s: float, now_unix_s: float) -> str:
    start = datetime.fromtimestamp(start_unix_s)
    form = "%H:%M" if start_unix_s - now_unix_s < 43200 else "%a %d %b %H:%M"
    left_s = start_unix_s - now_unix_s
    return f"expected start {start:{form}}" + (f", in {span_in_words(left_s)}" if left_s > 0 else "")


def summary(standings: Sequence[Standing]) -> str:
    """Returns how many runs there are of each state, e.g. "24 runs: 20 finished, 3 running, 1 failed"."""
    counts = Counter(one.state.label for one in standings)
    told = ", ".join(f"{count} {label}" for label, count in counts.most_common())
    return f"{len(standings)} run{'' if len(standings) == 1 else 's'}: {told}" if standings else "no runs"
