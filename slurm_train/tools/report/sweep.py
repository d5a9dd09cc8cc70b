"""The document of a sweep: its runs as values, compared by one metric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from slurm_train.config.schema import flat
from slurm_train.errors import ConfigError
from slurm_train.formatting import number
from slurm_train.metrics.series import largest_is_best, read_series
from slurm_train.rundir.files import read_json
from slurm_train.rundir.sweep import Element, SweepDirectory
from slurm_train.tools.report.attempts import Bar, Verdict, bar_of, read_attempts, time_sums, time_tiles
from slurm_train.tools.report.origin import provenance, read_config, settings
from slurm_train.tools.report.page import (
    Block,
    Curve,
    Document,
    as_float,
    chip,
    moment,
    plot,
    section,
    setting,
    skeleton,
    table,
    text,
)

_MOST_POINTS = 40_000
_LEAST_PER_CURVE, _MOST_PER_CURVE = 10, 300
_MOST_FAILURES = 200
_MOST_MARKS = 100
_MOST_AXES = 12
_BEST, _STEP = "best_", "_step"
# Shares of the runs that count as the best, the good, and so on.
_CLASSES = (0.1, 0.3, 0.6, 0.85)
_STYLES = {"state": "chip", "run": "code", "note": "words"}
_RENAMED = {"gpu_hours": "device hours", "index": "run", "run": "id"}

Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    index: int
    run: str
    """Name and id, e.g. "gpt/3f9a1c07"."""
    given: Mapping[str, str]
    """The values that the sweep set."""
    verdict: Verdict
    is_active: bool
    """It runs, waits, or comes back by itself."""
    cells: Mapping[str, Any]
    """Its row in the collated table."""
    bars: Sequence[Bar] = ()
    curves: Mapping[str, Points] = field(default_factory=dict)
    """Curves by metric, thinned."""
    value: float | None = None
    """The best of the metric that the sweep is judged by."""
    grade: int | None = None
    """From 0, the best tenth, to 4; None without a value."""

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a result and will not go on by itself."""
        return not self.is_active and self.verdict.state not in ("finished", "not started")

    @property
    def colour(self) -> str:
        """Name of its colour in the page."""
        return f"q{self.grade}" if self.grade is not None else "failed" if self.has_failed else "quiet"

    @property
    def label(self) -> str:
        """E.g. "run 3: optim.lr=0.001 seed=1"."""
        return f"run {self.index}: {' '.join(f'{key}={value}' for key, value in self.given.items())}"


