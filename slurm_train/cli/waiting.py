"""Waits for the runs of a sweep, for people and programs that need the values: results are read from the files.

Slurm is asked rarely, with one command for all runs: `result.json` says by itself that a run is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_train.cli.terminal import note
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ClusterError
from slurm_train.rundir.sweep import SweepDirectory, read_table
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.status.activity import find_active

_FIRST_S, _LONGEST_S = 2.0, 60.0


def wait_for_sweep(
    sweep: SweepDirectory, commands: SlurmCommands, *, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Returns when no run of the sweep is active any more: 0 if all are finished, else 1.

    Ctrl-C ends the waiting, not the runs.
    """
    runs = [element.run for element in read_table(sweep)]
    pause_s, said = _FIRST_S, -1
    while True:
        left = [run for run in runs if not run.result.exists()]
        if not left:
            note(f"all {len(runs)} runs are finished")
            return EXIT_DONE
        try:
            if not find_active(left, commands):
                note(f"{len(left)} of {len(runs)} runs ended without a result; `status {sweep.sweep_id}` says why")
                return EXIT_FAILURE
        except ClusterError as err:
            note(f"Slurm does not answer, asking again later: {err.message}")
        if len(left) != said:
            note(f"{len(runs) - len(left)} of {len(runs)} runs are finished; Ctrl-C leaves the others alone")
            # Where something happens more may follow soon.
            pause_s, said = _FIRST_S, len(left)
        sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_S)
