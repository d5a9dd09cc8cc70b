"""What the hours went to: each attempt as a bar of causes, at its place in time, and the sums over all of them.

The ledger has sums per attempt, not an order, so the causes of an attempt are drawn one after the other in the order
in which an attempt usually spends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_train.report.quantity import as_float

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
    "checkpoint_stall_s": "standing still for a save",
    "suspended_s": "suspended",
    "end_s": "ending",
    "unknown_s": "not accounted for",
}
"""What time is spent on, in the order of drawing, in words."""
_LEAST_UNKNOWN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One attempt."""

    attempt: int
    start_unix_s: float
    end_unix_s: float
    world_size: int
    seconds: Mapping[str, float]
    """By cause; all of them add up to the bar, the queue before its start included."""
    reason: str
    is_open: bool = False
    events: Sequence[tuple[float, str]] = ()
    """Moments and what happened then."""

    @property
    def held_s(self) -> float:
        """How long it held its nodes."""
        return max(0.0, self.end_unix_s - self.start_unix_s)

    @property
    def queue_s(self) -> float:
        """How long it waited for them."""
        return self.seconds.get("queue_s", 0.0)


def bars_of(attempts: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> list[Bar]:
    """Returns the attempts of a closed ledger as bars, oldest first."""
    return [_bar(entry, events) for entry in attempts]


def totals(bars: Sequence[Bar]) -> dict[str, float]:
    """Returns the seconds of all attempts by cause, those that there are, in the order of `CAUSES`."""
    sums = {cause: sum(bar.seconds.get(cause, 0.0) for bar in bars) for cause in CAUSES}
    return {cause: seconds for cause, seconds in sums.items() if seconds > 0}


def goodput(bars: Sequence[Bar]) -> float | None:
    """Returns the share of the time in which nodes were held that went into steps that count; None: not known."""
    held_s = sum(bar.held_s - bar.seconds.get("suspended_s", 0.0) for bar in bars)
    known = any("productive_s" in bar.seconds for bar in bars)
    return totals(bars).get("productive_s", 0.0) / held_s if known and held_s > 0 else None


def device_s(bars: Sequence[Bar]) -> float:
    """Returns the seconds for which all ranks held their devices, added up."""
    return sum(bar.held_s * bar.world_size for bar in bars)


def _bar(entry: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Bar:
    start, end = float(entry["time_unix_s"]), float(entry["end_time_unix_s"])
    seconds = _seconds(entry, held_s=max(0.0, end - start))
    own = [event for event in events if event.get("attempt") == entry["attempt"]]
    moments = ((as_float(event.get("time_unix_s")), str(event.get("event", "event"))) for event in own)
    return Bar(
        attempt=int(entry["attempt"]),
        start_unix_s=start,
        end_unix_s=max(start, end),
        world_size=int(as_float(entry.get("world_size")) or 1),
        seconds=seconds,
        reason=str(entry.get("reason", "ended")),
        is_open=bool(entry.get("is_open")),
        events=[(moment, name) for moment, name in moments if moment is not None],
    )


def _seconds(entry: Mapping[str, Any], *, held_s: float) -> dict[str, float]:
    found = {cause: max(0.0, as_float(entry.get(cause)) or 0.0) for cause in CAUSES}
    step_s = as_float(entry.get("step_s"))
    if step_s is not None:
        found["productive_s"] = max(0.0, step_s - found["lost_work_s"])
    unknown_s = held_s - sum(seconds for cause, seconds in found.items() if cause != "queue_s")
    if unknown_s > _LEAST_UNKNOWN * held_s:
        found["unknown_s"] = unknown_s
    kept = {cause: seconds for cause, seconds in found.items() if seconds > 0}
    return kept if step_s is None else {"productive_s": 0.0, **kept}
