"""The default command: submits a run to Slurm if it has a cluster, else trains it here. `write` starts nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.multirun import multirun
from slurm_train.cli.preview import look_at, read_settings_of, refuse_unused_flags
from slurm_train.cli.start import carry_out
from slurm_train.cli.terminal import answer, note, working_folder
from slurm_train.config.compose import Composer
from slurm_train.config.schema import RunConfig
from slurm_train.config.words import read_words
from slurm_train.errors import EXIT_DONE, ConfigError, RunError, require_all
from slurm_train.plan.choice import settle_parallel
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.rundir.files import read_json, to_json
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.site import ask_early
from slurm_train.start.drift import changed_files
from slurm_train.start.start import Starter
from slurm_train.verbs import PUBLIC_VERBS


def main(words: Sequence[str], commands: SlurmCommands | None = None) -> int:
    """Composes, plans, and submits or trains; returns the exit code."""
    return begin(words, commands=commands)[0]


def begin(
    words: Sequence[str], *, only_submits: bool = False, commands: SlurmCommands | None = None
) -> tuple[int, RunDirectory | SweepDirectory | None]:
    """Does what `main` does; returns the exit code, and the directory of the run or of the sweep if there is one.

    Args:
        words: the command line.
        only_submits: refuse words that would print a configuration or train here, so that it returns soon.
        commands: Slurm, where it has been asked already.
    """
    flags = read_words(words, verbs=PUBLIC_VERBS)
    env = dict(os.environ)
    cwd = working_folder(env)
    for name in ("json", "measure", "suggest", "when"):
        if getattr(flags, name):
            raise ConfigError(f"--{name} goes with `plan`", hint=f"write `plan --{name} ...` to look at the run first")
    if flags.only_prints:
        if only_submits:
            raise ConfigError("--cfg and --info print something and submit nothing", hint="leave them out")
        Composer(flags).show()
        return EXIT_DONE, None
    commands = commands or ask_early(words, env)
    settings = read_settings_of(flags)
    flags = settings.words
    if flags.wait and not flags.multirun:
        raise ConfigError("--wait waits for the runs of a sweep", hint="add -m, or follow one: `logs -f RUN`")
    if flags.ranks:
        raise ConfigError("--ranks prints where the ranks would run", hint="put `plan` in front: nothing is run then")
    if flags.multirun:
        check = require_submission if only_submits else None
        return multirun(flags, words, settings=settings, env=env, cwd=cwd, check=check)
    start = Starter(words=words, env=env, say=note, accept=flags.accept, after=flags.after, commands=commands)
    plan = plan_run(settings.compose(), cwd=cwd, env=env, settle=settle_parallel, node_cpus=start.node_cpus)
    if only_submits:
        require_submission(plan.config)
    # os.path, since Path.exists raises where a folder above may not be entered.
    if os.path.exists(plan.run.result):  # noqa: PTH110
        _show_result(plan, cwd)
        return EXIT_DONE, plan.run
    source = look_at(plan, env=env, cwd=cwd)
    return carry_out(start.fresh(plan, source)), plan.run


def require_submission(config: RunConfig) -> None:
    """Refuses a run that would be trained by this process.

    Raises:
        ConfigError: it has no cluster, or waits for an allocation.
    """
    if not config.is_submitted:
        raise ConfigError(
            "`submit` gives runs to Slurm, but this one would be trained here",
            hint="add +cluster=NxG, e.g. +cluster=2x4; to train here, type the words behind `python -m slurm_train`",
        )


def _show_result(plan: RunPlan, cwd: Path) -> None:
    run = plan.run
    result = read_json(run.result)
    if result is None:
        raise RunError(f"{run.result} cannot be read", hint="move it away to have the run continue")
    note(f"{run.name}/{run.run_id} is finished: {run.path}")
    number = 2
    while (run.place / f"{run.name}-{number}").exists():
        number += 1
    name = f"{run.name}-{number}"
    changed = changed_files(run, plan.config, cwd)
    if changed:
        note(f"your files have changed since: {changed}; to train with them, from the first step: add run.name={name}")
    else:
        note(f"to repeat it with the present code: add run.name={name}, or seed=N")
    answer(to_json(result))


# --- a run directory for a launcher of your own ---

_WRITE_HELP = """\
usage: python -m slurm_train write [settings]

Writes the run directory and prints its path; nothing is started. For torchrun on machines without Slurm that all see
the directory:

  python -m slurm_train write run.root=/shared/runs batch.global_size=48

once, and then on each machine

  cd RUN_DIR/code
  torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint FIRST_HOST:29400 --rdzv-id RUN_ID -m slurm_train worker RUN_DIR
"""


def write(words: Sequence[str]) -> int:
    """Writes a run directory for a launcher of the person's own, prints its path and returns 0; starts nothing.

    The number of ranks is the launcher's; the global batch is what is planned here.
    """
    flags = read_words(words, verbs=PUBLIC_VERBS)
    if flags.help:
        print(_WRITE_HELP, end="")
        return EXIT_DONE
    env = dict(os.environ)
    cwd = working_folder(env)
    settings = read_settings_of(flags)
    flags = settings.words
    if flags.multirun:
        raise ConfigError("`write` is for one run", hint="drop -m and give each key one value")
    refuse_unused_flags(flags, verb="write", used=["accept"])
    plan = plan_run(settings.compose(), cwd=cwd, env=env, settle=settle_parallel)
    require_all(
        [
            (
                plan.config.uses_cluster,
                "`write` is for a launcher of your own, and a cluster is asked for",
                "drop +cluster; with it, `plan` prints the batch script and the words alone submit it",
            ),
            (
                plan.config.container is not None,
                "`write` is for a launcher of your own, which does not know of the container",
                "drop container=, and start torchrun inside the image",
            ),
        ]
    )
    source = look_at(plan, env=env, cwd=cwd)
    with Starter(words=["write", *words], env=env, say=note, accept=flags.accept).fresh(plan, source) as batch:
        batch.write_provenance()
    run = plan.run
    note(f"written; on each machine that sees it:\n  cd {run.code}")
    note(f"  torchrun --nnodes N --nproc-per-node M --max-restarts 3 --rdzv-backend c10d --rdzv-id {run.run_id} \\")
    note(f"    --rdzv-endpoint {socket.gethostname()}:29400 -m slurm_train worker {run.path}")
    answer(str(run.path))
    return EXIT_DONE
