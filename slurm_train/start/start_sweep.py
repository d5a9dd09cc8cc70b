"""The first half of a start for the runs of a sweep: held, compared, accepted by Slurm as job arrays, written.

Finished and active runs are left alone, so the same command again starts only missing runs. One submitter holds the
sweep until the block ends; within the block the runs are submitted, or trained on this machine by the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from slurm_train.code.job_python import gone_python, require_lasting_python
from slurm_train.code.snapshot import Source, read_source, source_notes
from slurm_train.config.frozen import load_config
from slurm_train.errors import RunError
from slurm_train.plan.plan import RunPlan, SweepPlan, replan_run
from slurm_train.request.acceptance import require_slurm
from slurm_train.request.arrays import ArrayPlan, find_lost_arrays, plan_arrays
from slurm_train.request.batch_script import job_request
from slurm_train.rundir.files import for_each
from slurm_train.rundir.jobs import named
from slurm_train.rundir.lookup import remember_root
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.sweep import Element, SweepDirectory, choosing_runs, read_table, submitting
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_request import JobRequest
from slurm_train.start.drift import check_drift
from slurm_train.start.start import Batch, Starter
from slurm_train.start.write import link_code, put_on_record, write_shared_code, write_table_of
from slurm_train.status.activity import are_being_submitted, find_active, writing
from slurm_train.status.run_status import RunState, read_statuses
from slurm_train.status.selection import filter_where, summary

# Another sweep of thousands of runs may be under way, with an sbatch that is slow.
_WAIT_S = 120.0


@contextlib.contextmanager
def fresh_sweep(start: Starter, plan: SweepPlan, source: Source) -> Iterator[Batch]:
    """Holds a sweep and yields its missing runs, written as planned.

    Args:
        start: how it is started.
        plan: the sweep.
        source: its code.

    Raises:
        SlurmTrainError: the site or one of the runs is refused; nothing was written.
    """
    sweep = plan.sweep
    commands = start.commands
    config = plan.plans[0].config
    dependency = start.dependency(config, sweep.place)
    require_lasting_python(config)
    start.say_variables(config, Path(plan.plans[0].directory))
    if plan.uses_cluster:
        require_slurm(commands, start.env)
    with contextlib.ExitStack() as stack:
        if plan.uses_cluster:
            runs = [run_plan.run for run_plan in plan.plans]
            stack.enter_context(choosing_runs(sweep, runs, wait_s=_WAIT_S, say=start.say))
        # A sweep that Slurm refuses must leave no directory, so a new sweep is created and held only after that.
        is_new = not sweep.table.exists()
        if not is_new:
            stack.enter_context(submitting(sweep))
            if plan.uses_cluster:
                find_lost_arrays(sweep, commands)
        missing = _missing_runs(start, plan)
        todo = [run_plan for run_plan in plan.plans if run_plan.run in missing]
        requests: list[tuple[RunDirectory, JobRequest]] = []
        arrays: list[ArrayPlan] = []
        if plan.uses_cluster:
            todo, (requests, arrays) = start.acceptable(todo, partial(_arrays_of, sweep=sweep, commands=commands))
        if is_new:
            stack.enter_context(submitting(sweep))
            if sweep.table.exists():
                raise RunError(
                    f"sweep {sweep.sweep_id} was submitted by another command just now",
                    hint=f"`status {sweep.sweep_id}` shows it; the same command again submits what is missing",
                )
        planned = write_table_of(plan, words=start.words)
        code = write_shared_code(sweep, source) if missing else None
        by_run = dict(requests)

        def write(run_plan: RunPlan) -> None:
            # A run with checkpoints continues with its own code; `resume --accept code` replaces it.
            is_trained = run_plan.run.code.exists() and bool(list_checkpoints(run_plan.run.checkpoints))
            start.write(run_plan, None if is_trained else code, by_run.get(run_plan.run))

        for_each(write, todo)
        yield _opened(
            Batch(
                start=start,
                path=sweep.path,
                config=config,
                elements=[element for element in planned if element.run in missing],
                requests=requests,
                source=source,
                provenance=code and code.with_suffix(".json"),
                sweep=sweep,
                arrays=arrays,
                dependency=dependency,
            )
        )


def _arrays_of(
    plans: Sequence[RunPlan], *, sweep: SweepDirectory, commands: SlurmCommands
) -> tuple[list[tuple[RunDirectory, JobRequest]], list[ArrayPlan]]:
    """Returns what planned runs ask for, and the arrays of them that Slurm accepts; see `plan_arrays`."""
    requests = [(plan.run, job_request(plan)) for plan in plans]
    if not plans:
        return [], []
    return requests, plan_arrays(sweep, requests, commands, limits=plans[0].config.sweep, example=plans[0])


def _opened(batch: Batch) -> Batch:
    """Returns the runs of a sweep without a request to stop it, or one of them."""
    assert batch.sweep is not None
    for element in batch.elements:
        element.run.stop_file.unlink(missing_ok=True)
    batch.sweep.stop_file.unlink(missing_ok=True)
    remember_root(batch.sweep.place, batch.start.env)
    return batch


def _missing_runs(start: Starter, plan: SweepPlan) -> set[RunDirectory]:
    """Returns the runs of a sweep that are neither finished nor active, and prints their number."""
    runs = {run_plan.run for run_plan in plan.plans}
    finished = {run for run in runs if run.result.exists()}
    # In the order of the plan, so that each call asks Slurm in the same order.
    unfinished = [run_plan.run for run_plan in plan.plans if run_plan.run not in finished]
    # In this order: what is submitted between the two is active.
    held = are_being_submitted(unfinished, start.commands)
    found = find_active(unfinished, start.commands)
    elsewhere = {run for run, activity in found.items() if activity.elsewhere and not activity.is_known}
    active = held | elsewhere | {run for run, activity in found.items() if activity.is_known}
    if elsewhere:
        first = next(run for run in unfinished if run in elsewhere)
        text = f"{named(found[first].elsewhere)} of {first.name}/{first.run_id}"
        start.say(f"{len(elsewhere)} runs count as active since another cluster may have their jobs: {text}")
    missing = runs - finished - active
    if len(missing) < len(runs):
        start.say(f"{len(finished)} runs are finished, {len(active)} active; {len(missing)} to submit")
    return missing


@contextlib.contextmanager
def sweep_as_written(
    start: Starter,
    sweep: SweepDirectory,
    *,
    states: Collection[RunState] | None,
    where: Sequence[str],
    code_from: Path | None,
) -> Iterator[Batch]:
    """Holds a sweep and yields its runs that ended early, as they are on disk.

    Args:
        start: how they are started.
        sweep: the sweep.
        states: states of the selected runs; None: all that are neither finished nor active.
        where: conditions on their values.
        code_from: the folder with new code for these runs, e.g. with a corrected script; None: they keep their code.

    Raises:
        RunError: there is no run to continue, or a run was never written.
        ClusterError: Slurm refuses.
    """
    commands = start.commands
    with contextlib.ExitStack() as stack:
        stack.enter_context(submitting(sweep))
        if commands.is_available():
            sweep_runs = [element.run for element in read_table(sweep)]
            stack.enter_context(choosing_runs(sweep, sweep_runs, wait_s=_WAIT_S, say=start.say))
            find_lost_arrays(sweep, commands)
        todo = _ended_early(sweep, commands, states=states, where=where)
        runs = [element.run for element in todo]
        unwritten = [element.index for element in todo if not element.run.config.is_file()]
        if unwritten:
            raise RunError(
                f"{len(unwritten)} runs of sweep {sweep.sweep_id} were never written, the first is {unwritten[0]}",
                hint="type the words of the sweep again: they submit what is missing",
            )
        config = load_config(todo[0].run.config)
        start.say_variables(config, code_from or todo[0].run.code)
        source = None
        if code_from is not None:
            source = read_source(todo[0].run, config, code_from, env=start.env)
            for line in source_notes(source):
                start.say(line)
        requests: list[tuple[RunDirectory, JobRequest]] = []
        if config.uses_cluster:
            require_slurm(commands, start.env)
            requests = [(run, JobRequest.read(run.submit_script)) for run in runs]
            gone = gone_python(config, requests[0][1].python)
            if gone:
                hint = "type the words of the sweep again: what is missing goes on with the Python of that command"
                raise RunError(f"the Python of sweep {sweep.sweep_id} is gone: {gone}", hint=hint)
        arrays = plan_arrays(sweep, requests, commands, limits=config.sweep)
        code = None
        if source is not None:
            code = _replace_code(start, sweep, runs, source)
        yield _opened(
            Batch(
                start=start,
                path=sweep.path,
                config=config,
                elements=todo,
                requests=requests,
                is_as_written=True,
                source=source,
                provenance=code and code.with_suffix(".json"),
                sweep=sweep,
                arrays=arrays,
            )
        )


def _ended_early(
    sweep: SweepDirectory, commands: SlurmCommands, *, states: Collection[RunState] | None, where: Sequence[str]
) -> list[Element]:
    """Returns the runs of a sweep that `resume` continues; see `sweep_as_written`.

    Raises:
        RunError: there is none.
    """
    elements = read_table(sweep)
    selected = filter_where(elements, where)
    # In this order: what is submitted between the two is active.
    held = are_being_submitted([element.run for element in elements], commands)
    statuses = read_statuses(elements, commands)
    todo = [
        status.subject
        for status in statuses
        if status.subject in selected
        and (states is None or status.state in states)
        and not (status.is_finished or status.is_active or status.other_cluster or status.run in held)
    ]
    if not todo:
        raise RunError(f"no run of sweep {sweep.sweep_id} is to be continued: {summary(statuses)}", hint="see `status`")
    return todo


def _replace_code(start: Starter, sweep: SweepDirectory, runs: Sequence[RunDirectory], source: Source) -> Path:
    """Replaces the code of runs of a sweep, and returns its path; all runs are compared before one is changed."""
    changes = {}
    for run in runs:
        plan = replan_run(load_config(run.config), PlanRecord.read(run.plan), run=run, typed=(), env={})
        changes[run] = check_drift(plan, source, accept={"code"}, say=start.say)
    code = write_shared_code(sweep, source)
    for run, change in changes.items():
        with writing(run, start.commands):
            if change is not None:
                put_on_record(run, change)
            renamed = link_code(run, code, change=change)
        start.say_renamed(run, renamed)
    return code
