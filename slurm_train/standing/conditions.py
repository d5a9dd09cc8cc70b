"""Chooses runs by what they were given: `--where KEY=VALUE`, a key of their sweep or of their configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slurm_train.errors import ConfigError, RunError
from slurm_train.standing.facts import Subject


def choose(subjects: Iterable[Subject], conditions: Sequence[str]) -> list[Subject]:
    """Returns the runs for which every condition holds, e.g. ["optim.lr=1e-3", "seed=2"]; numbers are compared as such.

    Raises:
        ConfigError: a condition is not KEY=VALUE, or no run has such a key.
    """
    pairs = [_read(condition) for condition in conditions]
    chosen = list(subjects)
    for key, value in pairs:
        values = [value_of(subject, key) for subject in chosen]
        if chosen and all(found is None for found in values):
            known = ", ".join(dict.fromkeys(name for one in chosen for name in one.overrides))
            hint = f"the sweep sets {known}; `--cfg job` prints all keys" if known else "`--cfg job` prints all keys"
            raise ConfigError(f"no run has the key {key!r}", hint=hint)
        pairs_found = zip(chosen, values, strict=True)
        chosen = [subject for subject, found in pairs_found if found is not None and _is_same(found, value)]
    return chosen


def value_of(subject: Subject, key: str) -> str | None:
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


def _read(condition: str) -> tuple[str, str]:
    key, equals, value = condition.partition("=")
    if not key or not equals:
        raise ConfigError(f"--where {condition!r} is no condition", hint="write --where optim.lr=1e-3")
    return key.lstrip("+"), value


def _is_same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.lower() == other.lower() if one.lower() in ("true", "false", "null") else one == other
