"""`resume RUN | SWEEP`: continues from the newest verified checkpoint, with its own settings and code.

Settings after RUN change it from there on: another size (cluster=2x8) or a log interval at once, what changes the
training only with --accept. The same for the code: --accept code takes the files as they are now.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_train.cli.changes import check_names, tell_of_other_code, weigh
from slurm_train.cli.display import print_plan, say_source
from slurm_train.cli.submit import avoid_bad_nodes, hand_over, require_slurm
from slurm_train.cli.terminal import note
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.config.words import read_names
from slurm_train.errors import ClusterError, RunError
from slurm_train.launch.acceptance import require_acceptable
from slurm_train.launch.code_index import require_sealed
from slurm_train.launch.plan import replan_run
from slurm_train.launch.resources import renewed_warning
from slurm_train.launch.snapshot import ask_git, read_answers
from slurm_train.launch.source import read_source
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory, require_private
from slurm_train.rundir.lookup import find_run
from slurm_train.rundir.sweep import SweepDirectory, find_sweep
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import refuse_active, submitting
from slurm_train.status.run_status import RESUMABLE, read_states
from slurm_train.verbs import parse


def main(words: Sequence[str]) -> int:
    """Submits the run's own script again, or trains on here; prints `<job id> <run directory>`."""
    arguments = parse("resume", words)
    settings: list[str] = arguments.settings
    accept = {name for text in arguments.accept for name in read_names(text)}
    check_names(accept)
    if (sweep := find_sweep(Path(arguments.root), arguments.run)) is not None:
        return _resume_sweep(sweep, arguments, settings, accept=accept, words=words)
    if arguments.only or arguments.where:
        raise RunError(f"{arguments.run} is not a sweep", hint="--only and --where choose runs of a sweep")
    run = find_run(Path(arguments.root), arguments.run)
    # What is resumed runs in the name of whoever types it.
    require_private(run)
    config = load_config(run.config)
    if settings or accept:
        from slurm_train.config.compose import apply_words

        changed = apply_words(config, settings, config_dir=arguments.config_dir)
        _refuse_finished(run, config, changed)
        return _go_on_with(run, changed, settings, accept=accept, words=["resume", *words])
    _refuse_finished(run, config, config)
    _refuse_touched(run, config)
    tell_of_other_code(run, config, Path.cwd())
    if config.launch == "interactive":
        return _go_on_with(run, config, (), accept=(), words=["resume", *words])
    return resume_here(run, os.environ) if config.cluster is None else resubmit(run, os.environ)


def _refuse_finished(run: RunDirectory, config: RunConfig, changed: RunConfig) -> None:
    if run.result.exists() and not changed.train.max_steps > config.train.max_steps:
        raise RunError(
            f"{run.name}/{run.run_id} is finished; there is nothing to resume",
            hint="to train it longer: train.max_steps=N --accept train.max_steps; another run of the same: the first "
            "command again with run.name=NAME, or seed=N",
        )


def _go_on_with(
    run: RunDirectory, config: RunConfig, settings: Sequence[str], *, accept: Collection[str], words: Sequence[str]
) -> int:
    """Plans the run anew, and submits or trains it as a first command would."""
    before = _read_plan(run)
    typed = [word.lstrip("+~").partition("=")[0] for word in settings]
    plan = replan_run(config, before, run=run, typed=typed, env=os.environ)
    source = None
    if "code" in accept:
        here = Path.cwd()
        plan = replace(plan, directory=str(here))
        source = read_source(plan, here, read_answers(ask_git(here, os.environ)), env=os.environ)
        say_source(source)
    print_plan(plan)
    from slurm_train.cli.run import carry_out

    return carry_out(plan, source, words=words, env=dict(os.environ), accept=accept)


def _refuse_touched(run: RunDirectory, config: RunConfig) -> None:
    """Refuses here what the ranks would refuse later: files of the run directory that were edited since."""
    require_sealed(run)
    before = _read_plan(run)
    if "batch" not in before:
        return
    try:
        weigh(replan_run(config, before, run=run, typed=(), env=os.environ), None, accept=())
    except RunError as err:
        # Nothing was typed, so somebody has edited the run's own files, or the data.
        hint = f"put back what was edited ({run.config}, or the data), or {err.hint.partition(';')[0]}"
        raise RunError(err.message, hint=hint) from err


def _resume_sweep(
    sweep: SweepDirectory,
    arguments: argparse.Namespace,
    settings: Sequence[str],
    *,
    accept: Collection[str],
    words: Sequence[str],
) -> int:
    from slurm_train.cli.sweep_resume import resume_sweep

    if settings or set(accept) - {"code"}:
        raise RunError(
            f"the runs of sweep {sweep.sweep_id} go on with their own settings",
            hint="change one of them with `resume RUN key=value --accept key`; a sweep takes --accept code",
        )
    return resume_sweep(
        sweep,
        os.environ,
        only=read_states(arguments.only, option="--only", of=RESUMABLE) if arguments.only else None,
        where=arguments.where,
        takes_code="code" in accept,
        words=["resume", *words],
    )


def resubmit(run: RunDirectory, env: Mapping[str, str]) -> int:
    """Submits the run's script again as it stands.

    Raises:
        RunError: the run is active.
        ClusterError: no Slurm here, no script, or Slurm refuses.
    """
    commands = SlurmCommands(env)
    require_slurm(commands, env)
    with submitting(run, commands):
        if not run.submit_script.is_file():
            raise ClusterError(f"{run.submit_script} is missing", hint="type the run's first command again")
        script = run.submit_script.read_text(encoding="utf-8")
        require_acceptable(script, commands)
        run.stop_file.unlink(missing_ok=True)
        config = load_config(run.config)
        export, flags = config.cluster.export if config.cluster else (), renewed_warning(config, run)
        flags = [*flags, *avoid_bad_nodes(script, run, env)]
        job_id = hand_over(run, script, commands, env=env, flags=flags, export=export)
    note(f"submitted again; it continues from the newest verified checkpoint in {run.checkpoints}")
    print(f"{job_id} {run.path}", flush=True)
    return 0


def resume_here(run: RunDirectory, env: Mapping[str, str]) -> int:
    """Trains on, on this machine, with the frozen configuration and plan."""
    from slurm_train.cli.here import supervise_here

    plan = _read_plan(run)
    refuse_active(run, SlurmCommands(env))
    run.stop_file.unlink(missing_ok=True)
    return supervise_here(run, load_config(run.config), world_size=int(plan["world"]["size"]), env=env)


def _read_plan(run: RunDirectory) -> dict[str, Any]:
    plan = read_json(run.plan)
    if plan is None:
        raise RunError(f"{run.plan} cannot be read", hint="type the run's first command again")
    return plan
