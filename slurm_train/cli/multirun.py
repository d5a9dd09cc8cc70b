"""`--multirun`: the words are a sweep. With a cluster its runs become job arrays, without one they are trained here.

Everything is composed, planned and looked at before anything is written. A run that is finished or active is left
alone, so the same words again submit only what is missing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.display import plan_rows, say_source
from slurm_train.cli.inputs import refuse_missing_inputs, warn_unexported_keys
from slurm_train.cli.outputs import RunOutput, make_outputs, plan_outputs, say_outputs
from slurm_train.cli.submit import require_slurm, tell_of_bad_nodes
from slurm_train.cli.terminal import note
from slurm_train.config.compose import Point, read_points
from slurm_train.config.words import Words
from slurm_train.errors import ConfigError, RunError
from slurm_train.launch.acceptance import require_acceptable
from slurm_train.launch.array import ArrayPlan, cut_arrays, max_array_size, render_array
from slurm_train.launch.array_submission import find_lost_arrays, job_name, next_number, submit_arrays
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.preparation import require_writable
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.script import render_script
from slurm_train.launch.snapshot import GitQuestions, read_answers
from slurm_train.launch.source import Source, read_source, uses_own_code
from slurm_train.launch.sweep import SweepPlan, plan_sweep
from slurm_train.launch.sweep_files import write_sweep
from slurm_train.rundir.jobs import clear_dead
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, submitting
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import find_active, holder_lives, writing

if TYPE_CHECKING:
    from slurm_train.config.hydra import HydraSettings

_SHOWN_VALUES = 3


def multirun(
    flags: Words,
    words: Sequence[str],
    *,
    settings: HydraSettings,
    env: Mapping[str, str],
    cwd: Path,
    git: GitQuestions | None,
) -> int:
    """Submits or trains the runs of a sweep; prints `<array job id> <sweep directory>` per array.

    Args:
        flags: the command line.
        words: the same as it was typed.
        settings: what it says to Hydra itself.
        env: the environment.
        cwd: where it was typed.
        git: what git is being asked about that folder.

    Raises:
        SlurmTrainError: something is wrong with the words, the site, or one of the runs; nothing was written then.
    """
    state = read_answers(git)
    num_before = 0

    def carry_out(points: Sequence[Point], *, wait: bool) -> tuple[int, SweepPlan]:
        nonlocal num_before
        plan, outputs = plan_points(points, settings=settings, env=env, cwd=cwd, first=num_before)
        num_before += len(points)
        if any(one.config.launch == "interactive" for one in plan.plans):
            raise ConfigError(
                "launch=interactive attends to one run, and this is a sweep", hint="drop -m, or launch=interactive"
            )
        source = read_source(_whose_code(plan), cwd, state, env=env)
        say_source(source)
        if plan.uses_cluster:
            return _submit(plan, source, words=words, env=env, wait=wait, outputs=outputs), plan
        from slurm_train.cli.sweep_here import run_here

        return run_here(plan, source, words=words, env=env, outputs=outputs), plan

    if not settings.sweeper_needs_values:
        return carry_out(read_points(settings.sweep_words), wait=flags.wait)[0]
    from slurm_train.cli.sweeper import drive_sweeper

    return drive_sweeper(settings, lambda points: carry_out(points, wait=True)[1])


def plan_words(*, settings: HydraSettings, env: Mapping[str, str], cwd: Path) -> tuple[SweepPlan, list[RunOutput]]:
    """Returns the plan of the sweep that the words ask for, and prints it; touches nothing.

    Raises:
        ConfigError: as `plan_sweep`, or a sweeper that does not know its points beforehand.
        DataError: data that a run asks for are not there.
    """
    if settings.sweeper_needs_values:
        raise ConfigError("this sweeper chooses its points as it goes", hint="plan one point of it, without -m")
    return plan_points(read_points(settings.sweep_words), settings=settings, env=env, cwd=cwd)


def plan_points(
    points: Sequence[Point],
    *,
    settings: HydraSettings,
    env: Mapping[str, str],
    cwd: Path,
    first: int = 0,
) -> tuple[SweepPlan, list[RunOutput]]:
    """Returns the plan of a sweep of these points, and what its runs shall have besides; prints it, touches nothing.

    Raises:
        ConfigError: as `plan_sweep`, or what is said to Hydra does not go together with it.
        DataError: data that a run asks for are not there.
    """
    composed = settings.compose_points([point.overrides for point in points], first=first)
    plan = plan_sweep(points, composed, cwd=cwd, env=env)
    settings.refuse_cluster(plan.plans[0].config)
    outputs = plan_outputs(settings, plan.plans, [point.overrides for point in points], cwd=cwd, first=first)
    _refuse_missing_inputs(plan.plans, cwd=cwd)
    require_writable(RunDirectory(plan.sweep.path))
    for name, text in sweep_rows(plan):
        note(f"  {name:<13}  {text}")
    say_outputs(outputs)
    return plan, outputs


def sweep_rows(plan: SweepPlan) -> list[tuple[str, str]]:
    """Returns the rows of the sweep's table: those of its runs, with the values that differ side by side."""
    axes = " x ".join(f"{key} ({len({element.overrides[key] for element in plan.elements})})" for key in plan.keys)
    rows = [("sweep", f"{len(plan.plans)} runs" + (f": {axes}" if axes else "")), ("directory", str(plan.sweep.path))]
    seen: dict[str, dict[str, None]] = {}
    for name, text in (row for one in plan.plans for row in plan_rows(one)):
        seen.setdefault(name, {})[text] = None
    del seen["run"]
    for name, texts in seen.items():
        more = f", and {len(texts) - _SHOWN_VALUES} more" if len(texts) > _SHOWN_VALUES else ""
        rows.append((name, " | ".join(list(texts)[:_SHOWN_VALUES]) + more))
    return rows


