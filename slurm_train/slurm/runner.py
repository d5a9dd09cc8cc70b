"""Runs one command to its end: no shell, no input, a time limit, and an error that names what went wrong."""

from __future__ import annotations

import shlex
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


def run_process(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> Finished:
    """Runs a command without a shell and without input, and returns how it ended.

    Raises:
        ClusterError: no such command on this machine, or it did not end in time.
    """
    try:
        done = subprocess.run(
            list(argv),
            env=dict(env),
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except FileNotFoundError as err:
        raise ClusterError(
            f"there is no {argv[0]} on this machine",
            hint="run this where Slurm's commands are (a login node), or without +cluster to train on this machine",
        ) from err
    except subprocess.TimeoutExpired as err:
        raise ControllerAway(
            f"`{shlex.join(argv)}` did not answer in {timeout_s:g} s",
            hint="the Slurm controller may be busy: try later",
        ) from err
    return Finished(done.returncode, done.stdout, done.stderr)


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
