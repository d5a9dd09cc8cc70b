"""How much notice a run gets before it is ended, and how much it needs. Pure; two small files carry the facts.

The supervisor writes down what Slurm says (`notice.json` of the attempt): when the job ends, and how long ranks live
after a TERM. Rank 0 keeps what its saves and steps take (`timing.json`). Neither needs Slurm's commands in the ranks,
which may run in a container.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.timing import account_path

_UNKNOWN_LEAD_S = 120.0
_MARGIN_S = 15.0
# The slowest so far is not the slowest to come.
_SAFETY = 1.5
_LEAST_LEAD_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What Slurm says about a job's end; None for what is not known."""

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

    The same TERM comes at a preemption and at a scancel. The longer time is believed: a save that is cut off leaves
    the checkpoint before it as it was.
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
    """Writes what Slurm says for the ranks."""
    write_atomic(notice_path(run, attempt), json.dumps(asdict(notice)) + "\n", durable=False)


def read_notice(run: RunDirectory, attempt: int) -> Notice:
    """Returns what Slurm said; nothing is known where nobody asked, as without Slurm."""
    found = read_json(notice_path(run, attempt)) or {}
    return Notice(**{name: found.get(name) for name in Notice.__slots__})


def read_measured(run: RunDirectory) -> Measured | None:
    """Returns what the newest attempt that saved has measured, None where none has."""
    for attempt in reversed(existing_attempts(run)):
        kept = read_json(account_path(run, attempt)) or {}
        if kept.get("longest_save_s", 0.0) > 0:
            return Measured(
                save_s=float(kept["longest_save_s"]),
                step_s=float(kept.get("longest_step_s", 0.0)),
                evaluation_s=float(kept.get("longest_evaluation_s", 0.0)),
            )
    return None
