"""No verb: the words are a run. With a cluster it is submitted, without one it is trained here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.composition import read_settings_of
from slurm_train.config.words import Words, read_words
from slurm_train.errors import EXIT_DONE, ConfigError, RunError
from slurm_train.launch.snapshot import GitQuestions, ask_git, drop_questions, read_answers
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory

if TYPE_CHECKING:
    from slurm_train.cli.outputs import RunOutput
    from slurm_train.config.hydra import HydraSettings
    from slurm_train.launch.plan import RunPlan
    from slurm_train.launch.source import Source


def main(words: Sequence[str]) -> int:
    """Composes, plans, and submits or trains; returns the exit code."""
    flags = read_words(words)
    env, cwd = dict(os.environ), Path.cwd()
    if flags.json or flags.measure or flags.suggest is not None:
        flag = "--json" if flags.json else "--measure" if flags.measure else "--suggest"
        raise ConfigError(f"{flag} goes with `plan`", hint=f"write `plan {flag} ...` to look at the run first")
    if flags.only_prints:
        from slurm_train.config.compose import Composer

        Composer(flags).show()
        return EXIT_DONE
    git = ask_git(cwd, env)
    try:
        settings = read_settings_of(flags)
        flags = settings.words
        if flags.wait and not flags.multirun:
            raise ConfigError("--wait waits for the runs of a sweep", hint="add -m, or follow one: `logs -f RUN`")
        if flags.ranks:
            raise ConfigError(
                "--ranks says where the ranks would stand", hint="put `plan` in front: nothing is run then"
            )
        if flags.multirun:
            from slurm_train.cli.multirun import multirun

            return multirun(flags, words, settings=settings, env=env, cwd=cwd, git=git)
        return _run(flags, words, settings=settings, env=env, cwd=cwd, git=git)
    finally:
        drop_questions(git)


def _run(
    flags: Words,
    words: Sequence[str],
    *,
    settings: HydraSettings,
    env: Mapping[str, str],
    cwd: Path,
    git: GitQuestions | None,
) -> int:
    from slurm_train.cli.changes import tell_of_another
    from slurm_train.cli.display import print_plan, say_source
    from slurm_train.cli.inputs import refuse_missing_inputs, warn_unexported_keys
    from slurm_train.cli.outputs import make_outputs, plan_outputs, say_outputs
    from slurm_train.launch.plan import plan_run
    from slurm_train.launch.preparation import require_writable
    from slurm_train.launch.source import read_source

    plan = plan_run(settings.compose(), cwd=cwd, env=env)
    outputs = plan_outputs(settings, [plan], [flags.overrides], cwd=cwd)
    # os.path, since Path.exists raises where a folder above may not be entered.
    if os.path.exists(plan.run.result):  # noqa: PTH110
        make_outputs(outputs)
        say_outputs(outputs)
        return _show_result(plan.run)
    require_writable(plan.run)
    refuse_missing_inputs(plan, cwd=cwd)
    tell_of_another(plan)
    print_plan(plan)
    say_outputs(outputs)
    warn_unexported_keys(plan.config, env)
    source = read_source(plan, cwd, read_answers(git), env=env)
    say_source(source)
    return carry_out(plan, source, words=words, env=env, accept=flags.accept, outputs=outputs)


def carry_out(
    plan: RunPlan,
    source: Source | None,
    *,
    words: Sequence[str],
    env: Mapping[str, str],
    accept: Collection[str],
    outputs: Sequence[RunOutput] = (),
) -> int:
    """Submits a run, trains it here or in an allocation, as it asks; returns the exit code.

    Args:
        plan: the run.
        source: its code; None: the snapshot that it has.
        words: the command line.
        env: the environment.
        accept: changes of a run in progress that the person accepts.
        outputs: what the run shall have besides its own directory.
    """
    if plan.config.cluster is None:
        from slurm_train.cli.here import train_here

        return train_here(plan, source, words=words, env=env, accept=accept, outputs=outputs)
    if plan.config.launch == "interactive":
        from slurm_train.cli.interactive import run_interactively

        return run_interactively(plan, source, words=words, env=env, accept=accept, outputs=outputs)
    from slurm_train.cli.submit import submit

    return submit(plan, source, words=words, env=env, accept=accept, outputs=outputs)


def _show_result(run: RunDirectory) -> int:
    result = read_json(run.result)
    if result is None:
        raise RunError(f"{run.result} cannot be read", hint="move it away to have the run continue")
    note = f"{run.name}/{run.run_id} is finished: {run.path}"
    print(
        f"{note}\na change of your code does not make it another run; for another: add run.name=NAME, or seed=N",
        file=sys.stderr,
    )
    print(json.dumps(result))
    return EXIT_DONE
