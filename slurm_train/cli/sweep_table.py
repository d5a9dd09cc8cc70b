"""The runs of a sweep with their states: chosen by state or by value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_train.cli.status import Row, read_row
from slurm_train.config.frozen import load_config
from slurm_train.config.structure import to_mapping
from slurm_train.errors import ConfigError
from slurm_train.rundir.sweep import Element
from slurm_train.slurm.records import JobState

# What the status of a run says, in the words of --only.
_KINDS = {"not started": "missing", "time_limit": "timeout", "node failure": "node_failure"}
KINDS = (
    "missing",
    "failed",
    "timeout",
    "cancelled",
    "preempted",
    "node_failure",
    "stopped",
    "interrupted",
)
"""What --only takes; runs of other kinds (lost, requeued, unknown) are chosen where --only is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One run of a sweep as it stands."""

    element: Element
    row: Row
    is_active: bool
    """Queued, running, or about to come back by itself."""

    @property
    def kind(self) -> str:
        """Its state in one word, e.g. "missing"."""
        return _KINDS.get(self.row.state, self.row.state.replace(" ", "_"))

    @property
    def is_finished(self) -> bool:
        """Whether it has a result."""
        return self.row.state == "finished"


def read_rows(elements: Sequence[Element], jobs: Mapping[str, JobState]) -> list[SweepRow]:
    """Returns how the runs of a sweep stand.

    Args:
        elements: its table.
        jobs: what Slurm says about their jobs.
    """
    rows = []
    for element in elements:
        row = read_row(element.run, jobs)
        job = jobs.get(row.job)
        is_active = row.state != "finished" and (row.state == "running" or (job is not None and job.is_active))
        rows.append(SweepRow(element=element, row=row, is_active=is_active))
    return rows


def summary(rows: Sequence[SweepRow]) -> str:
    """Returns how many runs there are of each kind, e.g. "24 runs: 20 finished, 3 running, 1 failed"."""
    counts = Counter(one.row.state for one in rows)
    return f"{len(rows)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())


def read_kinds(text: str) -> set[str]:
    """Returns the kinds in "failed,missing".

    Raises:
        ConfigError: a word that is none.
    """
    kinds = {word.strip() for word in text.split(",") if word.strip()}
    unknown = sorted(kinds - set(KINDS))
    if unknown or not kinds:
        raise ConfigError(f"--only {text}: there is no state {', '.join(unknown)!r}", hint=f"use {', '.join(KINDS)}")
    return kinds


def chosen(rows: Sequence[SweepRow], conditions: Sequence[str]) -> list[SweepRow]:
    """Returns the rows for which every condition holds, e.g. ["optim.lr=1e-3", "seed=2"].

    A key is one that the sweep sets, or any other of the run's configuration.

    Raises:
        ConfigError: a condition is not KEY=VALUE, or a run has no such key.
    """
    pairs = []
    for condition in conditions:
        key, equals, value = condition.partition("=")
        if not key or not equals:
            raise ConfigError(f"--where {condition!r} is no condition", hint="write --where optim.lr=1e-3")
        pairs.append((key.lstrip("+"), value))
    return [one for one in rows if all(_is_same(_value_of(one.element, key), value) for key, value in pairs)]


def _value_of(element: Element, key: str) -> str:
    if key in element.overrides:
        return element.overrides[key]
    value = to_mapping(load_config(element.run.config))
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(
                f"the sweep has no key {key!r}",
                hint=f"it sets {', '.join(element.overrides) or 'none'}; `status` shows it",
            )
        value = value[part]
    return "null" if value is None else str(value)


def _is_same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.lower() == other.lower() if one.lower() in ("true", "false", "null") else one == other
