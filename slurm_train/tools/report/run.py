"""The facts of a run, from the files in its directory, as the document of a report.

Damaged, missing and half-written files give less, never an error: a report is wanted most when something went wrong.

The ledger has sums per attempt, not an order, so the causes of an attempt are drawn one after the other in the order
in which an attempt usually spends them. Ranks wait for each other in every step, so their step times are alike. A
rank's own part of a step is its own; it is compared with the middle rank in the same seconds.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from slurm_train.checkpoint.verify import check_sizes, survey
from slurm_train.config.frozen import list_settings, load_values
from slurm_train.errors import SlurmTrainError
from slurm_train.formatting import byte_size
from slurm_train.launch.provenance import environment_of
from slurm_train.metrics import Series, read_series
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import CALM_EVENTS, read_changes, read_events, read_saves
from slurm_train.rundir.files import last_lines, read_json
from slurm_train.rundir.paths import RunDirectory, name_of
from slurm_train.rundir.timing import (
    Histogram,
    PaceWindow,
    all_findings,
    goodput,
    held_s,
    read_account,
    read_step_times,
    read_windows,
)
from slurm_train.slurm.allocation import compact_nodelist
from slurm_train.tools.report.page import Block, Curve, Document, as_float, drawn, line, plot

Fact = dict[str, Any]
"""Of one attempt, run, rank, ...: JSON."""

CAUSES = {
    "queue_s": "queue",
    "start_s": "starting processes",
    "rendezvous_s": "ranks finding each other",
    "load_s": "loading checkpoints",
    "compile_s": "first pass (compile)",
    "productive_s": "steps that count",
    "lost_work_s": "steps done again",
    "data_wait_s": "waiting for data",
    "evaluate_s": "evaluation",
    "checkpoint_stall_s": "training paused for a save",
    "suspended_s": "suspended",
    "end_s": "ending",
    "unknown_s": "not accounted for",
}
"""What time is spent on, in the order of drawing, with its name; page.css has a colour for each."""
_LEAST_UNKNOWN = 0.01
_MOST_ROWS = 500
_MOST_ATTEMPT_MARKS = 40
_MOST_EVENT_MARKS = 200
_MOST_NODE_MARKS = 64
_MOST_COLUMNS = 160
_MOST_LINES = 3000
_QUANTILES = (0.05, 0.5, 0.95, 0.99)
# Damage of a file shows in one of these.
_DAMAGE = (SlurmTrainError, OSError, AttributeError, KeyError, TypeError, ValueError)


def run_document(run: RunDirectory, *, state: str, note: str = "", nodelist: str = "", now_unix_s: float) -> Document:
    """Returns what a run's directory holds as a document.

    Args:
        run: the run.
        state: its status as `status` prints it, e.g. "not started".
        note: why, in a sentence.
        nodelist: where it runs.
        now_unix_s: the time of day.
    """
    attempts = read_attempts(run, until_unix_s=now_unix_s if state == "running" else None)
    series, events, saves, settings = read_series(run.metrics), read_events(run), read_saves(run), read_settings(run)
    ranks, changes, stored = _ranks(run, attempts), [], []
    with contextlib.suppress(*_DAMAGE):
        changes = [asdict(change) for change in read_changes(run)]
        for path, found in survey(run.checkpoints, check_sizes):
            stored.append((name_of(path).step, None if isinstance(found, SlurmTrainError) else found.num_bytes))
    for event in events:
        event.pop("sample_ids", None)
        event["is_calm"] = event.get("event") in CALM_EVENTS
    return {
        "kind": "run",
        "title": f"{run.name}/{run.run_id}: {state}",
        "name": run.name,
        "id": run.run_id,
        "path": str(run.path),
        "written_unix_s": now_unix_s,
        "state": state,
        "note": note or (f"on {nodelist}" if nodelist else ""),
        "progress": _progress(run, series),
        "plots": {
            "training": _training_plots(series, events),
            "speed": _speed_plots(series),
            "ranks": _rank_plots(ranks["ranks"]) if ranks else [],
            "checkpoints": [_save_plot(saves[-2 * _MOST_ROWS :])] if saves else [],
        },
        "profiles": [str(path.relative_to(run.path)) for path in sorted(run.profiles.glob("*"))],
        "ranks": ranks,
        "stragglers": _stragglers(read_windows(run)),
        "time": time_by_cause(attempts),
        "attempts": attempts,
        "num_superseded": series.num_superseded,
        "changes": changes,
        "saves": saves[-_MOST_ROWS:],
        # Step and bytes of each checkpoint on disk, oldest first; None for one that is not whole.
        "stored": stored[::-1],
        "num_events": len(events),
        "events": events[-_MOST_ROWS:],
        "settings": settings,
        "provenance": provenance(read_json(run.provenance) or {}),
        "environment": environment_of(run),
    }


def _progress(run: RunDirectory, series: Series) -> Fact:
    """Returns how far a run is and what it has reached; evaluations as key, value, and step or None for the final."""
    result = read_json(run.result) or {}
    evaluations: list[tuple[str, float, float | None]] = []
    for key in series.evaluations:
        steps, values = series.points(key)
        if (final := as_float(result.get(key))) is not None:
            evaluations.append((key, final, None))
        elif len(values):
            evaluations.append((key, values[-1], steps[-1]))
    return {
        "step": max(series.last("step") or 0.0, as_float(result.get("step")) or 0.0),
        "max_steps": series.last("max_steps") or as_float((read_json(run.plan) or {}).get("max_steps")),
        "evaluations": evaluations,
        **{key: series.last(key) for key in ("loss", "tokens_per_s", "samples_per_s", "mfu")},
    }


# Settings and provenance.


def read_config(path: Path) -> Mapping[str, Any]:
    """Returns a frozen configuration as it is written: one of another version is shown all the same."""
    with contextlib.suppress(*_DAMAGE):
        return load_values(path)
    return {}


def read_settings(run: RunDirectory, *, leave_out: Collection[str] = ()) -> list[Fact]:
    """Returns the settings of a run but for some keys: key, value, default, and whether it was chosen."""
    config = read_config(run.config)
    return [asdict(setting) for setting in list_settings(config) if setting.key not in leave_out] if config else []


def provenance(value: Any) -> Any:
    """Returns what provenance.json holds without what the document has elsewhere; long texts are cut."""
    if isinstance(value, str):
        lines = value.splitlines()
        left = len(lines) - _MOST_LINES
        return "\n".join([*lines[:_MOST_LINES], f"... {left} more lines in provenance.json"]) if left > 0 else value
    if isinstance(value, list):
        return list(map(provenance, value))
    if isinstance(value, Mapping):
        return {key: provenance(item) for key, item in value.items() if key not in ("versions", "environment")}
    return value


# Curves.


def _column(series: Series, key: str, name: str, *, factor: float = 1.0, **more: Any) -> Curve:
    steps, values = series.points(key)
    return line(name, steps, [factor * value for value in values], **more)


def _training_plots(series: Series, events: Sequence[Fact]) -> list[Block]:
    curves = [_column(series, "loss", "training"), _column(series, "eval_loss", "held out", colour="two")]
    columns = series.columns
    attempts = list(zip(columns["attempt"], columns["step"], strict=True)) if "attempt" in columns else []
    changes = [(step, f"attempt {new:.0f}", "attempt") for (old, _), (new, step) in pairwise(attempts) if new != old]
    marks = changes if len(changes) <= _MOST_ATTEMPT_MARKS else []
    for event in events[-_MOST_EVENT_MARKS:]:
        if (step := as_float(event.get("step"))) is not None:
            name = str(event.get("event")).replace("_", " ")
            marks.append((step, f"{name} at step {step:.0f}", "calm" if event["is_calm"] else "event"))
    names = {key: key.removeprefix("eval_").replace("_", " ") for key in series.evaluations if key != "eval_loss"}
    evaluations = [plot(key, f"Held-out {of}", [_column(series, key, of, colour="two")]) for key, of in names.items()]
    rate, norm = "Learning rate", "Gradient norm before clipping"
    rates = [_column(series, "lr", rate, colour="three")]
    others = [
        *evaluations,
        plot("lr", rate, rates, from_zero=True, linear=True),
        plot("grad_norm", norm, [_column(series, "grad_norm", norm)]),
    ]
    return [plot("loss", "Loss", curves, marks=marks, is_wide=True), *drawn(others)]


_SPEEDS = {
    "tokens_per_s": ("Throughput of all ranks", "tokens/s", 1.0),
    "samples_per_s": ("Throughput of all ranks", "samples/s", 1.0),
    "mfu": ("Model FLOP utilisation", "% of peak", 100.0),
}


def _speed_plots(series: Series) -> list[Block]:
    plots = []
    for key, (title, unit, factor) in _SPEEDS.items():
        curve = _column(series, key, title, factor=factor, colour="four")
        plots.append(plot(key, title, [curve], unit=unit, from_zero=True, linear=True))
    times = {"step_time_s": ("step", "one"), "data_time_s": ("waiting for data", "two")}
    curves = [_column(series, key, name, colour=colour) for key, (name, colour) in times.items()]
    return drawn([*plots, plot("step_time", "Step time on rank 0", curves, unit="s", from_zero=True)])


def _save_plot(saves: Sequence[Fact]) -> Block:
    curves = []
    for name, key, colour in (("until durable", "save_s", "one"), ("training paused", "stall_s", "two")):
        points = sorted(
            (step, seconds, byte_size(as_float(save.get("bytes")) or 0.0))
            for save in saves
            if not save.get("error")
            for step, seconds in [(as_float(save.get("step")), as_float(save.get(key)))]
            if step is not None and seconds is not None
        )
        x, y, labels = ([point[place] for point in points] for place in range(3))
        curves.append(Curve(name=name, x=x, y=y, kind="dots", colour=colour, labels=labels))  # type: ignore[arg-type]
    return plot("saves", "Time of a save", curves, unit="s", from_zero=True)


# Attempts and their time.


def read_attempts(run: RunDirectory, *, until_unix_s: float | None) -> list[Fact]:
    """Returns the ledger: what should be a number is one or absent; "seconds" has the attempt's time by cause.

    An attempt without an end line gets an end as far as files tell, and its "reason" says so.

    Args:
        run: the run.
        until_unix_s: the end of the newest attempt if it still runs, None if it does not.
    """
    found: list[Fact] = []
    with contextlib.suppress(*_DAMAGE):
        for entry in read_ledger(run):
            numbers = [key for key in entry if key.endswith("_s") or key in ("world_size", "first_step", "last_step")]
            found.append(
                {key: value for key, value in entry.items() if key not in numbers or as_float(value) is not None}
            )
    attempts = [entry for entry in found if "time_unix_s" in entry]
    step_before = 0.0
    for entry in attempts:
        if "end_time_unix_s" not in entry:
            _close(run, entry, step_before, until_unix_s if entry is attempts[-1] else None)
        entry["end_time_unix_s"] = max(entry["time_unix_s"], entry["end_time_unix_s"])
        entry["seconds"] = _seconds_of(entry)
        if isinstance(nodes := entry.get("nodes"), list):
            entry["nodes"] = compact_nodelist(list(map(str, nodes)))
        step_before = max(step_before, entry.get("last_step", 0))
    return attempts


def _close(run: RunDirectory, entry: Fact, step_before: float, until_unix_s: float | None) -> None:
    """Gives an attempt an end: `until_unix_s` where it runs, else the newest time on record."""
    attempt, start, end = entry["attempt"], entry["time_unix_s"], until_unix_s
    entry["reason"] = "running"
    if end is None:
        times = [(read_json(run.account(attempt)) or {}).get("end_unix_s")]
        times += [record.get("time_unix_s") for record in last_lines(run.metrics) if record.get("attempt") == attempt]
        end = max((known for moment in times if (known := as_float(moment)) is not None), default=start)
        entry["reason"] = "no end on record"
    entry["end_time_unix_s"] = end
    with contextlib.suppress(*_DAMAGE):
        entry |= read_account(run, attempt, start_unix_s=start, end_unix_s=end, step_before=int(step_before))
        # What came after the last account is not known to be the end.
        del entry["end_s"]


def _seconds_of(entry: Fact) -> dict[str, float]:
    """Returns the time of an attempt by cause, those above 0; all add up to it, the queue before its start included."""
    seconds = {cause: max(0.0, entry.get(cause, 0.0)) for cause in CAUSES}
    if "step_s" in entry:
        seconds["productive_s"] = max(0.0, entry["step_s"] - seconds["lost_work_s"])
    held = held_s(entry)
    unknown_s = held + seconds["queue_s"] - sum(seconds.values())
    if unknown_s > _LEAST_UNKNOWN * held:
        seconds["unknown_s"] = unknown_s
    return {cause: spent for cause, spent in seconds.items() if spent > 0}


def time_by_cause(attempts: Sequence[Fact]) -> Fact:
    """Returns the time of all attempts: seconds, and seconds of all devices, by cause; goodput; names of the causes.

    Goodput is None where it is not known. No device is held while a job waits.
    """
    seconds, device_s = Counter[str](), Counter[str]()
    for entry in attempts:
        seconds.update(entry["seconds"])
        device_s.update({cause: spent * entry.get("world_size", 1) for cause, spent in entry["seconds"].items()})
    return {
        "names": CAUSES,
        "seconds": {cause: seconds[cause] for cause in CAUSES if cause in seconds},
        "device_s": {cause: spent for cause, spent in device_s.items() if cause != "queue_s"},
        "held_s": sum(map(held_s, attempts)),
        "held_device_s": sum(held_s(entry) * entry.get("world_size", 1) for entry in attempts),
        "goodput": goodput(attempts).share if any("step_s" in entry for entry in attempts) else None,
        "num_attempts": len(attempts),
    }


# Ranks.


def _ranks(run: RunDirectory, attempts: Sequence[Fact]) -> Fact | None:
    """Returns the ranks of the attempt with the most steps, the newest of several; None without a record.

    Times are a list: 5 %, median, 95 %, 99 %, longest.
    """
    records = {entry["attempt"]: read_step_times(run, entry["attempt"]) for entry in attempts}
    counts = {attempt: max(time.step.num for time in times) for attempt, times in records.items() if times}
    if not counts:
        return None
    attempt = max(counts, key=lambda number: (counts[number], number))

    def times_of(histogram: Histogram) -> list[float]:
        return [*map(histogram.quantile_s, _QUANTILES), histogram.longest_s]

    ranks = [
        {
            "rank": record.rank,
            "host": record.host,
            "steps": record.step.num,
            "step_s": times_of(record.step),
            "data_s": times_of(record.data_wait),
        }
        for record in records[attempt]
    ]
    return {"attempt": attempt, "num_attempts": len(counts), "ranks": ranks}


def _rank_plots(ranks: Sequence[Fact]) -> list[Block]:
    x, hosts = [float(rank_row["rank"]) for rank_row in ranks], [rank_row["host"] for rank_row in ranks]
    nodes = [(host, next(of_host)) for host, of_host in groupby(range(len(hosts)), key=hosts.__getitem__)]
    marks = [(x[first] - 0.5, host, "node") for host, first in nodes] if 1 < len(nodes) <= _MOST_NODE_MARKS else []
    plots = []
    for key, title, name in (
        ("rank_step_time", "Step time by rank", "step_s"),
        ("rank_data_wait", "Wait for data by rank", "data_s"),
    ):
        low, middle, high, late, longest = map(list, zip(*(rank_row[name] for rank_row in ranks), strict=True))
        curves = [
            Curve(name="longest", x=x, y=longest, kind="dots", colour="quiet"),
            Curve(name="99 %", x=x, y=late, kind="dots", colour="two"),
            Curve(name="median, 5 to 95 %", x=x, y=middle, low=low, high=high, kind="ranges", labels=hosts),
        ]
        plots.append(plot(key, title, curves, x_label="rank", unit="s", marks=marks, from_zero=True))
    return plots


def _stragglers(windows: Sequence[PaceWindow]) -> Fact | None:
    """Returns who held the others up, and the map of the attempt with the longest record; None without a record."""
    several, seconds = [window for window in windows if len(window.ranks) > 1], Counter[int]()
    for window in several:
        seconds[window.attempt] += window.end_unix_s - window.begin_unix_s  # type: ignore[assignment]  # of floats
    if not several:
        return None
    attempt = max(seconds, key=lambda number: (seconds[number], number))
    own = [window for window in several if window.attempt == attempt]
    # Ranks do not change within an attempt; a line that says otherwise is damaged.
    own = [window for window in own if len(window.ranks) == len(own[0].ranks)]
    findings = []
    for first, finding in all_findings(windows):
        key = (first.attempt, finding.kind, finding.ranks)
        last = [
            window
            for window in windows
            for other in window.findings
            if (window.attempt, other.kind, other.ranks) == key
        ][-1]
        span = {"attempt": first.attempt, "begin_unix_s": first.begin_unix_s, "end_unix_s": last.end_unix_s}
        findings.append(asdict(finding) | span)
    ranks = []
    for rank, pace in enumerate(own[0].ranks):
        paces = [window.ranks[rank] for window in own]
        means = {name: fmean(getattr(pace, name) for pace in paces) for name in ("own_s", "wait_s", "data_s")}
        named = sum(rank in finding.ranks for window in own for finding in window.findings)
        ranks.append({"rank": rank, "host": pace.host, **means, "named": named})
    return {
        "attempt": attempt,
        "num_windows": len(windows),
        "findings": findings,
        "ranks": ranks,
        "map": _heat_map(own),
    }


def _heat_map(windows: Sequence[PaceWindow]) -> Fact:
    """Returns how much longer each rank's own part took than the middle rank's; many windows share a column.

    "percent" is (rank, column); "edges_unix_s" are the borders of the columns.
    """
    width = -(-len(windows) // _MOST_COLUMNS)
    columns = [windows[first : first + width] for first in range(0, len(windows), width)]
    excess = []
    for column in columns:
        own_s = [
            fmean(of_rank) for of_rank in zip(*([rank.own_s for rank in point.ranks] for point in column), strict=True)
        ]
        # Of an even number the lower of the two in the middle: of two ranks the quick one is what the other should be.
        middle = sorted(own_s)[(len(own_s) - 1) // 2]
        excess.append([round(100 * (own / middle - 1)) if middle > 0 else 0 for own in own_s])
    return {
        "edges_unix_s": [*(column[0].begin_unix_s for column in columns), windows[-1].end_unix_s],
        "percent": list(zip(*excess, strict=True)),
    }
