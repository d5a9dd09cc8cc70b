"""`resume SWEEP`: continues the runs of a sweep that ended early, as they stand on disk; one array per shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurm_train.cli.changes import weigh
from slurm_train.cli.display import say_source
from slurm_train.cli.multirun import plan_arrays
from slurm_train.cli.selection import filter_where
from slurm_train.cli.status_table import summary
from slurm_train.cli.submit import require_slurm, tell_of_bad_nodes
from slurm_train.cli.terminal import note
from slurm_train.config.frozen import load_config
from slurm_train.errors import EXIT_DONE, RunError
from slurm_train.launch.array_submission import find_lost_arrays, submit_arrays
from slurm_train.launch.plan import replan_run
from slurm_train.launch.preparation import link_code, put_on_record, write_shared_code
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.snapshot import ask_git, read_answers
from slurm_train.launch.source import Source, plan_source
from slurm_train.launch.sweep_files import next_code
from slurm_train.rundir.events import AcceptedChange
from slurm_train.rundir.files import read_json
from slurm_train.rundir.jobs import clear_dead
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table, submitting
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import holder_lives, writing
from slurm_train.status.run_status import RunState, RunStatus, read_statuses, subjects_of


def resume_sweep(
    sweep: SweepDirectory,
    env: Mapping[str, str],
    *,
    only: Collection[RunState] | None,
    where: Sequence[str],
    takes_code: bool,
    words: Sequence[str],
) -> int:
    """Continues the chosen runs and returns 0; prints `<array job id> <sweep directory>` per array.

    Args:
        sweep: the sweep.
        env: environment of the caller.
        only: states of the runs that are meant; None: all that are neither finished nor active.
        where: conditions on their values.
        takes_code: the runs take the code of the current directory, for the runs of a mended script.
        words: the command line, for the new code's provenance.

    Raises:
        RunError: nothing is to be continued, or a run was never written.
        ClusterError: Slurm refuses.
    """
    commands = SlurmCommands(env)
    with submitting(sweep):
        if commands.is_available():
            find_lost_arrays(sweep, commands)
        elements = read_table(sweep)
        subjects = subjects_of(elements)
        rows = read_statuses(subjects, commands)
        named = {subject.run for subject in filter_where(subjects, where)}
        meant = [one for one in rows if one.run in named and (only is None or one.state in only)]
        todo = [one for one in meant if not one.is_finished and not one.is_active]
        if not todo:
            raise RunError(f"no run of sweep {sweep.sweep_id} is to be continued: {summary(rows)}", hint="see `status`")
        _require_written(sweep, todo)
        source = _new_source(todo, cwd=Path.cwd(), env=env) if takes_code else None
        config = load_config(todo[0].run.config)
        if config.cluster is None:
            _prepare(sweep, todo, source, commands, words=words)
            meant_here = {one.run for one in todo}
            elements = [element for element in elements if element.run in meant_here]
            return _here(sweep, elements, num_parallel=config.sweep.max_parallel or 1, env=env)
        require_slurm(commands, env)
        scripts = [(one.run, one.run.submit_script.read_text(encoding="utf-8")) for one in todo]
        arrays = plan_arrays(sweep, scripts, commands, max_parallel=config.sweep.max_parallel)
        _prepare(sweep, todo, source, commands, words=words)
        tell_of_bad_nodes(scripts, env)
        for _, job_id in submit_arrays(sweep, arrays, env=env):
            print(f"{job_id} {sweep.path}", flush=True)
    note(f"submitted {len(todo)} runs again; each continues from its newest verified checkpoint")
    return EXIT_DONE


def _require_written(sweep: SweepDirectory, rows: Sequence[RunStatus]) -> None:
    unwritten = [one.subject.index for one in rows if not one.run.config.is_file()]
    if unwritten:
        raise RunError(
            f"{len(unwritten)} runs of sweep {sweep.sweep_id} were never written, the first is {unwritten[0]}",
            hint="type the words of the sweep again: they submit what is missing",
        )


def _new_source(rows: Sequence[RunStatus], *, cwd: Path, env: Mapping[str, str]) -> Source:
    run = rows[0].run
    settings = load_config(run.config).run
    source = plan_source(run, cwd, read_answers(ask_git(cwd, env)), settings=settings, env=env)
    say_source(source)
    return source


def _prepare(
    sweep: SweepDirectory,
    rows: Sequence[RunStatus],
    source: Source | None,
    commands: SlurmCommands,
    *,
    words: Sequence[str],
) -> None:
    code = next_code(sweep)
    changes = {} if source is None else _changes_of_code(rows, source)
    if source is not None:
        write_shared_code(source, code)
        write_provenance(code.provenance, source, words=words, slurm=commands.version())
    for one in rows:
        run = one.run
        run.stop_file.unlink(missing_ok=True)
        clear_dead(run, is_alive=lambda holder: holder_lives(holder, commands))
        if source is not None:
            with writing(run, commands):
                if (change := changes.get(run)) is not None:
                    put_on_record(run, change)
                link_code(run, code)


def _changes_of_code(rows: Sequence[RunStatus], source: Source) -> dict[RunDirectory, AcceptedChange]:
    """Returns what the other code changes in each run that has been trained already."""
    found = {}
    for one in rows:
        run = one.run
        plan = replan_run(load_config(run.config), read_json(run.plan) or {}, run=run, typed=(), env={})
        if (change := weigh(plan, source, accept={"code"})) is not None:
            found[run] = change
    return found


def _here(sweep: SweepDirectory, elements: Sequence[Element], *, num_parallel: int, env: Mapping[str, str]) -> int:
    from slurm_train.cli.sweep_here import train_each

    sweep.stop_file.unlink(missing_ok=True)
    return train_each(sweep, elements, num_parallel=num_parallel, env=env)
