"""Which runs a person means by names, sweeps and filters; and the look at their status that most verbs begin with."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurm_train.cli.terminal import note
from slurm_train.errors import ConfigError, RunError
from slurm_train.formatting import count
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.lookup import find_runs, root_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, find_sweep, read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.queue_view import QueueView
from slurm_train.status.run_status import RunState, RunStatus, Surveyor, read_states
from slurm_train.verbs import DEFAULT_ROOT, parse

# What a command that answers a person at a prompt waits for.
_SLURM_TIMEOUT_S = 10.0
# Attributes of parsed words that name runs or sweeps.
_NAMED = ("runs", "run", "sweep", "what", "checkpoint", "first")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was typed to choose runs by."""

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
        found = [] if self.words else [Element(run=run) for run in find_runs(self.root, [])]
        for word in self.words:
            sweep = find_sweep(self.root, word)
            if sweep is None:
                found += [Element(run=run) for run in find_runs(self.root, [word])]
            else:
                found += read_table(sweep)
        # A run that is named twice is shown once, as it was named first.
        by_run = {candidate.run: candidate for candidate in reversed(found)}
        found = filter_where([candidate for candidate in found if by_run[candidate.run] is candidate], self.where)
        if self.since_unix_s or self.last is not None:
            active_s = {candidate.run: _active_unix_s(candidate.run) for candidate in found}
            newest = set(sorted(active_s, key=lambda run: active_s[run], reverse=True)[: self.last])
            found = [
                candidate
                for candidate in found
                if candidate.run in newest and active_s[candidate.run] >= self.since_unix_s
            ]
        return found

    def keeps(self, status: RunStatus) -> bool:
        """Returns whether a run in this state is meant."""
        return self.states is None or status.state in self.states


def parse_runs(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """Returns what was typed behind a verb; its root is that of the runs that ids name, wherever it is typed."""
    arguments = parse(verb, words)
    find_root(arguments)
    return arguments


def find_root(arguments: argparse.Namespace) -> None:
    """Sets the root to that of the runs that ids name; a root that is typed is the only one that is looked at."""
    arguments.root, default = Path(arguments.root), Path(DEFAULT_ROOT)
    if arguments.root == default:
        named = [getattr(arguments, name, None) for name in _NAMED]
        for word in (
            word for candidate in named for word in ([candidate] if isinstance(candidate, str) else candidate or [])
        ):
            arguments.root = root_of(word.partition("@")[0], default, os.environ)
            if arguments.root != default:
                note(f"{word} is below {arguments.root}")
                break


def read_selection(arguments: argparse.Namespace, words: Sequence[str]) -> Selection:
    """Returns what was typed.

    Raises:
        ConfigError: a state, a number or a time that makes no sense.
    """
    if arguments.last is not None and arguments.last < 1:
        raise ConfigError(f"--last must be at least 1, got {arguments.last}", hint="write --last 5")
    return Selection(
        root=arguments.root,
        words=words,
        where=arguments.where,
        states=read_states(arguments.state, option="--state") if arguments.state is not None else None,
        last=arguments.last,
        since_unix_s=read_since(arguments.since, now_unix_s=time.time()) if arguments.since is not None else 0.0,
    )


def _active_unix_s(run: RunDirectory) -> float:
    """Returns when a run was last submitted or began an attempt, else when it was written."""
    record, ledger = read_job(run), read_ledger(run)
    known = [record.submit_time_unix_s] if record is not None else []
    known += [float(ledger[-1]["time_unix_s"])] if ledger and "time_unix_s" in ledger[-1] else []
    if not known:
        try:
            return run.config.stat().st_mtime
        except OSError:
            return 0.0
    return max(known)


def read_since(text: str, *, now_unix_s: float) -> float:
    """Returns the moment that is meant by "90m", "12h", "2d", "1w" ago, or by "2026-01-31" or "2026-01-31T09:00".

    Raises:
        ConfigError: it is none of these.
    """
    if match := _SPAN.fullmatch(text.strip()):
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
        if chosen and all(found is None for found in values):
            raise ConfigError(f"no run has the key {key!r}", hint="`--cfg job` prints all keys")
        pairs = zip(chosen, values, strict=True)
        chosen = [subject for subject, found in pairs if found is not None and _is_same(found, value)]
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


def look_once(subjects: Sequence[Element], env: Mapping[str, str]) -> tuple[RunStatus, ...]:
    """Returns the status of runs; prints a note where Slurm does not answer and the files alone were read."""
    survey = build_surveyor(env).look(subjects)
    if survey.look.problem:
        note(f"Slurm does not answer, so this is from the files alone: {survey.look.problem}")
    return survey.statuses


def summary(statuses: Sequence[RunStatus]) -> str:
    """Returns how many runs there are of each state, e.g. "24 runs: 20 finished, 3 running, 1 failed"."""
    states = Counter(status.state.label for status in statuses).most_common()
    return ": ".join(filter(None, [count(len(statuses), "run"), ", ".join(f"{num} {label}" for label, num in states)]))
