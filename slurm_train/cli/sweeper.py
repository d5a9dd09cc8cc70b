"""A sweeper that needs values: each batch of its points is a sweep that is waited for, and the results are read.

What was finished before is not trained again, so a driver that was killed catches up when it is started anew with the
same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from slurm_train.config.compose import Point, unquoted
from slurm_train.config.hydra import HydraSettings
from slurm_train.config.words import split_word
from slurm_train.errors import RunError
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.sweep import SweepPlan
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory

CarryOut = Callable[[list[Point]], SweepPlan]
"""Carries out a sweep of these points to its end and returns its plan."""


def drive_sweeper(settings: HydraSettings, carry_out: CarryOut) -> int:
    """Runs the sweeper to its end and returns 0.

    Raises:
        RunError: a run has no value, and the sweeper cannot go on without it.
    """
    fixed = settings.fixed_keys()

    def launch(batch: list[list[str]]) -> list[Any]:
        points = {tuple(words): _point(words, fixed) for words in batch}
        plan = carry_out(list(points.values()))
        plans = dict(zip(points, plan.plans, strict=True))
        return [_returned(words, plans[tuple(words)]) for words in batch]

    settings.drive_sweeper(launch)
    return 0


def _point(words: Sequence[str], fixed: set[str]) -> Point:
    values = {}
    for word in words:
        _, key, value = split_word(word)
        if key not in fixed:
            values[key] = unquoted(value or "")
    return Point(tuple(words), values)


def _returned(words: Sequence[str], plan: RunPlan) -> JobReturn:
    try:
        value = objective(plan.run, plan.config.sweep.objective)
    except RunError as err:
        return JobReturn(overrides=list(words), status=JobStatus.FAILED, _return_value=err)
    return JobReturn(overrides=list(words), status=JobStatus.COMPLETED, _return_value=value)


def objective(run: RunDirectory, key: str | None) -> float:
    """Returns a run's value from its result.

    Args:
        run: the run.
        key: which one; None: eval_loss, or loss where nothing was evaluated.

    Raises:
        RunError: there is no result, or no such number in it.
    """
    result: Mapping[str, Any] = read_json(run.result) or {}
    for name in (key,) if key is not None else ("eval_loss", "loss"):
        if isinstance(result.get(name), (int, float)):
            return float(result[name])
    known = ", ".join(name for name, value in result.items() if isinstance(value, float)) or "no number"
    raise RunError(
        f"{run.path} has no result {key or 'eval_loss'}",
        hint=f"it has {known}; set sweep.objective" if result else "`status` and `logs` say why it ended",
    )
