"""`collate SWEEP`: one row per run: what it was given, how it ended, best and last metrics, attempts, GPU-hours."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurm_train.cli.selection import look_once, parse_runs
from slurm_train.cli.terminal import note
from slurm_train.errors import ConfigError, RunError
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.lookup import closed_places, find_sweep
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, list_sweeps, read_table, sweeps_named
from slurm_train.tools.report.collate import Cells, as_columns, as_csv, as_markdown, best_line, collate
from slurm_train.tools.report.run import read_config

# Formats of --out by the ending of the file.
_FORMATS = {"csv": "csv", "md": "markdown", "parquet": "parquet"}
_MOST_SWEEPS = 8


def main(words: Sequence[str]) -> int:
    """Prints or writes the table and returns 0."""
    arguments = parse_runs("collate", words)
    sweep = _find(arguments.root, arguments.sweep)
    statuses = look_once(read_table(sweep), os.environ)
    rows = collate(statuses)
    _put_out(rows, arguments.format, arguments.out)
    values = [status.subject.overrides for status in statuses]
    line = best_line(rows, values, objective=_objective_of([status.run for status in statuses]))
    if line:
        note(line)
    return 0


def _objective_of(runs: Iterable[RunDirectory]) -> str | None:
    """Returns `sweep.objective` of a sweep's runs, which is the same for all of them."""
    for run in runs:
        config = read_config(run.config)
        # A run that was never written has no configuration.
        if config:
            objective: str | None = config.get("sweep", {}).get("objective")
            return objective
    return None


def _find(root: Path, word: str) -> SweepDirectory:
    sweep = find_sweep(root, word)
    if sweep is not None:
        return sweep
    sweeps = sweeps_named(root, word)
    if len(sweeps) > 1:
        note(f"{len(sweeps)} sweeps are named {word}; this is the newest, {sweeps[0].sweep_id}")
    if sweeps:
        return sweeps[0]
    labels: list[str] = []
    for candidate in list_sweeps(root)[:_MOST_SWEEPS]:
        names = dict.fromkeys(element.run.name for element in read_table(candidate))
        labels.append(f"{candidate.sweep_id} ({', '.join(names)})")
    hint = f"sweeps there: {', '.join(labels) or 'none'}; `status RUN` and `report RUN` show one run"
    closed = closed_places(root)
    if closed:
        hint += f"; folders that you may not enter: {closed}"
    raise RunError(f"no sweep matches {word!r} below {root}", hint=hint)


def _put_out(rows: Sequence[Cells], form: str | None, out: str | None) -> None:
    if form is None:
        form = _FORMATS.get(Path(out).suffix[1:], "csv") if out else "markdown"
    if form == "parquet":
        if out is None:
            raise ConfigError("--format parquet needs a file", hint="name one with --out FILE.parquet")
        content = _as_parquet(rows)
    else:
        text = as_csv(rows) if form == "csv" else as_markdown(rows)
        if out is None:
            sys.stdout.write(text)
            return
        content = text.encode()
    try:
        write_atomic(Path(out), content, durable=False, mode=0o644)
    except OSError as err:
        raise RunError(f"{out} cannot be written: {err.strerror or err}", hint="name another file") from err
    note(f"{len(rows)} runs in {out}")


def _as_parquet(rows: Sequence[Cells]) -> bytes:
    try:
        from pyarrow import Table, parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        hint = "pip install pyarrow, or write --out FILE.csv"
        raise ConfigError("pyarrow is not installed here", hint=hint) from None
    content = io.BytesIO()
    parquet.write_table(Table.from_pydict(as_columns(rows)), content)
    return content.getvalue()
