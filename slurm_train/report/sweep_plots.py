"""The plots of a sweep: all curves over each other, and the best value so far."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_train.metrics.best import largest_is_best
from slurm_train.report.curve import Curve
from slurm_train.report.plot import Mark, Plot
from slurm_train.report.trials import Trial, best_trial

_MOST_MARKS = 100


def run_curves(trials: Sequence[Trial], metric: str) -> list[Plot]:
    """Returns training loss and metric of all runs; without those that no run has a value for."""
    found = [_curves(trials, "loss", "Training loss")]
    if metric != "loss":
        found.append(_curves(trials, metric, f"Held-out {metric.removeprefix('eval_').replace('_', ' ')}"))
    return [plot for plot in found if not plot.is_empty]


def best_so_far(trials: Sequence[Trial], metric: str) -> Plot:
    """Returns each run's best value in the order in which the runs ended, and the best up to then."""
    pick = max if largest_is_best(metric) else min
    ended = sorted((trial for trial in trials if trial.bars), key=lambda one: (one.ended_unix_s, one.index))
    places = {trial.index: place for place, trial in enumerate(ended, start=1)}
    valued = [(places[trial.index], trial, trial.value) for trial in ended if trial.value is not None]
    x, y = [], []
    best: float | None = None
    for place, _, value in valued:
        better = value if best is None else pick(best, value)
        # A step, not a slope: between two runs nothing got better.
        x += [place, place] if best is not None else [place]
        y += [best, better] if best is not None else [better]
        best = better
    if valued and best is not None:
        x.append(len(ended))
        y.append(best)
    runs = Curve(
        name="runs",
        x=[place for place, _, _ in valued],
        y=[value for _, _, value in valued],
        kind="dots",
        colour="quiet",
        labels=[trial.label for _, trial, _ in valued],
    )
    failed = [
        Mark(places[trial.index], f"{trial.label}: {trial.verdict.state}", "event")
        for trial in ended
        if trial.has_failed
    ]
    return Plot(
        key="best",
        title=f"Best so far: {metric.replace('_', ' ')}",
        curves=[Curve(name="best so far", x=x, y=y), runs] if valued else [],
        x_label="runs that have ended, in order",
        marks=failed[:_MOST_MARKS],
        note="" if valued else "no run has a value yet",
    )


def _curves(trials: Sequence[Trial], metric: str, title: str) -> Plot:
    """Returns one line per run, the best drawn last."""
    best = best_trial(trials, metric)
    order = sorted(trials, key=lambda trial: (trial.grade is not None, -(trial.grade or 0), trial is best))
    curves = [
        Curve(
            name=trial.label,
            x=steps,
            y=values,
            colour=trial.colour,
            key=str(trial.index),
            # A single point has no line.
            is_dotted=len(steps) == 1,
        )
        for trial in order
        if len((points := trial.curves.get(metric, ((), ())))[0])
        for steps, values in (points,)
    ]
    return Plot(key=f"runs_{metric}", title=title, curves=curves)
