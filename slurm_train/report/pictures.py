"""The plots of a page as PNG files, for slides and papers. Needs matplotlib (extra: plot), but no screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.errors import ConfigError, RunError
from slurm_train.report.curve import Curve
from slurm_train.report.parallel import NOWHERE, Axis, axes_of, worst_first
from slurm_train.report.plot import Plot
from slurm_train.report.quantity import short
from slurm_train.report.ranks import rank_plots, shown_attempt
from slurm_train.report.record import RunRecord
from slurm_train.report.run_plots import run_plots
from slurm_train.report.saved import save_plot
from slurm_train.report.stragglers import HeatMap, build_heat_map, mapped_attempt
from slurm_train.report.sweep_plots import best_so_far, run_curves
from slurm_train.report.sweep_record import SweepRecord
from slurm_train.report.timeline import CAUSES, Bar, bars_of
from slurm_train.report.trials import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 160
_COLOURS = {
    "one": "#2563c9",
    "two": "#d4500c",
    "three": "#7a4fc0",
    "four": "#0a7d6c",
    "quiet": "#9aa1a9",
    "failed": "#c3202b",
    "q0": "#08519c",
    "q1": "#3f8fc9",
    "q2": "#8db9d8",
    "q3": "#b9bfc6",
    "q4": "#d5d8dc",
}
_CAUSE_COLOURS = {
    "queue_s": "#d3d7db",
    "start_s": "#8a94a6",
    "rendezvous_s": "#6f7fc4",
    "load_s": "#9b86cf",
    "compile_s": "#b79ddb",
    "productive_s": "#23946a",
    "lost_work_s": "#cf3f3f",
    "data_wait_s": "#e8912d",
    "evaluate_s": "#5aa9d6",
    "checkpoint_stall_s": "#c05a9c",
    "suspended_s": "#c9bfa9",
    "end_s": "#6b7280",
    "unknown_s": "#e7e1d2",
}
_MOST_NAMED = 8
_MOST_BARS = 60


def require_matplotlib() -> None:
    """Does nothing where pictures can be made.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError:
        hint = "pip install matplotlib (extra: plot), or leave --png out: the page has the same plots"
        raise ConfigError("--png needs matplotlib, which is not installed here", hint=hint) from None


def write_run_pictures(record: RunRecord, folder: Path) -> list[Path]:
    """Writes the plots of a run and returns their files.

    Raises:
        RunError: the folder cannot be made or written.
    """
    attempt = shown_attempt(record.step_times)
    ranks = [] if attempt is None else rank_plots(record.step_times[attempt])
    found = [*run_plots(record), *ranks, save_plot(record.saves)]
    drawings: dict[str, Callable[[], Figure]] = dict(_drawings(found))
    if (slowed := mapped_attempt(record.windows)) is not None:
        drawings["stragglers"] = lambda: _heat_map(build_heat_map(record.windows, slowed))
    bars = bars_of(record.attempts)
    if bars:
        drawings["timeline"] = lambda: _timeline(bars[-_MOST_BARS:], record.name)
    return _write(drawings, folder)


def write_sweep_pictures(record: SweepRecord, folder: Path) -> list[Path]:
    """Writes the plots of a sweep and returns their files.

    Raises:
        RunError: the folder cannot be made or written.
    """
    found = [best_so_far(record.trials, record.metric), *run_curves(record.trials, record.metric)]
    drawings = dict(_drawings(found))
    axes = axes_of(record.trials, record.metric)
    if len(axes) > 1:
        drawings["parallel"] = lambda: _parallel(record.trials, axes)
    return _write(drawings, folder)


