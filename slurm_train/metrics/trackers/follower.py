"""One tracker's process: started with a pipe that tells it of the end, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_train.rundir.private import create_private, make_private


@dataclass(slots=True)
class Follower:
    """One tracker's process, or the wait for the next one."""

    name: str
    pause_s: float
    """Seconds from the end of the newest process to the next one; doubles each time."""
    process: subprocess.Popen[bytes] | None = None
    pipe: int = -1
    """Writing end of the pipe; it is closed when no line will be added any more."""
    due_s: float = 0.0
    """When the next process may be started."""
    said: set[str] = field(default_factory=set)
    """Problems that the person has been told."""
    is_placed: bool = False
    """The person has been told where to find the run."""
    is_given_up: bool = False
    had_last_try: bool = False

    @property
    def is_running(self) -> bool:
        """Whether its process is at work."""
        return self.process is not None and self.process.poll() is None

    def start(self, command: Sequence[str], reader: int, *, env: Mapping[str, str], log: Path) -> None:
        """Starts its process.

        Args:
            command: what it runs.
            reader: the pipe's other end, which it inherits.
            env: its environment.
            log: where it says what it says.
        """
        make_private(log.parent)
        create_private(log)
        # A session of its own: no Ctrl-C of the terminal, and what it starts itself can be ended with it.
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=(reader,),
                start_new_session=True,
            )

    def close_pipe(self) -> None:
        """Tells its process that no line will be added any more."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def end(self) -> None:
        """Ends what is left of its process and, where that did not end well, of those that it has started."""
        self.close_pipe()
        if self.process is None:
            return
        if self.process.poll() != 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
