"""The figures of a document as PNG files, for slides and papers. Needs matplotlib (extra: plot), but no screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from slurm_train.errors import ConfigError, RunError
from slurm_train.tools.report.page import Block, Document, read_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DOTS_PER_INCH = 160
_MOST_NAMED = 8
_NOWHERE = -0.08
_MOST_BARS = 60

Colours: TypeAlias = Mapping[str, str]
Draw: TypeAlias = Callable[[Any, Block, Colours], tuple[str, str]]
"""Draws a figure and returns the labels of its axes."""


def require_matplotlib() -> None:
    """Checks that matplotlib can be imported.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError:
        hint = "pip install matplotlib (extra: plot), or leave --png out: the page has the same plots"
        raise ConfigError("--png needs matplotlib, which is not installed here", hint=hint) from None


def write_pictures(document: Document, folder: Path) -> list[Path]:
    """Writes each figure of a document as a file that is named by its key; returns the files.

    Raises:
        RunError: the folder cannot be made or written.
    """
    # Made without pyplot: no window system is looked for, and nothing is kept open.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = read_colours()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for draw, block in _figures(document):
            figure = Figure(figsize=_size_of(block), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
            x_label, y_label = draw(axes, block, colours)
            axes.set_xlabel(_plain(x_label), fontsize=9)
            axes.set_ylabel(_plain(y_label), fontsize=9)
            axes.set_title(_plain(block["title"]), loc="left", fontsize=11, fontweight="bold")
            path = folder / f"{block['key']}.png".replace("/", "_")
            figure.savefig(path, dpi=_DOTS_PER_INCH)
            written.append(path)
    except OSError as err:
        hint = "name another folder with --png"
        raise RunError(f"{folder} cannot be written: {err.strerror or err}", hint=hint) from err
    return written


def _size_of(block: Block) -> tuple[float, float]:
    """Returns width and height of a figure in inches: more axes are wider, more attempts or ranks higher."""
    if "axes" in block:
        width = 1.6 * len(block["axes"]) + 2.0
    elif "curves" in block:
        width = 6.0
    else:
        width = 8.0
    rows = len(block.get("attempts") or block.get("ranks") or ())
    return width, max(3.4, 1.4 + 0.28 * min(rows, _MOST_BARS))


def _figures(document: Document) -> Iterator[tuple[Draw, Block]]:
    """Yields what draws each figure, and the figure."""
    for blocks in document["plots"].values():
        for block in blocks:
            if block["curves"]:
                yield _plot, block
    if document.get("parallel"):
        yield _parallel, document["parallel"]
    if document.get("stragglers"):
        yield _heat_map, {"key": "stragglers", "title": "Own part of a step, by rank", **document["stragglers"]}
    if document.get("attempts") and document["time"]["seconds"]:
        timeline = {
            "key": "timeline",
            "title": "What the hours went to",
            "names": document["time"]["names"],
            "attempts": document["attempts"][-_MOST_BARS:],
        }
        yield _timeline, timeline


def _plot(axes: Axes, block: Block, colours: Colours) -> tuple[str, str]:
    for at, _, kind in block["marks"]:
        colour = colours["failed" if kind == "event" else "mark"]
        axes.axvline(at, color=colour, linewidth=0.8, linestyle=":")
    for curve in block["curves"]:
        has_point = [value is not None for value in curve["y"]]
        x = list(compress(block["x"], has_point))
        y = list(compress(curve["y"], has_point))
        band = [list(compress(curve[name], has_point)) for name in ("low", "high") if name in curve]
        colour = colours[curve["colour"]]
        label = _plain(curve["name"])
        kind = curve["kind"]
        if kind in ("dots", "ranges"):
            axes.plot(x, y, ".", color=colour, markersize=6, label=label)
        else:
            style = "steps-post" if kind == "steps" else "default"
            marker = "." if len(x) < min(60, len(block["x"])) else None
            axes.plot(x, y, color=colour, linewidth=1.3, label=label, drawstyle=style, marker=marker)
        if band and kind == "ranges":
            axes.vlines(x, band[0], band[1], color=colour, alpha=0.4, linewidth=3)
        elif band:
            axes.fill_between(x, band[0], band[1], color=colour, alpha=0.2, linewidth=0)
    axes.set_yscale(block["scales"][0])
    if block["from_zero"] and block["scales"][0] == "linear":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", integer=True)
    if 1 < len(block["curves"]) <= _MOST_NAMED:
        axes.legend(frameon=False, fontsize=8)
    return block["x_label"], block["unit"]


def _unit(seconds: float) -> tuple[float, str]:
    """Returns the seconds of a unit in which a time is easy to read, and its name, e.g. (60.0, "min")."""
    if seconds >= 2 * 3600.0:
        return 3600.0, "h"
    if seconds >= 2 * 60.0:
        return 60.0, "min"
    return 1.0, "s"


def _timeline(axes: Axes, block: Block, colours: Colours) -> tuple[str, str]:
    begins = [attempt["time_unix_s"] - attempt["seconds"].get("queue_s", 0.0) for attempt in block["attempts"]]
    first = min(begins)
    size, unit = _unit(max(attempt["end_time_unix_s"] for attempt in block["attempts"]) - first)
    named = set()
    for attempt, begin in zip(block["attempts"], begins, strict=True):
        left = (begin - first) / size
        for cause, name in block["names"].items():
            width = attempt["seconds"].get(cause, 0.0) / size
            if not width:
                continue
            # In the legend each cause is named once.
            label = None if cause in named else name
            hatch = "////" if cause == "lost_work_s" else None
            axes.barh(str(attempt["attempt"]), width, left=left, color=colours[cause], label=label, hatch=hatch)
            named.add(cause)
            left += width
    axes.invert_yaxis()
    axes.figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    return unit, "attempt"


def _heat_map(axes: Axes, block: Block, _colours: Colours) -> tuple[str, str]:
    edges = block["map"]["edges_unix_s"]
    num_ranks = len(block["ranks"])
    size, unit = _unit(edges[-1] - edges[0])
    times = [(edge - edges[0]) / size for edge in edges]
    borders = [rank - 0.5 for rank in range(num_ranks + 1)]
    mesh = axes.pcolormesh(times, borders, block["map"]["percent"], cmap="Reds", vmin=0, vmax=100)
    axes.figure.colorbar(mesh, ax=axes, label="% longer than the middle rank")
    axes.invert_yaxis()
    axes.set_yticks(range(0, num_ranks, -(-num_ranks // 16)))
    return unit, "rank"


def _parallel(axes: Axes, block: Block, colours: Colours) -> tuple[str, str]:
    places = range(len(block["axes"]))
    for run in block["runs"]:
        heights = [_NOWHERE if at is None else at for at in run["at"]]
        axes.plot(places, heights, "-" if run["has_value"] else "--", color=colours[run["colour"]], linewidth=1.2)
    for place, axis in enumerate(block["axes"]):
        axes.axvline(place, color=colours["mark"], linewidth=0.8, zorder=0)
        labels = list(axis["ticks"])
        if any(run["at"][place] is None for run in block["runs"]):
            labels.append((_NOWHERE, "none"))
        for height, label in labels:
            axes.text(place + 0.03, height, _plain(label), fontsize=7, va="center")
    axes.set_xticks(places, [_plain(axis["name"]) for axis in block["axes"]], fontsize=8)
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    return "", ""


def _plain(text: str) -> str:
    """Returns a text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