def read_trial(
    element: Element,
    verdict: Verdict,
    cells: Mapping[str, Any],
    *,
    is_active: bool,
    num_runs: int,
    now_unix_s: float,
) -> Trial:
    """Returns a run of a sweep.

    Args:
        element: its entry in the sweep's table.
        verdict: its status.
        cells: its row of the collated table.
        is_active: it runs, waits, or comes back by itself.
        num_runs: of the sweep; the more, the fewer points each curve has.
        now_unix_s: the time of day.
    """
    run, series = element.run, read_series(element.run.metrics)
    most = min(_MOST_PER_CURVE, max(_LEAST_PER_CURVE, _MOST_POINTS // max(1, num_runs)))
    return Trial(
        index=element.index,
        run=f"{run.name}/{run.run_id}",
        given=element.overrides,
        verdict=verdict,
        is_active=is_active,
        cells=cells,
        bars=list(map(bar_of, read_attempts(run, verdict, now_unix_s=now_unix_s))),
        curves={key: skeleton(*series.points(key), most=most) for key in ("loss", *series.evaluations)},
    )


def sweep_document(
    sweep: SweepDirectory, trials: Sequence[Trial], *, metric: str | None, now_unix_s: float
) -> Document:
    """Returns a sweep with its runs compared as a document.

    Args:
        sweep: the sweep.
        trials: its runs.
        metric: what to judge by; None: `sweep.objective` of its runs, else held-out loss, else training loss.
        now_unix_s: the time of day.

    Raises:
        ConfigError: no run has the metric.
    """
    configs = list(filter(None, (read_config(sweep.root / trial.run / "config.yaml") for trial in trials))) or [{}]
    own = own_settings(configs, trials)
    objective = flat(configs[0]).get("sweep.objective") if "sweep.objective" not in own else None
    metric = choose_metric(trials, asked=metric, configured=objective)
    trials, bars = graded(trials, metric), [bar for trial in trials for bar in trial.bars]
    best, finished = best_trial(trials, metric), sum(trial.verdict.state == "finished" for trial in trials)
    tiles = [("runs", str(len(trials)), f"{finished} finished")]
    if best is not None:
        tiles.append((f"best {metric.replace('_', ' ')}", number(best.value, 4), best.label))
    newest = max(sweep.code.glob("*.json"), default=None, key=lambda path: path.name)
    origin = (read_json(newest) if newest else None) or {}
    environment = origin.get("environment")
    origin |= {"words": (read_json(sweep.facts) or {}).get("words", origin.get("words"))}
    known = provenance(origin, environment if isinstance(environment, Mapping) else {})
    names = sorted({trial.run.partition("/")[0] for trial in trials})
    counts = Counter(trial.verdict.state for trial in trials)
    return {
        "title": f"sweep {sweep.sweep_id}: {len(trials)} runs",
        "name": f"sweep {', '.join(names[:3])}",
        "id": sweep.sweep_id,
        "chips": [[f"{count} {chip(state)[0]}", chip(state)[1]] for state, count in counts.most_common()],
        "sentence": ["", ""],
        "path": str(sweep.path),
        "tiles": tiles + time_tiles(bars, f"{len(bars)} attempts"),
        "sections": [
            section("failures", "Ended without a result", *_failures(trials)),
            section("values", "Values and results", parallel(trials, metric), best_so_far(trials, metric)),
            section("curves", "Curves", *_run_curves(trials, metric, best)),
            section("runs", "Runs", _runs(trials, metric)),
            section("time", "What the hours went to", *time_sums(bars)),
            section("settings", "Settings that the runs share", *settings(configs[0], leave_out=own)),
            section("provenance", "Provenance", *known),
        ],
        "written": f"written {moment(now_unix_s)} by slurm_train report",
    }


def choose_metric(trials: Sequence[Trial], *, asked: str | None, configured: str | None) -> str:
    """Returns the metric that a sweep is judged by: the one that is asked for, or held-out loss, or training loss.

    Raises:
        ConfigError: no run has the metric that is asked for.
    """
    keys = dict.fromkeys(key for trial in trials for key, value in trial.cells.items() if as_float(value) is not None)
    names = [key.removeprefix(_BEST) for key in keys if key.startswith(_BEST) and not key.endswith(_STEP)]
    if asked is not None and asked not in names:
        raise ConfigError(f"--metric {asked}: no run has it", hint=f"there are {', '.join(names) or 'none yet'}")
    wishes = (asked, configured, "eval_loss", *(name for name in names if name != "loss"))
    return next((name for name in wishes if name in names), "loss")


def graded(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """Returns the trials with their values and how they compare."""
    valued = [replace(trial, value=as_float(trial.cells.get(f"{_BEST}{metric}"))) for trial in trials]
    sign = -1.0 if largest_is_best(metric) else 1.0
    order = sorted((trial for trial in valued if trial.value is not None), key=lambda one: sign * (one.value or 0.0))
    grades = {
        trial.index: 0 if place == 0 else sum(place >= part * len(order) for part in _CLASSES)
        for place, trial in enumerate(order)
    }
    return [replace(trial, grade=grades.get(trial.index)) for trial in valued]


def best_trial(trials: Sequence[Trial], metric: str) -> Trial | None:
    """Returns the trial with the best value, None where none has one."""
    pick = max if largest_is_best(metric) else min
    return pick((trial for trial in trials if trial.value is not None), key=lambda one: one.value or 0.0, default=None)


def _given_keys(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(key for trial in trials for key in trial.given))


def _failures(trials: Sequence[Trial]) -> list[Block]:
    failed = [trial for trial in trials if trial.has_failed]
    if not failed:
        return []
    keys, shown = _given_keys(trials), failed[:_MOST_FAILURES]
    rows = []
    for one in shown:
        why = one.verdict.note or "no reason is on record"
        rows.append([one.index, chip(one.verdict.state), why, *(one.given.get(key, "") for key in keys)])
    columns = ["run|num", "state|chip", "why|words", *(f"{key}|" for key in keys)]
    found = table("failures", columns, rows, runs=[trial.index for trial in shown])
    more = text(f"{len(failed) - len(shown)} more, see the table of all runs.", "note")
    return [found, more] if len(shown) < len(failed) else [found]


def parallel(trials: Sequence[Trial], metric: str) -> Block:
    """Returns parallel coordinates: an axis per key with several values, one for the metric, and a line per run."""
    swept = [key for key in _given_keys(trials) if len({trial.given.get(key) for trial in trials}) > 1]
    if not swept:
        return text("The runs differ in nothing that could be drawn.", "none")
    columns: dict[str, list[float | str | None]] = {
        key: [_as_number(trial.given.get(key)) for trial in trials] for key in swept[: _MOST_AXES - 1]
    }
    columns[metric.replace("_", " ")] = [trial.value for trial in trials]
    axes, places = [], []
    for name, values in columns.items():
        at, ticks = _axis(values)
        axes.append({"name": name, "ticks": ticks})
        places.append(at)
    runs = []
    placed = list(zip(trials, zip(*places, strict=True), strict=True))
    # The best are drawn last, above the others.
    placed.sort(key=lambda one: -10 if one[0].grade is None else -one[0].grade)
    for trial, of_run in placed:
        facts = [("run", f"{trial.index} ({trial.run})"), *trial.given.items(), ("state", trial.verdict.state)]
        facts.append((metric, number(trial.value, digits=6)))
        if trial.has_failed and trial.verdict.note:
            facts.append(("why", trial.verdict.note[:200]))
        run = {"run": trial.index, "colour": trial.colour, "has_value": trial.value is not None}
        runs.append({**run, "at": list(of_run), "facts": facts})
    return {"kind": "parallel", "key": "parallel", "title": "Values and result", "axes": axes, "runs": runs}


def _axis(values: Sequence[float | str | None]) -> tuple[list[float | None], list[tuple[float, str]]]:
    """Returns where each run is on an axis, from 0 below to 1 above, and the labels; words are spaced evenly."""
    known = list(dict.fromkeys(value for value in values if value is not None))
    numbers = sorted(value for value in known if not isinstance(value, str))
    places: dict[Any, float]
    if len(numbers) < len(known):
        places = {value: (index + 0.5) / len(known) for index, value in enumerate(known)}
        ticks = [(place, setting(value)[:24]) for value, place in places.items()]
    else:
        is_log = bool(numbers) and numbers[0] > 0 and numbers[-1] > 8 * numbers[0]
        at = [math.log(value) if is_log else value for value in numbers]
        span = at[-1] - at[0] if at else 0.0
        places = {
            value: 0.04 + 0.92 * ((x - at[0]) / span) if span else 0.5 for value, x in zip(numbers, at, strict=True)
        }
        ticks = [(place, number(value, 4)) for value, place in places.items()]
    shown: list[tuple[float, str]] = []
    for place, label in ticks:
        # A label needs room, and the last one is always shown.
        if not shown or place - shown[-1][0] >= 1 / 14:
            shown.append((round(place, 4), label))
    if ticks:
        shown[-1] = (round(ticks[-1][0], 4), ticks[-1][1])
    return [None if value is None else round(places[value], 4) for value in values], shown


def _as_number(value: str | None) -> float | str | None:
    try:
        found = float(value) if value is not None else None
    except ValueError:
        return value
    return found if found is None or abs(found) < 1e100 else value


def best_so_far(trials: Sequence[Trial], metric: str) -> Block:
    """Returns each run's best value in the order in which the runs ended, and the best up to then."""
    pick = max if largest_is_best(metric) else min
    ended = sorted((trial for trial in trials if trial.bars), key=lambda one: (one.bars[-1].end_unix_s, one.index))
    x, y, labels, failed = list[float](), list[float](), list[str](), []
    for place, one in enumerate(ended, 1):
        if one.value is not None:
            x.append(place)
            y.append(one.value)
            labels.append(one.label)
        if one.has_failed:
            failed.append((place, f"{one.label}: {one.verdict.state}", "event"))
    best = list(accumulate(y, pick))
    curves = [
        Curve(name="best so far", x=[*x, len(ended)], y=[*best, *best[-1:]], kind="steps"),
        Curve(name="runs", x=x, y=y, kind="dots", colour="quiet", labels=labels),
    ]
    return plot(
        "best",
        f"Best so far: {metric.replace('_', ' ')}",
        curves if y else [],
        x_label="runs that have ended, in order",
        marks=failed[:_MOST_MARKS],
        is_wide=True,
        note="" if y else "no run has a value yet",
    )


def _run_curves(trials: Sequence[Trial], metric: str, best: Trial | None) -> list[Block]:
    """Returns training loss and metric of all runs, the best drawn last; without those that no run has a value of."""
    order = sorted(trials, key=lambda trial: (trial.grade is not None, -(trial.grade or 0), trial is best))
    titles = {metric: f"Held-out {metric.removeprefix('eval_').replace('_', ' ')}", "loss": "Training loss"}
    plots = []
    for key in dict.fromkeys(("loss", metric)):
        curves = []
        for one in order:
            x, y = one.curves.get(key, ((), ()))
            kind: Any = "dots" if len(x) == 1 else "line"
            curves.append(Curve(name=one.label, x=x, y=y, kind=kind, colour=one.colour, run=one.index))
        plots.append(plot(f"runs_{key}", titles[key], curves))
    return [block for block in plots if block["curves"]]


def _runs(trials: Sequence[Trial], metric: str) -> Block:
    """Returns the table of all runs: the run's id instead of its whole name, no column without a value."""
    first = ["index", "run", *_given_keys(trials), "state", f"{_BEST}{metric}"]
    columns: dict[str, list[Any]] = {}
    heads = []
    for name in dict.fromkeys([*first, *(name for trial in trials for name in trial.cells)]):
        values = [trial.cells.get(name) for trial in trials]
        if all(value in (None, "") for value in values):
            continue
        style = "num" if any(as_float(value) is not None for value in values) else ""
        head = _RENAMED.get(name, name if "." in name else name.replace("_", " "))
        heads.append(f"{head}|{_STYLES.get(name, style)}")
        if name == "state":
            values = [chip(str(value)) for value in values]
        elif name == "run":
            values = [str(value).partition("/")[2] or str(value) for value in values]
        columns[name] = values
    rows = list(zip(*columns.values(), strict=True))
    return table("runs", heads, rows, sortable=True, runs=[trial.index for trial in trials])


def own_settings(configs: Sequence[Mapping[str, Any]], trials: Sequence[Trial]) -> set[str]:
    """Returns the keys that the runs do not share; a file that the sweep names may set more than its words."""
    swept = tuple(f"{key}." for key in _given_keys(trials))
    first, *others = map(flat, configs)
    return {
        key
        for key, value in first.items()
        if f"{key}.".startswith(swept) or any(key not in other or other[key] != value for other in others)
    }
