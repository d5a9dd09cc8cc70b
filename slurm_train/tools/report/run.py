"""Makes the document of a report about a run, from the files in its directory.

Damaged, missing and half-written files lead to a shorter document, never to an error: a report is needed most when
something went wrong.

The ledger has sums per attempt and no order, so what an attempt spent its time on is drawn in the usual order. Ranks
wait for each other in every step, so their step times are about the same. What tells them apart is the time of a rank's
own work, which is compared with that of the middle rank in the same seconds.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from slurm_train.checkpoint.verify import check_sizes, survey
from slurm_train.code.provenance import environment_of
from slurm_train.config.frozen import list_settings, load_values
from slurm_train.errors import SlurmTrainError
from slurm_train.formatting import as_float, byte_size
from slurm_train.metrics import Series, read_series
from slurm_train.rundir.events import CALM_EVENTS, read_changes, read_events, read_saves
from slurm_train.rundir.files import last_lines, read_json
from slurm_train.rundir.ledger import Attempt, End, read_ledger
from slurm_train.rundir.paths import RunDirectory, name_of
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.timing import (
    Histogram,
    PaceWindow,
    all_findings,
    read_account,
    read_step_times,
    read_windows,
)
from slurm_train.slurm.allocation import compact_nodelist
from slurm_train.tools.report.page import Block, Curve, Document, drawn, line, plot

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
    series = read_series(run.metrics)
    events = read_events(run)
    saves = read_saves(run)
    ranks = _ranks(run, attempts)
    changes: list[Fact] = []
    stored: list[tuple[int, int | None]] = []
    with contextlib.suppress(*_DAMAGE):
        changes = [asdict(change) for change in read_changes(run)]
        for path, manifest in survey(run.checkpoints, check_sizes):
            num_bytes = None if isinstance(manifest, SlurmTrainError) else manifest.num_bytes
            stored.append((name_of(path).step, num_bytes))
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
        "settings": read_settings(run),
        "provenance": provenance(read_json(run.provenance) or {}),
        "environment": environment_of(run),
    }


def _progress(run: RunDirectory, series: Series) -> Fact:
    """Returns how far a run is and what it has reached; evaluations as key, value, and step or None for the final."""
    result = read_json(run.result) or {}
    evaluations: list[tuple[str, float, float | None]] = []
    for key in series.evaluations:
        steps, values = series.points(key)
        final = as_float(result.get(key))
        if final is not None:
            evaluations.append((key, final, None))
        elif len(values):
            evaluations.append((key, values[-1], steps[-1]))
    return {
        "step": max(series.last("step") or 0.0, as_float(result.get("step")) or 0.0),
        "max_steps": series.last("max_steps") or PlanRecord.read(run.plan).max_steps,
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
    if not config:
        return []
    return [asdict(setting) for setting in list_settings(config) if setting.key not in leave_out]


def provenance(value: Any) -> Any:
    """Returns what provenance.json holds without what the document has elsewhere; long texts are cut."""
    if isinstance(value, str):
        lines = value.splitlines()
        left = len(lines) - _MOST_LINES
        if left <= 0:
            return value
        return "\n".join([*lines[:_MOST_LINES], f"... {left} more lines in provenance.json"])
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
    marks = [*_attempt_marks(series), *_event_marks(events)]
    further_plots = []
    for key in series.evaluations:
        if key != "eval_loss":
            name = key.removeprefix("eval_").replace("_", " ")
            further_plots.append(plot(key, f"Held-out {name}", [_column(series, key, name, colour="two")]))
    rate = _column(series, "lr", "Learning rate", colour="three")
    further_plots.append(plot("lr", rate.name, [rate], from_zero=True, linear=True))
    norm = _column(series, "grad_norm", "Gradient norm before clipping")
    further_plots.append(plot("grad_norm", norm.name, [norm]))
    return [plot("loss", "Loss", curves, marks=marks, is_wide=True), *drawn(further_plots)]


_Mark = tuple[float, str, str]
"""Place on the x axis, text, kind; see `plot`."""


def _attempt_marks(series: Series) -> list[_Mark]:
    """Returns a mark where each further attempt begins; none where there are too many to tell apart."""
    columns = series.columns
    if "attempt" not in columns:
        return []
    marks: list[_Mark] = []
    for (old, _), (new, step) in pairwise(zip(columns["attempt"], columns["step"], strict=True)):
        if new != old:
            marks.append((step, f"attempt {new:.0f}", "attempt"))
    return marks if len(marks) <= _MOST_ATTEMPT_MARKS else []


def _event_marks(events: Sequence[Fact]) -> list[_Mark]:
    marks: list[_Mark] = []
    for event in events[-_MOST_EVENT_MARKS:]:
        step = as_float(event.get("step"))
        if step is not None:
            name = str(event.get("event")).replace("_", " ")
            marks.append((step, f"{name} at step {step:.0f}", "calm" if event["is_calm"] else "event"))
    return marks


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
        points: list[tuple[float, float, str]] = []
        for save in saves:
            step = as_float(save.get("step"))
            seconds = as_float(save.get(key))
            if step is not None and seconds is not None and not save.get("error"):
                points.append((step, seconds, byte_size(as_float(save.get("bytes")) or 0.0)))
        points.sort()
        x = [step for step, _, _ in points]
        y = [seconds for _, seconds, _ in points]
        labels = [size for _, _, size in points]
        curves.append(Curve(name=name, x=x, y=y, kind="dots", colour=colour, labels=labels))
    return plot("saves", "Time of a save", curves, unit="s", from_zero=True)


# Attempts and their time.


def read_attempts(run: RunDirectory, *, until_unix_s: float | None) -> list[Fact]:
    """Returns the attempts as the page shows them; "seconds" has the attempt's time by cause.

    An attempt without an end line gets an end as far as files tell, and its "reason" says so.

    Args:
        run: the run.
        until_unix_s: the end of the newest attempt if it still runs, None if it does not.
    """
    ledger = list[Attempt]()
    with contextlib.suppress(*_DAMAGE):
        ledger = read_ledger(run)
    shown: list[Fact] = []
    step_before = 0
    for attempt in ledger:
        start = attempt.start
        is_running = attempt is ledger[-1] and until_unix_s is not None
        end = attempt.end or _estimated_end(run, attempt, step_before, until_unix_s if is_running else None)
        without_end = "running" if is_running else "no end on record"
        end_unix_s = max(start.time_unix_s, end.time_unix_s)
        shown.append(
            {
                **asdict(end),
                **asdict(start),
                "attempt": attempt.number,
                "nodes": compact_nodelist(start.nodes),
                "end_time_unix_s": end_unix_s,
                "reason": without_end if attempt.end is None else end.reason,
                "seconds": _by_cause(end.seconds, held_s=end_unix_s - start.time_unix_s),
            }
        )
        step_before = max(step_before, end.last_step or 0)
    return shown


def _estimated_end(run: RunDirectory, attempt: Attempt, step_before: int, until_unix_s: float | None) -> End:
    """Returns the end of an attempt that has recorded none: `until_unix_s`, else the newest time on record."""
    number = attempt.number
    start_unix_s = attempt.start.time_unix_s
    end_unix_s = until_unix_s
    if end_unix_s is None:
        times = [as_float((read_json(run.account(number)) or {}).get("end_unix_s"))]
        times += [
            as_float(line.get("time_unix_s")) for line in last_lines(run.metrics) if line.get("attempt") == number
        ]
        end_unix_s = max((time for time in times if time is not None), default=start_unix_s)
    seconds: dict[str, float] = {}
    with contextlib.suppress(*_DAMAGE):
        seconds = read_account(run, number, start_unix_s=start_unix_s, end_unix_s=end_unix_s, step_before=step_before)
        # What came after the last account is not known to be the end.
        seconds.pop("end_s", None)
    return End(time_unix_s=end_unix_s, seconds=seconds)


def _by_cause(spent: Mapping[str, float], *, held_s: float) -> dict[str, float]:
    """Returns the time of an attempt by cause; all add up to it, the queue before its start included."""
    seconds = {cause: max(0.0, spent.get(cause, 0.0)) for cause in CAUSES}
    if "step_s" in spent:
        seconds["productive_s"] = max(0.0, spent["step_s"] - seconds["lost_work_s"])
    unknown_s = held_s + seconds["queue_s"] - sum(seconds.values())
    if unknown_s > _LEAST_UNKNOWN * held_s:
        seconds["unknown_s"] = unknown_s
    # Steps that took no time are known; without them nothing is known of goodput.
    return {cause: s for cause, s in seconds.items() if s > 0 or (cause == "productive_s" and "step_s" in spent)}


def time_by_cause(attempts: Sequence[Fact]) -> Fact:
    """Returns the time of all attempts: seconds, and seconds of all devices, by cause; goodput; names of the causes.

    Goodput is None where it is not known.
    """
    seconds: Counter[str] = Counter()
    device_s: Counter[str] = Counter()
    held_s = 0.0
    held_device_s = 0.0
    for attempt in attempts:
        num_devices = attempt["world_size"]
        attempt_s = attempt["end_time_unix_s"] - attempt["time_unix_s"]
        held_s += attempt_s
        held_device_s += attempt_s * num_devices
        seconds.update(attempt["seconds"])
        # No device is held while a job waits.
        device_s.update({cause: s * num_devices for cause, s in attempt["seconds"].items() if cause != "queue_s"})
    allocated_s = held_s - seconds["suspended_s"]
    is_known = "productive_s" in seconds
    return {
        "names": CAUSES,
        "seconds": {cause: seconds[cause] for cause in CAUSES if seconds[cause] > 0},
        "device_s": dict(device_s),
        "held_s": held_s,
        "held_device_s": held_device_s,
        "goodput": (seconds["productive_s"] / allocated_s if allocated_s > 0 else 0.0) if is_known else None,
        "num_attempts": len(attempts),
    }


# Ranks.


def _ranks(run: RunDirectory, attempts: Sequence[Fact]) -> Fact | None:
    """Returns the ranks of the attempt with the most steps, the newest of several; None without a record.

    Times are a list: 5 %, median, 95 %, 99 %, longest.
    """
    records = {entry["attempt"]: read_step_times(run, entry["attempt"]) for entry in attempts}
    counts: dict[int, int] = {}
    for number, times in records.items():
        if times:
            counts[number] = max(rank_times.step.num for rank_times in times)
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
    x = [float(row["rank"]) for row in ranks]
    hosts = [row["host"] for row in ranks]
    marks: list[_Mark] = []
    for position, host in enumerate(hosts):
        if position == 0 or host != hosts[position - 1]:
            marks.append((x[position] - 0.5, host, "node"))
    if not 1 < len(marks) <= _MOST_NODE_MARKS:
        marks = []
    plots = []
    for key, title, name in (
        ("rank_step_time", "Step time by rank", "step_s"),
        ("rank_data_wait", "Wait for data by rank", "data_s"),
    ):
        quantiles = [row[name] for row in ranks]
        low, middle, high, late, longest = zip(*quantiles, strict=True)
        curves = [
            Curve(name="longest", x=x, y=longest, kind="dots", colour="quiet"),
            Curve(name="99 %", x=x, y=late, kind="dots", colour="two"),
            Curve(name="median, 5 to 95 %", x=x, y=middle, low=low, high=high, kind="ranges", labels=hosts),
        ]
        plots.append(plot(key, title, curves, x_label="rank", unit="s", marks=marks, from_zero=True))
    return plots


def _stragglers(windows: Sequence[PaceWindow]) -> Fact | None:
    """Returns who held the others up, and the map of the attempt with the longest record; None without a record."""
    several = [window for window in windows if len(window.ranks) > 1]
    if not several:
        return None
    seconds: dict[int, float] = {}
    for window in several:
        seconds[window.attempt] = seconds.get(window.attempt, 0.0) + window.end_unix_s - window.begin_unix_s
    attempt = max(seconds, key=lambda number: (seconds[number], number))
    of_attempt = [window for window in several if window.attempt == attempt]
    # Ranks do not change within an attempt; a line that says otherwise is damaged.
    of_attempt = [window for window in of_attempt if len(window.ranks) == len(of_attempt[0].ranks)]
    findings = []
    for first, finding in all_findings(windows):
        end_unix_s = _last_window(windows, first.attempt, finding).end_unix_s
        span = {"attempt": first.attempt, "begin_unix_s": first.begin_unix_s, "end_unix_s": end_unix_s}
        findings.append(asdict(finding) | span)
    return {
        "attempt": attempt,
        "num_windows": len(windows),
        "findings": findings,
        "ranks": [_pace_of(rank, of_attempt) for rank in range(len(of_attempt[0].ranks))],
        "map": _heat_map(of_attempt),
    }


def _last_window(windows: Sequence[PaceWindow], attempt: int, finding: Any) -> PaceWindow:
    """Returns the last window of an attempt that has a finding of the same kind about the same ranks."""
    for window in reversed(windows):
        if window.attempt != attempt:
            continue
        if any((other.kind, other.ranks) == (finding.kind, finding.ranks) for other in window.findings):
            return window
    raise AssertionError(f"no window of attempt {attempt} has {finding}")


def _pace_of(rank: int, windows: Sequence[PaceWindow]) -> Fact:
    """Returns a rank's mean times over windows, and how many findings name it."""
    paces = [window.ranks[rank] for window in windows]
    num_findings = 0
    for window in windows:
        num_findings += sum(rank in finding.ranks for finding in window.findings)
    return {
        "rank": rank,
        "host": paces[0].host,
        "own_s": fmean(pace.own_s for pace in paces),
        "wait_s": fmean(pace.wait_s for pace in paces),
        "data_s": fmean(pace.data_s for pace in paces),
        "named": num_findings,
    }


def _heat_map(windows: Sequence[PaceWindow]) -> Fact:
    """Returns how much longer each rank's own part took than the middle rank's; many windows share a column.

    "percent" is (rank, column); "edges_unix_s" are the borders of the columns.
    """
    width = -(-len(windows) // _MOST_COLUMNS)
    columns = [windows[first : first + width] for first in range(0, len(windows), width)]
    excess = []
    for column in columns:
        num_ranks = len(column[0].ranks)
        means_s = [fmean(window.ranks[rank].own_s for window in column) for rank in range(num_ranks)]
        # Of an even number the lower of the two in the middle: of two ranks the quick one is what the other should be.
        middle_s = sorted(means_s)[(num_ranks - 1) // 2]
        excess.append([round(100 * (mean_s / middle_s - 1)) if middle_s > 0 else 0 for mean_s in means_s])
    return {
        "edges_unix_s": [*(column[0].begin_unix_s for column in columns), windows[-1].end_unix_s],
        "percent": list(zip(*excess, strict=True)),
    }
