"""`cancel RUN ... | SWEEP`: ends runs' jobs; a run that trains on this machine is asked to save and stop."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slurm_train.cli.selection import parse_runs
from slurm_train.cli.terminal import note
from slurm_train.errors import RunError
from slurm_train.rundir.lookup import find_runs, find_sweep
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.start.cancel import cancel_run, cancel_sweep


def main(words: Sequence[str]) -> int:
    """Cancels the named runs and returns 0; a run that is not active is an error."""
    arguments = parse_runs("cancel", words)
    commands = SlurmCommands(os.environ)
    first = arguments.runs[0]
    sweep = find_sweep(arguments.root, first) if len(arguments.runs) == 1 else None
    if sweep is not None:
        for line in cancel_sweep(sweep, commands, where=arguments.where):
            note(line)
        return 0
    if arguments.where:
        raise RunError(f"{first} is not a sweep", hint="--where chooses runs of a sweep")
    for run in find_runs(arguments.root, arguments.runs):
        for line in cancel_run(run, commands):
            note(line)
    return 0
