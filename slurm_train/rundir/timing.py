"""What an attempt's time was spent on, how far it is, and how much notice it gets before it is ended.

Rank 0 keeps sums in `timing.json`, the supervisor books them in the ledger, `status` shows them. All are seconds of
one rank. The causes of an attempt add up to its wall-clock time: what lies before rank 0 was ready to meet the others
is its start, what lies after its last account is its end. Lost work is a part of the steps.

The supervisor writes what Slurm knows about the job's end into `notice.json` of the attempt. So the ranks, which may
run in a container, need none of Slurm's commands to know how long they have.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_train.rundir.files import last_lines, read_json, write_atomic
from slurm_train.rundir.paths import RunDirectory, existing_attempts


def newest_training_line(path: Path) -> dict[str, Any] | None:
    """Returns the newest line with a training loss, None before the first."""
    return next((line for line in reversed(last_lines(path)) if "loss" in line), None)


def last_step(run: RunDirectory) -> int:
    """Returns the newest optimizer step on record in metrics.jsonl, 0 before the first."""
    return max((int(line.get("step", 0)) for line in last_lines(run.metrics)), default=0)


KEPT_CAUSES = (
    "rendezvous_s",
    "load_s",
    "compile_s",
    "step_s",
    "data_wait_s",
    "checkpoint_stall_s",
    "evaluate_s",
    "suspended_s",
)
"""What rank 0 keeps sums of."""
CAUSES = ("start_s", *KEPT_CAUSES, "end_s")
"""What the wall-clock time of an attempt consists of."""


@dataclass(slots=True, kw_only=True)
class Spent:
    """Rank 0's sums."""

    begin_unix_s: float
    """When rank 0 was ready to meet the others; time in which it was suspended before is taken out."""
    first_step: int = 0
    """The step that this attempt resumed from."""
    steps: int = 0
    rolled_back_steps: int = 0
    """Steps that a rollback threw away."""
    rendezvous_s: float = 0.0
    """The ranks found each other."""
    load_s: float = 0.0
    """The checkpoint was loaded; also after a rollback."""
    compile_s: float = 0.0
    """The pass before the first step, in which torch.compile does its work."""
    step_s: float = 0.0
    """Steps, without the wait for data."""
    data_wait_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    """Training stood still for a save, that of a stop included."""
    evaluate_s: float = 0.0
    suspended_s: float = 0.0
    """The job was suspended."""
    longest_step_s: float = 0.0
    """Mean step of the slowest window."""
    longest_save_s: float = 0.0
    """Longest time until a save was durable."""
    longest_evaluation_s: float = 0.0
    end_unix_s: float = 0.0
    """When these sums were written."""

    def add_steps(self, steps: int, *, seconds: float, data_wait_s: float) -> None:
        """Adds steps that took so long together, of which they waited for data so long."""
        self.steps += steps
        self.step_s += max(0.0, seconds - data_wait_s)
        self.data_wait_s += data_wait_s
        self.longest_step_s = max(self.longest_step_s, seconds / max(steps, 1))

    def add(self, cause: str, seconds: float) -> None:
        """Adds seconds to an account; "" is nobody's."""
        if cause:
            setattr(self, cause, getattr(self, cause) + seconds)

    def write(self, path: Path) -> None:
        """Writes the sums for the supervisor; a lost write costs a few seconds of an account."""
        self.end_unix_s = time.time()
        # Where the time went is not worth a run: a full disk must not end it here.
        with contextlib.suppress(OSError):
            write_atomic(path, json.dumps(asdict(self)) + "\n", durable=False)


def account_path(run: RunDirectory, attempt: int) -> Path:
    """Returns the file that rank 0 keeps its sums in."""
    return run.attempt_logs(attempt) / "timing.json"


def read_account(
    run: RunDirectory, attempt: int, *, start_unix_s: float, end_unix_s: float, step_before: int
) -> dict[str, float]:
    """Returns seconds per cause for the ledger; empty where rank 0 never came to meet the others.

    Args:
        run: the run.
        attempt: its number.
        start_unix_s: when the attempt began.
        end_unix_s: when it ended.
        step_before: newest step on record before it; what it did again of those is lost work.
    """
    kept = read_json(account_path(run, attempt))
    if kept is None:
        return {}
    _add_unbooked(kept, run, attempt)
    seconds = {"start_s": max(0.0, float(kept["begin_unix_s"]) - start_unix_s)}
    seconds |= {cause: float(kept.get(cause, 0.0)) for cause in KEPT_CAUSES}
    seconds["end_s"] = max(0.0, end_unix_s - start_unix_s - sum(seconds.values()))
    again = min(max(0, step_before - int(kept["first_step"])), int(kept["steps"])) + int(kept["rolled_back_steps"])
    share = min(1.0, again / kept["steps"]) if kept["steps"] else 0.0
    seconds["lost_work_s"] = seconds["step_s"] * share
    return {cause: round(value, 3) for cause, value in seconds.items()}


