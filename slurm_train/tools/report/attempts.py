"""What the time of a run was spent on: its attempts, and its ranks compared.

The ledger has sums per attempt, not an order, so the causes of an attempt are drawn one after the other in the order
in which an attempt usually spends them.

Ranks wait for each other in every step, so their step times are alike. A rank's own part of a step is its own; it is
compared with the middle rank in the same seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import fmean, median
from typing import Any

from slurm_train.formatting import duration, hours, number, share
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import CALM_EVENTS
from slurm_train.rundir.files import last_lines, read_json
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.step_times import Histogram, PaceWindow, RankTimes, all_findings
from slurm_train.rundir.timing import account_path, read_account
from slurm_train.slurm.nodelist import compact_nodelist
from slurm_train.tools.report.page import (
    Block,
    Curve,
    as_float,
    duration_cell,
    in_unit,
    moment,
    plot,
    setting,
    table,
    text,
)

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
_MOST_BARS = 60
_MOST_NODE_MARKS = 64
_MOST_RANKS = 128
_MOST_COLUMNS = 160


@dataclass(frozen=True, slots=True)
class Verdict:
    """The status of a run, as `status` prints it."""

    state: str
    """E.g. "finished", "running", "failed"."""
    note: str = ""
    """Why, in a sentence."""
    nodelist: str = ""
    """Where it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The time of one attempt."""

    attempt: int
    start_unix_s: float
    end_unix_s: float
    world_size: int
    seconds: Mapping[str, float]
    """By cause; all of them add up to the bar, the queue before its start included."""
    reason: str

    @property
    def held_s(self) -> float:
        """How long it held its nodes."""
        return self.end_unix_s - self.start_unix_s

    @property
    def begin_unix_s(self) -> float:
        """When it began to wait in the queue."""
        return self.start_unix_s - self.seconds.get("queue_s", 0.0)


def read_attempts(run: RunDirectory, verdict: Verdict, *, now_unix_s: float) -> list[Mapping[str, Any]]:
    """Returns the ledger; an attempt without an end line has one as far as files tell, and "reason" says so."""
    try:
        ledger = [entry for entry in read_ledger(run) if as_float(entry.get("time_unix_s")) is not None]
    except (KeyError, ValueError, TypeError):
        return []
    # Only the newest attempt can be the one that runs.
    until = [None] * (len(ledger) - 1) + [now_unix_s if verdict.state == "running" else None]
    return [_closed(run, entry, ledger[:index], until[index]) for index, entry in enumerate(ledger)]


def _closed(
    run: RunDirectory, entry: Mapping[str, Any], before: Sequence[Mapping[str, Any]], now_unix_s: float | None
) -> Mapping[str, Any]:
    """Returns an attempt with an end; `now_unix_s` is None where it is over but has no end line."""
    if as_float(entry.get("end_time_unix_s")) is not None:
        return entry
    attempt, start = int(entry["attempt"]), float(entry["time_unix_s"])
    end, reason = now_unix_s, "running"
    if end is None:
        # The newest time on record.
        times = [(read_json(account_path(run, attempt)) or {}).get("end_unix_s")]
        times += [line.get("time_unix_s") for line in last_lines(run.metrics) if line.get("attempt") == attempt]
        end = max((known for one in times if (known := as_float(one)) is not None), default=start)
        reason = "no end on record"
    step_before = max((int(as_float(one.get("last_step")) or 0) for one in before), default=0)
    try:
        seconds = read_account(run, attempt, start_unix_s=start, end_unix_s=end, step_before=step_before)
    except (KeyError, ValueError, TypeError):
        seconds = {}
    # What came after the last account is not known to be the end.
    seconds.pop("end_s", None)
    return {**entry, **seconds, "end_time_unix_s": end, "reason": reason}


def bar_of(entry: Mapping[str, Any]) -> Bar:
    """Returns an attempt of `read_attempts` as a bar."""
    start, end = float(entry["time_unix_s"]), float(entry["end_time_unix_s"])
    end = max(start, end)
    seconds = {cause: max(0.0, as_float(entry.get(cause)) or 0.0) for cause in CAUSES}
    step_s = as_float(entry.get("step_s"))
    if step_s is not None:
        seconds["productive_s"] = max(0.0, step_s - seconds["lost_work_s"])
    unknown_s = end - start - sum(spent for cause, spent in seconds.items() if cause != "queue_s")
    if unknown_s > _LEAST_UNKNOWN * (end - start):
        seconds["unknown_s"] = unknown_s
    return Bar(
        attempt=int(entry["attempt"]),
        start_unix_s=start,
        end_unix_s=end,
        world_size=int(as_float(entry.get("world_size")) or 1),
        seconds={cause: spent for cause, spent in seconds.items() if spent or (cause == "productive_s" and step_s)},
        reason=str(entry.get("reason", "ended")).replace("_", " "),
    )


def totals(bars: Sequence[Bar]) -> dict[str, float]:
    """Returns the seconds of all attempts by cause, those above 0, in the order of `CAUSES`."""
    sums = {cause: sum(bar.seconds.get(cause, 0.0) for bar in bars) for cause in CAUSES}
    return {cause: seconds for cause, seconds in sums.items() if seconds > 0}


def goodput(bars: Sequence[Bar]) -> float | None:
    """Returns the share of the time in which nodes were held that went into steps that count; None: not known."""
    held_s = sum(bar.held_s - bar.seconds.get("suspended_s", 0.0) for bar in bars)
    known = any("productive_s" in bar.seconds for bar in bars)
    return totals(bars).get("productive_s", 0.0) / held_s if known and held_s > 0 else None


def time_tiles(bars: Sequence[Bar], remark: str) -> list[tuple[str, str, str]]:
    """Returns the tiles of device time, with a remark, and goodput, where they are known."""
    useful, device_s = goodput(bars), sum(bar.held_s * bar.world_size for bar in bars)
    found = [("device time", hours(device_s), remark)] if bars else []
    if useful is not None:
        found.append(("goodput", share(useful), "of the held time went into steps that count"))
    return found


def time_sums(bars: Sequence[Bar]) -> list[Block]:
    """Returns a bar and a table of the time of all attempts by cause."""
    sums = totals(bars)
    if not sums:
        return [text("No attempt has begun yet.", "none")]
    whole, rows = sum(sums.values()), []
    for cause, seconds in sums.items():
        device_s = sum(bar.seconds.get(cause, 0.0) * bar.world_size for bar in bars)
        # No device is held while a job waits.
        device = ("-", None) if cause == "queue_s" else (hours(device_s), device_s)
        rows.append([(CAUSES[cause], cause), duration_cell(seconds), (share(seconds / whole), seconds), device])
    return [
        {"kind": "causes", "seconds": sums, "words": CAUSES},
        table("sums", ["cause|cause", "time|num", "share|num", "device time|num"], rows),
    ]


def timeline(bars: Sequence[Bar], events: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Returns each attempt as a bar at its place in time, with what happened in it."""
    if not totals(bars):
        return []
    shown = bars[-_MOST_BARS:]
    begin = min(bar.begin_unix_s for bar in shown)
    block: Block = {
        "kind": "timeline",
        "key": "timeline",
        "words": CAUSES,
        "begin_unix_s": begin,
        "end_unix_s": max(bar.end_unix_s for bar in shown),
        "since": moment(begin),
        "bars": [{**asdict(bar), "begin_unix_s": bar.begin_unix_s, "held": duration(bar.held_s)} for bar in shown],
        "events": [
            [as_float(event.get("attempt")), at, f"{event.get('event', 'event')}, {moment(at)}", is_calm(event)]
            for event in events
            if (at := as_float(event.get("time_unix_s"))) is not None
        ],
    }
    cut = f"The newest {_MOST_BARS} of {len(bars)} attempts. " if len(shown) < len(bars) else ""
    note = (
        f"{cut}Each bar lies where the attempt lies in time, its causes one after the other: the ledger has sums per "
        "attempt, not their order. Hatched: steps that were done again."
    )
    return [text("Attempts in time", "heading"), block, text(note, "note")]


