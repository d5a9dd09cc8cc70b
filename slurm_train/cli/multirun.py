"""`--multirun`: the words are a sweep. With a cluster its runs become job arrays, without one they are trained here.

Everything is composed, planned and checked before anything is written. A sweeper that needs values asks for its points
in batches: the runs of a batch are trained to their end, and their results are read; all batches are one sweep. Runs
that are finished are not trained again, so the same words continue a study whose process was killed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.cli.preview import check_inputs, take_inputs, warn_unexported_keys
from slurm_train.cli.start import carry_out, wait_for_sweep
from slurm_train.cli.terminal import note
from slurm_train.code.snapshot import names_own_code, read_source, source_notes
from slurm_train.config.compose import Point, read_points, unquoted
from slurm_train.config.words import Words, split_word
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError, StudyError
from slurm_train.formatting import as_float, shorten
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.plan import SweepPlan, plan_sweep
from slurm_train.plan.preview import plan_rows
from slurm_train.rundir.files import read_json
from slurm_train.rundir.ledger import read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.start.start import Starter
from slurm_train.start.write import require_writable

if TYPE_CHECKING:
    from slurm_train.code.snapshot import Source
    from slurm_train.config.hydra import HydraSettings
    from slurm_train.config.schema import RunConfig
    from slurm_train.rundir.sweep import SweepDirectory

_SHOWN_VALUES = 3


class _Stopped(Exception):
    """Stopped by a person while a sweeper waited for the values of its runs."""


def multirun(
    flags: Words,
    words: Sequence[str],
    *,
    settings: HydraSettings,
    env: Mapping[str, str],
    cwd: Path,
    check: Callable[[RunConfig], None] | None = None,
) -> tuple[int, SweepDirectory | None]:
    """Submits or trains the runs of a sweep; prints `<array job id> <sweep directory>` per array.

    Returns the exit code, and the sweep unless a sweeper has chosen its points by their values.

    Args:
        flags: the command line.
        words: the same as it was typed.
        settings: what it says to Hydra itself.
        env: the environment.
        cwd: where it was typed.
        check: refuses the configuration of a run; then a sweeper that waits for values is refused as well.

    Raises:
        SlurmTrainError: something is wrong with the words, the site, or one of the runs; nothing was written then.
    """
    if check is not None and settings.sweeper_needs_values:
        hint = "type the words behind `python -m slurm_train`, or sweep given values: -m optim.lr=1e-3,3e-4"
        raise ConfigError("this sweeper waits for the values of its runs, which may take days", hint=hint)
    sweep = _TypedSweep(flags=flags, words=words, settings=settings, env=env, cwd=cwd, check=check)
    if not settings.sweeper_needs_values:
        code, plan = sweep.start(read_points(settings.sweep_words), wait=flags.wait)
        return code, plan.sweep
    try:
        settings.drive_sweeper(sweep.results_of)
    except _Stopped:
        return EXIT_REQUEUE, None
    return EXIT_DONE, None


@dataclass(slots=True, kw_only=True)
class _TypedSweep:
    """The sweep of a command line: its points are started all together, or in the batches that a sweeper asks for."""

    flags: Words
    words: Sequence[str]
    settings: HydraSettings
    env: Mapping[str, str]
    cwd: Path
    check: Callable[[RunConfig], None] | None
    num_started: int = 0
    """Points of earlier batches."""

    def start(self, points: Sequence[Point], *, wait: bool) -> tuple[int, SweepPlan]:
        """Starts the runs of some points; returns the exit code and their plan."""
        sweep_id = self.settings.study_id if self.settings.sweeper_needs_values else None
        plan = plan_points(
            points, settings=self.settings, env=self.env, cwd=self.cwd, first=self.num_started, sweep_id=sweep_id
        )
        self.num_started += len(points)
        if self.check is not None:
            self.check(plan.plans[0].config)
        # A run that needs the code of the submitting directory, if there is one.
        with_own_code = [candidate for candidate in plan.plans if names_own_code(candidate.config)]
        example = with_own_code[0] if with_own_code else plan.plans[0]
        source = read_source(example.run, example.config, self.cwd, env=self.env)
        for line in source_notes(source):
            note(line)
        warn_unexported_keys(example.config, self.env)
        start = Starter(words=self.words, env=self.env, say=note, after=self.flags.after)
        return _start(start, plan, source, wait=wait), plan

    def results_of(self, batch: list[list[str]]) -> list[Any]:
        """Runs the points of a batch to their end and returns their results, as Hydra's sweepers ask for them.

        Raises:
            _Stopped: a person has stopped the runs; not a failure of the runs, which a study may allow.
        """
        fixed_keys = self.settings.fixed_keys()
        # A sweeper may ask for the same point twice in a batch; it is one run.
        points = {tuple(point_words): _point(point_words, fixed_keys) for point_words in batch}
        code, plan = self.start(list(points.values()), wait=True)
        if code == EXIT_REQUEUE:
            raise _Stopped
        plans = dict(zip(points, plan.plans, strict=True))
        objective_key = plan.plans[0].config.sweep.objective
        return [_job_return(point_words, plans[tuple(point_words)].run, objective_key) for point_words in batch]


def _start(start: Starter, plan: SweepPlan, source: Source, *, wait: bool) -> int:
    """Submits or trains what is missing of a sweep, and returns the exit code; with `wait` when all runs have ended."""
    from slurm_train.start.start_sweep import fresh_sweep

    code = carry_out(fresh_sweep(start, plan, source))
    if not plan.uses_cluster:
        return code
    sweep_id = plan.sweep.sweep_id
    verbs = ("status", "cancel", "collate", "report")
    note("next:\n" + "\n".join(f"  python -m slurm_train {verb} {sweep_id}" for verb in verbs))
    if not wait:
        return EXIT_DONE
    return wait_for_sweep(start, [element.run for element in plan.elements], sweep_id=sweep_id)


def plan_words(*, settings: HydraSettings, env: Mapping[str, str], cwd: Path) -> SweepPlan:
    """Returns the plan of the sweep that the command line describes, and prints it; touches nothing.

    Raises:
        ConfigError: as `plan_sweep`, or a sweeper that does not know its points beforehand.
        DataError: data that a run asks for are not there.
    """
    if settings.sweeper_needs_values:
        raise ConfigError("this sweeper chooses its points as it goes", hint="plan one point of it, without -m")
    points = read_points(settings.sweep_words)
    return plan_points(points, settings=settings, env=env, cwd=cwd, take=check_inputs)


def plan_points(
    points: Sequence[Point],
    *,
    settings: HydraSettings,
    env: Mapping[str, str],
    cwd: Path,
    first: int = 0,
    sweep_id: str | None = None,
    take: Callable[..., None] = take_inputs,
) -> SweepPlan:
    """Returns the plan of a sweep of these points; prints it.

    Args:
        points: what each run is given.
        settings: what the words say to Hydra itself.
        env: the environment.
        cwd: where the words were typed.
        first: how many points were before these.
        sweep_id: as in `plan_sweep`.
        take: fetches or checks the inputs of a run: `take_inputs` or `check_inputs`.

    Raises:
        ConfigError: as `plan_sweep`.
        DataError: data that a run asks for are not there.
    """
    composed = settings.compose_points([point.overrides for point in points], first=first)
    plan = plan_sweep(points, composed, cwd=cwd, env=env, sweep_id=sweep_id, settle=settle_parallel)
    seen = set[str]()
    for planned in plan.plans:
        config = planned.config
        inputs = json.dumps(
            [config.model, config.data, config.task, config.script, config.train.init_from], default=str
        )
        if inputs not in seen:
            seen.add(inputs)
            take(planned, cwd=cwd)
    require_writable(RunDirectory(plan.sweep.path), share=plan.plans[0].config.run.share, is_sweep=True)
    for name, text in sweep_rows(plan):
        note(f"  {name:<13}  {text}")
    return plan


def sweep_rows(plan: SweepPlan) -> list[tuple[str, str]]:
    """Returns the rows of the sweep's table: those of its runs, with the values that differ side by side."""
    axes = []
    for key in plan.keys:
        values = {element.overrides[key] for element in plan.elements}
        axes.append(f"{key} ({len(values)})")
    size = f"{len(plan.plans)} runs" + (f": {' x '.join(axes)}" if axes else "")
    rows = [("sweep", size), ("directory", str(plan.sweep.path))]
    texts_by_name: dict[str, dict[str, None]] = {}
    for run_plan in plan.plans:
        for name, text in plan_rows(run_plan):
            texts_by_name.setdefault(name, {})[text] = None
    del texts_by_name["run"]
    for name, texts in texts_by_name.items():
        rows.append((name, shorten(texts, _SHOWN_VALUES, separator=" | ")))
    return rows


