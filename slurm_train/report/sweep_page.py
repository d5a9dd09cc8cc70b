"""The page of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurm_train.report.figure import figure
from slurm_train.report.markup import Html, join, tag
from slurm_train.report.origin import provenance, settings
from slurm_train.report.page import Section, chip, mood, page, plots, tiles
from slurm_train.report.parallel import axes_of, parallel
from slurm_train.report.quantity import duration, hours, moment, number, share
from slurm_train.report.sweep_plots import best_so_far, run_curves
from slurm_train.report.sweep_record import SweepRecord
from slurm_train.report.table import Cell, cell_of, folded, table
from slurm_train.report.timeline import device_s, goodput
from slurm_train.report.timeline_figure import sums
from slurm_train.report.trials import Trial, best_trial

_MOST_FAILURES = 200
_RENAMED = {"gpu_hours": "device hours", "index": "run", "run": "id"}


def sweep_page(record: SweepRecord) -> str:
    """Returns the page of a sweep as text."""
    trials = record.trials
    best = replace(best_so_far(trials, record.metric), is_wide=True)
    swept = {key for trial in trials for key in trial.given}
    return page(
        title=f"sweep {record.sweep.sweep_id}: {len(trials)} runs",
        head=_head(record),
        sections=[
            Section("failures", "Ended without a result", _failures(trials)),
            Section("values", "Values and results", join(_values(record), plots([figure(best)]))),
            Section("curves", "Curves", plots([figure(plot) for plot in run_curves(trials, record.metric)])),
            Section("runs", "Runs", _runs(record)),
            Section("time", "What the hours went to", sums([bar for trial in trials for bar in trial.bars])),
            Section("settings", "Settings that the runs share", settings(_without(record.config, swept))),
            Section("provenance", "Provenance", provenance(record.provenance)),
        ],
        now_unix_s=record.now_unix_s,
    )


def _head(record: SweepRecord) -> Html:
    counts = Counter(trial.verdict.state for trial in record.trials)
    chips = [
        tag("span", f"{count} {state.replace('_', ' ')}", class_=f"chip {mood(state)}")
        for state, count in counts.most_common()
    ]
    names = sorted({trial.run.partition("/")[0] for trial in record.trials})
    return join(
        tag("h1", tag("span", "sweep ", ", ".join(names[:3]), class_="name"), tag("code", record.sweep.sweep_id)),
        tag("p", chips, class_="counts"),
        tag("p", tag("code", str(record.sweep.path)), class_="path"),
        tiles(_tiles(record)),
    )


def _tiles(record: SweepRecord) -> list[tuple[str, str, str]]:
    trials, best = record.trials, best_trial(record.trials, record.metric)
    bars = [bar for trial in trials for bar in trial.bars]
    finished = sum(trial.verdict.state == "finished" for trial in trials)
    found = [("runs", str(len(trials)), f"{finished} finished")]
    if best is not None:
        found.append((f"best {record.metric.replace('_', ' ')}", number(best.value), best.label))
    if bars:
        begin, end = min(bar.start_unix_s for bar in bars), max(bar.end_unix_s for bar in bars)
        found.append(("device time", hours(device_s(bars)), f"{len(bars)} attempts"))
        found.append(("from first to last", duration(end - begin), f"since {moment(begin)}"))
        if (useful := goodput(bars)) is not None:
            found.append(("goodput", share(useful), "of the held time went into steps that count"))
    return found


def _failures(trials: Sequence[Trial]) -> Html:
    failed = [trial for trial in trials if trial.has_failed]
    if not failed:
        return Html("")
    keys = list(dict.fromkeys(key for trial in trials for key in trial.given))
    rows = [
        [
            cell_of(trial.index),
            Cell(chip(trial.verdict.state)),
            Cell(trial.verdict.note or "no reason is on record", None, "words"),
            *(Cell(trial.given.get(key, "")) for key in keys),
        ]
        for trial in failed[:_MOST_FAILURES]
    ]
    more = len(failed) - len(rows)
    return join(
        table(["run", "state", "why", *keys], rows, attributes=_rows(failed[:_MOST_FAILURES]), name="failures"),
        tag("p", f"{more} more, see the table of all runs.", class_="note") if more else None,
    )


def _values(record: SweepRecord) -> Html:
    axes = axes_of(record.trials, record.metric)
    if len(axes) < 2 or not record.trials:
        return tag("p", "The runs differ in nothing that could be drawn.", class_="none")
    return join(
        tag(
            "div",
            tag("button", "all runs", type="button", id="all-runs", disabled=True),
            tag("span", id="chosen", class_="note"),
            class_="controls",
        ),
        parallel(record.trials, axes, record.metric),
    )


def _runs(record: SweepRecord) -> Html:
    trials = record.trials
    columns = _columns(trials, record.metric)
    rows = [[_cell(trial, column) for column in columns] for trial in trials]
    header = [_RENAMED.get(column, column.replace("_", " ") if "." not in column else column) for column in columns]
    return join(
        tag(
            "div",
            tag("input", type="search", id="find", placeholder="rows with ...", aria_label="rows with"),
            class_="controls",
        ),
        table(header, rows, attributes=_rows(trials), is_sortable=True, name="runs"),
    )


def _columns(trials: Sequence[Trial], metric: str) -> list[str]:
    """Returns what the table shows: the run's id instead of its whole name, no column without a value."""
    first = ["index", "run", *(key for trial in trials for key in trial.given), "state", f"best_{metric}"]
    names = dict.fromkeys([*first, *(name for trial in trials for name in trial.cells)])
    return [name for name in names if any(trial.cells.get(name) not in (None, "") for trial in trials)]


def _cell(trial: Trial, column: str) -> Cell:
    value = trial.cells.get(column)
    if column == "state":
        return Cell(chip(str(value)), str(value))
    if column == "run":
        return Cell(tag("code", str(value).partition("/")[2] or str(value)), str(value))
    if column == "note":
        return Cell(folded(str(value or "")), str(value or ""), "words")
    return cell_of(value)


def _rows(trials: Sequence[Trial]) -> list[dict[str, object]]:
    return [{"data_run": trial.index, "class_": "bad" if trial.has_failed else None} for trial in trials]


def _without(config: Mapping[str, Any], swept: set[str], prefix: str = "") -> dict[str, Any]:
    """Returns a configuration without the keys that the sweep sets."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name not in swept:
            found[key] = _without(value, swept, f"{name}.") if isinstance(value, Mapping) and value else value
    return found
