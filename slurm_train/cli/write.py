"""`write [settings]`: writes a run directory and starts nothing, for a launcher of your own such as torchrun.

Prints the run directory. The number of ranks is the launcher's; the global batch is what is planned here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.changes import weigh
from slurm_train.cli.composition import read_settings_of
from slurm_train.cli.display import print_plan, say_source
from slurm_train.cli.inputs import refuse_missing_inputs
from slurm_train.cli.terminal import note
from slurm_train.config.words import read_words
from slurm_train.errors import EXIT_DONE, ConfigError
from slurm_train.launch.plan import plan_run
from slurm_train.launch.preparation import require_writable, write_run_directory
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.snapshot import ask_git, read_answers
from slurm_train.launch.source import read_source
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import refuse_active, writing

_HELP = """\
usage: python -m slurm_train write [settings]

Writes the run directory and prints its path; nothing is started. For torchrun on machines without Slurm that all see
the directory:

  python -m slurm_train write run.root=/shared/runs batch.global_size=48

once, and then on each machine

  cd RUN_DIR/code
  torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint FIRST_HOST:29400 --rdzv-id RUN_ID -m slurm_train worker RUN_DIR
"""


def main(words: Sequence[str]) -> int:
    """Writes the run directory and returns 0; what cannot be planned is an error with exit code 2."""
    flags = read_words(words)
    if flags.help:
        print(_HELP, end="")
        return EXIT_DONE
    if flags.multirun:
        raise ConfigError("`write` is for one run", hint="drop -m and give each key one value")
    env, cwd = dict(os.environ), Path.cwd()
    git = ask_git(cwd, env)
    settings = read_settings_of(flags)
    flags = settings.words
    plan = plan_run(settings.compose(), cwd=cwd, env=env)
    if plan.config.cluster is not None:
        raise ConfigError(
            "`write` is for a launcher of your own, and a cluster is asked for",
            hint="drop +cluster; with it, `plan` prints the batch script and the words alone submit it",
        )
    if plan.config.container is not None:
        raise ConfigError(
            "`write` is for a launcher of your own, which does not know of the container",
            hint="drop container=, and start torchrun inside the image",
        )
    require_writable(plan.run)
    refuse_missing_inputs(plan, cwd=cwd)
    print_plan(plan)
    source = read_source(plan, cwd, read_answers(git), env=env)
    say_source(source)
    refuse_active(plan.run, SlurmCommands(env))
    with writing(plan.run, SlurmCommands(env)):
        write_run_directory(plan, source, script=None, change=weigh(plan, source, accept=flags.accept))
    write_provenance(plan.run.provenance, source, words=["write", *words], slurm=None)
    note(f"written; on each machine that sees it:\n  cd {plan.run.code}")
    note(
        f"  torchrun --nnodes N --nproc-per-node M --max-restarts 3 --rdzv-backend c10d --rdzv-id {plan.run.run_id} \\"
    )
    note(f"    --rdzv-endpoint {socket.gethostname()}:29400 -m slurm_train worker {plan.run.path}")
    print(plan.run.path, flush=True)
    return EXIT_DONE
