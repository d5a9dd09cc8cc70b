"""A sweep as its files tell it, read once: its runs with their curves, what they share, where they came from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_train.report.record import Verdict, read_attempts, read_config
from slurm_train.report.timeline import bars_of
from slurm_train.report.trials import Trial, choose_metric, graded, read_curves
from slurm_train.rundir.files import read_json
from slurm_train.rundir.sweep import Element, SweepDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """Everything that is known of a sweep."""

    sweep: SweepDirectory
    trials: Sequence[Trial]
    """With their values and how they compare."""
    metric: str
    """What the sweep is judged by."""
    config: Mapping[str, Any]
    """What all its runs have in common."""
    provenance: Mapping[str, Any]
    now_unix_s: float


def read_trial(
    element: Element,
    verdict: Verdict,
    cells: Mapping[str, Any],
    *,
    is_active: bool,
    num_runs: int,
    now_unix_s: float,
) -> Trial:
    """Returns a run of a sweep.

    Args:
        element: its place in the table.
        verdict: how it stands.
        cells: its row of the collated table.
        is_active: it runs, waits, or comes back by itself.
        num_runs: of the sweep, which share the room of the page.
        now_unix_s: the time of day.
    """
    run = element.run
    return Trial(
        index=element.index,
        run=f"{run.name}/{run.run_id}",
        given=element.overrides,
        verdict=verdict,
        is_active=is_active,
        cells=cells,
        bars=bars_of(read_attempts(run, verdict, now_unix_s=now_unix_s)),
        curves=read_curves(run.metrics, num_runs=num_runs),
    )


def read_sweep_record(
    sweep: SweepDirectory, trials: Sequence[Trial], *, metric: str | None, now_unix_s: float
) -> SweepRecord:
    """Returns a sweep with its runs compared.

    Args:
        sweep: the sweep.
        trials: its runs.
        metric: what to judge by; None: `sweep.objective` of its runs, else held-out loss, else training loss.
        now_unix_s: the time of day.

    Raises:
        ConfigError: no run has the metric.
    """
    runs = [sweep.root / trial.run for trial in trials]
    config = _shared([read_config(run / "config.yaml") for run in runs])
    section = config.get("sweep")
    configured = section.get("objective") if isinstance(section, Mapping) else None
    chosen = choose_metric(trials, asked=metric, configured=configured)
    newest = max(sweep.code.glob("*.json"), default=None, key=lambda path: path.name)
    facts = (read_json(newest) if newest else None) or {}
    return SweepRecord(
        sweep=sweep,
        trials=graded(trials, chosen),
        metric=chosen,
        config=config,
        provenance=facts | {"words": (read_json(sweep.facts) or {}).get("words", facts.get("words"))},
        now_unix_s=now_unix_s,
    )


def _shared(configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the settings that all runs have: a file that the sweep names may set more than the sweep's own words."""
    read = [config for config in configs if config]
    return functools.reduce(_in_both, read) if read else {}


def _in_both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in one.items():
        if isinstance(value, Mapping) and isinstance(other.get(key), Mapping):
            found[key] = _in_both(value, other[key])
        elif key in other and other[key] == value:
            found[key] = value
    return found
