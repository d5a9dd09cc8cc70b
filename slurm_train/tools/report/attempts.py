"""The attempts of a run: the ledger with ends as far as files tell them, and what the time was spent on.

The ledger has sums per attempt, not an order, so the causes of an attempt are drawn one after the other in the order
in which an attempt usually spends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import CALM_EVENTS
from slurm_train.rundir.files import last_lines, read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.timing import account_path, read_account
from slurm_train.slurm.nodelist import compact_nodelist
from slurm_train.tools.report.page import Block, as_float, duration, hours, moment, number, setting, share, table, text

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
"""What time is spent on, in the order of drawing, in words."""
_LEAST_UNKNOWN = 0.01
_MOST_BARS = 60


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run stands, as `status` prints it."""

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
    end = _last_sign(run, attempt, start) if now_unix_s is None else now_unix_s
    step_before = max((int(as_float(one.get("last_step")) or 0) for one in before), default=0)
    try:
        seconds = read_account(run, attempt, start_unix_s=start, end_unix_s=end, step_before=step_before)
    except (KeyError, ValueError, TypeError):
        seconds = {}
    # What came after the last account is not known to be the end.
    seconds.pop("end_s", None)
    return {
        **entry,
        **seconds,
        "end_time_unix_s": end,
        "reason": "no end on record" if now_unix_s is None else "running",
    }


def _last_sign(run: RunDirectory, attempt: int, start: float) -> float:
    """Returns the newest time on record of an attempt without an end line."""
    signs = [as_float((read_json(account_path(run, attempt)) or {}).get("end_unix_s"))]
    signs += [as_float(line.get("time_unix_s")) for line in last_lines(run.metrics) if line.get("attempt") == attempt]
    return max((sign for sign in signs if sign is not None), default=start)


def bar_of(entry: Mapping[str, Any]) -> Bar:
    """Returns an attempt of `read_attempts` as a bar."""
    start, end = float(entry["time_unix_s"]), float(entry["end_time_unix_s"])
    return Bar(
        attempt=int(entry["attempt"]),
        start_unix_s=start,
        end_unix_s=max(start, end),
        world_size=int(as_float(entry.get("world_size")) or 1),
        seconds=_seconds(entry, held_s=max(0.0, end - start)),
        reason=str(entry.get("reason", "ended")).replace("_", " "),
    )


def _seconds(entry: Mapping[str, Any], *, held_s: float) -> dict[str, float]:
    found = {cause: max(0.0, as_float(entry.get(cause)) or 0.0) for cause in CAUSES}
    step_s = as_float(entry.get("step_s"))
    if step_s is not None:
        found["productive_s"] = max(0.0, step_s - found["lost_work_s"])
    unknown_s = held_s - sum(seconds for cause, seconds in found.items() if cause != "queue_s")
    if unknown_s > _LEAST_UNKNOWN * held_s:
        found["unknown_s"] = unknown_s
    return {cause: seconds for cause, seconds in found.items() if seconds or (cause == "productive_s" and step_s)}


def totals(bars: Sequence[Bar]) -> dict[str, float]:
    """Returns the seconds of all attempts by cause, those above 0, in the order of `CAUSES`."""
    sums = {cause: sum(bar.seconds.get(cause, 0.0) for bar in bars) for cause in CAUSES}
    return {cause: seconds for cause, seconds in sums.items() if seconds > 0}


def time_tiles(bars: Sequence[Bar], remark: str) -> list[tuple[str, str, str]]:
    """Returns the tiles of device time, with a remark, and goodput, where they are known."""
    if not bars:
        return []
    device_s = sum(bar.held_s * bar.world_size for bar in bars)
    useful = goodput(bars)
    found = [("device time", hours(device_s), remark)]
    return found + (
        [] if useful is None else [("goodput", share(useful), "of the held time went into steps that count")]
    )


def goodput(bars: Sequence[Bar]) -> float | None:
    """Returns the share of the time in which nodes were held that went into steps that count; None: not known."""
    held_s = sum(bar.held_s - bar.seconds.get("suspended_s", 0.0) for bar in bars)
    known = any("productive_s" in bar.seconds for bar in bars)
    return totals(bars).get("productive_s", 0.0) / held_s if known and held_s > 0 else None


def time_sums(bars: Sequence[Bar]) -> list[Block]:
    """Returns a bar and a table of the time of all attempts by cause."""
    sums = totals(bars)
    whole = sum(sums.values())
    if not sums:
        return [text("No attempt has begun yet.", "none")]
    rows = []
    for cause, seconds in sums.items():
        device_s = sum(bar.seconds.get(cause, 0.0) * bar.world_size for bar in bars)
        # Nobody holds a device while a job waits.
        device = ("-", None) if cause == "queue_s" else (hours(device_s), device_s)
        rows.append([(CAUSES[cause], cause), (duration(seconds), seconds), (share(seconds / whole), seconds), device])
    return [
        {"kind": "causes", "seconds": sums, "words": CAUSES},
        table("sums", ["cause|cause", "time|num", "share|num", "device time|num"], rows),
    ]


def timeline(bars: Sequence[Bar], events: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Returns each attempt as a bar at its place in time, with what happened in it."""
    if not totals(bars):
        return []
    shown = bars[-_MOST_BARS:]
    cut = f"The newest {_MOST_BARS} of {len(bars)} attempts. " if len(shown) < len(bars) else ""
    block: Block = {
        "kind": "timeline",
        "key": "timeline",
        "words": CAUSES,
        "begin_unix_s": min(bar.begin_unix_s for bar in shown),
        "end_unix_s": max(bar.end_unix_s for bar in shown),
        "since": moment(min(bar.begin_unix_s for bar in shown)),
        "bars": [{**asdict(bar), "begin_unix_s": bar.begin_unix_s, "held": duration(bar.held_s)} for bar in shown],
        "events": [
            [as_float(event.get("attempt")), at, f"{event.get('event', 'event')}, {moment(at)}", is_calm(event)]
            for event in events
            if (at := as_float(event.get("time_unix_s"))) is not None
        ],
    }
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
    return table("attempts", [*columns, "note|words"], [_row(entry) for entry in attempts])


def _row(entry: Mapping[str, Any]) -> list[Any]:
    start, end = float(entry["time_unix_s"]), float(entry["end_time_unix_s"])
    first, last = as_float(entry.get("first_step")), as_float(entry.get("last_step"))
    code, nodes = as_float(entry.get("exit_code")), entry.get("nodes")
    return [
        entry.get("attempt"),
        str(entry.get("job_id") or "-"),
        compact_nodelist([str(node) for node in nodes]) if isinstance(nodes, list) else "-",
        entry.get("world_size"),
        moment(start),
        duration(end - start),
        "-" if last is None else f"{number(first or 0.0)} to {number(last)}",
        setting(entry.get("reason", "-")) + (f" (code {code:.0f})" if code else ""),
        str(entry.get("action", "-")),
        str(entry.get("note", "")),
    ]
