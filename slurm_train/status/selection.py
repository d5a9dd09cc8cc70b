"""Selects runs by names, sweeps and filters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurm_train.errors import ConfigError, RunError
from slurm_train.formatting import count
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.ledger import read_ledger
from slurm_train.rundir.lookup import find_runs, find_sweep
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.queue_view import QueueView
from slurm_train.status.run_status import RunState, RunStatus, Surveyor

# What a command that answers a person at a prompt waits for.
_SLURM_TIMEOUT_S = 10.0
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which runs are meant: by name, by values of their configuration, by state, by time."""

    root: Path
    words: Sequence[str] = ()
    """Runs and sweeps; none: all runs."""
    where: Sequence[str] = ()
    states: frozenset[RunState] | None = None
    last: int | None = None
    since_unix_s: float = 0.0

    def sweep(self) -> SweepDirectory | None:
        """Returns the sweep that is meant, None where runs are, or several things."""
        return find_sweep(self.root, self.words[0]) if len(self.words) == 1 else None

    def subjects(self) -> list[Element]:
        """Returns the runs that exist now and may be meant; which states they are in is checked later.

        Raises:
            RunError: a word names nothing.
            ConfigError: a condition makes no sense.
        """
        elements = filter_where(self._named(), self.where)
        if not self.since_unix_s and self.last is None:
            return elements
        active_s = {element.run: _active_unix_s(element.run) for element in elements}
        newest = set(sorted(active_s, key=lambda run: active_s[run], reverse=True)[: self.last])
        return [element for element in elements if element.run in newest and active_s[element.run] >= self.since_unix_s]

    def _named(self) -> list[Element]:
        if not self.words:
            return [Element(run=run) for run in find_runs(self.root, [])]
        by_run: dict[RunDirectory, Element] = {}
        for word in self.words:
            sweep = find_sweep(self.root, word)
            if sweep is None:
                elements = [Element(run=run) for run in find_runs(self.root, [word])]
            else:
                elements = read_table(sweep)
            for element in elements:
                # A run that is named twice is shown once, as it was named first.
                by_run.setdefault(element.run, element)
        return list(by_run.values())

    def keeps(self, status: RunStatus) -> bool:
        """Returns whether a run in this state is meant."""
        return self.states is None or status.state in self.states


def _active_unix_s(run: RunDirectory) -> float:
    """Returns when a run was last submitted or began an attempt, else when it was written."""
    times: list[float] = []
    record = read_job(run)
    if record is not None:
        times.append(record.submit_time_unix_s)
    ledger = read_ledger(run)
    if ledger:
        times.append(ledger[-1].start.time_unix_s)
    if times:
        return max(times)
    try:
        return run.config.stat().st_mtime
    except OSError:
        return 0.0


def read_since(text: str, *, now_unix_s: float) -> float:
    """Returns the moment that is meant by "90m", "12h", "2d", "1w" ago, or by "2026-01-31" or "2026-01-31T09:00".

    Raises:
        ConfigError: it is none of these.
    """
    match = _SPAN.fullmatch(text.strip())
    if match:
        return now_unix_s - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        hint = "write 90m, 12h, 2d, 1w, or a date such as 2026-01-31 or 2026-01-31T09:00"
        raise ConfigError(f"--since {text} is neither a span of time nor a date", hint=hint) from None


def filter_where(subjects: Iterable[Element], conditions: Sequence[str]) -> list[Element]:
    """Returns the runs for which every condition holds, e.g. ["optim.lr=1e-3", "seed=2"]; numbers are compared as such.

    A key is one of the run's sweep or of its configuration.

    Raises:
        ConfigError: a condition is not KEY=VALUE, or no run has such a key.
    """
    chosen = list(subjects)
    for condition in conditions:
        key, equals, value = condition.lstrip("+").partition("=")
        if not key or not equals:
            raise ConfigError(f"--where {condition!r} is not KEY=VALUE", hint="write --where optim.lr=1e-3")
        values = [_value_of(subject, key) for subject in chosen]
        if chosen and all(run_value is None for run_value in values):
            raise ConfigError(f"no run has the key {key!r}", hint="`--cfg job` prints all keys")
        matching = []
        for subject, run_value in zip(chosen, values, strict=True):
            if run_value is not None and _is_same(run_value, value):
                matching.append(subject)
        chosen = matching
    return chosen


def _value_of(subject: Element, key: str) -> str | None:
    """Returns a value as it would be typed, None where the run has no such key or no configuration."""
    if key in subject.overrides:
        return subject.overrides[key]
    # YAML and the schema cost a twentieth of a second, which `status` without --where does not pay.
    from slurm_train.config.frozen import load_values

    try:
        value: Any = load_values(subject.run.config)
    except RunError:
        return None
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return "null" if value is None else str(value)


def _is_same(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return text.lower() == other.lower() if text.lower() in ("true", "false", "null") else text == other


def build_surveyor(env: Mapping[str, str]) -> Surveyor:
    """Returns what reads the status of runs, with the Slurm of an environment."""
    return Surveyor(QueueView(SlurmCommands(env, timeout_s=_SLURM_TIMEOUT_S)))


def summary(statuses: Sequence[RunStatus]) -> str:
    """Returns how many runs there are of each state, e.g. "24 runs: 20 finished, 3 running, 1 failed"."""
    text = count(len(statuses), "run")
    if not statuses:
        return text
    labels = Counter(status.state.label for status in statuses)
    return f"{text}: " + ", ".join(f"{number} {label}" for label, number in labels.most_common())
