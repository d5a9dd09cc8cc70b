"""The document of a run, from the files in its directory.

Damaged, missing and half-written files give less, never an error: a report is wanted most when something went wrong.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from slurm_train.checkpoint.directory import check_sizes, survey
from slurm_train.errors import SlurmTrainError
from slurm_train.formatting import byte_size, duration, number, share
from slurm_train.launch.environment import environment_of
from slurm_train.metrics.series import Series, read_series
from slurm_train.rundir.events import read_changes, read_events, read_saves
from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory, name_of
from slurm_train.rundir.step_times import read_step_times, read_windows
from slurm_train.tools.report.attempts import (
    Bar,
    Verdict,
    attempts_table,
    bar_of,
    by_rank,
    is_calm,
    read_attempts,
    stragglers,
    time_sums,
    time_tiles,
    timeline,
)
from slurm_train.tools.report.origin import provenance, read_config, settings
from slurm_train.tools.report.page import (
    Block,
    Cell,
    Curve,
    Document,
    as_float,
    chip,
    duration_cell,
    in_unit,
    moment,
    moment_cell,
    plot,
    section,
    setting,
    table,
    text,
    thinned,
)

_MOST_ROWS = 500
_MOST_SAVES = 1000
_MOST_ATTEMPT_MARKS = 40
_MOST_EVENT_MARKS = 200
_NOT_FACTS = ("event", "attempt", "time_unix_s", "step", "sample_ids", "sentence")

Marks = list[tuple[float, str, str]]


def run_document(run: RunDirectory, verdict: Verdict, *, now_unix_s: float) -> Document:
    """Returns what a run's directory holds as a document.

    Args:
        run: the run.
        verdict: its status.
        now_unix_s: the time of day.
    """
    attempts = read_attempts(run, verdict, now_unix_s=now_unix_s)
    bars = list(map(bar_of, attempts))
    series, config, saves, events = read_series(run.metrics), read_config(run.config), read_saves(run), read_events(run)
    step_times = {bar.attempt: times for bar in bars if (times := read_step_times(run, bar.attempt))}
    state, mood = chip(verdict.state)
    sentence = verdict.note or (f"on {verdict.nodelist}" if verdict.nodelist else "")
    return {
        "title": f"{run.name}/{run.run_id}: {verdict.state}",
        "name": run.name,
        "id": run.run_id,
        "chips": [[state, mood]],
        "sentence": [sentence, "bad" if mood == "bad" else ""],
        "path": str(run.path),
        "tiles": _tiles(run, series, bars),
        "sections": [
            section("training", "Training", *_training(series, events)),
            section("speed", "Speed", *_speed(series), *by_rank(step_times)),
            section("stragglers", "Who holds the others up", *stragglers(read_windows(run))),
            section("time", "What the hours went to", *time_sums(bars), *timeline(bars, events)),
            section("checkpoints", "Checkpoints", *_checkpoints(run, saves, is_expected=bool(config))),
            section("events", "Events", *_events(events)),
            section("attempts", "Attempts", *_attempts(run, attempts, series.num_superseded)),
            section("settings", "Settings", *settings(config)),
            section("provenance", "Provenance", *provenance(read_json(run.provenance) or {}, _environment(run))),
        ],
        "written": f"written {moment(now_unix_s)} by slurm_train report",
    }


def _environment(run: RunDirectory) -> Mapping[str, Any]:
    found = environment_of(run)
    return found if isinstance(found, dict) else {}


def _tiles(run: RunDirectory, series: Series, bars: Sequence[Bar]) -> list[tuple[str, str, str]]:
    result = read_json(run.result) or {}
    total = as_float((read_json(run.plan) or {}).get("max_steps"))
    step = int(max(series.last("step") or 0.0, as_float(result.get("step")) or 0.0))
    found = [("step", f"{step:,}", f"of {total:,.0f}, {share(step / total)}" if total else "")]
    found.append(("loss", number(series.last("loss"), 4), "training, newest"))
    for key in series.evaluations[:3]:
        steps, values = series.points(key)
        final = as_float(result.get(key))
        newest = (number(values[-1], 4), f"at step {steps[-1]:,.0f}") if len(values) else ("-", "")
        found.append((key.replace("_", " "), *(newest if final is None else (number(final, 4), "at the end"))))
    for unit in ("tokens", "samples"):
        if (rate := series.last(f"{unit}_per_s")) is not None:
            found.append(("speed", number(rate, digits=3), f"{unit}/s, newest"))
    if (mfu := series.last("mfu")) is not None:
        found.append(("MFU", share(mfu), "newest"))
    if bars:
        found.append(("attempts", str(len(bars)), f"since {moment(bars[0].start_unix_s)}"))
        held = duration(sum(bar.held_s for bar in bars))
        found += time_tiles(bars, f"{held} on {bars[-1].world_size} ranks")
    return found


def _training(series: Series, events: Sequence[Mapping[str, Any]]) -> list[Block]:
    train, held_out = thinned("training", *series.points("loss")), _evaluation("held out", series, "eval_loss")
    note = "Line: mean of neighbouring steps. Band: smallest and largest, so spikes stay visible." if train.low else ""
    marks = [*_attempt_marks(series), *_event_marks(events)]
    note = note if len(train.x) else "no step is on record yet"
    plots = [plot("loss", "Loss", [train, held_out], marks=marks, is_wide=True, note=note)]
    for key in series.evaluations:
        if key != "eval_loss":
            name = key.removeprefix("eval_").replace("_", " ")
            plots.append(plot(key, f"Held-out {name}", [_evaluation(name, series, key)]))
    plots.append(_column(series, "lr", "Learning rate", colour="three", from_zero=True, linear=True))
    plots.append(_column(series, "grad_norm", "Gradient norm before clipping"))
    return [block for block in plots if block["key"] == "loss" or block["curves"]]


def _column(series: Series, key: str, title: str, *, colour: str = "one", factor: float = 1.0, **more: Any) -> Block:
    """Returns a plot of one column of the metrics."""
    steps, values = series.points(key)
    return plot(key, title, [thinned(title, steps, [factor * value for value in values], colour=colour)], **more)


def _evaluation(name: str, series: Series, key: str) -> Curve:
    curve = thinned(name, *series.points(key), colour="two")
    return replace(curve, kind="dots") if len(curve.x) == 1 else curve


def _attempt_marks(series: Series) -> Marks:
    """Returns where another attempt took over."""
    columns = series.columns
    pairs = list(zip(columns["attempt"], columns["step"], strict=True)) if "attempt" in columns else []
    found: Marks = [
        (step, f"attempt {attempt:.0f}", "attempt")
        for (before, _), (attempt, step) in pairwise(pairs)
        if attempt != before
    ]
    return found if len(found) <= _MOST_ATTEMPT_MARKS else []


def _event_marks(events: Sequence[Mapping[str, Any]]) -> Marks:
    return [
        (step, f"{_event_chip(event)[0]} at step {step:.0f}", "calm" if is_calm(event) else "event")
        for event in events[-_MOST_EVENT_MARKS:]
        if (step := as_float(event.get("step"))) is not None
    ]


def _speed(series: Series) -> list[Block]:
    style: Any = {"colour": "four", "from_zero": True, "linear": True}
    mfu = _column(series, "mfu", "Model FLOP utilisation", unit="% of peak", factor=100.0, **style)
    times = {"step": series.points("step_time_s"), "waiting for data": series.points("data_time_s")}
    unit, factor = in_unit([value for _, values in times.values() for value in values])
    curves = [
        thinned(name, steps, [factor * value for value in values], colour=colour)
        for (name, (steps, values)), colour in zip(times.items(), ("one", "two"), strict=True)
    ]
    plots = [
        _column(series, "tokens_per_s", "Throughput of all ranks", unit="tokens/s", **style),
        _column(series, "samples_per_s", "Throughput of all ranks", unit="samples/s", **style),
        mfu,
        plot("step_time", "Step time on rank 0", curves, unit=unit, from_zero=True),
    ]
    shown = [block for block in plots if block["curves"]]
    if shown and not mfu["curves"]:
        unknown = "MFU is not known: no peak is on record for this device, or no count of operations for this model."
        shown.append(text(unknown, "note"))
    return shown


def _checkpoints(run: RunDirectory, saves: Sequence[Mapping[str, Any]], *, is_expected: bool) -> list[Block]:
    good = [save for save in saves if not save.get("error")]
    stored = _stored(run)
    if not (is_expected or saves or stored):
        return []
    whole = [f"step {step} ({byte_size(size)})" for step, size in stored if size is not None]
    sentences = []
    if good:
        stalls = [as_float(save.get("stall_s")) or 0.0 for save in good]
        sentences.append(
            f"{len(good):,} saves, the newest of {_size_cell(good[-1])[0]}. They paused training for "
            f"{duration(sum(stalls))} in total: median {duration(statistics.median(stalls))}, longest "
            f"{duration(max(stalls))}."
        )
    if len(good) < len(saves):
        sentences.append(f"{len(saves) - len(good)} failed.")
    if stored:
        sentences.append(f"On disk now: {', '.join(whole[-8:]) or 'none that is whole'}.")
    if len(whole) < len(stored):
        sentences.append(f"{len(stored) - len(whole)} on disk are not whole.")
    summary = text(" ".join(sentences) or "No checkpoint was written.")
    return [summary, _save_plot(good[-_MOST_SAVES:]), _saves_table(saves)] if saves else [summary]


def _stored(run: RunDirectory) -> list[tuple[int, int | None]]:
    """Returns step and bytes of each checkpoint on disk, oldest first; None for one that is not whole."""
    try:
        found = list(survey(run.checkpoints, check_sizes))
    except OSError:
        return []
    return [
        (name_of(path).step, None if isinstance(outcome, SlurmTrainError) else outcome.num_bytes)
        for path, outcome in reversed(found)
    ]


def _size_cell(save: Mapping[str, Any]) -> Cell:
    size = as_float(save.get("bytes"))
    return byte_size(size or 0.0), size


def _save_plot(saves: Sequence[Mapping[str, Any]]) -> Block:
    unit, factor = in_unit([as_float(save.get("save_s")) or 0.0 for save in saves])
    curves = []
    for name, key, colour in (("until durable", "save_s", "one"), ("training paused", "stall_s", "two")):
        points = sorted(
            (step, factor * seconds, _size_cell(save)[0])
            for save in saves
            if (seconds := as_float(save.get(key))) is not None and (step := as_float(save.get("step"))) is not None
        )
        x, y, labels = [one[0] for one in points], [one[1] for one in points], [one[2] for one in points]
        curves.append(Curve(name=name, x=x, y=y, kind="dots", colour=colour, labels=labels))
    return plot("saves", "Time of a save", curves, unit=unit, from_zero=True, note="" if saves else "no save succeeded")


def _saves_table(saves: Sequence[Mapping[str, Any]]) -> Block:
    names = ["step", "attempt", "size", "training paused", "until durable"]
    columns = [*(f"{name}|num" for name in names), "ended|time", "error|words"]
    rows = []
    for save in reversed(saves[-_MOST_ROWS:]):
        seconds = [duration_cell(as_float(save.get(key))) for key in ("stall_s", "save_s")]
        error = str(save.get("error", ""))
        rows.append([save.get("step"), save.get("attempt"), _size_cell(save), *seconds, moment_cell(save), error])
    return table("saves", columns, rows, summary="Every save", sortable=True)


def _events(events: Sequence[Mapping[str, Any]]) -> list[Block]:
    if not events:
        return [text("Nothing went wrong and nothing was asked of the run: no event is on record.", "none")]
    rows = []
    for event in events[-_MOST_ROWS:]:
        facts = (f"{key} {_fact(value)}" for key, value in event.items() if key not in _NOT_FACTS and value is not None)
        known = ". ".join(filter(None, [str(event.get("sentence", "")), ", ".join(facts)]))
        rows.append([moment_cell(event), event.get("attempt"), event.get("step"), _event_chip(event), known])
    columns = ["time|time", "attempt|num", "step|num", "event|chip", "what is known|words"]
    cut = [text(f"The newest {_MOST_ROWS} of {len(events)} events.", "note")] if len(rows) < len(events) else []
    return [*cut, table("events", columns, rows)]


def _event_chip(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("event", "event")).replace("_", " "), "calm" if is_calm(event) else "bad"


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else setting(value)


def _attempts(run: RunDirectory, attempts: Sequence[Mapping[str, Any]], num_superseded: int) -> list[Block]:
    found = [attempts_table(attempts) if attempts else text("No attempt has begun yet.", "none")]
    if num_superseded:
        sentence = f"{num_superseded:,} lines of metrics.jsonl are superseded by newer attempts and not drawn."
        found.append(text(sentence, "note"))
    rows = []
    with contextlib.suppress(SlurmTrainError, AttributeError, KeyError, ValueError, TypeError):
        for change in read_changes(run):
            values = {key: f"{key}: {setting(was)} -> {setting(now)}" for key, (was, now) in change.config.items()}
            what = "; ".join(values.get(name, str(name)) for name in change.names)
            rows.append([moment_cell({"time_unix_s": change.time_unix_s}), change.step, what])
    columns = ["accepted|time", "after step|num", "what|words"]
    return [*found, text("Accepted changes", "heading"), table("changes", columns, rows)] if rows else found
