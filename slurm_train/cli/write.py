"""`write [settings]`: writes a run directory and starts nothing, for a launcher of your own such as torchrun.

Prints the run directory. The number of ranks is the launcher's; the global batch is what is planned here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.inputs import read_settings_of
from slurm_train.cli.run import look_at
from slurm_train.cli.start import Start
from slurm_train.cli.terminal import note
from slurm_train.config.words import read_words
from slurm_train.errors import EXIT_DONE, ConfigError
from slurm_train.launch.placement import require_all
from slurm_train.launch.plan import plan_run
from slurm_train.launch.snapshot import ask_git

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
    require_all(
        [
            (
                plan.config.cluster is not None,
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
    source = look_at(plan, git, env=env, cwd=cwd)
    Start(words=["write", *words], env=env, accept=flags.accept).write(plan, source)
    run = plan.run
    note(f"written; on each machine that sees it:\n  cd {run.code}")
    note(f"  torchrun --nnodes N --nproc-per-node M --max-restarts 3 --rdzv-backend c10d --rdzv-id {run.run_id} \\")
    note(f"    --rdzv-endpoint {socket.gethostname()}:29400 -m slurm_train worker {run.path}")
    print(run.path, flush=True)
    return EXIT_DONE
