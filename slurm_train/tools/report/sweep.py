"""The facts of a sweep as the document of a report: its runs as values, compared by one metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from slurm_train.config.schema import flat
from slurm_train.errors import ConfigError
from slurm_train.formatting import number
from slurm_train.metrics import largest_is_best, read_series
from slurm_train.rundir.files import read_json
from slurm_train.rundir.sweep import Element, SweepDirectory
from slurm_train.tools.report.page import Block, Curve, Document, as_float, drawn, line, plot
from slurm_train.tools.report.run import Fact, provenance, read_attempts, read_config, read_settings, time_by_cause

_MOST_POINTS = 40_000
_LEAST_PER_CURVE, _MOST_PER_CURVE = 10, 300
_MOST_MARKS = 100
_MOST_AXES = 12
_BEST, _STEP = "best_", "_step"
# Shares of the runs that count as the best, the good, and so on.
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
    given = " ".join(f"{key}={value}" for key, value in element.overrides.items())
    return {
        "index": element.index,
        "run": f"{element.run.name}/{element.run.run_id}",
        "label": f"run {element.index}: {given}",
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
    configs = [flat(config) for element in elements if (config := read_config(element.run.config))]
    own = _own_settings(configs, [key for trial in trials for key in trial["given"]])
    objective = configs[0].get("sweep.objective") if configs and "sweep.objective" not in own else None
    metric = choose_metric([trial["cells"] for trial in trials], asked=metric, configured=objective)
    runs = grade(trials, metric)
    newest = max(sweep.code.glob("*.json"), default=None, key=lambda path: path.name)
    origin = (read_json(newest) if newest else None) or {}
    return {
        "kind": "sweep",
        "title": f"sweep {sweep.sweep_id}: {len(runs)} runs",
        "name": f"sweep {', '.join(sorted({element.run.name for element in elements})[:3])}",
        "id": sweep.sweep_id,
        "path": str(sweep.path),
        "written_unix_s": now_unix_s,
        "metric": metric,
        "runs": [{key: value for key, value in run.items() if key != "attempts"} for run in runs],
        "parallel": _parallel(runs, metric),
        "plots": {"values": [_best_so_far(runs, metric)], "curves": _curves(elements, runs, metric)},
        "time": time_by_cause([attempt for run in runs for attempt in run["attempts"]]),
        "settings": read_settings(elements[0].run, leave_out=own) if elements else [],
        "provenance": provenance({**origin, "words": (read_json(sweep.facts) or origin).get("words")}),
        "environment": origin.get("environment"),
    }


def choose_metric(rows: Sequence[Mapping[str, Any]], *, asked: str | None, configured: str | None) -> str:
    """Returns the metric that a sweep is judged by: the one that is asked for, or held-out loss, or training loss.

    Args:
        rows: the collated table.
        asked: by --metric.
        configured: `sweep.objective` of the runs.

    Raises:
        ConfigError: no run has the metric that is asked for.
    """
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if as_float(value) is not None)
    names = [key.removeprefix(_BEST) for key in keys if key.startswith(_BEST) and not key.endswith(_STEP)]
    if asked is not None and asked not in names:
        raise ConfigError(f"--metric {asked}: no run has it", hint=f"there are {', '.join(names) or 'none yet'}")
    wishes = (asked, configured, "eval_loss", *(name for name in names if name != "loss"))
    return next((name for name in wishes if name in names), "loss")


def grade(trials: Sequence[Fact], metric: str) -> list[Fact]:
    """Returns the trials with "value", "place" (0: the best), and "colour": "q0" of the best tenth to "q4"."""
    found = {trial["index"]: as_float(trial["cells"].get(f"{_BEST}{metric}")) for trial in trials}
    values = {index: value for index, value in found.items() if value is not None}
    order = sorted(values, key=values.__getitem__, reverse=largest_is_best(metric))
    places = {index: place for place, index in enumerate(order)}
    graded = []
    for trial in trials:
        place, colour = places.get(trial["index"]), "failed" if trial["has_failed"] else "quiet"
        if place is not None:
            colour = f"q{sum(place >= max(1, part * len(order)) for part in _GRADES)}"
        graded.append(trial | {"value": values.get(trial["index"]), "place": place, "colour": colour})
    return graded


def _best_last(runs: Sequence[Fact]) -> list[Fact]:
    """Returns the runs in the order of drawing: the best above the others."""
    return sorted(runs, key=lambda run: len(runs) if run["place"] is None else run["place"], reverse=True)


def _parallel(runs: Sequence[Fact], metric: str) -> Block | None:
    """Returns parallel coordinates: an axis per key with several values, one for the metric, and where each run is.

    None where the runs differ in nothing.
    """
    keys = dict.fromkeys(key for run in runs for key in run["given"])
    swept = [key for key in keys if len({run["given"].get(key) for run in runs}) > 1]
    if not swept:
        return None
    columns = {key: [_as_number(run["given"].get(key)) for run in runs] for key in swept[: _MOST_AXES - 1]}
    columns[metric.replace("_", " ")] = [run["value"] for run in runs]
    axes, places = zip(*(_axis(name, values) for name, values in columns.items()), strict=True)
    at = dict(zip((run["index"] for run in runs), zip(*places, strict=True), strict=True))
    lines = [
        {"run": run["index"], "colour": run["colour"], "has_value": run["value"] is not None, "at": at[run["index"]]}
        for run in _best_last(runs)
    ]
    return {"key": "parallel", "title": "Values and result", "axes": axes, "runs": lines}


def _axis(name: str, values: Sequence[float | str | None]) -> tuple[Block, list[float | None]]:
    """Returns an axis with its labels and where each run is on it, from 0 below to 1 above; words are spaced evenly."""
    known: Any = list(dict.fromkeys(value for value in values if value is not None))
    if any(isinstance(value, str) for value in known):
        places = {value: (index + 0.5) / len(known) for index, value in enumerate(known)}
    else:
        known.sort()
        is_log = bool(known) and known[0] > 0 and known[-1] > 8 * known[0]
        at = [math.log(value) if is_log else value for value in known]
        span = (at[-1] - at[0]) if len(at) > 1 else 0.0
        places = {value: 0.04 + 0.92 * (x - at[0]) / span if span else 0.5 for value, x in zip(known, at, strict=True)}
    ticks: list[tuple[float, str]] = []
    # A label needs room; both ends have one.
    for value in known:
        label = value[:24] if isinstance(value, str) else number(value, 4)
        if ticks and places[value] - ticks[-1][0] < 1 / 14:
            if value != known[-1]:
                continue
            ticks.pop()
        ticks.append((round(places[value], 4), label))
    return {"name": name, "ticks": ticks}, [None if value is None else round(places[value], 4) for value in values]


def _as_number(value: str | None) -> float | str | None:
    try:
        found = float(value or "")
    except ValueError:
        return value
    return found if abs(found) < 1e100 else value


def _best_so_far(runs: Sequence[Fact], metric: str) -> Block:
    """Returns each run's best value in the order in which the runs ended, and the best up to then."""
    order = sorted((run["attempts"][-1]["end_time_unix_s"], run["index"], run) for run in runs if run["attempts"])
    ended = [(place, run) for place, (_, _, run) in enumerate(order, 1)]
    valued = [(place, run) for place, run in ended if run["value"] is not None]
    x, y = [place for place, _ in valued], [run["value"] for _, run in valued]
    best = list(accumulate(y, max if largest_is_best(metric) else min))
    failed = [(place, f"{run['label']}: {run['state']}", "event") for place, run in ended if run["has_failed"]]
    curves = [
        Curve(name="best so far", x=[*x, len(ended)] if y else [], y=[*best, *best[-1:]], kind="steps"),
        Curve(name="runs", x=x, y=y, kind="dots", colour="quiet", labels=[run["label"] for _, run in valued]),
    ]
    title, x_label = f"Best so far: {metric.replace('_', ' ')}", "runs that have ended, in order"
    return plot("best", title, curves, x_label=x_label, marks=failed[:_MOST_MARKS], is_wide=True)


