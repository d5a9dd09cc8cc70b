"""How the table of `status` looks on a terminal: rich's tables, states in colour, rows that fit the height."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_train.cli.status_table import View
from slurm_train.standing.states import RunState

if TYPE_CHECKING:
    from rich.console import Group

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
_TROUBLE = "bold red"


def style_of(state: RunState) -> str:
    """Returns the colour of a state; all that needs a person is red."""
    return _STYLES.get(state, _TROUBLE)


def render(view: View, *, lines_after: Sequence[str] = ()) -> Group:
    """Returns the table, the reasons that have no column, and lines after them, for a console of rich's."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in view.header:
        is_note = name == "NOTE"
        table.add_column(name, no_wrap=not is_note, overflow="fold" if is_note else "ellipsis")
    for row, state in zip(view.rows, view.states, strict=True):
        styles = [style_of(state) if name == "STATE" else "" for name in view.header]
        table.add_row(*(Text(text, style=style) for text, style in zip(row, styles, strict=True)))
    below = [Text(f"  {name}: {note}") for name, note in view.notes_below]
    return Group(table, *below, *map(Text, lines_after))
