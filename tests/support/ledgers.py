"""The ledger of a run as it lies on disk, for tests that look at lines, or write ends as they want them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from slurm_train.rundir.files import append_line, read_lines
from slurm_train.rundir.ledger import Action, Attempt, End, Reason, Start
from slurm_train.rundir.paths import RunDirectory


def ledger_lines(run: RunDirectory) -> list[dict[str, Any]]:
    """Returns one mapping per attempt, start and end line merged; "end_time_unix_s" is absent while it runs."""
    merged: dict[int, dict[str, Any]] = {}
    for line in read_lines(run.attempts):
        entry = merged.setdefault(int(line["attempt"]), {})
        prefix = "end_" if line["event"] == "end" else ""
        entry |= {(f"{prefix}{key}" if key == "time_unix_s" else key): value for key, value in line.items()}
    return [merged[number] for number in sorted(merged)]


def close_attempt(run: RunDirectory, attempt: int, facts: Mapping[str, Any]) -> None:
    """Writes an end line with these facts, by default of now."""
    append_line(run.attempts, {"event": "end", "attempt": attempt, "time_unix_s": time.time(), **facts})


def attempt_of(**facts: Any) -> Attempt:
    """Returns an attempt with facts by the names that lines have; it has ended if one of them tells of its end."""
    number = facts.pop("attempt", 0)
    of_start = {one.name: facts.pop(one.name) for one in fields(Start) if one.name in facts}
    start = Start(**of_start)
    if not facts:
        return Attempt(number, start)
    facts["time_unix_s"] = facts.pop("end_time_unix_s", start.time_unix_s)
    seconds = {key: facts.pop(key) for key in list(facts) if key.endswith("_s") and not hasattr(End, key)}
    kinds = {"reason": Reason, "action": Action, "failed_on": lambda names: tuple(names.split(","))}
    values = {key: kinds[key](value) if key in kinds else value for key, value in facts.items()}
    return Attempt(number, start, End(seconds=seconds, **values))
