"""A run as its files tell it, read once: everything that a page about it shows.

Damaged, missing and half-written files give less, never an error: a report is wanted most when something went wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from slurm_train.checkpoint.directory import check_sizes, survey
from slurm_train.errors import SlurmTrainError
from slurm_train.launch.provenance import environment_of
from slurm_train.metrics.series import Series, read_series
from slurm_train.report.quantity import as_float
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.changes import read_changes
from slurm_train.rundir.events import read_events
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory, name_of
from slurm_train.rundir.progress import last_lines
from slurm_train.rundir.saves import read_saves
from slurm_train.rundir.step_times import RankTimes, read_step_times
from slurm_train.rundir.stragglers import PaceWindow, read_windows
from slurm_train.rundir.timing import account_path, read_account


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run stands, as `status` says it."""

    state: str
    """E.g. "finished", "running", "failed"."""
    note: str = ""
    """Why, in a sentence."""
    nodelist: str = ""
    """Where it runs."""

    @property
    def is_active(self) -> bool:
        """Whether its newest attempt goes on."""
        return self.state == "running"


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint in the run directory."""

    step: int
    num_bytes: int | None
    """None where it is not whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that is known of a run."""

    run: RunDirectory
    verdict: Verdict
    now_unix_s: float
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    provenance: Mapping[str, Any]
    environment: Mapping[str, Any]
    """Of the newest attempt, else of the submission."""
    result: Mapping[str, Any] | None
    attempts: Sequence[Mapping[str, Any]]
    """The ledger; an attempt without an end line has one as far as it is known, and "is_open"."""
    series: Series
    events: Sequence[Mapping[str, Any]]
    saves: Sequence[Mapping[str, Any]]
    stored: Sequence[Stored]
    changes: Sequence[Mapping[str, Any]]
    step_times: Mapping[int, Sequence[RankTimes]]
    """By attempt; only attempts that left some."""
    windows: Sequence[PaceWindow]
    """What ranks spent their steps on."""

    @property
    def name(self) -> str:
        """E.g. "gpt-stdlib/3f9a1c07"."""
        return f"{self.run.name}/{self.run.run_id}"

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run, None where nobody counts them."""
        steps = as_float(self.plan.get("max_steps"))
        return int(steps) if steps else None

    @property
    def step(self) -> int:
        """The newest step on record."""
        known = (self.series.last("step"), as_float((self.result or {}).get("step")))
        return int(max((step for step in known if step is not None), default=0))


def read_record(run: RunDirectory, verdict: Verdict, *, now_unix_s: float) -> RunRecord:
    """Returns what a run's directory holds.

    Args:
        run: the run.
        verdict: how it stands.
        now_unix_s: the time of day.
    """
    attempts = read_attempts(run, verdict, now_unix_s=now_unix_s)
    step_times = {int(entry["attempt"]): read_step_times(run, int(entry["attempt"])) for entry in attempts}
    return RunRecord(
        run=run,
        verdict=verdict,
        now_unix_s=now_unix_s,
        config=read_config(run.config),
        plan=read_json(run.plan) or {},
        provenance=read_json(run.provenance) or {},
        environment=_environment(run),
        result=read_json(run.result),
        attempts=attempts,
        series=read_series(run.metrics),
        events=read_events(run),
        saves=read_saves(run),
        stored=_stored(run),
        changes=_changes(run),
        step_times={attempt: times for attempt, times in step_times.items() if times},
        windows=read_windows(run),
    )


def read_attempts(run: RunDirectory, verdict: Verdict, *, now_unix_s: float) -> list[Mapping[str, Any]]:
    """Returns the ledger, every attempt with an end as far as it is known; see `RunRecord.attempts`."""
    ledger = [entry for entry in _ledger(run) if as_float(entry.get("time_unix_s")) is not None]
    # Only the newest attempt can be the one that runs.
    until = [None] * (len(ledger) - 1) + [now_unix_s if verdict.is_active else None]
    return [_closed(run, entry, ledger[:index], until[index]) for index, entry in enumerate(ledger)]


def _ledger(run: RunDirectory) -> list[dict[str, Any]]:
    try:
        return read_ledger(run)
    except (KeyError, ValueError, TypeError):
        return []


def _environment(run: RunDirectory) -> Mapping[str, Any]:
    try:
        found = environment_of(run)
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
    return {} if found is None else found.as_json()


def _changes(run: RunDirectory) -> list[Mapping[str, Any]]:
    try:
        return [asdict(change) | {"names": change.names} for change in read_changes(run)]
    except (SlurmTrainError, KeyError, ValueError, TypeError):
        return []


def read_config(path: Path) -> Mapping[str, Any]:
    """Returns a frozen configuration as it is written: one of another version is shown all the same."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _stored(run: RunDirectory) -> list[Stored]:
    try:
        found = list(survey(run.checkpoints, check_sizes))
    except OSError:
        return []
    stored = [
        Stored(name_of(path).step, None if isinstance(outcome, SlurmTrainError) else outcome.num_bytes)
        for path, outcome in found
    ]
    return stored[::-1]


def _closed(
    run: RunDirectory, entry: Mapping[str, Any], before: Sequence[Mapping[str, Any]], now_unix_s: float | None
) -> Mapping[str, Any]:
    """Returns an attempt with an end and seconds per cause, as far as files tell where its end line is missing.

    Args:
        run: the run.
        entry: the attempt.
        before: those before it.
        now_unix_s: the time of day if it runs; None: nobody closed it, though it is over.
    """
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
    reason = "no end on record" if now_unix_s is None else "running"
    return {**entry, **seconds, "end_time_unix_s": end, "is_open": True, "reason": reason}


def _last_sign(run: RunDirectory, attempt: int, start: float) -> float:
    """Returns when an attempt that nobody closed was last heard of."""
    signs = [as_float((read_json(account_path(run, attempt)) or {}).get("end_unix_s"))]
    signs += [as_float(line.get("time_unix_s")) for line in last_lines(run.metrics) if line.get("attempt") == attempt]
    return max((sign for sign in signs if sign is not None), default=start)
