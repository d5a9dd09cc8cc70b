"""`worker RUN_DIR`: one rank. srun, a local launch or a hand-typed command starts it; it reads the run directory.

The stop handlers are installed first: importing what a rank needs takes seconds, and a preemption does not wait.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slurm_train.errors import RunError
from slurm_train.train.signals import StopFlag, hold_continue, install


def main(words: Sequence[str]) -> NoReturn:
    """Runs one rank and ends the process with its exit code; an unexpected error leaves its traceback."""
    parent = os.getppid()
    if stage := os.environ.get("SLURM_TRAIN_STAGE"):
        from slurm_train.launch.imports import import_from_stage

        import_from_stage(stage)
    stop = StopFlag()
    install(stop)
    hold_continue()
    if len(words) != 1:
        raise RunError(f"worker takes one run directory, found {list(words)}", hint="worker RUN_DIR")
    from slurm_train.cli.rank import run_rank
    from slurm_train.rundir.paths import RunDirectory

    run_rank(RunDirectory(Path(words[0])), dict(os.environ), stop, parent=parent)