def _whose_code(plan: SweepPlan) -> RunPlan:
    """Returns a run that needs the code of the submitting directory, if there is one."""
    return next((one for one in plan.plans if uses_own_code(one)), plan.plans[0])


def _refuse_missing_inputs(plans: Sequence[RunPlan], *, cwd: Path) -> None:
    looked_at = set()
    for plan in plans:
        config = plan.config
        inputs = json.dumps([config.model, config.data, config.task, config.script], default=str)
        if inputs not in looked_at:
            looked_at.add(inputs)
            refuse_missing_inputs(plan, cwd=cwd)


def _submit(
    plan: SweepPlan,
    source: Source,
    *,
    words: Sequence[str],
    env: Mapping[str, str],
    wait: bool,
    outputs: Sequence[RunOutput],
) -> int:
    commands, sweep = SlurmCommands(env), plan.sweep
    require_slurm(commands, env)
    warn_unexported_keys(plan.plans[0].config, env)
    scripts = [(one.run, render_script(one)) for one in plan.plans]
    with contextlib.ExitStack() as held:
        was_known = sweep.table.exists()
        if was_known:
            held.enter_context(submitting(sweep))
            find_lost_arrays(sweep, commands)
        missing = missing_runs([one.run for one in plan.plans], commands)
        todo = [(run, script) for run, script in scripts if run in missing]
        arrays = plan_arrays(plan.sweep, todo, commands, max_parallel=plan.max_parallel, example=plan.plans[0])
        if not was_known:
            held.enter_context(submitting(sweep))
            _refuse_overtaken(sweep)
        code = write_sweep(plan, source, dict(todo), words=words, holding=partial(writing, commands=commands))
        make_outputs(outputs)
        for run, _ in todo:
            # A dead process on this machine can be told from here, not from the node that the job starts on.
            clear_dead(run, is_alive=lambda holder: holder_lives(holder, commands))
        tell_of_bad_nodes(todo, env)
        for _, job_id in submit_arrays(sweep, arrays, env=env):
            print(f"{job_id} {sweep.path}", flush=True)
        if code is not None:
            write_provenance(code.provenance, source, words=words, slurm=commands.version())
    _say_what_next(sweep)
    if wait:
        from slurm_train.cli.waiting import wait_for_sweep

        return wait_for_sweep(sweep, commands)
    return 0


def missing_runs(runs: Sequence[RunDirectory], commands: SlurmCommands) -> set[RunDirectory]:
    """Returns the runs that are neither finished nor active, and says how many of each there are."""
    finished = {run for run in runs if run.result.exists()}
    active = set(find_active([run for run in runs if run not in finished], commands))
    missing = set(runs) - finished - active
    if len(missing) < len(runs):
        note(f"{len(finished)} runs are finished, {len(active)} active; {len(missing)} to submit")
    return missing


def plan_arrays(
    sweep: SweepDirectory,
    scripts: Sequence[tuple[RunDirectory, str]],
    commands: SlurmCommands,
    *,
    max_parallel: int | None,
    example: RunPlan | None = None,
) -> list[ArrayPlan]:
    """Returns the arrays for the runs; Slurm has said that it would take each shape.

    Raises:
        ClusterError: it would not, or there are no arrays at this site.
    """
    if not scripts:
        return []
    max_size = max_array_size(commands.show_config())
    arrays = cut_arrays(scripts, max_size=max_size, max_parallel=max_parallel)
    # A limit on submitted jobs counts the elements of all arrays: the first question is about as many as can be asked.
    whole = replace(arrays[0], runs=tuple(run for run, _ in scripts)[:max_size], throttle=None)
    folder = sweep.array(next_number(sweep))
    by_shape = {array.directives: array for array in reversed(arrays)} | {whole.directives: whole}
    for array in by_shape.values():
        script = render_array(array, folder, name=job_name(sweep, folder))
        require_acceptable(script, commands, example if array is whole else None)
    return arrays


def _refuse_overtaken(sweep: SweepDirectory) -> None:
    if sweep.table.exists():
        raise RunError(
            f"sweep {sweep.sweep_id} was submitted by another command just now",
            hint=f"`status {sweep.sweep_id}` shows it; the same command again submits what is missing",
        )


def _say_what_next(sweep: SweepDirectory) -> None:
    verbs = ("status", "cancel", "collate", "report")
    note("next:\n" + "\n".join(f"  python -m slurm_train {verb} {sweep.sweep_id}" for verb in verbs))
