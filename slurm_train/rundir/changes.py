"""changes.jsonl: what a person changed in the middle of a run, on purpose: what, when, from which step on.

A line is durable before anything else is written, so that no checkpoint can come from a change that is not on record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slurm_train.rundir.files import append_line, read_lines
from slurm_train.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedChange:
    """One change that a person accepted."""

    number: int
    """Counts the changes of the run, from 1."""
    step: int
    """Step of the newest checkpoint at that time; what comes after it is trained with the change."""
    config: dict[str, list[Any]] = field(default_factory=dict)
    """Old and new value by dotted key; only keys that change the training."""
    code: dict[str, Any] | None = None
    """Old and new digest of the snapshot, and the lines added and removed per file."""
    data: dict[str, str] | None = None
    """Old fingerprint of the data set, and the new one, "" where only the ranks can tell."""
    time_unix_s: float = 0.0

    @property
    def names(self) -> list[str]:
        """What was changed: keys, "code", "data"."""
        return [*self.config, *(["code"] if self.code else []), *(["data"] if self.data else [])]


def read_changes(run: RunDirectory) -> list[AcceptedChange]:
    """Returns the accepted changes of a run, oldest first."""
    names = AcceptedChange.__dataclass_fields__
    return [AcceptedChange(**{name: line[name] for name in names if name in line}) for line in read_lines(run.changes)]


def record_change(run: RunDirectory, change: AcceptedChange) -> None:
    """Adds a change; durable when this returns."""
    append_line(run.changes, {**asdict(change), "time_unix_s": time.time()}, durable=True)


def covers_config(changes: list[AcceptedChange], key: str, value: Any) -> bool:
    """Returns whether the newest accepted change of a key has brought this value."""
    brought = [change.config[key][1] for change in changes if key in change.config]
    return bool(brought) and bool(brought[-1] == value)


def covers_code(changes: list[AcceptedChange], digest: str) -> bool:
    """Returns whether the newest accepted change of the code has brought the snapshot with this digest."""
    brought = [change.code["new"] for change in changes if change.code]
    return bool(brought) and bool(brought[-1] == digest)


def covers_data(changes: list[AcceptedChange], *, old: str, new: str) -> bool:
    """Returns whether going from one fingerprint of the data set to another was accepted."""
    return any(change.data["old"] == old and change.data["new"] in ("", new) for change in changes if change.data)


def ledger_facts(changes: list[AcceptedChange], ledger: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what an attempt's start line says of the changes that it is the first to carry; {} where there are none.

    Args:
        changes: all accepted changes.
        ledger: the attempts before.
    """
    known = max((int(entry.get("changes", 0)) for entry in ledger), default=0)
    if not changes:
        return {}
    fresh = [name for change in changes if change.number > known for name in change.names]
    return {"changes": changes[-1].number, **({"accepted": fresh} if fresh else {})}
