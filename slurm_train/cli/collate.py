"""`collate SWEEP`: one row per run: what it was given, how it ended, best and last metrics, attempts, GPU-hours."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_train.cli.arguments import build_run_parser
from slurm_train.cli.display import note
from slurm_train.cli.survey import look_once
from slurm_train.errors import ConfigError, RunError
from slurm_train.metrics.best import largest_is_best
from slurm_train.metrics.writer import read_metrics
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, find_sweep, list_sweeps, read_table, sweeps_named
from slurm_train.rundir.timing import goodput, held_s
from slurm_train.standing.facts import Standing, subjects_of

_EXAMPLES = """\
examples:
  python -m slurm_train collate 9b1c44e0                          a Markdown table
  python -m slurm_train collate 9b1c44e0 --out results.csv
  python -m slurm_train collate 9b1c44e0 --out results.parquet    needs pyarrow
"""
_FORMATS = {"csv": "csv", "md": "markdown", "parquet": "parquet"}

Cells = dict[str, Any]


def main(words: Sequence[str]) -> int:
    """Prints or writes the table and returns 0."""
    parser = build_run_parser("collate", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("sweep", metavar="SWEEP", help="run name or id of a sweep, job id of an array, or path")
    parser.add_argument("--format", choices=sorted(_FORMATS.values()), help="default: after --out, else markdown")
    parser.add_argument("--out", metavar="FILE", help="default: stdout")
    arguments = parser.parse_args(list(words))
    sweep = _find(Path(arguments.root), arguments.sweep)
    standings = look_once(subjects_of(read_table(sweep)), os.environ)
    rows = collate(standings)
    _put_out(rows, arguments.format, arguments.out)
    for line in best_lines(rows, standings):
        note(line)
    return 0


def _find(root: Path, word: str) -> SweepDirectory:
    if (sweep := find_sweep(root, word)) is not None:
        return sweep
    if found := sweeps_named(root, word):
        if len(found) > 1:
            older = ", ".join(one.sweep_id for one in found[1:])
            note(f"{word} is the name of {len(found)} sweeps; this is the newest, {found[0].sweep_id}, not {older}")
        return found[0]
    known = ", ".join(f"{one.sweep_id} ({_name_of(one)})" for one in list_sweeps(root)[:8]) or "none"
    one_run = "; `status RUN` and `report RUN` show one run"
    raise RunError(f"no sweep matches {word!r} below {root}", hint=f"sweeps there: {known}{one_run}")


def _name_of(sweep: SweepDirectory) -> str:
    return ", ".join(dict.fromkeys(element.run.name for element in read_table(sweep)))


def best_lines(rows: Sequence[Cells], standings: Sequence[Standing]) -> list[str]:
    """Returns which run is the best so far, by held-out loss, or by training loss where nothing is evaluated."""
    known = {name for row in rows for name, value in row.items() if value is not None}
    metric = next((name for name in ("eval_loss", "loss") if f"best_{name}" in known), None)
    valued = [pair for pair in zip(rows, standings, strict=True) if metric and pair[0][f"best_{metric}"] is not None]
    if not valued:
        return []
    row, one = min(valued, key=lambda pair: pair[0][f"best_{metric}"])
    given = " ".join(f"{key}={value}" for key, value in one.subject.overrides.items())
    value, step = row[f"best_{metric}"], row[f"best_{metric}_step"]
    return [f"best {metric}: {value:.5g} at step {step} of run {row['index']}, {row['run']}: {given}"]


def collate(rows: Sequence[Standing]) -> list[Cells]:
    """Returns one mapping per run; a column that a run has no value for is None, and all have the same columns."""
    found = [_cells(one) for one in rows]
    columns = list(dict.fromkeys(name for cells in found for name in cells))
    return [{name: cells.get(name) for name in columns} for cells in found]


def _cells(one: Standing) -> Cells:
    run, ledger = one.run, read_ledger(one.run)
    return {
        "index": one.subject.index,
        "run": f"{run.name}/{run.run_id}",
        **{key: _number(value) for key, value in one.subject.overrides.items()},
        "state": one.state.value,
        **_metrics(run),
        "attempts": len(ledger),
        "gpu_hours": round(sum(held_s(entry) * int(entry.get("world_size", 1)) for entry in ledger) / 3600, 4),
        "goodput": round(goodput(ledger).share, 4),
        "note": one.note,
    }


def _metrics(run: RunDirectory) -> Cells:
    """Returns the last value of each metric, and the best of loss and evaluations with its step."""
    values: dict[str, list[tuple[int, float]]] = {}
    step = 0
    for line in read_metrics(run.metrics):
        step = int(line["step"])
        for key, value in line.items():
            if (key == "loss" or key.startswith("eval_")) and isinstance(value, (int, float)):
                values.setdefault(key, []).append((step, float(value)))
    cells: Cells = {"step": step}
    for key, series in values.items():
        pick = max if largest_is_best(key) else min
        best_step, best = pick(series, key=lambda point: point[1])
        cells |= {f"last_{key}": series[-1][1], f"best_{key}": best, f"best_{key}_step": best_step}
    return cells


def _number(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _put_out(table: Sequence[Cells], form: str | None, out: str | None) -> None:
    form = form or _FORMATS.get(Path(out).suffix[1:] if out else "md", "csv")
    if form == "parquet":
        _write_parquet(table, out)
        return
    text = as_csv(table) if form == "csv" else as_markdown(table)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        write_atomic(Path(out), text, durable=False, mode=0o644)
    except OSError as err:
        raise RunError(f"{out} cannot be written: {err.strerror or err}", hint="name another file") from err
    note(f"{len(table)} runs in {out}")


def as_csv(table: Sequence[Cells]) -> str:
    """Returns the table as CSV with a header; floats in full precision, no value as an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]) if table else ["index"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def as_markdown(table: Sequence[Cells]) -> str:
    """Returns the table as Markdown; floats in five digits."""
    columns = list(table[0]) if table else ["index"]
    lines = [columns, ["---"] * len(columns), *([_shown(cells[name]) for name in columns] for cells in table)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


def _write_parquet(table: Sequence[Cells], out: str | None) -> None:
    if out is None:
        raise ConfigError("Parquet is not for a terminal", hint="name a file with --out FILE.parquet")
    try:
        from pyarrow import Table, parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        hint = "pip install pyarrow, or write --out FILE.csv"
        raise ConfigError("pyarrow is not installed here", hint=hint) from None
    parquet.write_table(Table.from_pydict(as_columns(table)), out)
    note(f"{len(table)} runs in {out}")


def as_columns(table: Sequence[Cells]) -> dict[str, list[Any]]:
    """Returns the table by columns, the values of each of one type: text where one is, else float where one is."""
    columns = {name: [cells[name] for cells in table] for name in (table[0] if table else ())}
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1:
            kind = str if str in kinds else float
            columns[name] = [None if value is None else kind(value) for value in values]
    return columns
