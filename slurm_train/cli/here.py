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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurm_train.cli.logs import LogPrinter
from slurm_train.cli.terminal import note
from slurm_train.config.frozen import load_config
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.formatting import count
from slurm_train.plan.plan import describe
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.sweep import Element, SweepDirectory
from slurm_train.status.failure import find_failure
from slurm_train.status.logs import choose_log
from slurm_train.supervise.main import supervise_here
from slurm_train.supervise.supervisor import on_stop
from slurm_train.tools.trackers import build_trackers

_LOOK_S = 0.2


def main(words: Sequence[str]) -> int:
    """Trains one run of a sweep, which is ready on disk: `here RUN_DIR`."""
    return train_here(RunDirectory(Path(words[0])), env=dict(os.environ))


def train_here(run: RunDirectory, *, env: Mapping[str, str]) -> int:
    """Runs one attempt of a run that is on disk, prints what the terminal has not shown; returns the exit code.

    Raises:
        RunError: the run is active already.
    """
    config = load_config(run.config)
    world_size = PlanRecord.read(run.plan).world.size
    code = supervise_here(run, config, world_size=world_size, env=env, build_trackers=build_trackers)
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
    # Looked up before the process starts, which may open an attempt at once.
    last_attempt_before = max(existing_attempts(run), default=-1)
    # A session of its own keeps Ctrl-C on the terminal from reaching srun, which would kill the ranks.
    process = subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
    attended = _AttendedProcess(run, process, last_attempt_before=last_attempt_before)
    with on_stop(attended.ask_to_stop):
        # Rank 0's log of the newest attempt that began here, else what srun says.
        LogPrinter(run, 0, attempt=None, env=env).follow(
            lambda: choose_log(run, attempt=None, rank=0, after=last_attempt_before),
            until=attended.has_ended,
        )
    code = process.wait()
    if code and not run.result.exists():
        note(f"ended with exit code {code}; `status {run.run_id}` says why, and the same command continues the run")
    return 128 - code if code < 0 else code


class _AttendedProcess:
    """The process of an allocation, and what a person has asked of it by Ctrl-C.

    Args:
        run: the run whose ranks it starts.
        process: bash or salloc, which leads its session.
        last_attempt_before: the run's last attempt before this process, -1 for none.
    """

    def __init__(self, run: RunDirectory, process: subprocess.Popen[bytes], *, last_attempt_before: int) -> None:
        self._run = run
        self._process = process
        self._num_asked = 0
        self._num_carried_out = 0
        self._last_attempt_before = last_attempt_before

    def ask_to_stop(self) -> None:
        """Counts a Ctrl-C; a signal handler calls it, so it does nothing else."""
        self._num_asked += 1

    def has_ended(self) -> bool:
        """Carries out what was asked since the last call, and returns whether the process has ended."""
        if self._num_asked > self._num_carried_out and self._process.poll() is None:
            is_first = self._num_carried_out == 0
            self._num_carried_out = self._num_asked
            # Nothing can be printed to a closed terminal.
            with contextlib.suppress(OSError):
                if is_first:
                    self._stop()
                else:
                    os.killpg(self._process.pid, signal.SIGTERM)
                    note("ending the ranks")
        return self._process.poll() is not None

    def _stop(self) -> None:
        if max(existing_attempts(self._run), default=-1) > self._last_attempt_before:
            self._run.stop_file.touch()
            note("saving and stopping; Ctrl-C once more ends the ranks at once")
            return
        # Without a new attempt there is nothing to save.
        self._process.terminate()
        note("no rank has started, so the command is ended")


# --- the runs of a sweep ---


class _StopFlag:
    """Whether a person has asked for a stop. No `Event`: it has a lock, and a second signal may interrupt the first."""

    is_set = False

    def set(self) -> None:
        """Asks for a stop; a signal handler calls it."""
        self.is_set = True


def train_each(sweep: SweepDirectory, elements: Sequence[Element], *, num_parallel: int, env: Mapping[str, str]) -> int:
    """Trains runs that are ready on disk, so many at a time; returns 0, 1 if one failed, 75 if asked to stop."""
    waiting = list(elements)
    processes = dict[RunDirectory, subprocess.Popen[bytes]]()
    stop = _StopFlag()

    def is_stopping() -> bool:
        return stop.is_set or sweep.stop_file.exists()

    with on_stop(stop.set):
        while True:
            while waiting and len(processes) < num_parallel and not is_stopping():
                element = waiting.pop(0)
                if element.run.result.exists():
                    note(f"run {element.index}: {describe(element.overrides)}  was finished by another command")
                    continue
                processes[element.run] = _start(element, shares_terminal=num_parallel > 1, env=env)
            if stop.is_set:
                _stop_all(processes.values())
                break
            ended = [run for run, process in processes.items() if process.poll() is not None]
            for run in ended:
                del processes[run]
            if not processes and (not waiting or is_stopping()):
                break
            if not ended:
                time.sleep(_LOOK_S)
    num_unfinished = sum(not element.run.result.exists() for element in elements)
    if stop.is_set or waiting:
        note(f"stopped; without a result: {count(num_unfinished, 'run')}; the same command continues")
        return EXIT_REQUEUE
    if elements:
        note(f"{len(elements) - num_unfinished} of {len(elements)} runs are finished; next:")
        for verb in ("status", "collate", "report"):
            note(f"  python -m slurm_train {verb} {sweep.sweep_id}")
    return EXIT_FAILURE if num_unfinished else EXIT_DONE


def _stop_all(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Asks runs to save and stop, and waits until all have ended."""
    # A terminal signals the runs as well, `kill` does not; asked twice they save once.
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def _start(element: Element, *, shares_terminal: bool, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    run = element.run
    note(f"run {element.index}: {describe(element.overrides)}  {run.path}")
    command = [sys.executable, "-m", "slurm_train", "here", str(run.path)]
    if not shares_terminal:
        # What a run prints on stdout is for people here; stdout is for data.
        return subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=sys.stderr)
    with (run.logs / "batch.log").open("ab") as log:
        return subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
