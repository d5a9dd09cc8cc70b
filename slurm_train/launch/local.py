"""Starts the ranks of a run on this machine, as srun would on a cluster: one process each, one log each.

Rank 0 keeps the terminal; the others write to their log files. The first rank that fails ends the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE
from slurm_train.rundir.paths import RunDirectory

_KILL_AFTER_S = 30.0


@dataclass(slots=True)
class LocalRanks:
    """Running local ranks; `interrupt` passes a stop request on, `wait` returns the exit code of the whole."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    kill_after_s: float = _KILL_AFTER_S
    """How long the others may take to end by themselves once a rank has failed."""

    def interrupt(self) -> None:
        """Asks every rank to save and stop, as Slurm does before a time limit."""
        self._signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Ends every rank at once, also one that is stopped."""
        self._signal(signal.SIGKILL)

    def wait(self, beside: Callable[[], None] = lambda: None) -> int:
        """Waits for all ranks; after a failure the others get a moment to end by themselves.

        Args:
            beside: called now and then, at least once a second; it neither waits nor raises.

        Returns:
            The first failing rank's exit code (128 + signal for a killed one), or what all agreed on.
        """
        first_bad: int | None = None
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            bad = [
                code for process in self.processes if (code := process.poll()) not in (None, EXIT_DONE, EXIT_REQUEUE)
            ]
            if bad and first_bad is None:
                first_bad = bad[0]
                deadline = time.monotonic() + self.kill_after_s
                self._signal(signal.SIGTERM)
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            beside()
            self._wait_briefly()
        ended = [process.returncode for process in self.processes]
        if first_bad is None:
            # All ended between two looks; a failure counts for more than a wish to be run again.
            first_bad = next((code for code in ended if code not in (EXIT_DONE, EXIT_REQUEUE)), max(ended))
        return 128 - first_bad if first_bad < 0 else first_bad

    def _wait_briefly(self) -> None:
        running = next((process for process in self.processes if process.poll() is None), None)
        if running is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(timeout=0.1)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def start_local(
    command: Sequence[str], *, run: RunDirectory, attempt: int, num_ranks: int, env: Mapping[str, str]
) -> LocalRanks:
    """Starts the ranks in the code snapshot, where there is one, and returns at once.

    Args:
        command: the worker's command line.
        run: the run; logs go to its attempt's folder.
        attempt: number of the attempt.
        num_ranks: world size; all ranks are on this machine.
        env: environment of the ranks, MASTER_ADDR and MASTER_PORT included.
    """
    ranks = LocalRanks()
    for rank in range(num_ranks):
        rank_env = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        rank_env |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        log = os.open(run.rank_log(attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        # A session of its own keeps Ctrl-C on the terminal from reaching the ranks: the parent asks them to stop.
        ranks.processes.append(
            subprocess.Popen(
                command,
                cwd=run.code if run.code.is_dir() else None,
                env=rank_env,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=None if rank == 0 else log,
                start_new_session=True,
            )
        )
        os.close(log)
    return ranks
