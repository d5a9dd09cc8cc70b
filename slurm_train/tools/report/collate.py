"""A sweep as a table: a row per run with its settings, its end, best and last metrics, attempts, GPU-hours."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_train.errors import ConfigError
from slurm_train.metrics import direction_of, largest_is_best, read_series
from slurm_train.rundir.ledger import read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import goodput
from slurm_train.status.run_status import RunStatus

Cells = dict[str, Any]
BEST = "best_"
"""Prefix of the columns with the best value of a metric."""
STEP = "_step"
"""Suffix of the columns with the step of a best value."""


def best_line(rows: Sequence[Cells], given: Sequence[Mapping[str, str]], *, objective: str | None) -> str:
    """Returns which run is the best so far by the metric that the sweep is judged by, "" where no run has a value.

    Args:
        rows: the table.
        given: what the sweep gave to each run.
        objective: `sweep.objective` of the runs.
    """
    metric = choose_metric(rows, asked=None, configured=objective)
    key = f"{BEST}{metric}"
    valued = [(row[key], number) for number, row in enumerate(rows) if row.get(key) is not None]
    if not valued:
        return ""
    choose = max if largest_is_best(metric) else min
    value, number = choose(valued, key=lambda pair: pair[0])
    row = rows[number]
    words = " ".join(f"{name}={setting}" for name, setting in given[number].items())
    # Nobody may take the worst run for the best because of a name that says neither.
    which = "most" if largest_is_best(metric) else "least"
    unclear = "" if direction_of(metric) else f"; the {which} counts as the best, which its name does not say"
    best = f"best {metric}: {value:.5g} at step {row[f'{key}{STEP}']} of run {row['index']}, {row['run']}: {words}"
    return best + unclear


def choose_metric(rows: Sequence[Mapping[str, Any]], *, asked: str | None, configured: str | None) -> str:
    """Returns the metric that a sweep is judged by: the one that is asked for, or held-out loss, or training loss.

    Args:
        rows: the collated table.
        asked: by --metric.
        configured: `sweep.objective` of the runs.

    Raises:
        ConfigError: no run has the metric that is asked for.
    """
    names: list[str] = []
    for row in rows:
        for key, value in row.items():
            name = key.removeprefix(BEST)
            is_metric = key.startswith(BEST) and not key.endswith(STEP)
            if is_metric and name not in names and value is not None:
                names.append(name)
    if asked is not None and asked not in names:
        raise ConfigError(f"--metric {asked}: no run has it", hint=f"there are {', '.join(names) or 'none yet'}")
    measures = [name for name in names if name != "loss"]
    for candidate in (asked, configured, "eval_loss", *measures):
        if candidate in names:
            return candidate
    return "loss"


def collate(statuses: Sequence[RunStatus]) -> list[Cells]:
    """Returns one mapping per run; a column that a run has no value for is None, and all have the same columns."""
    rows = [_cells(status) for status in statuses]
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _cells(status: RunStatus) -> Cells:
    ledger = read_ledger(status.run)
    return {
        "index": status.subject.index,
        "run": status.label,
        **{key: number_or_text(value) for key, value in status.subject.overrides.items()},
        "state": status.state.value,
        **_metrics(status.run),
        "attempts": len(ledger),
        "gpu_hours": round(sum(attempt.held_s * attempt.start.world_size for attempt in ledger) / 3600, 4),
        "goodput": round(goodput(ledger).share, 4),
        "note": status.note,
    }


def _metrics(run: RunDirectory) -> Cells:
    """Returns the last value of each metric, and the best of loss and evaluations with its step."""
    series = read_series(run.metrics)
    cells: Cells = {"step": int(series.last("step") or 0)}
    # Lightning logs "eval_loss_step" beside "eval_loss": of the last batch alone, under the name of a column here.
    of_one_batch = {f"{key}{STEP}" for key in series.evaluations}
    evaluations = [key for key in series.evaluations if key not in of_one_batch]
    for key in ("loss", *evaluations):
        steps, values = series.points(key)
        if values:
            choose = max if largest_is_best(key) else min
            best = choose(range(len(values)), key=values.__getitem__)
            cells[f"last_{key}"] = values[-1]
            cells[f"{BEST}{key}"] = values[best]
            cells[f"{BEST}{key}{STEP}"] = int(steps[best])
    return cells


def number_or_text(value: str) -> float | str:
    """Returns a value of a sweep as a number; a text that only looks like one stays as it is: "007", "1_000", "1e3"."""
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        if repr(number) == value:
            return number
    return value


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
    lines = [columns, ["---"] * len(columns)]
    lines += [[_shown(cells[name]) for name in columns] for cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


def as_columns(rows: Sequence[Cells]) -> dict[str, list[Any]]:
    """Returns the table by columns, the values of each of one type: text where one is, else float where one is."""
    names = list(rows[0]) if rows else []
    columns = {name: [cells[name] for cells in rows] for name in names}
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1:
            kind = str if str in kinds else float
            columns[name] = [None if value is None else kind(value) for value in values]
    return columns
