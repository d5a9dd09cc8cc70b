"""What `plan -m` says beyond the arithmetic of its runs: the outlook of each kind of run, and what all will cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.cli.outlook import Outlook, read_outlook
from slurm_train.config.schema import OptimSection, RunSection
from slurm_train.launch.cost import hours_in_words
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.sweep import SweepPlan

_MOST_KINDS = 3
"""Each asks Slurm and looks at runs of the past."""


def sweep_outlook_rows(plan: SweepPlan, *, env: Mapping[str, str], cwd: Path) -> list[tuple[str, str]]:
    """Returns the rows of `Outlook` for the kinds of runs that a sweep has, side by side, and the hours of all.

    Runs that differ in seed, name and optimizer alone are of one kind. Asks Slurm where the sweep asks for a cluster.
    """
    kinds: list[list[RunPlan]] = []
    for one in plan.plans:
        alike = next((kind for kind in kinds if _work(kind[0]) == _work(one)), None)
        if alike is None:
            kinds.append([one])
        else:
            alike.append(one)
    outlooks = [read_outlook(kind[0], measure=False, env=env, cwd=cwd) for kind in kinds[:_MOST_KINDS]]
    more = f", and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
    rows: dict[str, dict[str, None]] = {}
    for name, text in (row for outlook in outlooks for row in outlook.rows()):
        rows.setdefault(name, {})[text] = None
    shown = [(name, " | ".join(texts) + more) for name, texts in rows.items()]
    return shown if more else shown + _hours_of_all(outlooks, [len(kind) for kind in kinds])


def _work(plan: RunPlan) -> object:
    """Returns what decides memory, speed and size of a run."""
    return replace(plan.config, seed=0, run=RunSection(), optim=OptimSection()), plan.batch, plan.world.size


def _hours_of_all(outlooks: Sequence[Outlook], counts: Sequence[int]) -> list[tuple[str, str]]:
    """Returns one row, none where no run's hours are known."""
    parts = []
    most = [one.cost.per_attempt_h for one in outlooks]
    if all(hours is not None for hours in most):
        total_h = sum((hours or 0.0) * count for hours, count in zip(most, counts, strict=True))
        parts.append(f"at most {hours_in_words(total_h)} if each run has one attempt")
    left = [one.cost.left_h for one in outlooks]
    if all(hours is not None for hours in left):
        total_h = sum((hours or 0.0) * count for hours, count in zip(left, counts, strict=True))
        parts.append(f"about {hours_in_words(total_h)} for all steps (estimate)")
    return [(f"all {sum(counts)}", f"{outlooks[0].cost_unit}: {'; '.join(parts)}")] if parts else []
