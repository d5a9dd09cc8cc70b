"""The timeline as markup: a bar of everything, a bar per attempt at its place in time, and a table of the sums."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_train.report.markup import Html, join, tag
from slurm_train.report.quantity import duration, hours, moment, share
from slurm_train.report.scale import fit
from slurm_train.report.table import Cell, table
from slurm_train.report.timeline import CAUSES, Bar, totals
from slurm_train.rundir.events import CALM_EVENTS

MOST_BARS = 60
_MANY = 16


def timeline(bars: Sequence[Bar]) -> Html:
    """Returns what the hours went to; a sentence where there is no attempt yet."""
    if not totals(bars):
        return sums(bars)
    shown = bars[-MOST_BARS:]
    left_out = len(bars) - len(shown)
    return join(
        sums(bars),
        tag("h3", "Attempts in time"),
        tag("p", f"The newest {MOST_BARS} of {len(bars)} attempts.", class_="note") if left_out else None,
        _gantt(shown),
        tag(
            "p",
            "Each bar lies where the attempt lies in time, its causes one after the other: the ledger has sums per "
            "attempt, not their order. Hatched: steps that were done again.",
            class_="note",
        ),
    )


def sums(bars: Sequence[Bar]) -> Html:
    """Returns a bar and a table of the time of all attempts by cause."""
    seconds = totals(bars)
    if not seconds:
        return tag("p", "No attempt has begun yet.", class_="none")
    return join(
        tag("div", _segments(seconds), class_="bar total", role="img", aria_label="all attempts by cause"),
        _sums_table(seconds, bars),
    )


def _segments(seconds: dict[str, float]) -> list[Html]:
    whole = sum(seconds.values()) or 1.0
    return [
        tag(
            "span",
            class_=f"seg {cause}",
            style=f"width:{100 * value / whole:.3f}%",
            title=f"{CAUSES[cause]}: {duration(value)} ({share(value / whole)})",
        )
        for cause, value in seconds.items()
        if value > 0
    ]


def _sums_table(seconds_by_cause: dict[str, float], bars: Sequence[Bar]) -> Html:
    whole = sum(seconds_by_cause.values())
    rows = []
    for cause, seconds in seconds_by_cause.items():
        device_s = sum(bar.seconds.get(cause, 0.0) * bar.world_size for bar in bars)
        name = join(tag("i", class_=f"seg swatch {cause}"), CAUSES[cause])
        # Nobody holds a device while a job waits.
        held = Cell("-", None, "num") if cause == "queue_s" else Cell(hours(device_s), device_s, "num")
        shown = Cell(share(seconds / whole), seconds / whole, "num")
        rows.append([Cell(name, CAUSES[cause]), Cell(duration(seconds), seconds, "num"), shown, held])
    return table(["cause", "time", "share", "device time"], rows, name="sums")


def _gantt(bars: Sequence[Bar]) -> Html:
    first = min(bar.start_unix_s - bar.queue_s for bar in bars)
    last = max(bar.end_unix_s for bar in bars)
    whole = max(last - first, 1e-9)
    rows = [_row(bar, first, whole) for bar in bars]
    return tag("div", rows, _axis(first, whole), class_="gantt dense" if len(bars) > _MANY else "gantt")


def _row(bar: Bar, first: float, whole: float) -> Html:
    begin = bar.start_unix_s - bar.queue_s
    left, width = 100 * (begin - first) / whole, 100 * (bar.end_unix_s - begin) / whole
    seconds = {cause: bar.seconds[cause] for cause in CAUSES if cause in bar.seconds}
    events = [
        tag(
            "i",
            class_="event calm" if name in CALM_EVENTS else "event",
            style=f"left:{100 * (at - first) / whole:.3f}%",
            title=f"{name}, {moment(at)}",
        )
        for at, name in bar.events
        if first <= at <= first + whole
    ]
    text = f"attempt {bar.attempt}: {duration(bar.held_s)}, {bar.reason}"
    return tag(
        "div",
        tag("span", str(bar.attempt), class_="who", title=text),
        tag(
            "div",
            tag("div", _segments(seconds), class_="bar", style=f"left:{left:.3f}%;width:{width:.3f}%"),
            events,
            class_="lane",
        ),
        tag("span", bar.reason.replace("_", " "), class_="why"),
        class_="row",
    )


def _axis(first: float, whole: float) -> Html:
    size, unit = next(
        ((size, unit) for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")) if whole >= 2 * size), (1.0, "s")
    )
    scale = fit([0.0, whole / size], is_padded=False)
    ticks = [tag("span", f"{tick:g} {unit}", style=f"left:{100 * scale.at(tick):.2f}%") for tick in scale.ticks(5)]
    return tag(
        "div",
        tag("span", class_="who"),
        tag("div", ticks, class_="lane axis"),
        tag("span", class_="why"),
        class_="row",
        title=f"since {moment(first)}",
    )
