"""Runs one command to its end: no shell, no input, a time limit, and an error that names what went wrong."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_train.errors import ClusterError

# What the commands say when nobody answers; an answer that was lost on the way may have been acted upon.
_UNREACHABLE = (
    "unable to contact slurm controller",
    "unexpected message received",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "communication connection failure",
    "backup controller in standby",
)
_KILLED_WITHIN_S = 1.0


class ControllerAway(ClusterError):
    """Slurm's controller does not answer; asking again later may help."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A process that has ended."""

    return_code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of stderr with something on it, else of stdout."""
        lines = [line.strip() for text in (self.stdout, self.stderr) for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


class Runner(Protocol):
    """Runs a command to its end; tests pass their own."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> Finished:
        """Returns the ended process; raises ClusterError if it cannot start or takes too long."""


def run_program(
    argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, cwd: str | None = None, text: str = ""
) -> Finished:
    """Runs a program to its end, with `text` as its input, and returns how it ended.

    One that is too slow is killed with all that it has started. A program that even KILL does not end, as nvidia-smi
    in a hanging driver, is left behind.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=pipe if text else nothing,
        stdout=pipe,
        stderr=pipe,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(text or None, timeout=timeout_s)
    except BaseException:
        _end_group(process)
        raise
    return Finished(process.returncode, stdout, stderr)


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_WITHIN_S)
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def run_process(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> Finished:
    """Runs a command without a shell and without input, and returns how it ended.

    Raises:
        ClusterError: no such command on this machine, or it did not end in time.
    """
    try:
        return run_program(argv, env=env, timeout_s=timeout_s)
    except FileNotFoundError as err:
        raise ClusterError(
            f"there is no {argv[0]} on this machine",
            hint="run this where Slurm's commands are (a login node), or without +cluster to train on this machine",
        ) from err
    except OSError as err:
        # No memory, no descriptors, a file server that is away: that may pass.
        raise ControllerAway(
            f"`{shlex.join(argv)}` could not be started: {err}", hint="see `ulimit -a` and `free` on this machine"
        ) from err
    except subprocess.TimeoutExpired as err:
        raise ControllerAway(
            f"`{shlex.join(argv)}` did not answer in {timeout_s:g} s",
            hint="the Slurm controller may be busy: try later",
        ) from err


def failed_command(argv: Sequence[str], done: Finished) -> ClusterError:
    """Returns the error for a command that ended badly, which quotes it."""
    # A job that ends takes the commands that its script runs along (22.05 with linuxproc signals every descendant).
    kind = ControllerAway if done.return_code < 0 or is_away(done.stderr) else ClusterError
    return kind(
        f"`{shlex.join(argv)}` ended with exit code {done.return_code}: {done.last_line}",
        hint="run the command by hand; `scontrol ping` says whether the controller answers",
    )


def is_away(stderr: str) -> bool:
    """Returns whether a command that failed says that it did not reach the controller."""
    return any(text in stderr.lower() for text in _UNREACHABLE)
