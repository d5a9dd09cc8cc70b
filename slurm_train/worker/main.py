"""`worker RUN_DIR`: one rank. srun, a local launch or a hand-typed command starts it; it reads the run directory.

The stop handlers are installed before the imports of a rank, which take seconds, since a preemption does not wait for
them. A rank in waiting (`requeue.warm_ranks`) imports before that: until its attempt begins, it has nothing to save.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slurm_train.distributed.master import is_under_torchrun
from slurm_train.errors import RunError
from slurm_train.rundir.node_disk import kernel_variables
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag, hold_continue, install
from slurm_train.slurm.job_variables import node_name
from slurm_train.slurm.pack_slot import enter_slot
from slurm_train.supervise.ranks import WAITS


def main(words: Sequence[str]) -> NoReturn:
    """Runs one rank and ends the process with its exit code; an unexpected error leaves its traceback."""
    parent = os.getppid()
    stage = os.environ.get("SLURM_TRAIN_STAGE")
    if stage:
        from slurm_train.code.imports import import_from_stage

        refusal = import_from_stage(stage)
        if refusal:
            print(f"warning: packages are imported from where they are installed: {refusal}", file=sys.stderr)
    hold_continue()
    if len(words) != 1:
        raise RunError(f"worker takes one run directory, found {list(words)}", hint="worker RUN_DIR")
    run = RunDirectory(Path(words[0]))
    if not is_under_torchrun(os.environ):
        # The ranks of torchrun's launcher inherit its share.
        os.environ.update(enter_slot(os.environ))
    # torch reads them from the environment when it is imported, and a user's script inherits them.
    os.environ.update(kernel_variables(os.environ, instead=run.kernels(node_name(os.environ))))
    if WAITS in os.environ:
        from slurm_train.worker.rank import wait_for_turn

        # Until then a stop signal ends the process, which has nothing to save.
        wait_for_turn(run)
    stop = StopFlag()
    install(stop)
    from slurm_train.worker.rank import run_rank

    run_rank(run, dict(os.environ), stop, parent=parent)