def _curves(elements: Sequence[Element], runs: Sequence[Fact], metric: str) -> list[Block]:
    """Returns training loss and metric of all runs; the more runs, the fewer points each curve has."""
    most = min(_MOST_PER_CURVE, max(_LEAST_PER_CURVE, _MOST_POINTS // max(1, len(runs))))
    files = {element.index: element.run.metrics for element in elements}
    titles = {metric: f"Held-out {metric.removeprefix('eval_').replace('_', ' ')}", "loss": "Training loss"}
    curves: dict[str, list[Curve]] = {key: [] for key in dict.fromkeys(("loss", metric))}
    for run in _best_last(runs):
        series = read_series(files[run["index"]])
        for key, of_key in curves.items():
            style = {"colour": run["colour"], "run": run["index"]}
            of_key.append(line(run["label"], *series.points(key), most=most, band=False, **style))
    return drawn([plot(f"runs_{key}", titles[key], of_key) for key, of_key in curves.items()])


def _own_settings(configs: Sequence[Mapping[str, Any]], given: Sequence[str]) -> set[str]:
    """Returns the keys that the runs do not share; a file that the sweep names may set more than its words."""
    swept = tuple(f"{key}." for key in given)
    return {
        key
        for key, value in (configs[0] if configs else {}).items()
        if f"{key}.".startswith(swept) or any(key not in other or other[key] != value for other in configs)
    }