def is_calm(event: Mapping[str, Any]) -> bool:
    """Returns whether an event was asked for rather than wrong."""
    return event.get("event") in CALM_EVENTS


def attempts_table(attempts: Sequence[Mapping[str, Any]]) -> Block:
    """Returns the ledger as a table."""
    columns = ["attempt|num", "job", "nodes", "ranks|num", "began|time", "held|num", "steps|num", "ended", "next"]
    rows = []
    for entry in attempts:
        start, end = float(entry["time_unix_s"]), float(entry["end_time_unix_s"])
        first, last = as_float(entry.get("first_step")), as_float(entry.get("last_step"))
        code, nodes = as_float(entry.get("exit_code")), entry.get("nodes")
        row = [entry.get("attempt"), str(entry.get("job_id") or "-")]
        row += [compact_nodelist(list(map(str, nodes))) if isinstance(nodes, list) else "-", entry.get("world_size")]
        row += [moment(start), duration(end - start)]
        row += ["-" if last is None else f"{number(first or 0.0)} to {number(last)}"]
        row += [setting(entry.get("reason", "-")) + (f" (code {code:.0f})" if code else "")]
        rows.append([*row, str(entry.get("action", "-")), str(entry.get("note", ""))])
    return table("attempts", [*columns, "note|words"], rows)


