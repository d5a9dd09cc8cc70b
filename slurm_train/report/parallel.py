"""Parallel coordinates: an upright axis per swept key and one for the metric, a line per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_train.report.markup import Html, as_json, tag
from slurm_train.report.path import SIDE, line
from slurm_train.report.quantity import number, short
from slurm_train.report.scale import Scale, fit, wants_log
from slurm_train.report.trials import Trial

_MOST_AXES = 12
_MOST_NAMED = 10
NOWHERE = -0.08
"""Where runs without a value meet, below the axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One upright axis: where each run stands on it, from 0 below to 1 above, and the labels."""

    name: str
    places: Sequence[float | None]
    ticks: Sequence[tuple[float, str]]
    scale: Scale | None = None
    """None where the values are words."""


def axes_of(trials: Sequence[Trial], metric: str) -> list[Axis]:
    """Returns the axes: keys with more than one value, then the metric."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.given))
    swept = [key for key in keys if len({trial.given.get(key) for trial in trials}) > 1]
    found = [_swept_axis(key, [trial.given.get(key) for trial in trials]) for key in swept[: _MOST_AXES - 1]]
    return [*found, _number_axis(metric.replace("_", " "), [trial.value for trial in trials])]


def _swept_axis(key: str, texts: Sequence[str | None]) -> Axis:
    numbers = [_as_number(text) for text in texts]
    if all(value is not None for value, text in zip(numbers, texts, strict=True) if text is not None):
        return _number_axis(key, numbers)
    words = list(dict.fromkeys(text for text in texts if text is not None))
    places = {word: (index + 0.5) / len(words) for index, word in enumerate(words)}
    shown = [(places[word], word if len(word) <= 24 else f"{word[:21]}...") for word in words]
    step = -(-len(shown) // _MOST_NAMED)
    return Axis(key, [None if text is None else places[text] for text in texts], shown[::step])


def _number_axis(name: str, values: Sequence[float | None]) -> Axis:
    known = [value for value in values if value is not None]
    scale = fit(known, is_log=wants_log(known))
    distinct = sorted(set(known))
    is_short = 0 < len(distinct) <= _MOST_NAMED and _has_room(scale, distinct)
    ticks = (
        [(scale.at(value), number(value)) for value in distinct]
        if is_short
        else [(scale.at(value), short(value)) for value in scale.ticks(7)]
    )
    return Axis(name, [None if value is None else scale.at(value) for value in values], ticks if known else [], scale)


def _has_room(scale: Scale, values: Sequence[float]) -> bool:
    return all(scale.at(b) - scale.at(a) > 0.05 for a, b in pairwise(values))


def _as_number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < 1e100 else None


def parallel(trials: Sequence[Trial], axes: Sequence[Axis], metric: str) -> Html:
    """Returns the picture; its script lets axes be brushed and lines be pointed at."""
    # The best are drawn last, above the others.
    order = sorted(range(len(trials)), key=lambda place: worst_first(trials[place]))
    svg = tag(
        "svg",
        [_line(trials[place], [axis.places[place] for axis in axes]) for place in order],
        viewBox=f"0 0 {SIDE} {SIDE}",
        preserveAspectRatio="none",
        role="img",
        aria_label="one line per run through the values it was given and the metric it reached",
    )
    lines = [_axis(axis, index, len(axes)) for index, axis in enumerate(axes)]
    texts = {str(trial.index): _texts(trial, metric) for trial in trials}
    return tag(
        "figure",
        tag("figcaption", tag("span", "Values and result", class_="title"), ramp()),
        tag("div", tag("div", svg, lines, class_="stage"), class_="parallel"),
        tag(
            "p",
            "Drag along an axis to keep only the runs that pass there, click it to let go; the curves and the table "
            "follow. Dashed: no value.",
            class_="note on-screen",
        ),
        tag("script", as_json(texts), type="application/json"),
        id="parallel",
    )


def worst_first(trial: Trial) -> int:
    """Returns what orders runs for drawing, those without a value first, the best last."""
    return -10 if trial.grade is None else -trial.grade


def ramp() -> Html:
    """Returns the legend of the colours."""
    boxes = [tag("i", class_=f"q{grade}") for grade in range(5)]
    return tag("span", "best", boxes, "worst", tag("i", class_="failed"), "failed", class_="ramp")


def _line(trial: Trial, places: Sequence[float | None]) -> Html:
    last = max(1, len(places) - 1)
    points = [
        (round(SIDE * index / last), round(SIDE * (1 - (NOWHERE if place is None else place))))
        for index, place in enumerate(places)
    ]
    css = f"run-line {trial.colour}" + (" failed" if trial.value is None else "")
    values = ",".join("" if place is None else f"{place:.4f}" for place in places)
    return tag("path", d=line(points), class_=css, data_run=trial.index, data_v=values)


def _axis(axis: Axis, index: int, num: int) -> Html:
    ticks = [tag("span", text, class_="tick", style=f"bottom:{100 * place:.2f}%") for place, text in axis.ticks]
    nowhere = tag("span", "none", class_="tick quiet", style=f"bottom:{100 * NOWHERE:.1f}%")
    return tag(
        "div",
        tag("span", axis.name, class_="name", title=axis.name),
        ticks,
        nowhere if any(place is None for place in axis.places) else None,
        tag("button", class_="grip", type="button", aria_label=f"choose by {axis.name}"),
        class_="axis-line",
        style=f"left:{100 * index / max(1, num - 1):.3f}%",
        data_axis=index,
    )


def _texts(trial: Trial, metric: str) -> list[list[str]]:
    pairs = [["run", f"{trial.index} ({trial.run})"], *([key, value] for key, value in trial.given.items())]
    pairs += [["state", trial.verdict.state], [metric, number(trial.value, digits=6)]]
    return pairs + ([["why", trial.verdict.note[:200]]] if trial.has_failed and trial.verdict.note else [])
