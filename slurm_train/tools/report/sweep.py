"""Makes the document of a report about a sweep: its runs with their settings and results, compared by one metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from slurm_train.config.schema import flat
from slurm_train.formatting import as_float, number
from slurm_train.metrics import largest_is_best, read_series
from slurm_train.rundir.files import read_json
from slurm_train.rundir.sweep import Element, SweepDirectory
from slurm_train.tools.report.collate import BEST, choose_metric
from slurm_train.tools.report.page import Block, Curve, Document, drawn, line, plot
from slurm_train.tools.report.run import Fact, provenance, read_attempts, read_config, read_settings, time_by_cause

_MOST_POINTS = 40_000
_LEAST_PER_CURVE = 10
_MOST_PER_CURVE = 300
_MOST_MARKS = 100
_MOST_AXES = 12
# Borders between the five colours, as shares of the runs in the order of their results.
_GRADES = (0.1, 0.3, 0.6, 0.85)


def read_trial(
    element: Element, cells: Mapping[str, Any], *, state: str, note: str, is_active: bool, now_unix_s: float
) -> Fact:
    """Returns the facts of one run of a sweep.

    Args:
        element: its entry in the sweep's table.
        cells: its row of the collated table.
        state: its status, e.g. "not started".
        note: why, in a sentence.
        is_active: it runs, waits, or is requeued automatically.
        now_unix_s: the time of day.
    """
    settings = " ".join(f"{key}={value}" for key, value in element.overrides.items())
    return {
        "index": element.index,
        "run": f"{element.run.name}/{element.run.run_id}",
        "label": f"run {element.index}: {settings}",
        "given": element.overrides,
        "state": state,
        "note": note,
        "has_failed": not is_active and state not in ("finished", "not started"),
        "cells": cells,
        "attempts": read_attempts(element.run, until_unix_s=now_unix_s if state == "running" else None),
    }


def sweep_document(
    sweep: SweepDirectory,
    elements: Sequence[Element],
    trials: Sequence[Fact],
    *,
    metric: str | None,
    now_unix_s: float,
) -> Document:
    """Returns a sweep with its runs compared as a document.

    Args:
        sweep: the sweep.
        elements: its runs.
        trials: the facts of each.
        metric: what to judge by; None: `sweep.objective` of its runs, else held-out loss, else training loss.
        now_unix_s: the time of day.

    Raises:
        ConfigError: no run has the metric.
    """
    configs = _read_configs(elements)
    different = _different_settings(configs, trials)
    objective = None
    if configs and "sweep.objective" not in different:
        objective = configs[0].get("sweep.objective")
    metric = choose_metric([trial["cells"] for trial in trials], asked=metric, configured=objective)
    runs = grade(trials, metric)
    attempts = []
    for run in runs:
        attempts += run["attempts"]
    newest = max(sweep.code.glob("*.json"), default=None, key=lambda path: path.name)
    origin = (read_json(newest) if newest else None) or {}
    words = (read_json(sweep.facts) or origin).get("words")
    return {
        "kind": "sweep",
        "title": f"sweep {sweep.sweep_id}: {len(runs)} runs",
        "name": f"sweep {', '.join(sorted({element.run.name for element in elements})[:3])}",
        "id": sweep.sweep_id,
        "path": str(sweep.path),
        "written_unix_s": now_unix_s,
        "metric": metric,
        "runs": [_without_attempts(run) for run in runs],
        "parallel": _parallel(runs, metric),
        "plots": {"values": [_best_so_far(runs, metric)], "curves": _curves(elements, runs, metric)},
        "time": time_by_cause(attempts),
        "settings": read_settings(elements[0].run, leave_out=different) if elements else [],
        "provenance": provenance({**origin, "words": words}),
        "environment": origin.get("environment"),
    }


def _read_configs(elements: Sequence[Element]) -> list[dict[str, Any]]:
    configs = []
    for element in elements:
        config = read_config(element.run.config)
        if config:
            configs.append(flat(config))
    return configs


def _without_attempts(run: Fact) -> Fact:
    return {key: value for key, value in run.items() if key != "attempts"}


def grade(trials: Sequence[Fact], metric: str) -> list[Fact]:
    """Returns the trials with "value", "place" (0: the best), and "colour": "q0" of the best tenth to "q4"."""
    values: dict[int, float] = {}
    for trial in trials:
        value = as_float(trial["cells"].get(f"{BEST}{metric}"))
        if value is not None:
            values[trial["index"]] = value
    order = sorted(values, key=values.__getitem__, reverse=largest_is_best(metric))
    places = {index: place for place, index in enumerate(order)}
    graded = []
    for trial in trials:
        index = trial["index"]
        place = places.get(index)
        if place is not None:
            colour = f"q{sum(place >= max(1, part * len(order)) for part in _GRADES)}"
        elif trial["has_failed"]:
            colour = "failed"
        else:
            colour = "quiet"
        graded.append(trial | {"value": values.get(index), "place": place, "colour": colour})
    return graded


def _best_last(runs: Sequence[Fact]) -> list[Fact]:
    """Returns the runs in the order of drawing: the best above the others."""
    return sorted(runs, key=lambda run: len(runs) if run["place"] is None else run["place"], reverse=True)


def _parallel(runs: Sequence[Fact], metric: str) -> Block | None:
    """Returns parallel coordinates: an axis per key with several values, one for the metric, and where each run is.

    None where the runs differ in nothing.
    """
    swept = _swept_keys(runs)
    if not swept:
        return None
    columns: dict[str, list[float | str | None]] = {}
    for key in swept[: _MOST_AXES - 1]:
        columns[key] = [_as_number(run["given"].get(key)) for run in runs]
    columns[metric.replace("_", " ")] = [run["value"] for run in runs]
    axes: list[Block] = []
    at: dict[int, list[float | None]] = {run["index"]: [] for run in runs}
    for name, values in columns.items():
        axis, places = _axis(name, values)
        axes.append(axis)
        for run, place in zip(runs, places, strict=True):
            at[run["index"]].append(place)
    lines = []
    for run in _best_last(runs):
        index = run["index"]
        has_value = run["value"] is not None
        lines.append({"run": index, "colour": run["colour"], "has_value": has_value, "at": tuple(at[index])})
    return {"key": "parallel", "title": "Values and result", "axes": axes, "runs": lines}


def _swept_keys(runs: Sequence[Fact]) -> list[str]:
    """Returns the keys of which the runs have different values, in the order of the sweep."""
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run["given"])
    return [key for key in keys if len({run["given"].get(key) for run in runs}) > 1]


def _axis(name: str, values: Sequence[float | str | None]) -> tuple[Block, list[float | None]]:
    """Returns an axis with its labels and where each run is on it, from 0 below to 1 above; words are spaced evenly."""
    distinct: Any = list(dict.fromkeys(value for value in values if value is not None))
    if any(isinstance(value, str) for value in distinct):
        places = {value: (index + 0.5) / len(distinct) for index, value in enumerate(distinct)}
    else:
        distinct.sort()
        places = _places_of_numbers(distinct)
    ticks: list[tuple[float, str]] = []
    # A label needs room; both ends have one.
    for value in distinct:
        label = value[:24] if isinstance(value, str) else number(value, 4)
        if ticks and places[value] - ticks[-1][0] < 1 / 14:
            if value != distinct[-1]:
                continue
            ticks.pop()
        ticks.append((round(places[value], 4), label))
    return {"name": name, "ticks": ticks}, [None if value is None else round(places[value], 4) for value in values]


def _places_of_numbers(ascending: Sequence[float]) -> dict[float, float]:
    """Returns where numbers are on an axis from 0 to 1, with a margin; a wide range of positive ones by logarithm."""
    if not ascending:
        return {}
    is_log = ascending[0] > 0 and ascending[-1] > 8 * ascending[0]
    at = [math.log(value) if is_log else value for value in ascending]
    span = at[-1] - at[0]
    places: dict[float, float] = {}
    for value, position in zip(ascending, at, strict=True):
        places[value] = 0.04 + 0.92 * (position - at[0]) / span if span else 0.5
    return places


def _as_number(value: str | None) -> float | str | None:
    try:
        as_number = float(value or "")
    except ValueError:
        return value
    return as_number if abs(as_number) < 1e100 else value


def _best_so_far(runs: Sequence[Fact], metric: str) -> Block:
    """Returns each run's best value in the order in which the runs ended, and the best up to then."""
    ended = [run for run in runs if run["attempts"]]
    ended.sort(key=lambda run: (run["attempts"][-1]["end_time_unix_s"], run["index"]))
    x: list[int] = []
    y: list[float] = []
    labels: list[str] = []
    failed: list[tuple[int, str, str]] = []
    for place, run in enumerate(ended, 1):
        if run["value"] is not None:
            x.append(place)
            y.append(run["value"])
            labels.append(run["label"])
        if run["has_failed"]:
            failed.append((place, f"{run['label']}: {run['state']}", "event"))
    best = list(accumulate(y, max if largest_is_best(metric) else min))
    # The best value so far holds until the last run that has ended.
    curves = [
        Curve(name="best so far", x=[*x, len(ended)] if y else [], y=[*best, *best[-1:]], kind="steps"),
        Curve(name="runs", x=x, y=y, kind="dots", colour="quiet", labels=labels),
    ]
    title = f"Best so far: {metric.replace('_', ' ')}"
    x_label = "runs that have ended, in order"
    return plot("best", title, curves, x_label=x_label, marks=failed[:_MOST_MARKS], is_wide=True)