def _drawings(plots: Sequence[Plot]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    for plot in plots:
        if not plot.is_empty:
            yield plot.key, lambda plot=plot: draw(plot)  # type: ignore[misc]  # mypy sees no type for the default


def _write(drawings: dict[str, Callable[[], Figure]], folder: Path) -> list[Path]:
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key, make in drawings.items():
            path = folder / f"{key}.png"
            make().savefig(path, dpi=_DOTS_PER_INCH)
            written.append(path)
    except OSError as err:
        hint = "name another folder with --png"
        raise RunError(f"{folder} cannot be written: {err.strerror or err}", hint=hint) from err
    return written


def draw(plot: Plot) -> Figure:
    """Returns a plot as a matplotlib figure, with the scale that the page begins with."""
    figure, axes = _canvas(8.0 if plot.is_wide else 6.0, 3.6)
    x, y = plot.x_scale(), plot.y_scales()[0]
    for mark in plot.marks:
        axes.axvline(mark.x, color="#c3202b" if mark.kind == "event" else "#b9bec5", linewidth=0.8, linestyle=":")
    for curve in plot.curves:
        _draw_curve(axes, curve)
    axes.set_yscale("log" if y.is_log else "linear")
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)
    _label_ticks(axes, plot, y.ticks(), x.ticks(is_whole=True))
    axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold")
    if 1 < len(plot.curves) <= _MOST_NAMED:
        axes.legend(frameon=False, fontsize=8)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    # Made without pyplot: no window system is looked for, and nothing is kept open.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def _label_ticks(axes: Axes, plot: Plot, y_ticks: list[float], x_ticks: list[float]) -> None:
    axes.set_yticks(y_ticks, [short(tick) for tick in y_ticks])
    axes.set_yticks([], minor=True)
    axes.set_xticks(x_ticks, [short(tick) for tick in x_ticks])
    axes.grid(axis="y", color="#eceef0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(_plain(plot.x_label), fontsize=9)
    axes.set_ylabel(_plain(plot.y_label), fontsize=9)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    colour = _COLOURS.get(curve.colour, _COLOURS["one"])
    if curve.kind == "line":
        marker = "." if curve.is_dotted else None
        axes.plot(curve.x, curve.y, color=colour, linewidth=1.3, marker=marker, label=_plain(curve.name))
        if curve.is_thinned:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        return
    if curve.kind == "ranges":
        axes.vlines(curve.x, curve.low, curve.high, color=colour, alpha=0.4, linewidth=3)
    axes.plot(curve.x, curve.y, ".", color=colour, markersize=6, label=_plain(curve.name))


def _timeline(bars: Sequence[Bar], name: str) -> Figure:
    figure, axes = _canvas(8.0, max(3.0, 1.4 + 0.28 * len(bars)))
    first = min(bar.start_unix_s - bar.queue_s for bar in bars)
    last = max(bar.end_unix_s for bar in bars)
    size, unit = next(
        ((size, unit) for size, unit in ((3600.0, "h"), (60.0, "min")) if last - first >= 2 * size), (1.0, "s")
    )
    named = set()
    for bar in bars:
        left = (bar.start_unix_s - bar.queue_s - first) / size
        for cause, text in CAUSES.items():
            width = bar.seconds.get(cause, 0.0) / size
            if width > 0:
                label = None if cause in named else text
                named.add(cause)
                hatch = "////" if cause == "lost_work_s" else None
                axes.barh(str(bar.attempt), width, left=left, color=_CAUSE_COLOURS[cause], label=label, hatch=hatch)
                left += width
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=9)
    axes.set_ylabel("attempt", fontsize=9)
    axes.set_title(f"What the hours went to: {_plain(name)}", loc="left", fontsize=11, fontweight="bold")
    figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    return figure


def _heat_map(heat: HeatMap) -> Figure:
    figure, axes = _canvas(8.0, max(2.4, min(5.0, 1.4 + 0.28 * len(heat.hosts))))
    size, unit = heat.unit
    edges = [(at - heat.begins_unix_s[0]) / size for at in (*heat.begins_unix_s, heat.end_unix_s)]
    rows = [[100 * column[rank] for column in heat.excess] for rank in range(len(heat.hosts))]
    borders = [rank - 0.5 for rank in range(len(heat.hosts) + 1)]
    mesh = axes.pcolormesh(edges, borders, rows, cmap="Reds", vmin=0, vmax=100)
    figure.colorbar(mesh, ax=axes, label="% longer than the middle rank")
    axes.invert_yaxis()
    axes.set_yticks(range(0, len(heat.hosts), -(-len(heat.hosts) // 16)))
    axes.set_xlabel(unit, fontsize=9)
    axes.set_ylabel("rank", fontsize=9)
    axes.set_title("Own part of a step, by rank", loc="left", fontsize=11, fontweight="bold")
    return figure


def _parallel(trials: Sequence[Trial], axes_of_trials: Sequence[Axis]) -> Figure:
    figure, axes = _canvas(1.6 * len(axes_of_trials) + 2.0, 4.0)
    order = sorted(range(len(trials)), key=lambda place: worst_first(trials[place]))
    for place in order:
        trial = trials[place]
        heights = [NOWHERE if (height := axis.places[place]) is None else height for axis in axes_of_trials]
        style = "--" if trial.value is None else "-"
        axes.plot(range(len(heights)), heights, style, color=_COLOURS[trial.colour], linewidth=1.2)
    for index, axis in enumerate(axes_of_trials):
        axes.axvline(index, color="#b9bec5", linewidth=0.8, zorder=0)
        for height, text in axis.ticks:
            axes.text(index + 0.03, height, _plain(text), fontsize=7, va="center")
    axes.set_xticks(range(len(axes_of_trials)), [_plain(axis.name) for axis in axes_of_trials], fontsize=8)
    if any(place is None for axis in axes_of_trials for place in axis.places):
        axes.text(len(axes_of_trials) - 1 + 0.03, NOWHERE, "none", fontsize=7, va="center", color=_COLOURS["quiet"])
    axes.set_yticks([])
    axes.set_title("Values and result", loc="left", fontsize=11, fontweight="bold")
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def _plain(text: str) -> str:
    """Returns a text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
