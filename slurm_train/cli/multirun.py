"""`--multirun`: the words are a sweep. With a cluster its runs become job arrays, without one they are trained here.

Everything is composed, planned and looked at before anything is written. A run that is finished or active is left
alone, so the same words again submit only what is missing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.cli.display import note, plan_rows
from slurm_train.cli.inputs import refuse_missing_inputs
from slurm_train.cli.liveness import holder_lives
from slurm_train.cli.selection import active_runs
from slurm_train.cli.submit import avoid_bad_nodes, require_slurm
from slurm_train.config.compose import compose_points
from slurm_train.config.lean import is_enough
from slurm_train.config.points import Point, read_points
from slurm_train.config.words import Words
from slurm_train.errors import ConfigError, RunError
from slurm_train.launch.acceptance import require_acceptable
from slurm_train.launch.array import ArrayPlan, cut_arrays, max_array_size, render_array
from slurm_train.launch.array_submission import find_lost_arrays, job_name, next_number, submit_arrays
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.preparation import Source, read_source, require_writable, uses_own_code
from slurm_train.launch.script import render_script
from slurm_train.launch.snapshot import GitQuestions, read_answers
from slurm_train.launch.sweep import SweepPlan, plan_sweep
from slurm_train.launch.sweep_files import write_sweep
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lock import clear_dead
from slurm_train.rundir.sweep import SweepDirectory, submitting
from slurm_train.slurm.commands import SlurmCommands

_SHOWN_VALUES = 3


def multirun(flags: Words, words: Sequence[str], *, env: Mapping[str, str], cwd: Path, git: GitQuestions | None) -> int:
    """Submits or trains the runs of a sweep; prints `<array job id> <sweep directory>` per array.

    Raises:
        SlurmTrainError: something is wrong with the words, the site, or one of the runs; nothing was written then.
    """
    state = read_answers(git)

    def carry_out(points: Sequence[Point], *, wait: bool) -> tuple[int, SweepPlan]:
        plan = plan_points(flags, points, env=env, cwd=cwd)
        source = read_source(_whose_code(plan), cwd, state)
        if plan.uses_cluster:
            return _submit(plan, source, words=words, env=env, wait=wait), plan
        from slurm_train.cli.sweep_here import run_here

        return run_here(plan, source, words=words, env=env), plan

    if is_enough(flags):
        return carry_out(read_points(flags), wait=flags.wait)[0]
    from slurm_train.config.sweeper import read_sweeper

    choice = read_sweeper(flags)
    if not choice.needs_values:
        return carry_out(read_points(choice.words), wait=flags.wait)[0]
    from slurm_train.cli.sweeper import drive_sweeper

    return drive_sweeper(choice, lambda points: carry_out(points, wait=True)[1])


def plan_words(flags: Words, *, env: Mapping[str, str], cwd: Path) -> SweepPlan:
    """Returns the plan of the sweep that the words ask for, and prints it; touches nothing.

    Raises:
        ConfigError: as `plan_sweep`, or a sweeper that does not know its points beforehand.
        DataError: data that a run asks for are not there.
    """
    if not is_enough(flags):
        from slurm_train.config.sweeper import read_sweeper

        choice = read_sweeper(flags)
        if choice.needs_values:
            raise ConfigError("this sweeper chooses its points as it goes", hint="plan one point of it, without -m")
        flags = choice.words
    return plan_points(flags, read_points(flags), env=env, cwd=cwd)


def plan_points(flags: Words, points: Sequence[Point], *, env: Mapping[str, str], cwd: Path) -> SweepPlan:
    """Returns the plan of a sweep of these points, and prints it; touches nothing.

    Raises:
        ConfigError: as `plan_sweep`.
        DataError: data that a run asks for are not there.
    """
    composed = compose_points(flags, [point.overrides for point in points])
    plan = plan_sweep(points, composed, cwd=cwd, env=env)
    _refuse_missing_inputs(plan.plans, cwd=cwd)
    require_writable(RunDirectory(plan.sweep.path))
    for name, text in sweep_rows(plan):
        note(f"  {name:<12}  {text}")
    return plan


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


def _submit(plan: SweepPlan, source: Source, *, words: Sequence[str], env: Mapping[str, str], wait: bool) -> int:
    commands, sweep = SlurmCommands(env), plan.sweep
    require_slurm(commands)
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
        write_sweep(plan, source, dict(todo), words=words)
        for run, _ in todo:
            # A dead process on this machine can be told from here, not from the node that the job starts on.
            clear_dead(run, is_alive=lambda holder: holder_lives(holder, commands))
        if todo:
            avoid_bad_nodes(todo[0][1], todo[0][0], env)
        for _, job_id in submit_arrays(sweep, arrays, env=env):
            print(f"{job_id} {sweep.path}", flush=True)
    _say_what_next(sweep)
    if wait:
        from slurm_train.cli.waiting import wait_for_sweep

        return wait_for_sweep(sweep, commands)
    return 0


def missing_runs(runs: Sequence[RunDirectory], commands: SlurmCommands) -> set[RunDirectory]:
    """Returns the runs that are neither finished nor active, and says how many of each there are."""
    finished = {run for run in runs if run.result.exists()}
    active = active_runs([run for run in runs if run not in finished], commands)
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
    verbs = ("status", "cancel", "collate")
    note("next:\n" + "\n".join(f"  python -m slurm_train {verb} {sweep.sweep_id}" for verb in verbs))
