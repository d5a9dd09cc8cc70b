"""Runs the ranks of an attempt: as a step of srun in an allocation, or as processes of this machine.

The slurmstepd of a node reports the end of each task to srun. If slurmstepd was killed, srun waits for ranks that have
ended long ago. If srun itself was killed, the ranks go on without it. Both are ended here.

On this machine each rank is one process with its own log. Rank 0 keeps the terminal, and the first rank that fails ends
the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from slurm_train.code.provenance import record_environment
from slurm_train.code.snapshot import MOST_CHANGES_SHOWN, own_snapshot, require_sealed
from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE, ClusterError, RunError
from slurm_train.formatting import shorten
from slurm_train.rundir.events import FailureMark, append_event, leave_mark
from slurm_train.rundir.files import open_file
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_variables import node_name
from slurm_train.slurm.records import StepEnd, TaskEnd
from slurm_train.supervise.best_effort import say


def note_environment(run: RunDirectory, attempt: int, *, slurm: Callable[[], str | None]) -> threading.Thread:
    """Writes an attempt's `environment.json` in a thread that need not be joined; prints which packages have changed.

    A run has its own copy of the code, but not of installed packages; a package that is upgraded between two attempts
    changes the run.

    Args:
        run: the run.
        attempt: its attempt.
        slurm: returns Slurm's version.
    """

    def note() -> None:
        try:
            changes = record_environment(run, attempt, slurm=slurm())
            if changes:
                say(f"installed packages changed since the last attempt: {shorten(changes, MOST_CHANGES_SHOWN)}")
                append_event(run, "environment", attempt=attempt, changes=changes)
        except OSError as err:
            say(f"the environment of the attempt could not be written down: {err}")

    thread = threading.Thread(target=note, name="environment", daemon=True)
    thread.start()
    return thread


def refused_code(run: RunDirectory, attempt: int, env: Mapping[str, str]) -> int | None:
    """Returns the exit code of an attempt whose snapshot of the code was changed, None where it may begin.

    A requeue runs the snapshot again, perhaps days later. The error is printed and left as the attempt's mark, so that
    the ledger has it.
    """
    try:
        own_snapshot(run)
        require_sealed(run)
    except RunError as err:
        say(str(err))
        leave_mark(run, attempt, FailureMark(rank=0, host=node_name(env), exit_code=2, message=err.message))
        return err.exit_code
    return None


# --- the step of srun ---

ORPHAN_LINGER_S = 10.0
"""If srun still waits this long after a rank has reported the death of its slurmstepd, it waits for ever."""
LINGER_S = 150.0
"""Longer than --wait and any usual KillWait: after the failure of one rank all ranks must have ended by then."""
_GONE_WITHIN_S = 60.0
_WAITING_GONE_S = 5.0


def start_step(
    argv: Sequence[str], *, env: Mapping[str, str], log: BinaryIO, cwd: Path | None = None, waits: bool = False
) -> subprocess.Popen[bytes]:
    """Starts srun.

    Args:
        argv: srun and its arguments.
        env: its environment.
        log: file for its output.
        cwd: working directory of srun and its tasks; None: that of this process.
        waits: its tasks wait for a line on their stdin, which srun passes on to all of them.
    """
    return subprocess.Popen(
        list(argv),
        env=dict(env) | ({} if cwd is None else {"PWD": str(cwd)}),
        stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=cwd,
    )


def run_step(
    process: subprocess.Popen[bytes],
    *,
    log: BinaryIO,
    is_overdue: Callable[[], bool],
    beside: Callable[[], None] = lambda: None,
) -> int:
    """Waits for srun to end and returns its exit code, 128 + signal if it was killed.

    Args:
        process: srun.
        log: file for its output.
        is_overdue: whether the ranks are known to have ended so long ago that srun must have missed it.
        beside: called once a second; like `is_overdue` it neither waits nor raises.
    """
    is_given_up = False
    while True:
        try:
            code = process.wait(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            beside()
            if not is_given_up and is_overdue():
                is_given_up = True
                process.kill()
    if code < 0 and not is_given_up:
        # The ranks have ended: a full disk loses this line, and nothing else.
        with contextlib.suppress(OSError):
            log.write(f"srun: error: srun itself was killed by signal {-code}\n".encode())
            log.flush()
    return 128 - code if code < 0 else code


def end_step(
    job_id: str,
    name: str,
    commands: SlurmCommands,
    *,
    within_s: float = _GONE_WITHIN_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Ends what is left of a job's step and returns whether its nodes are free for another one.

    Args:
        job_id: the job.
        name: the step's name; the other steps of the allocation are left alone.
        commands: Slurm.
        within_s: seconds that it may take.
        sleep: waits for a number of seconds.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            remaining = [step for step, step_name in commands.steps(job_id).items() if step_name == name]
            if not remaining:
                return True
            for step in remaining:
                commands.cancel_step(step)
        except ClusterError:
            # Slurm does not answer, so a new step could not be made now either.
            pass
        if time.monotonic() > deadline:
            return False
        sleep(1.0)


# --- ranks in waiting ---

WAITS = "SLURM_TRAIN_WAITS"
"""Variable of a rank that imports torch and then waits for a line on its stdin."""


@dataclass(slots=True)
class RanksInWaiting:
    """The step of the attempt that follows if this one fails: its ranks have imported torch, and wait for a line."""

    process: subprocess.Popen[bytes] | None = None
    attempt: int = -1
    nodes: tuple[str, ...] = ()
    log: Path | None = None
    """Has the output of srun so far."""

    def start_attempt(self, attempt: int, nodes: tuple[str, ...], log: Path) -> subprocess.Popen[bytes] | None:
        """Starts the training of the ranks if they still wait, for this attempt and on these nodes; returns their srun.

        Args:
            attempt: the attempt that begins.
            nodes: where it runs.
            log: the attempt's log, which gets the output of srun up to now and from now on.
        """
        process = self.process
        self.process = None
        if process is None or self.log is None:
            return None
        fits = (attempt, nodes) == (self.attempt, self.nodes) and process.poll() is None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            if fits:
                self.log.replace(log)
                process.stdin.write(b"begin\n")
                process.stdin.close()
                return process
        self._end(process)
        return None

    def dismiss(self) -> None:
        """Ends the ranks; when their stdin closes without a line, they exit."""
        process = self.process
        self.process = None
        if process is not None:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_WAITING_GONE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            assert self.log is not None
            self.log.unlink(missing_ok=True)


# --- processes of this machine ---

_KILL_AFTER_S = 30.0
_LOOK_EVERY_S = 0.05
_LAST_ENDS_S = 0.8
"""How long after the first failure of a rank others may end by themselves before they are asked to."""
_ASKING = (signal.SIGTERM, signal.SIGUSR2)
"""Signals by which ranks are asked to stop; a program that does not handle them ends by them."""


@dataclass(slots=True)
class LocalRanks:
    """Running local ranks; `interrupt` passes a stop request on, `wait` returns the exit code of the whole."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    kill_after_s: float = _KILL_AFTER_S
    """How long the other ranks may take to end by themselves after a rank has failed."""
    ended: StepEnd = field(default_factory=StepEnd)
    """How ranks had ended when the first of them failed, and that one, if a signal killed it: its peers lose it."""

    def interrupt(self) -> None:
        """Asks every rank to save and stop, as Slurm does before a time limit."""
        self._signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Kills every rank at once, also a stopped one."""
        self._signal(signal.SIGKILL)

    def wait(self, beside: Callable[[], None] = lambda: None) -> int:
        """Waits for all ranks; after a failure the other ranks get some time to end by themselves.

        Args:
            beside: called now and then, at least once a second; it neither waits nor raises.

        Returns:
            The exit code of the first rank that failed (128 + signal if it was killed), or the code on
            which all agreed.
        """
        first_failure: int | None = None
        deadline = float("inf")
        while True:
            codes = self._exit_codes()
            if None not in codes:
                break
            failures = [code for code in codes if code not in (None, EXIT_DONE, EXIT_REQUEUE)]
            if failures and first_failure is None:
                first_failure = self._note_failure()
                deadline = time.monotonic() + self.kill_after_s
                self._signal(signal.SIGTERM)
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            beside()
            time.sleep(_LOOK_EVERY_S)
        exit_codes = [process.returncode for process in self.processes]
        if first_failure is None:
            # All ended between two looks; a failure has priority over a request to be requeued.
            is_failure = any(code not in (EXIT_DONE, EXIT_REQUEUE) for code in exit_codes)
            first_failure = self._note_failure() if is_failure else max(exit_codes)
        return 128 - first_failure if first_failure < 0 else first_failure

    def _note_failure(self) -> int:
        """Returns the exit code of the first rank to fail: one that was killed, else that of the lowest number."""
        host = socket.gethostname()
        first = self._failures()
        killed = next(((rank, code) for rank, code in first if is_violent(code)), None)
        if killed is None:
            # One that came to its end too early may end after those that have lost it.
            self._await_others(within_s=_LAST_ENDS_S)
        later = [failure for failure in self._failures() if failure not in first]
        ends = [TaskEnd((rank,), host, _words_of(code)) for rank, code in (*first, *later)]
        codes = [process.returncode for process in self.processes]
        going_on = tuple(rank for rank, code in enumerate(codes) if code in (None, EXIT_REQUEUE))
        if going_on:
            ends.append(TaskEnd(going_on, host, "Terminated"))
        self.ended = StepEnd(tasks=tuple(ends))
        if killed is None:
            return first[0][1]
        rank, code = killed
        self.ended = replace(self.ended, violent=TaskEnd((rank,), host, _words_of(code)))
        return code

    def _failures(self) -> list[tuple[int, int]]:
        """Returns rank and exit code of the ranks that have failed so far."""
        codes = enumerate(process.returncode for process in self.processes)
        return [(rank, code) for rank, code in codes if code not in (None, EXIT_DONE, EXIT_REQUEUE)]

    def _await_others(self, *, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while None in self._exit_codes() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)

    def _signal(self, number: signal.Signals) -> None:
        for process, code in zip(self.processes, self._exit_codes(), strict=True):
            if code is None:
                process.send_signal(number)

    def _exit_codes(self) -> list[int | None]:
        """Returns the exit codes of the ranks that have ended; kills what such a rank has left, as Slurm does.

        A shell script that starts the training without `exec` ends by a signal, and the training would go on beside
        the next attempt.
        """
        for process in self.processes:
            if process.returncode is None and process.poll() is not None:
                # At once, while no other process can have this number.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return [process.returncode for process in self.processes]


def is_violent(code: int) -> bool:
    """Returns whether a process of this machine was ended by a signal that no launcher sends to ask for a stop.

    Args:
        code: its exit code, the negative number of the signal.
    """
    return code < 0 and -code not in _ASKING


def _words_of(code: int) -> str:
    """Returns how a process ended, in srun's words."""
    return f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code) or "Killed"


