"""`resume RUN | SWEEP`: continues from the newest verified checkpoint, with its own settings and code.

Settings after RUN change it from there on: another size (cluster=2x8) or a log interval at once, what changes the
training only with --accept. The same for the code: --accept code takes the files as they are now.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.cli.preview import print_rows
from slurm_train.cli.selection import parse_runs
from slurm_train.cli.start import carry_out
from slurm_train.cli.terminal import note, working_folder
from slurm_train.code.hub import HubFiles, fetch_hub_files, pin_hub_files
from slurm_train.code.job_python import gone_python
from slurm_train.code.snapshot import read_source, require_sealed, source_notes
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.config.words import read_names
from slurm_train.errors import RunError
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.plan import replan_run
from slurm_train.plan.preview import plan_rows
from slurm_train.rundir.lookup import find_run, find_sweep
from slurm_train.rundir.paths import RunDirectory, require_private
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.slurm.job_request import JobRequest
from slurm_train.start.drift import changed_code_notes, check_drift, check_names, refuse_finished
from slurm_train.start.inputs import require_targets
from slurm_train.start.start import Starter
from slurm_train.status.run_status import RESUMABLE, read_states

_WITH_TARGETS = ("model", "data", "task", "optim", "callbacks")


def main(words: Sequence[str]) -> int:
    """Submits the run's own script again, or continues it here; prints `<job id> <run directory>`."""
    arguments = parse_runs("resume", words)
    settings: list[str] = arguments.settings
    env = dict(os.environ)
    root = arguments.root
    accept = {name for text in arguments.accept for name in read_names(text)}
    check_names(accept)
    start = Starter(words=["resume", *words], env=env, say=note, accept=accept)
    sweep = find_sweep(root, arguments.run)
    if sweep is not None:
        if settings or accept - {"code"}:
            raise RunError(
                f"the runs of sweep {sweep.sweep_id} go on with their own settings",
                hint="change one of them with `resume RUN key=value --accept key`; a sweep takes --accept code",
            )
        states = read_states(arguments.only, option="--only", of=RESUMABLE) if arguments.only else None
        require_private(RunDirectory(sweep.path))
        from slurm_train.start.start_sweep import sweep_as_written

        code_from = working_folder(env) if "code" in accept else None
        preparing = sweep_as_written(start, sweep, states=states, where=arguments.where, code_from=code_from)
        return carry_out(preparing)
    if arguments.only or arguments.where:
        raise RunError(f"{arguments.run} is not a sweep", hint="--only and --where choose runs of a sweep")
    run = find_run(root, arguments.run)
    # What is resumed runs in the name of whoever types it.
    require_private(run)
    frozen_config = load_config(run.config)
    config = frozen_config
    if settings or accept:
        from slurm_train.config.compose import apply_words

        config = apply_words(frozen_config, settings, config_dir=arguments.config_dir)
    refuse_finished(run, frozen_config, config, accept=accept)
    if not (settings or accept):
        _refuse_edited(run)
        for line in changed_code_notes(run, config, Path.cwd()):
            note(line)
        if config.launch != "interactive" and not _needs_another_script(run, config):
            return carry_out(start.as_written(run))
    typed = [word.lstrip("+~").partition("=")[0] for word in settings]
    old = _read_plan(run)
    source = None
    hub = tuple[HubFiles, ...]()
    if any(key.startswith(("model", "data", "train.init_from")) for key in typed):
        # What is typed now may name the Hub; what the run has are paths.
        config, hub = pin_hub_files(config, cwd=Path(old.directory or Path.cwd()))
    plan = replace(replan_run(config, old, run=run, typed=typed, env=env, settle=settle_parallel), hub=hub)
    if "code" in accept:
        here = working_folder(env)
        plan = replace(plan, directory=str(here))
        source = read_source(run, config, here, env=env)
        for line in source_notes(source):
            note(line)
    if any(key.partition(".")[0] in _WITH_TARGETS for key in typed):
        # The copy of the code does not have what lies in another folder of the person.
        require_targets(plan.config, folders=[*([] if source else [run.code]), Path(plan.directory)])
    print_rows(plan_rows(plan))
    fetch_hub_files(hub)
    return carry_out(start.fresh(plan, source))


def _needs_another_script(run: RunDirectory, config: RunConfig) -> bool:
    """Returns whether the run's script names another directory than the run's, or a Python that is gone."""
    if not config.uses_cluster or not run.submit_script.is_file():
        return False
    request = JobRequest.read(run.submit_script)
    missing_python = gone_python(config, request.python)
    if missing_python:
        note(f"the Python of the run is gone: {missing_python}; it goes on with {sys.executable}")
        return True
    if not request.run:
        return False
    path = Path(request.run)
    return path != run.path and not (path.exists() and path.samefile(run.path))


def _refuse_edited(run: RunDirectory) -> None:
    """Refuses here what the ranks would refuse later: files of the run directory that were edited since."""
    require_sealed(run)
    frozen_plan = _read_plan(run)
    if frozen_plan.batch is None:
        return
    try:
        plan = replan_run(load_config(run.config), frozen_plan, run=run, typed=(), env=os.environ)
        check_drift(plan, None, accept=(), say=note)
    except RunError as err:
        # Nothing was typed, so somebody has edited the run's own files, or the data.
        hint = f"put back what was edited ({run.config}, or the data), or {err.hint.partition(';')[0]}"
        raise RunError(err.message, hint=hint) from err


def _read_plan(run: RunDirectory) -> PlanRecord:
    plan = PlanRecord.read(run.plan)
    if plan == PlanRecord():
        raise RunError(f"{run.plan} cannot be read", hint="type the run's first command again")
    return plan
