"""What an attempt's time was spent on: rank 0 keeps the sums, the supervisor books them, `status` shows them.

All of it is wall-clock seconds of one rank. Start-up is what lies between the attempt's start and rank 0's first
account; the queue is Slurm's to tell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.progress import last_lines

# More lines than a run logs between two writings of its sums.
_TAIL_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class Spent:
    """Sums since rank 0 was ready to train."""

    begin_unix_s: float
    """When the first step could begin: ranks have met, the checkpoint is loaded."""
    first_step: int = 0
    """The step that this attempt resumed from."""
    steps: int = 0
    step_s: float = 0.0
    """Steps, without the wait for data."""
    data_wait_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    """Training stood still for a save."""
    evaluate_s: float = 0.0
    end_unix_s: float = 0.0
    """When these sums were written."""

    def add_steps(self, steps: int, *, seconds: float, data_wait_s: float) -> None:
        """Adds steps that took so long together, of which they waited for data so long."""
        self.steps += steps
        self.step_s += max(0.0, seconds - data_wait_s)
        self.data_wait_s += data_wait_s

    def add(self, cause: str, seconds: float) -> None:
        """Adds seconds to an account; "" is nobody's."""
        if cause:
            setattr(self, cause, getattr(self, cause) + seconds)

    def write(self, path: Path) -> None:
        """Writes the sums for the supervisor; a lost write costs a few seconds of an account."""
        self.end_unix_s = time.time()
        write_atomic(path, json.dumps(asdict(self)) + "\n", durable=False)


def account_path(run: RunDirectory, attempt: int) -> Path:
    """Returns the file that rank 0 keeps its sums in."""
    return run.attempt_logs(attempt) / "timing.json"


def read_account(run: RunDirectory, attempt: int, *, start_unix_s: float, step_before: int) -> dict[str, float]:
    """Returns seconds per cause for the ledger; empty where rank 0 never got to train.

    Args:
        run: the run.
        attempt: its number.
        start_unix_s: when the attempt began.
        step_before: newest step on record before it; what it did again of those is lost work.
    """
    kept = read_json(account_path(run, attempt))
    if kept is None:
        return {}
    _add_unbooked(kept, run, attempt)
    causes = ("step_s", "data_wait_s", "checkpoint_stall_s", "evaluate_s")
    seconds = {cause: round(float(kept.get(cause, 0.0)), 3) for cause in causes}
    again = min(max(0, step_before - int(kept["first_step"])), int(kept["steps"]))
    lost_s = seconds["step_s"] * again / kept["steps"] if kept["steps"] else 0.0
    start_s = max(0.0, float(kept["begin_unix_s"]) - start_unix_s)
    return {"start_s": round(start_s, 3), **seconds, "lost_work_s": round(lost_s, 3)}


def _add_unbooked(kept: dict[str, Any], run: RunDirectory, attempt: int) -> None:
    """Adds the steps that are on record since the sums were written: a killed rank 0 wrote them seconds before."""
    lines = [line for line in last_lines(run.metrics, tail_bytes=_TAIL_BYTES) if line.get("attempt") == attempt]
    step = int(kept["first_step"]) + int(kept["steps"])
    for line in lines:
        if "step_time_s" not in line:
            continue
        if float(line["time_unix_s"]) > float(kept["end_unix_s"]) and int(line["step"]) > step:
            steps = int(line["step"]) - step
            kept["steps"] = int(kept["steps"]) + steps
            kept["data_wait_s"] = float(kept["data_wait_s"]) + steps * float(line["data_time_s"])
            kept["step_s"] = float(kept["step_s"]) + steps * max(0.0, line["step_time_s"] - line["data_time_s"])
        step = int(line["step"])


@dataclass(frozen=True, slots=True)
class Goodput:
    """How much of the time that nodes were held went into steps that count."""

    productive_s: float
    allocated_s: float

    @property
    def share(self) -> float:
        """Productive over allocated time, from 0 to 1."""
        return self.productive_s / self.allocated_s if self.allocated_s > 0 else 0.0


def held_s(entry: Mapping[str, Any]) -> float:
    """Returns how long an attempt held its nodes; one that runs, until now."""
    return max(0.0, float(entry.get("end_time_unix_s", time.time())) - float(entry["time_unix_s"]))


def goodput(ledger: Sequence[Mapping[str, Any]]) -> Goodput:
    """Returns the goodput of a run from its attempts that have ended."""
    ended = [entry for entry in ledger if "end_time_unix_s" in entry]
    productive_s = sum(float(entry.get("step_s", 0)) - float(entry.get("lost_work_s", 0)) for entry in ended)
    allocated_s = sum(map(held_s, ended))
    return Goodput(productive_s, allocated_s)
