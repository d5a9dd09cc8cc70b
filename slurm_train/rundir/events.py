"""events@<host>.jsonl: what went wrong in a run, or was asked of it, and what was done about it, one line each.

Written by rank 0 and by the supervisor, which may be on different nodes, so each node has a file of its own. Every
line is durable when the writer goes on, since a rollback counts on it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from slurm_train.rundir.files import append_shared, read_shared
from slurm_train.rundir.layout import RunDirectory

CALM_EVENTS = ("stop", "shares")
"""Kinds that tell of nothing wrong."""


def append_event(run: RunDirectory, event: str, *, attempt: int, **facts: Any) -> None:
    """Adds a line; numbers that JSON does not have are written as text ("nan", "inf").

    Args:
        run: the run.
        event: its kind, e.g. "non_finite", "spike", "rollback", "hang".
        attempt: number of the attempt.
        facts: what is known of it.
    """
    line = {"event": event, "attempt": attempt, "time_unix_s": time.time()}
    append_shared(run.events, line | {name: _plain(value) for name, value in facts.items()}, durable=True)


def read_events(run: RunDirectory, event: str | None = None) -> list[dict[str, Any]]:
    """Returns the lines of all nodes by time; only those of one kind where it is named."""
    return [line for line in read_shared(run.events) if event is None or line.get("event") == event]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
