"""The runs of a sweep as values: what each was given, what it reached, in which order, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_train.errors import ConfigError
from slurm_train.metrics.best import largest_is_best
from slurm_train.metrics.series import Series, read_series
from slurm_train.report.curve import skeleton
from slurm_train.report.quantity import as_float
from slurm_train.report.record import Verdict
from slurm_train.report.timeline import Bar

_MOST_POINTS = 40_000
_LEAST_PER_CURVE, _MOST_PER_CURVE = 10, 300
_BEST, _STEP = "best_", "_step"
# Shares of the runs that count as the best, the good, and so on.
_CLASSES = (0.1, 0.3, 0.6, 0.85)

Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    index: int
    run: str
    """Name and id, e.g. "gpt/3f9a1c07"."""
    given: Mapping[str, str]
    """What the sweep gave to it."""
    verdict: Verdict
    is_active: bool
    cells: Mapping[str, Any]
    """Its row in the table of the sweep."""
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
    def ended_unix_s(self) -> float:
        """When its newest attempt ended, infinity where none has begun."""
        return self.bars[-1].end_unix_s if self.bars else math.inf

    @property
    def colour(self) -> str:
        """Name of its colour in the page."""
        return f"q{self.grade}" if self.grade is not None else "failed" if self.has_failed else "quiet"

    @property
    def label(self) -> str:
        """E.g. "run 3: optim.lr=0.001 seed=1"."""
        return f"run {self.index}: {' '.join(f'{key}={value}' for key, value in self.given.items())}"


def choose_metric(trials: Sequence[Trial], *, asked: str | None, configured: str | None) -> str:
    """Returns the metric that a sweep is judged by: the one that is asked for, or held-out loss, or training loss.

    Raises:
        ConfigError: no run has the metric that is asked for.
    """
    names = metric_names(trials)
    if asked is not None and asked not in names:
        raise ConfigError(f"--metric {asked}: no run has it", hint=f"there are {', '.join(names) or 'none yet'}")
    wishes = (asked, configured, "eval_loss", *(name for name in names if name != "loss"), "loss")
    return next(name for name in wishes if name is not None and (name in names or name == "loss"))


def metric_names(trials: Sequence[Trial]) -> list[str]:
    """Returns the metrics that some run has a best value of."""
    keys = dict.fromkeys(key for trial in trials for key, value in trial.cells.items() if as_float(value) is not None)
    return [key.removeprefix(_BEST) for key in keys if key.startswith(_BEST) and not key.endswith(_STEP)]


def graded(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """Returns the trials with their values and how they compare."""
    valued = [replace(trial, value=as_float(trial.cells.get(f"{_BEST}{metric}"))) for trial in trials]
    sign = -1.0 if largest_is_best(metric) else 1.0
    order = sorted((trial for trial in valued if trial.value is not None), key=lambda one: sign * (one.value or 0.0))
    grades = {trial.index: _grade(place, len(order)) for place, trial in enumerate(order)}
    return [replace(trial, grade=grades.get(trial.index)) for trial in valued]


def best_trial(trials: Sequence[Trial], metric: str) -> Trial | None:
    """Returns the trial with the best value, None where none has one."""
    pick = max if largest_is_best(metric) else min
    return pick((trial for trial in trials if trial.value is not None), key=lambda one: one.value or 0.0, default=None)


def read_curves(metrics: Path, *, num_runs: int) -> dict[str, Points]:
    """Returns training loss and evaluations of a run, of as many points as a page of so many runs has room for."""
    series = read_series(metrics)
    most = min(_MOST_PER_CURVE, max(_LEAST_PER_CURVE, _MOST_POINTS // max(1, num_runs)))
    return {key: _thin(series, key, most) for key in ("loss", *series.evaluations)}


def _thin(series: Series, key: str, most: int) -> Points:
    return skeleton(*series.points(key), most=most)


def _grade(place: int, num: int) -> int:
    if place == 0:
        return 0
    return next((grade for grade, share in enumerate(_CLASSES) if place < share * num), len(_CLASSES))