def _add_unbooked(kept: dict[str, Any], run: RunDirectory, attempt: int) -> None:
    """Adds the steps that are on record since the sums were written: a killed rank 0 wrote them seconds before."""
    step = int(kept["first_step"]) + int(kept["steps"])
    # More lines than a run logs between two writings of its sums.
    for line in last_lines(run.metrics, tail_bytes=1 << 20):
        if line.get("attempt") != attempt or "step_time_s" not in line:
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
    """Without the time in which the job was suspended."""
    losses_s: Mapping[str, float]
    """What the rest went into, by cause, largest first; "lost_work_s" are steps that were done again."""

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
    total = {cause: sum(float(entry.get(cause, 0)) for entry in ended) for cause in (*CAUSES, "lost_work_s")}
    lost = {cause: seconds for cause, seconds in total.items() if cause not in ("step_s", "suspended_s")}
    return Goodput(
        productive_s=total["step_s"] - total["lost_work_s"],
        allocated_s=sum(map(held_s, ended)) - total["suspended_s"],
        losses_s=dict(sorted(lost.items(), key=lambda item: -item[1])),
    )


_UNKNOWN_LEAD_S = 120.0
_MARGIN_S = 15.0
# The slowest so far is not the slowest to come.
_SAFETY = 1.5
_LEAST_LEAD_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What Slurm knows about a job's end; None for what is not known."""

    end_unix_s: float | None = None
    """When the time limit ends it."""
    limit_s: float | None = None
    """Length of the limit."""
    kill_wait_s: float | None = None
    """From the last TERM to KILL."""
    grace_s: float | None = None
    """From the first TERM of a preemption to its last; 0 where nobody preempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a stop consists of, in seconds, as slow as it has been seen."""

    save_s: float
    """Until a checkpoint is durable; 0 before the first."""
    step_s: float = 0.0
    evaluation_s: float = 0.0
    """One that has begun may have to be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How a rank was asked to stop."""

    by: str
    """ "TERM", "USR2", "clock", "file", or "another rank"."""
    since_s: float
    """How long ago."""


_MEASURED = ("save", "step", "evaluation")


def lead_s(measured: Measured | None, *, limit_s: float | None) -> float:
    """Returns how long before its end a run should be asked to stop.

    Args:
        measured: what its stop takes; None where no save was measured yet.
        limit_s: the job's time limit; a run that is asked at once would never get anywhere.
    """
    if measured is None or measured.save_s <= 0:
        return _UNKNOWN_LEAD_S if limit_s is None else min(_UNKNOWN_LEAD_S, max(_LEAST_LEAD_S, limit_s / 4))
    # The stop is agreed upon a step late, and a save under way comes before the last one.
    needed_s = _MARGIN_S + _SAFETY * (2 * measured.step_s + measured.evaluation_s + 2 * measured.save_s)
    return needed_s if limit_s is None else min(needed_s, max(_LEAST_LEAD_S, limit_s / 2))


def warning_lead_s(setting: int | str, run: RunDirectory, *, limit_s: float | None) -> int:
    """Returns the seconds for `--signal=USR2@...`.

    Args:
        setting: `requeue.warn_before_limit_s`: seconds, or "auto".
        run: earlier attempts of it have measured what a stop takes.
        limit_s: the job's time limit, None where it is the partition's.
    """
    return setting if isinstance(setting, int) else math.ceil(lead_s(read_measured(run), limit_s=limit_s))


def time_left_s(ask: Ask, notice: Notice, *, now_unix_s: float) -> float | None:
    """Returns the seconds until a rank that was asked to stop is killed; None where nobody kills, or nobody knows.

    A TERM may mean preemption or scancel. The longer grace time is assumed: a save that is cut off leaves the
    checkpoint before it as it was.
    """
    if notice.kill_wait_s is None:
        return None
    to_end_s = math.inf if notice.end_unix_s is None else notice.end_unix_s - now_unix_s
    left_s = max(to_end_s, 0.0) + notice.kill_wait_s
    if ask.by == "TERM":
        asked_at_the_limit = to_end_s + ask.since_s <= 0
        grace_s = 0.0 if asked_at_the_limit else notice.grace_s or 0.0
        after_term_s = grace_s + notice.kill_wait_s - ask.since_s
        left_s = after_term_s if asked_at_the_limit else min(left_s, after_term_s)
    return None if math.isinf(left_s) else max(left_s, 0.0)


def is_worth_saving(left_s: float | None, *, save_s: float | None) -> bool:
    """Returns whether a save that takes so long is durable in the time left; what is not known does not forbid it."""
    return left_s is None or not save_s or save_s <= left_s


def notice_path(run: RunDirectory, attempt: int) -> Path:
    """Returns the file that says when an attempt will be ended."""
    return run.attempt_logs(attempt) / "notice.json"


def write_notice(run: RunDirectory, attempt: int, notice: Notice) -> None:
    """Writes the notice for the ranks."""
    write_atomic(notice_path(run, attempt), json.dumps(asdict(notice)) + "\n", durable=False)


def read_notice(run: RunDirectory, attempt: int) -> Notice:
    """Returns the notice; all None where there is none, as without Slurm."""
    found = read_json(notice_path(run, attempt)) or {}
    return Notice(**{name: found.get(name) for name in Notice.__slots__})


def read_measured(run: RunDirectory) -> Measured | None:
    """Returns what the newest attempt that saved has measured, None where none has."""
    for attempt in reversed(existing_attempts(run)):
        kept = read_json(account_path(run, attempt)) or {}
        save_s, step_s, evaluation_s = (float(kept.get(f"longest_{what}_s", 0.0)) for what in _MEASURED)
        if save_s > 0:
            return Measured(save_s=save_s, step_s=step_s, evaluation_s=evaluation_s)
    return None
