"""The page of a run."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_train.report.figure import figure
from slurm_train.report.history import attempts_table, changes_table, events_table, saves_table
from slurm_train.report.markup import Html, join, tag
from slurm_train.report.origin import provenance, settings
from slurm_train.report.page import BAD, Section, chip, mood, page, plots, tiles
from slurm_train.report.plot import Plot
from slurm_train.report.quantity import as_float, duration, hours, moment, number, share
from slurm_train.report.ranks import NOTE, rank_plots, shown_attempt
from slurm_train.report.record import RunRecord
from slurm_train.report.run_plots import run_plots
from slurm_train.report.saved import save_plot, summary
from slurm_train.report.stragglers_figure import stragglers
from slurm_train.report.table import Cell, cell_of, table
from slurm_train.report.timeline import Bar, bars_of, device_s, goodput
from slurm_train.report.timeline_figure import timeline
from slurm_train.rundir.step_times import RankTimes

_TRAINING = ("loss", "lr", "grad_norm")
_MOST_RANKS = 128


def run_page(record: RunRecord) -> str:
    """Returns the page of a run as text."""
    bars = bars_of(record.attempts, record.events)
    found = run_plots(record)
    return page(
        title=f"{record.name}: {record.verdict.state}",
        head=_head(record, bars),
        sections=[
            Section("training", "Training", _figures(_of_training(found))),
            Section("speed", "Speed", _speed(record, [plot for plot in found if plot not in _of_training(found)])),
            Section("stragglers", "Who holds the others up", stragglers(record.windows)),
            Section("time", "What the hours went to", timeline(bars)),
            Section("checkpoints", "Checkpoints", _checkpoints(record)),
            Section("events", "Events", _events(record)),
            Section("attempts", "Attempts", _attempts(record)),
            Section("settings", "Settings", settings(record.config)),
            Section("provenance", "Provenance", provenance(record.provenance, environment=record.environment)),
        ],
        now_unix_s=record.now_unix_s,
    )


def _head(record: RunRecord, bars: Sequence[Bar]) -> Html:
    verdict = record.verdict
    sentence = verdict.note or (f"on {verdict.nodelist}" if verdict.nodelist else "")
    return join(
        tag("h1", tag("span", record.run.name, class_="name"), tag("code", record.run.run_id), chip(verdict.state)),
        tag("p", sentence, class_="sentence bad" if mood(verdict.state) == BAD else "sentence") if sentence else None,
        tag("p", tag("code", str(record.run.path)), class_="path"),
        tiles(_tiles(record, bars)),
    )


def _tiles(record: RunRecord, bars: Sequence[Bar]) -> list[tuple[str, str, str]]:
    series, total = record.series, record.max_steps
    found = [("step", f"{record.step:,}", f"of {total:,}, {share(record.step / total)}" if total else "")]
    found.append(("loss", number(series.last("loss")), "training, newest"))
    found += [(key.replace("_", " "), *_best(record, key)) for key in series.evaluations[:3]]
    for unit in ("tokens", "samples"):
        rate = series.last(f"{unit}_per_s")
        if rate is not None:
            found.append(("speed", f"{number(rate, digits=3)}", f"{unit}/s, newest"))
    if (mfu := series.last("mfu")) is not None:
        found.append(("MFU", share(mfu), "newest"))
    useful = goodput(bars)
    if bars:
        found.append(("attempts", str(len(bars)), f"since {moment(bars[0].start_unix_s)}"))
        held_s = sum(bar.held_s for bar in bars)
        found.append(("device time", hours(device_s(bars)), f"{duration(held_s)} on {bars[-1].world_size} ranks"))
    if useful is not None:
        found.append(("goodput", share(useful), "of the held time went into steps that count"))
    return found


def _best(record: RunRecord, key: str) -> tuple[str, str]:
    steps, values = record.series.points(key)
    final = as_float((record.result or {}).get(key))
    if final is not None:
        return number(final), "at the end"
    return (number(values[-1]), f"at step {steps[-1]:,.0f}") if len(values) else ("-", "")


def _of_training(found: Sequence[Plot]) -> list[Plot]:
    return [plot for plot in found if plot.key in _TRAINING or plot.key.startswith("eval_")]


def _figures(found: Sequence[Plot]) -> Html:
    return plots([figure(plot) for plot in found])


def _speed(record: RunRecord, found: Sequence[Plot]) -> Html:
    mfu = tag(
        "p",
        "MFU is not known here: no peak is on record for this device, or no count of operations for this model.",
        class_="note",
    )
    has_mfu = any(plot.key == "mfu" for plot in found)
    attempt = shown_attempt(record.step_times)
    ranks = None if attempt is None else _ranks(attempt, record.step_times[attempt], len(record.step_times))
    if not found and ranks is None:
        return Html("")
    return join(_figures(found), None if has_mfu or not found else mfu, ranks)


def _ranks(attempt: int, times: Sequence[RankTimes], num_attempts: int) -> Html:
    which = f"Attempt {attempt}" + (", the longest of those on record. " if num_attempts > 1 else ". ")
    rows = [
        [
            cell_of(one.rank),
            Cell(one.host),
            cell_of(one.step.num),
            *(_seconds(one.step.quantile_s(part)) for part in (0.05, 0.5, 0.95, 0.99)),
            _seconds(one.step.longest_s),
            *(_seconds(one.data_wait.quantile_s(part)) for part in (0.5, 0.95)),
            _seconds(one.data_wait.longest_s),
        ]
        for one in times[:_MOST_RANKS]
    ]
    header = ["rank", "node", "steps", "5 %", "median", "95 %", "99 %", "longest", "data: median", "95 %", "longest"]
    cut = f", the first {_MOST_RANKS}" if len(times) > _MOST_RANKS else ""
    return join(
        tag("h3", "By rank"),
        tag("p", which, NOTE, class_="note"),
        plots([figure(plot) for plot in rank_plots(times)]),
        tag(
            "details", tag("summary", f"Percentiles of {len(times)} ranks{cut}"), table(header, rows, is_sortable=True)
        ),
    )


def _seconds(seconds: float) -> Cell:
    return Cell(duration(seconds), seconds, "num")


def _checkpoints(record: RunRecord) -> Html:
    if not record.config and not record.saves and not record.stored:
        return Html("")
    found = [tag("p", summary(record.saves, record.stored))]
    if record.saves:
        found.append(plots([figure(save_plot(record.saves))]))
        found.append(tag("details", tag("summary", "Every save"), saves_table(record.saves)))
    return join(found)


def _events(record: RunRecord) -> Html:
    if not record.events:
        return tag("p", "Nothing went wrong and nothing was asked of the run: no event is on record.", class_="none")
    return events_table(record.events)


def _attempts(record: RunRecord) -> Html:
    found = (
        [attempts_table(record.attempts)] if record.attempts else [tag("p", "No attempt has begun yet.", class_="none")]
    )
    if record.series.num_superseded:
        text = (
            f"{record.series.num_superseded:,} lines of metrics.jsonl are superseded by newer attempts and not drawn."
        )
        found.append(tag("p", text, class_="note"))
    if record.changes:
        found += [tag("h3", "Accepted changes"), changes_table(record.changes)]
    return join(found)
