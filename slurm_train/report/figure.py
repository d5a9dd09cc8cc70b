"""A plot as markup: SVG that stretches, labels that do not, both scales where two make sense, points for the read-out.

Everything is drawn here, so the page shows it without scripts and on paper; the script only adds what follows the
pointer. Labels are text beside the drawing rather than in it, so they keep their size on a phone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_train.report.curve import Curve
from slurm_train.report.markup import Html, as_json, join, tag
from slurm_train.report.path import SIDE, band, dots, line, places, ranges
from slurm_train.report.plot import Plot
from slurm_train.report.quantity import short
from slurm_train.report.scale import Scale

_DIGITS = 6
# More curves are not named in a legend, and only the nearest is read out.
_MANY = 8


def figure(plot: Plot) -> Html:
    """Returns a plot as markup, with a sentence in its place where there is nothing to draw."""
    if plot.is_empty:
        return tag("figure", _caption(plot, []), tag("p", plot.note or "nothing was recorded", class_="none"))
    x, scales = plot.x_scale(), plot.y_scales()
    return tag(
        "figure",
        _caption(plot, scales),
        [_frame(plot, x, y, index) for index, y in enumerate(scales)],
        tag("p", plot.note, class_="note") if plot.note else None,
        tag("script", as_json(_points(plot)), type="application/json"),
        id=f"plot-{plot.key}",
        class_="plot wide" if plot.is_wide else "plot",
    )


def _caption(plot: Plot, scales: list[Scale]) -> Html:
    legend = [
        tag("span", tag("i", class_=f"key {curve.colour} {curve.kind}"), curve.name, class_="entry")
        for curve in plot.curves
        if len(curve.x)
    ]
    return tag(
        "figcaption",
        tag("span", plot.title, class_="title"),
        tag("span", plot.y_label, class_="unit") if plot.y_label else None,
        tag("span", legend, class_="legend") if 1 < len(legend) <= _MANY else None,
        _switch(plot.key, scales) if len(scales) > 1 else None,
    )


def _switch(key: str, scales: list[Scale]) -> Html:
    """Returns the choice between scales; the style sheet shows the frame of the chosen one."""
    choices = [
        tag(
            "label",
            tag("input", type="radio", name=f"scale-{key}", class_=f"pick-{index}", checked=index == 0),
            "log" if scale.is_log else "linear",
        )
        for index, scale in enumerate(scales)
    ]
    return tag("span", choices, class_="switch", role="group", aria_label="scale")


def _frame(plot: Plot, x: Scale, y: Scale, index: int) -> Html:
    area = tag("div", _drawing(plot, x, y), _mark_labels(plot, x), class_="area")
    return tag(
        "div",
        tag("div", _y_labels(y), class_="ylabels"),
        area,
        tag("div", _x_labels(x), tag("span", plot.x_label, class_="xname"), class_="xlabels"),
        class_=f"frame frame-{index}",
        data_low=_number(y.low),
        data_high=_number(y.high),
        data_log="1" if y.is_log else "0",
        data_xlow=_number(x.low),
        data_xhigh=_number(x.high),
    )


def _drawing(plot: Plot, x: Scale, y: Scale) -> Html:
    grid = "".join(f"M0 {_down(y, tick)}h{SIDE}" for tick in y.ticks())
    marks = {
        kind: "".join(f"M{_across(x, mark.x)} 0v{SIDE}" for mark in plot.marks if mark.kind == kind)
        for kind in ("attempt", "node", "event", "calm")
    }
    return tag(
        "svg",
        tag("path", d=grid, class_="grid"),
        [tag("path", d=path, class_=f"mark {kind}") for kind, path in marks.items() if path],
        [_shape(curve, x, y) for curve in plot.curves if len(curve.x)],
        viewBox=f"0 0 {SIDE} {SIDE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{plot.title} against {plot.x_label}",
    )


def _shape(curve: Curve, x: Scale, y: Scale) -> Html:
    points = places(curve, curve.y, x, y)
    if curve.kind == "line":
        around = tag("path", d=_band(curve, x, y), class_=f"band {curve.colour}") if len(curve.low) else None
        few = tag("path", d=dots(points), class_=f"few {curve.colour}") if curve.is_dotted else None
        return join(
            around, tag("path", d=line(points), class_=f"curve {curve.colour}", data_run=curve.key or None), few
        )
    upright = None
    if curve.kind == "ranges":
        path = ranges(places(curve, curve.low, x, y), places(curve, curve.high, x, y))
        upright = tag("path", d=path, class_=f"range {curve.colour}")
    return join(upright, tag("path", d=dots(points), class_=f"dots {curve.colour}"))


def _band(curve: Curve, x: Scale, y: Scale) -> str:
    return band(places(curve, curve.low, x, y), places(curve, curve.high, x, y))


def _mark_labels(plot: Plot, x: Scale) -> Iterator[Html]:
    for mark in plot.marks:
        style = f"left:{100 * x.at(mark.x):.2f}%"
        yield tag(
            "span",
            mark.text if mark.kind in ("attempt", "node") else None,
            class_=f"at {mark.kind}",
            style=style,
            title=mark.text,
        )


def _y_labels(y: Scale) -> Iterator[Html]:
    for tick in y.ticks():
        yield tag("span", short(tick), style=f"bottom:{100 * y.at(tick):.2f}%")


def _x_labels(x: Scale) -> Iterator[Html]:
    for tick in x.ticks(is_whole=True):
        yield tag("span", short(tick), style=f"left:{100 * x.at(tick):.2f}%")


def _down(y: Scale, value: float) -> int:
    return round(SIDE * (1 - y.at(value)))


def _across(x: Scale, value: float) -> int:
    return round(SIDE * x.at(value))


def _points(plot: Plot) -> dict[str, Any]:
    """Returns what the read-out shows, curve by curve."""
    curves = [_curve(curve) for curve in plot.curves if len(curve.x)]
    return {"x": plot.x_label, "unit": plot.y_label, "isMany": len(curves) > _MANY, "curves": curves}


def _curve(curve: Curve) -> dict[str, Any]:
    values = {"x": curve.x, "y": curve.y, "low": curve.low, "high": curve.high}
    found: dict[str, Any] = {
        name: [_number(value) for value in column] for name, column in values.items() if len(column)
    }
    found |= {"name": curve.name, "colour": curve.colour, "kind": curve.kind}
    found |= {"labels": list(curve.labels)} if curve.labels else {}
    return found | ({"key": curve.key} if curve.key else {})


def _number(value: float) -> int | float:
    """Returns a value short enough for a read-out."""
    rounded = float(f"{value:.{_DIGITS}g}") if abs(value) < 1e15 and value != int(value) else value
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded
