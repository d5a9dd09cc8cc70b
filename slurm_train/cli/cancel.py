"""`cancel RUN ... | SWEEP`: ends runs' jobs; a run that trains on this machine is asked to save and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.arguments import RUN_HELP, build_run_parser
from slurm_train.cli.display import note
from slurm_train.cli.liveness import active_of, newest_job, no_submitter
from slurm_train.errors import RunError
from slurm_train.rundir.jobs import ask_to_stop
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lookup import find_runs
from slurm_train.rundir.sweep import find_sweep
from slurm_train.slurm.commands import SlurmCommands

_EXAMPLES = """\
examples:
  python -m slurm_train cancel 3f9a1c07
  python -m slurm_train cancel 1234          by job id
  python -m slurm_train cancel 9b1c44e0 --where optim.lr=1e-3     those runs of a sweep
"""


def main(words: Sequence[str]) -> int:
    """Cancels the named runs and returns 0; a run that is not active is an error."""
    parser = build_run_parser("cancel", description=__doc__, examples=_EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"{RUN_HELP}, or a sweep")
    parser.add_argument("--where", metavar="KEY=VALUE", action="append", default=[], help="of a sweep: with this value")
    arguments = parser.parse_args(list(words))
    if len(arguments.runs) == 1 and (sweep := find_sweep(Path(arguments.root), arguments.runs[0])) is not None:
        from slurm_train.cli.sweep_cancel import cancel_sweep

        cancel_sweep(sweep, os.environ, where=arguments.where)
        return 0
    if arguments.where:
        raise RunError(f"{arguments.runs[0]} is no sweep", hint="--where chooses runs of a sweep")
    commands = SlurmCommands(os.environ)
    for run in find_runs(Path(arguments.root), arguments.runs):
        cancel(run, commands)
    return 0


def cancel(run: RunDirectory, commands: SlurmCommands) -> None:
    """Ends one run: all of its jobs, and a process that trains it.

    Raises:
        RunError: nothing of it is queued or running.
        ClusterError: Slurm refused.
    """
    with no_submitter(run, commands):
        active = active_of(run, commands)
        if not active:
            raise RunError(f"{run.name}/{run.run_id} is neither queued nor running", hint="`status` shows what is")
        if active.process is not None:
            _stop_here(run, active.process.host, active.process.pid)
        if active.jobs:
            cancel_jobs(run, active.jobs, commands)


def cancel_jobs(run: RunDirectory, jobs: Sequence[str], commands: SlurmCommands) -> None:
    """Cancels active jobs of a run, and whatever they have submitted meanwhile to take over."""
    cancelled: list[str] = []
    # A job that ends may be submitting the one that takes over; that one submits none.
    while new := [job_id for job_id in jobs if job_id not in cancelled]:
        cancelled += new
        # What is on its way by now finds the file and does not begin.
        with contextlib.suppress(OSError):  # an administrator may cancel what they may not write to
            ask_to_stop(run, cancelled, newest_job=newest_job(commands))
        # The newest first: it may be waiting for the others' end.
        commands.cancel(reversed(new))
        note(f"cancelled job {', '.join(reversed(new))} of {run.name}/{run.run_id}; `resume {run.run_id}` continues it")
        jobs = active_of(run, commands).jobs


def _stop_here(run: RunDirectory, host: str, pid: int) -> None:
    try:
        if host == socket.gethostname():
            os.kill(pid, signal.SIGTERM)
        else:
            run.stop_file.touch()
    except PermissionError as err:
        raise RunError(
            f"{run.name}/{run.run_id} is run by process {pid} on {host}, which is not yours to end",
            hint="ask its owner",
        ) from err
    note(f"asked {run.name}/{run.run_id} to save and stop; the same command continues it")