def start_local(
    command: Sequence[str], *, run: RunDirectory, attempt: int, num_ranks: int, env: Mapping[str, str]
) -> LocalRanks:
    """Starts the ranks in the code snapshot, where there is one, and returns at once.

    Args:
        command: command line of the worker.
        run: the run; logs go to its attempt's folder.
        attempt: number of the attempt.
        num_ranks: world size; all ranks are on this machine.
        env: environment of the ranks, MASTER_ADDR and MASTER_PORT included.

    Raises:
        OSError: a rank could not be started; those before it have been ended.
    """
    ranks = LocalRanks()
    try:
        for rank in range(num_ranks):
            rank_env = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            rank_env |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
            ranks.processes.append(_start_rank(command, run, rank, log=run.rank_log(attempt, rank), env=rank_env))
    except BaseException:
        # The system has no process or file for a further rank, or Ctrl-C: those that have started would wait for it.
        ranks.kill()
        ranks.wait()
        raise
    return ranks


def _start_rank(
    command: Sequence[str], run: RunDirectory, rank: int, *, log: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    descriptor = open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        return subprocess.Popen(
            command,
            cwd=run.code if run.code.is_dir() else None,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else descriptor,
            stderr=None if rank == 0 else descriptor,
            # In their own session the ranks do not get Ctrl-C of the terminal: the parent asks them to stop.
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