# --- the values that a sweeper reads ---


def _point(words: Sequence[str], fixed_keys: set[str]) -> Point:
    """Returns the point of a sweeper's words; keys that are the same for all runs are not among its values."""
    values = {key: unquoted(value or "") for _, key, value in map(split_word, words) if key not in fixed_keys}
    return Point(tuple(words), values)


def _job_return(words: Sequence[str], run: RunDirectory, key: str | None) -> Any:
    """Returns Hydra's `JobReturn` of a point, with its value or with the error that it has none."""
    from hydra.core.utils import JobReturn, JobStatus

    value: float | StudyError
    try:
        status = JobStatus.COMPLETED
        value = objective(run, key)
    except StudyError as err:
        status = JobStatus.FAILED
        value = err
    return JobReturn(overrides=list(words), status=status, _return_value=value)


def objective(run: RunDirectory, key: str | None) -> float:
    """Returns a run's value from its result.

    Args:
        run: the run.
        key: which one; None: eval_loss, or loss where nothing was evaluated.

    Raises:
        StudyError: there is no result, or no such number in it, or one that is not finite.
    """
    go_on = "hydra.sweeper.max_failure_rate=0.5 lets a study of Optuna go on without up to half of its runs"
    again = f"correct it and type the same command again: what is finished is not trained again; {go_on}"
    result: Mapping[str, Any] = read_json(run.result) or {}
    # The loss of a training says little where other things were evaluated.
    has_evaluations = any(name.startswith("eval_") for name in result)
    names = [key or "eval_loss"]
    if key is None and not has_evaluations:
        names.append("loss")
    for name in names:
        value = result.get(name, "")
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise StudyError(f"{name} of {run.path} is not finite: no value for a sweeper", hint=go_on)
        number = as_float(value)
        if number is not None:
            return number
    if not result:
        ledger = read_ledger(run)
        why = ledger[-1].note if ledger else ""
        reason = f": {why}" if why else ""
        raise StudyError(
            f"{run.path} has ended without a result for the sweeper{reason}",
            hint=f"`logs {run.run_id}` says more; {again}",
        )
    numbers = ", ".join(name for name, value in result.items() if isinstance(value, float)) or "no number"
    raise StudyError(
        f"{run.path} has no result {key or 'eval_loss'}",
        hint=f"it has {numbers}; set sweep.objective",
    )
