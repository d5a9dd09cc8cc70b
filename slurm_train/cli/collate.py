"""`collate SWEEP`: one row per run: what it was given, how it ended, best and last metrics, attempts, GPU-hours."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.cli.selection import look_once, parse_runs
from slurm_train.cli.terminal import note
from slurm_train.errors import ConfigError, RunError
from slurm_train.metrics import largest_is_best, read_series
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.lookup import closed_places
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, find_sweep, list_sweeps, read_table, sweeps_named
from slurm_train.rundir.timing import goodput, held_s
from slurm_train.status.run_status import RunStatus

_FORMATS = {"csv": "csv", "md": "markdown", "parquet": "parquet"}

Cells = dict[str, Any]


def main(words: Sequence[str]) -> int:
    """Prints or writes the table and returns 0."""
    arguments = parse_runs("collate", words)
    sweep = _find(arguments.root, arguments.sweep)
    statuses = look_once(read_table(sweep), os.environ)
    rows = collate(statuses)
    _put_out(rows, arguments.format, arguments.out)
    if line := best_line(rows, [status.subject.overrides for status in statuses]):
        note(line)
    return 0


def _find(root: Path, word: str) -> SweepDirectory:
    if (sweep := find_sweep(root, word)) is not None:
        return sweep
    if found := sweeps_named(root, word):
        if len(found) > 1:
            note(f"{len(found)} sweeps are named {word}; this is the newest, {found[0].sweep_id}")
        return found[0]
    names = {
        sweep.sweep_id: dict.fromkeys(run.run.name for run in read_table(sweep)) for sweep in list_sweeps(root)[:8]
    }
    known = ", ".join(f"{sweep_id} ({', '.join(its)})" for sweep_id, its in names.items()) or "none"
    hint = f"sweeps there: {known}; `status RUN` and `report RUN` show one run"
    closed = closed_places(root)
    hint += f"; folders that you may not enter: {closed}" if closed else ""
    raise RunError(f"no sweep matches {word!r} below {root}", hint=hint)


def best_line(rows: Sequence[Cells], given: Sequence[Mapping[str, str]]) -> str:
    """Returns which run is the best so far, by held-out loss, or by training loss where nothing is evaluated.

    Args:
        rows: the table.
        given: what the sweep gave to each run.
    """
    for metric in ("eval_loss", "loss"):
        key = f"best_{metric}"
        valued = [(row[key], number) for number, row in enumerate(rows) if row.get(key) is not None]
        if valued:
            value, number = min(valued)
            row, words = rows[number], " ".join(f"{name}={status}" for name, status in given[number].items())
            step, run = row[f"{key}_step"], f"run {row['index']}, {row['run']}"
            return f"best {metric}: {value:.5g} at step {step} of {run}: {words}"
    return ""


def collate(statuses: Sequence[RunStatus]) -> list[Cells]:
    """Returns one mapping per run; a column that a run has no value for is None, and all have the same columns."""
    found = [_cells(status) for status in statuses]
    columns = list(dict.fromkeys(name for cells in found for name in cells))
    return [{name: cells.get(name) for name in columns} for cells in found]


def _cells(status: RunStatus) -> Cells:
    ledger = read_ledger(status.run)
    return {
        "index": status.subject.index,
        "run": status.label,
        **{key: _number(value) for key, value in status.subject.overrides.items()},
        "state": status.state.value,
        **_metrics(status.run),
        "attempts": len(ledger),
        "gpu_hours": round(sum(held_s(entry) * int(entry.get("world_size", 1)) for entry in ledger) / 3600, 4),
        "goodput": round(goodput(ledger).share, 4),
        "note": status.note,
    }


def _metrics(run: RunDirectory) -> Cells:
    """Returns the last value of each metric, and the best of loss and evaluations with its step."""
    series = read_series(run.metrics)
    cells: Cells = {"step": int(series.last("step") or 0)}
    for key in ("loss", *series.evaluations):
        steps, values = series.points(key)
        if values:
            best = (max if largest_is_best(key) else min)(range(len(values)), key=values.__getitem__)
            cells |= {f"last_{key}": values[-1], f"best_{key}": values[best], f"best_{key}_step": int(steps[best])}
    return cells


def _number(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _put_out(rows: Sequence[Cells], form: str | None, out: str | None) -> None:
    form = form or _FORMATS.get(Path(out).suffix[1:] if out else "md", "csv")
    if form == "parquet":
        _write_parquet(rows, out)
    else:
        text = as_csv(rows) if form == "csv" else as_markdown(rows)
        if out is None:
            sys.stdout.write(text)
            return
        try:
            write_atomic(Path(out), text, durable=False, mode=0o644)
        except OSError as err:
            raise RunError(f"{out} cannot be written: {err.strerror or err}", hint="name another file") from err
    note(f"{len(rows)} runs in {out}")


def as_csv(rows: Sequence[Cells]) -> str:
    """Returns the table as CSV with a header; floats in full precision, no value as an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["index"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(rows: Sequence[Cells]) -> str:
    """Returns the table as Markdown; floats in five digits."""
    columns = list(rows[0]) if rows else ["index"]
    lines = [columns, ["---"] * len(columns), *([_shown(cells[name]) for name in columns] for cells in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


def _write_parquet(rows: Sequence[Cells], out: str | None) -> None:
    if out is None:
        raise ConfigError("--format parquet needs a file", hint="name one with --out FILE.parquet")
    try:
        from pyarrow import Table, parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        hint = "pip install pyarrow, or write --out FILE.csv"
        raise ConfigError("pyarrow is not installed here", hint=hint) from None
    parquet.write_table(Table.from_pydict(as_columns(rows)), out)


def as_columns(rows: Sequence[Cells]) -> dict[str, list[Any]]:
    """Returns the table by columns, the values of each of one type: text where one is, else float where one is."""
    columns = {name: [cells[name] for cells in rows] for name in (rows[0] if rows else ())}
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1:
            kind = str if str in kinds else float
            columns[name] = [None if value is None else kind(value) for value in values]
    return columns