# Ranks.


def by_rank(step_times: Mapping[int, Sequence[RankTimes]]) -> list[Block]:
    """Returns plots and a table of the attempt with the most steps, the newest of several."""
    counts = {attempt: max(times.step.num for times in of_ranks) for attempt, of_ranks in step_times.items()}
    attempt = max(counts, key=lambda one: (counts[one], one), default=None)
    if attempt is None:
        return []
    times, rows = step_times[attempt], []
    for one in times[:_MOST_RANKS]:
        parts = [one.step.quantile_s(part) for part in (0.05, 0.5, 0.95, 0.99)]
        parts += [one.step.longest_s, one.data_wait.quantile_s(0.5), one.data_wait.quantile_s(0.95)]
        rows.append([one.rank, one.host, one.step.num, *map(duration_cell, [*parts, one.data_wait.longest_s])])
    heads = ["5 %", "median", "95 %", "99 %", "longest", "data: median", "data: 95 %", "data: longest"]
    columns = ["rank|num", "node", "steps|num", *(f"{head}|num" for head in heads)]
    note = (
        f"Attempt {attempt}{', the longest of those on record' if len(step_times) > 1 else ''}. Ranks wait for each "
        "other in every step, so their step times are alike even where one of them slows the others down; the wait for "
        "data is each rank's own. An attempt's first step is not counted. Right to 2 %."
    )
    cut = f", the first {_MOST_RANKS}" if len(times) > _MOST_RANKS else ""
    return [
        text("By rank", "heading"),
        text(note, "note"),
        _rank_plot("rank_step_time", "Step time by rank", times, [one.step for one in times]),
        _rank_plot("rank_data_wait", "Wait for data by rank", times, [one.data_wait for one in times]),
        table("ranks", columns, rows, summary=f"Percentiles of {len(times)} ranks{cut}", sortable=True),
    ]


def _rank_plot(key: str, title: str, times: Sequence[RankTimes], histograms: Sequence[Histogram]) -> Block:
    unit, factor = in_unit([one.longest_s for one in histograms])
    ranks, labels = [float(one.rank) for one in times], [one.host for one in times]
    low, middle, high, late = (
        [factor * one.quantile_s(part) for one in histograms] for part in (0.05, 0.5, 0.95, 0.99)
    )
    longest = [factor * one.longest_s for one in histograms]
    curves = [
        Curve(name="longest", x=ranks, y=longest, kind="dots", colour="quiet"),
        Curve(name="99 %", x=ranks, y=late, kind="dots", colour="two"),
        Curve(name="median, 5 to 95 %", x=ranks, y=middle, low=low, high=high, kind="ranges", labels=labels),
    ]
    groups = [(host, next(same).rank) for host, same in groupby(times, key=lambda one: one.host)]
    marks = [(rank - 0.5, host, "node") for host, rank in groups] if 1 < len(groups) <= _MOST_NODE_MARKS else []
    return plot(key, title, curves, x_label="rank", unit=unit, marks=marks, from_zero=True)