def _curves(elements: Sequence[Element], runs: Sequence[Fact], metric: str) -> list[Block]:
    """Returns training loss and metric of all runs; the more runs, the fewer points each curve has."""
    most = min(_MOST_PER_CURVE, max(_LEAST_PER_CURVE, _MOST_POINTS // max(1, len(runs))))
    files = {element.index: element.run.metrics for element in elements}
    titles = {metric: f"Held-out {metric.removeprefix('eval_').replace('_', ' ')}", "loss": "Training loss"}
    curves: dict[str, list[Curve]] = {key: [] for key in dict.fromkeys(("loss", metric))}
    for run in _best_last(runs):
        series = read_series(files[run["index"]])
        for key, lines in curves.items():
            x, y = series.points(key)
            lines.append(line(run["label"], x, y, most=most, band=False, colour=run["colour"], run=run["index"]))
    return drawn([plot(f"runs_{key}", titles[key], lines) for key, lines in curves.items()])


def _different_settings(configs: Sequence[Mapping[str, Any]], trials: Sequence[Fact]) -> set[str]:
    """Returns the keys that the runs do not share; a file that the sweep names may set more than its words."""
    if not configs:
        return set()
    swept: set[str] = set()
    for trial in trials:
        swept |= {f"{key}." for key in trial["given"]}
    prefixes = tuple(swept)
    first = configs[0]
    different: set[str] = set()
    for key, value in first.items():
        is_swept = f"{key}.".startswith(prefixes)
        if is_swept or any(key not in config or config[key] != value for config in configs):
            different.add(key)
    return different
