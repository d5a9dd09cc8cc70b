"""Tables of what happened: attempts with their ends, events, accepted changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_train.report.markup import Html, tag
from slurm_train.report.quantity import as_float, byte_size, duration, moment, setting
from slurm_train.report.table import Cell, cell_of, folded, table
from slurm_train.rundir.events import CALM_EVENTS
from slurm_train.slurm.nodelist import compact_nodelist

_MOST_EVENTS = 500
_SHORT = 24
_NOT_FACTS = ("event", "attempt", "time_unix_s", "step", "sample_ids", "sentence")


def attempts_table(attempts: Sequence[Mapping[str, Any]]) -> Html:
    """Returns the ledger as a table."""
    header = ["attempt", "job", "nodes", "ranks", "began", "held", "steps", "ended", "next", "note"]
    return table(header, [_attempt(entry) for entry in attempts], name="attempts")


def _attempt(entry: Mapping[str, Any]) -> list[Cell]:
    start, end = float(entry["time_unix_s"]), float(entry["end_time_unix_s"])
    first, last = as_float(entry.get("first_step")), as_float(entry.get("last_step"))
    code = as_float(entry.get("exit_code"))
    nodes = _nodes(entry.get("nodes"))
    return [
        cell_of(entry.get("attempt")),
        Cell(str(entry.get("job_id") or "-")),
        Cell(folded(nodes), None, "time" if len(nodes) < _SHORT else ""),
        cell_of(entry.get("world_size")),
        Cell(moment(start), start, "time"),
        Cell(duration(end - start), end - start, "num"),
        Cell("-" if last is None else f"{first or 0:.0f} to {last:.0f}", last, "num"),
        Cell(str(entry.get("reason", "-")) + (f" (code {code:.0f})" if code else "")),
        Cell(str(entry.get("action", "-"))),
        Cell(folded(str(entry.get("note", ""))), None, "words"),
    ]


def _nodes(nodes: Any) -> str:
    return compact_nodelist([str(node) for node in nodes]) if isinstance(nodes, list) else "-"


def events_table(events: Sequence[Mapping[str, Any]]) -> Html:
    """Returns what went wrong or was asked, oldest first."""
    shown = events[-_MOST_EVENTS:]
    rows = [
        [
            Cell(moment(as_float(event.get("time_unix_s"))), as_float(event.get("time_unix_s")), "time"),
            cell_of(event.get("attempt")),
            cell_of(event.get("step")),
            Cell(tag("span", str(event.get("event", "event")).replace("_", " "), class_=f"chip event-{_kind(event)}")),
            Cell(folded(_said(event)), None, "words"),
        ]
        for event in shown
    ]
    left_out = len(events) - len(shown)
    note = tag("p", f"The newest {_MOST_EVENTS} of {len(events)} events.", class_="note") if left_out else None
    return tag("div", note, table(["time", "attempt", "step", "event", "what is known"], rows, name="events"))


def _kind(event: Mapping[str, Any]) -> str:
    return "calm" if event.get("event") in CALM_EVENTS else "bad"


def _said(event: Mapping[str, Any]) -> str:
    facts = ", ".join(
        f"{key} {_fact(value)}" for key, value in event.items() if key not in _NOT_FACTS and value is not None
    )
    return ". ".join(filter(None, [str(event.get("sentence", "")), facts]))


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else setting(value)


def changes_table(changes: Sequence[Mapping[str, Any]]) -> Html:
    """Returns what a person changed in the middle of the run."""
    rows = [
        [
            Cell(moment(as_float(change.get("time_unix_s"))), as_float(change.get("time_unix_s")), "time"),
            cell_of(change.get("step")),
            Cell(folded(_change(change))),
        ]
        for change in changes
    ]
    return table(["accepted", "after step", "what"], rows, name="changes")


def _change(change: Mapping[str, Any]) -> str:
    values = {key: f"{key}: {setting(was)} -> {setting(now)}" for key, (was, now) in dict(change["config"]).items()}
    return "; ".join(values.get(name, str(name)) for name in change["names"])


def saves_table(saves: Sequence[Mapping[str, Any]]) -> Html:
    """Returns the saves, newest first."""
    rows = [
        [
            cell_of(save.get("step")),
            cell_of(save.get("attempt")),
            Cell(byte_size(as_float(save.get("bytes")) or 0.0), as_float(save.get("bytes")), "num"),
            Cell(duration(as_float(save.get("stall_s"))), as_float(save.get("stall_s")), "num"),
            Cell(duration(as_float(save.get("save_s"))), as_float(save.get("save_s")), "num"),
            Cell(moment(as_float(save.get("time_unix_s"))), as_float(save.get("time_unix_s")), "time"),
            Cell(folded(str(save.get("error", "")))),
        ]
        for save in reversed(saves[-_MOST_EVENTS:])
    ]
    header = ["step", "attempt", "size", "training stood still", "until durable", "ended", "error"]
    return table(header, rows, name="saves", is_sortable=True)
