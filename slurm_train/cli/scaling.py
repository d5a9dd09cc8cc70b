"""`scaling +cluster=4x2 [settings]`: short runs from one rank to all nodes, and what they say about adding nodes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.terminal import note, working_folder
from slurm_train.config.words import Words, read_words, split_word
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ConfigError, require_all
from slurm_train.rundir.jobs import read_job
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.tools.scaling import Point, Size, measure, plan_points, render_page, render_text, sort_study
from slurm_train.verbs import parse

if TYPE_CHECKING:
    from slurm_train.launch.plan import RunPlan


def main(words: Sequence[str]) -> int:
    """Makes the runs that are missing, waits for them, prints the report and returns 0."""
    arguments = parse("scaling", words)
    env = dict(os.environ)
    cwd = working_folder(env)
    series = read_series(read_words(arguments.settings), steps=arguments.steps, env=env, cwd=cwd)
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
    series: Series, plans: Mapping[Point, RunPlan], *, words: Sequence[str], env: Mapping[str, str], cwd: Path
) -> bool:
    """Makes the runs that are not there yet, or submits them; returns whether there were any."""
    from slurm_train.cli.preview import take_inputs
    from slurm_train.cli.start import start_run
    from slurm_train.launch.git import read_git
    from slurm_train.launch.snapshot import read_source
    from slurm_train.launch.start import Start
    from slurm_train.launch.write import require_writable
    from slurm_train.status.activity import find_active

    left = [point for point, plan in plans.items() if not plan.run.result.exists()]
    runs = [plans[point].run for point in left]
    active = find_active(runs, SlurmCommands(env)) if series.uses_cluster else {}
    missing = [point for point in left if plans[point].run not in active]
    if not missing:
        return False
    require_writable(plans[missing[0]].run)
    take_inputs(plans[missing[0]], cwd=cwd)
    state = read_git(cwd, env)
    after = _newest_job(plans.values())
    for point in missing:
        plan = plan_of(series.words(point, after=after), env=env, cwd=cwd)
        source = read_source(plan.run, plan.config, cwd, state, env=env)
        # What they print on stdout is not this verb's data.
        with contextlib.redirect_stdout(sys.stderr):
            if start_run(Start(words=words, env=env, say=note), plan, source) != EXIT_DONE:
                note(f"the run {point} failed; see {plan.run.path}")
        after = _newest_job([plan]) if series.uses_cluster else ""
    return True


def _newest_job(plans: Iterable[RunPlan]) -> str:
    """Returns the job that the next one has to wait for, "" where there is none."""
    records = [read_job(plan.run) for plan in plans]
    ids = [int(record.job_id) for record in records if record is not None and record.job_id.isdigit()]
    return str(max(ids)) if ids else ""


def _report(series: Series, plans: Mapping[Point, RunPlan]) -> int:
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


LOG_EVERY = 8
"""Steps of a line of metrics: the mean of several steps is steadier than one."""
_OWN_KEYS = (
    *("batch.local_size", "batch.accumulation", "batch.global_size", "run.name", "train.max_steps", "ddp.comm"),
    *("train.max_epochs", "run.processes", "cluster.nodes", "cluster.gpus_per_node"),
)
"""Keys that each run sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The study as it was asked for."""

    flags: Words
    """What was typed, without what each run sets itself."""
    plan: RunPlan
    """The run at full size."""
    comms: tuple[str, ...]
    steps: int

    @property
    def name(self) -> str:
        """Of the study, which its runs share."""
        return f"{self.plan.run.name}-scaling"

    @property
    def size(self) -> Size:
        """The largest size."""
        return Size(self.plan.world.num_nodes, self.plan.world.ranks_per_node[0])

    @property
    def uses_cluster(self) -> bool:
        """Whether its runs are jobs. Not by the words: a file may name the cluster, or have one in it."""
        return self.plan.config.cluster is not None

    @property
    def points(self) -> list[Point]:
        """Its runs."""
        return plan_points(self.size, local_size=self.plan.batch.local_size, comms=self.comms)

    def words(self, point: Point, *, after: str = "") -> Words:
        """Returns what a person would type for one run; it begins when another job has ended."""
        size = point.size
        on_cluster = [f"cluster.nodes={size.nodes}", f"cluster.gpus_per_node={size.per_node}"]
        own = [
            *(on_cluster if self.uses_cluster else [f"run.processes={size.per_node}"]),
            f"run.name={self.name}-{size}",
            f"batch.local_size={point.local_size}",
            f"batch.accumulation={point.accumulation}",
            f"ddp.comm={point.comm}",
            f"train.max_steps={self.steps}",
            f"train.log_every_steps={LOG_EVERY}",
            "train.evaluate=false",
            "train.sample_tokens=0",
            "checkpoint.every_steps=null",
            "health.pace_every_steps=3",
        ]
        own += [f"cluster.sbatch.dependency=afterany:{after}"] if after else []
        return replace(self.flags, overrides=[*self.flags.overrides, *own])


def read_series(flags: Words, *, steps: int, env: Mapping[str, str], cwd: Path) -> Series:
    """Returns the study that the command line describes; touches nothing.

    Args:
        flags: the words, with one size and any ways of exchanging.
        steps: optimizer steps of each run.
        env: environment, for counting local GPUs.
        cwd: directory that a relative `run.root` starts from.

    Raises:
        ConfigError: too few steps or ranks, nodes or shares that are not equal, or nothing that the trainer would run.
    """
    if steps < 4 * LOG_EVERY:
        raise ConfigError(f"--steps={steps} is too short to measure", hint=f"give {4 * LOG_EVERY} or more")
    keys = {word: split_word(word)[1:] for word in flags.overrides}
    comms = [value for key, value in keys.values() if key == "ddp.comm" and value]
    # Of several ways of exchanging any will do to see whether the rest fits together.
    plan = plan_of(
        replace(flags, overrides=[word for word, (key, _) in keys.items() if key != "ddp.comm"]), env=env, cwd=cwd
    )
    _require_something_to_time(plan)
    return Series(
        flags=replace(flags, overrides=[word for word, (key, _) in keys.items() if key not in _OWN_KEYS]),
        plan=plan,
        comms=tuple(["none", *comms][-1].strip("[]").split(",")),
        steps=-(-steps // LOG_EVERY) * LOG_EVERY,
    )


def _require_something_to_time(plan: RunPlan) -> None:
    require_all(
        [
            (not plan.config.trains, "a function or script of your own measures nothing", "scaling is for the trainer"),
            (
                not plan.layout.is_replicated,
                f"scaling times whole replicas, parallel asks for {plan.layout}",
                "leave parallel.* out: a cut model does not fit the smallest size, and sends other things",
            ),
            (
                not plan.world.is_even or plan.world.min_nodes is not None,
                f"scaling compares numbers of equal nodes, the command line asks for {plan.world.nodes_in_words}",
                "give one number of nodes and one number of GPUs for all of them, e.g. +cluster=4x8",
            ),
            (
                plan.config.batch.shares != "even",
                "scaling gives all ranks equal shares, batch.shares was set",
                "leave batch.shares out: unequal shares would hide what a slow rank costs",
            ),
            (plan.world.size == 1, "scaling needs two ranks or more", "write +cluster=NxG, e.g. +cluster=4x8"),
        ]
    )


def plan_of(flags: Words, *, env: Mapping[str, str], cwd: Path) -> RunPlan:
    """Returns the plan of one run."""
    from slurm_train.config.compose import compose
    from slurm_train.estimate.choice import settle_parallel
    from slurm_train.launch.plan import plan_run

    return plan_run(compose(flags), cwd=cwd, env=env, settle=settle_parallel)