def stragglers(windows: Sequence[PaceWindow]) -> list[Block]:
    """Returns who held the others up, and the map of the attempt with the longest record; empty without one."""
    seconds: dict[int, float] = {}
    for window in windows:
        if len(window.ranks) > 1:
            seconds[window.attempt] = seconds.get(window.attempt, 0.0) + window.end_unix_s - window.begin_unix_s
    attempt = max(seconds, key=lambda one: (seconds[one], one), default=None)
    if attempt is None:
        return []
    own = [window for window in windows if window.attempt == attempt and len(window.ranks) > 1]
    # Ranks do not change within an attempt; a line that says otherwise is damaged.
    own = [window for window in own if len(window.ranks) == len(own[0].ranks)]
    note = (
        f"Attempt {attempt}. Colour: how much longer a rank's own part of a step (data, forward, backward, update) "
        "took than the middle rank's in the same seconds. The others wait for the dark ranks."
    )
    heat = _heat_map(own)
    table = _straggler_table(own, heat["percent"])
    return [_findings(windows), text("Ranks over time", "heading"), text(note, "note"), heat, table]


def _findings(windows: Sequence[PaceWindow]) -> Block:
    rows = []
    for first, finding in all_findings(windows):
        key = (first.attempt, finding.kind, finding.ranks)
        same = [one for one in windows for other in one.findings if (one.attempt, other.kind, other.ranks) == key]
        lasted_s = same[-1].end_unix_s - first.begin_unix_s
        what = f"{finding.sentence}. {finding.advice}"
        rows.append([first.attempt, moment(first.begin_unix_s), duration(lasted_s), share(finding.lost_share), what])
    if not rows:
        return text(f"No rank has held the others up for long, in {len(windows):,} windows.", "none")
    columns = ["attempt|num", "since|time", "for|num", "of each step lost|num", "what was found, and what helps|words"]
    return table("findings", columns, rows)


def _heat_map(windows: Sequence[PaceWindow]) -> Block:
    """Returns the map of one attempt; where windows are many, neighbours share a column."""
    width = -(-len(windows) // _MOST_COLUMNS)
    columns = [windows[first : first + width] for first in range(0, len(windows), width)]
    edges = [*(column[0].begin_unix_s for column in columns), windows[-1].end_unix_s]
    excess = []
    for column in columns:
        own_s = [
            fmean(of_rank) for of_rank in zip(*([rank.own_s for rank in one.ranks] for one in column), strict=True)
        ]
        # Of an even number the lower of the two in the middle: of two ranks the quick one is what the other should be.
        middle = sorted(own_s)[(len(own_s) - 1) // 2]
        excess.append([round(100 * (own / middle - 1)) if middle > 0 else 0 for own in own_s])
    return {
        "kind": "heatmap",
        "key": "stragglers",
        "title": "Own part of a step, by rank",
        "hosts": [rank.host for rank in windows[0].ranks],
        "edges_s": [round(edge - edges[0], 3) for edge in edges],
        "since": moment(edges[0]),
        "percent": [list(of_rank) for of_rank in zip(*excess, strict=True)],
    }


def _straggler_table(windows: Sequence[PaceWindow], percent: Sequence[Sequence[int]]) -> Block:
    rows: list[list[Any]] = []
    for rank, of_rank in enumerate(percent):
        paces = [window.ranks[rank] for window in windows]
        named = sum(rank in finding.ranks for window in windows for finding in window.findings)
        means = [fmean(values) for values in zip(*((one.own_s, one.wait_s, one.data_s) for one in paces), strict=True)]
        excess = median(of_rank)
        rows.append([rank, paces[0].host, *map(duration_cell, means), (f"{excess:+.0f} %", excess), named])
    rows.sort(key=lambda row: (-row[-1], -row[-2][1], row[0]))
    heads = ["own part", "waits for others", "of own: data", "against the middle", "windows named"]
    cut = f", the slowest {_MOST_RANKS}" if len(rows) > _MOST_RANKS else ""
    columns, summary = (
        ["rank|num", "node", *(f"{head}|num" for head in heads)],
        f"A step of each of {len(rows)} ranks{cut}",
    )
    return table("stragglers", columns, rows[:_MOST_RANKS], summary=summary, sortable=True)
