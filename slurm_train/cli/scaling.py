"""`scaling +cluster=4x2 [settings]`: short runs from one rank to all nodes, and what they say about adding nodes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.preview import refuse_unused_flags, take_inputs
from slurm_train.cli.terminal import note, working_folder
from slurm_train.config.words import read_words
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE
from slurm_train.rundir.jobs import read_job
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.tools.scaling.model import StudyPoint, measure, render_page, render_text, sort_study
from slurm_train.tools.scaling.series import StudyPlan, plan_of, read_series
from slurm_train.verbs import PUBLIC_VERBS, parse

if TYPE_CHECKING:
    from slurm_train.plan.plan import RunPlan


def main(words: Sequence[str]) -> int:
    """Makes the runs that are missing, waits for them, prints the report and returns 0."""
    arguments = parse("scaling", words)
    env = dict(os.environ)
    cwd = working_folder(env)
    flags = read_words(arguments.settings, verbs=PUBLIC_VERBS)
    refuse_unused_flags(flags, verb="scaling")
    series = read_series(flags, steps=arguments.steps, env=env, cwd=cwd)
    plans = {point: plan_of(series.words(point), env=env, cwd=cwd) for point in series.points}
    note(f"{len(plans)} runs of {series.steps} steps, one after the other:")
    for point, plan in plans.items():
        note(f"  {point!s:<48} {'finished' if plan.run.result.exists() else plan.run.run_id}")
    made = _make(series, plans, words=words, env=env, cwd=cwd)
    if series.uses_cluster and arguments.no_wait and made:
        note("the same command again waits for the runs and prints the report")
        return EXIT_DONE
    if series.uses_cluster:
        from slurm_train.status.activity import wait_for_runs

        wait_for_runs([plan.run for plan in plans.values()], SlurmCommands(env), say=note)
    return _report(series, plans)


def _make(
    series: StudyPlan, plans: Mapping[StudyPoint, RunPlan], *, words: Sequence[str], env: Mapping[str, str], cwd: Path
) -> bool:
    """Makes the runs that are not there yet, or submits them; returns whether there were any."""
    from slurm_train.cli.start import carry_out
    from slurm_train.code.git import read_git
    from slurm_train.code.snapshot import read_source
    from slurm_train.start.start import Starter
    from slurm_train.start.write import require_writable
    from slurm_train.status.activity import find_active

    unfinished = [point for point, plan in plans.items() if not plan.run.result.exists()]
    runs = [plans[point].run for point in unfinished]
    active = find_active(runs, SlurmCommands(env)) if series.uses_cluster else {}
    missing = [point for point in unfinished if plans[point].run not in active]
    if not missing:
        return False
    require_writable(plans[missing[0]].run)
    take_inputs(plans[missing[0]], cwd=cwd)
    state = read_git(cwd, env)
    after = _newest_job(plans.values())
    for point in missing:
        plan = plan_of(series.words(point, after=after), env=env, cwd=cwd)
        source = read_source(plan.run, plan.config, cwd, state, env=env)
        # What a run prints on stdout is not this verb's data.
        with contextlib.redirect_stdout(sys.stderr):
            start = Starter(words=words, env=env, say=note)
            if carry_out(start.fresh(plan, source)) != EXIT_DONE:
                note(f"the run {point} failed; see {plan.run.path}")
        after = _newest_job([plan]) if series.uses_cluster else ""
    return True


def _newest_job(plans: Iterable[RunPlan]) -> str:
    """Returns the job that the next one has to wait for, "" where there is none."""
    records = [read_job(plan.run) for plan in plans]
    ids = [int(record.job_id) for record in records if record is not None and record.job_id.isdigit()]
    return str(max(ids)) if ids else ""


def _report(series: StudyPlan, plans: Mapping[StudyPoint, RunPlan]) -> int:
    from slurm_train.rundir.files import make_private, write_atomic

    measured = []
    for point, plan in plans.items():
        measurement = measure(plan.run, point) if plan.run.result.exists() else None
        if measurement is not None:
            measured.append(measurement)
        else:
            note(f"nothing is known of {point}; `status {plan.run.run_id}` may say why")
    study = sort_study(measured, comm=series.comms[0])
    if not study.local:
        note("no run at a fixed local batch has a result, so there is nothing to compare")
        return EXIT_FAILURE
    print(render_text(study))
    folder = series.plan.run.path.parents[1] / series.name
    make_private(folder)
    stem = folder / f"scaling_{series.size}"
    write_atomic(
        stem.with_suffix(".json"), json.dumps([asdict(measurement) for measurement in measured], indent=1) + "\n"
    )
    title = f"{series.plan.run.name}: from 1 rank to {series.size.nodes} nodes x {series.size.per_node}"
    write_atomic(stem.with_suffix(".html"), render_page(study, title=title))
    note(f"the same as a page: {stem.with_suffix('.html')}")
    return EXIT_DONE
