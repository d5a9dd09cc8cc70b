"""Runs that a person waits for: on this machine, or with `launch=interactive` in an allocation of one's own.

Ctrl-C, or a closed terminal, asks running ranks to save and stop; the same command continues. The runs of a sweep are
trained one after the other, or some at a time, each in a process of its own: a run that fails ends no other.

Inside an salloc (or a job of any kind) an interactive run uses that; outside it makes an allocation and gives it back
at the end. Its directory is that of any other run: the same words with launch=slurm, or `resume RUN launch=slurm`,
continue it as a job. Nothing is requeued: a person is waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from slurm_train.cli.logs import LogPrinter
from slurm_train.cli.terminal import note
from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.formatting import count
from slurm_train.launch.plan import describe
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.sweep import Element, SweepDirectory
from slurm_train.status.failure import find_failure
from slurm_train.status.logs import choose_log
from slurm_train.supervise.supervisor import on_stop
from slurm_train.worker.attempt import supervise_here

_LOOK_S = 0.2


def train_here(run: RunDirectory, config: RunConfig, *, world_size: int, env: Mapping[str, str]) -> int:
    """Runs one attempt of a run that is on disk, prints what the terminal has not shown; returns the exit code.

    Raises:
        RunError: the run is active already.
    """
    code = supervise_here(run, config, world_size=world_size, env=env)
    try:
        failure = find_failure(run, max(existing_attempts(run), default=0))
    except OSError:
        return code  # a stale handle, as the attempt itself may have met
    # The terminal shows rank 0 alone.
    if failure is not None and failure.rank and failure.excerpt:
        for line in [*failure.lines(rank_shown=0)[1:], *failure.excerpt.splitlines()]:
            note(line)
    return code


# --- in an allocation ---


def attend(run: RunDirectory, command: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs bash with the run's script, or salloc, to its end; prints rank 0's output; returns the exit code.

    The first Ctrl-C, or a closed terminal, asks the ranks to save and stop; the second one does not wait.
    """
    before = max(existing_attempts(run), default=-1)
    # A session of its own keeps Ctrl-C on the terminal from reaching srun, which would kill the ranks.
    process = subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
    asked = list[None]()
    num_done = 0

    def is_over() -> bool:
        """Does what was asked since the last call, and returns whether the process has ended."""
        nonlocal num_done
        if len(asked) > num_done and process.poll() is None:
            is_first = num_done == 0
            num_done = len(asked)
            # Nothing can be printed to a closed terminal.
            with contextlib.suppress(OSError):
                if not is_first:
                    os.killpg(process.pid, signal.SIGTERM)
                    note("ending the ranks")
                elif max(existing_attempts(run), default=-1) > before:
                    run.stop_file.touch()
                    note("saving and stopping; Ctrl-C once more ends the ranks at once")
                else:
                    # Without a new attempt there is nothing to save.
                    process.terminate()
                    note("nothing has begun; giving it up")
        return process.poll() is not None

    with on_stop(lambda: asked.append(None)):
        # Rank 0's log of the newest attempt that began here, else what srun says.
        LogPrinter(run, 0, attempt=None, env=env).follow(
            lambda: choose_log(run, attempt=None, rank=0, after=before), until=is_over
        )
    code = process.wait()
    if code and not run.result.exists():
        note(f"ended with exit code {code}; `status {run.run_id}` says why, and the same command continues the run")
    return 128 - code if code < 0 else code


# --- the runs of a sweep ---


def train_each(sweep: SweepDirectory, elements: Sequence[Element], *, num_parallel: int, env: Mapping[str, str]) -> int:
    """Trains runs that are on disk, so many at a time; returns 0, 1 if a run failed, 75 if it was asked to stop."""
    waiting = list(elements)
    at_work = dict[RunDirectory, subprocess.Popen[bytes]]()
    num_failed = 0
    asked = list[None]()
    with on_stop(lambda: asked.append(None)):
        while waiting or at_work:
            while waiting and len(at_work) < num_parallel and not (asked or sweep.stop_file.exists()):
                element = waiting.pop(0)
                if element.run.result.exists():
                    note(f"run {element.index}: {describe(element.overrides)}  was finished by another command")
                    continue
                at_work[element.run] = _start(element, shares_terminal=num_parallel > 1, env=env)
            if not (asked or at_work or waiting):
                break
            if asked:
                # A terminal signals the runs as well, `kill` does not; asked twice they save once.
                for process in at_work.values():
                    process.terminate()
                for process in at_work.values():
                    process.wait()
            ended = [run for run, process in at_work.items() if process.poll() is not None]
            unfinished = sum(not run.result.exists() for run in ended)
            if asked or not at_work:
                num_left = len(waiting) + unfinished
                note(f"stopped; without a result: {count(num_left, 'run')}; the same command continues")
                return EXIT_REQUEUE
            num_failed += unfinished
            for run in ended:
                del at_work[run]
            if not ended:
                time.sleep(_LOOK_S)
    if elements:
        note(f"{len(elements) - num_failed} of {len(elements)} runs are finished; next:")
        for verb in ("status", "collate", "report"):
            note(f"  python -m slurm_train {verb} {sweep.sweep_id}")
    return EXIT_FAILURE if num_failed else EXIT_DONE


def _start(element: Element, *, shares_terminal: bool, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    run = element.run
    note(f"run {element.index}: {describe(element.overrides)}  {run.path}")
    command = [sys.executable, "-m", "slurm_train", "resume", str(run.path)]
    if not shares_terminal:
        # What a run prints on stdout is for people here; stdout is for data.
        return subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=sys.stderr)
    with (run.logs / "batch.log").open("ab") as log:
        return subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
