"""Keeps one process per tracker running beside the ranks, restarts those that fail, reports problems once, ends them.

Called where the supervisor runs. A process each, since a package that hangs, crashes or exits takes its whole process
with it: threads of one process would lose the other trackers, too. Nothing here waits for a tracker, except for
`track.close_timeout_s` when the ranks have ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from slurm_train.config.schema import TrackSection
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_WRONG_USE
from slurm_train.rundir.events import append_event
from slurm_train.rundir.files import create_empty, make_private
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.tools.trackers.follow import count_unsent, explain_exit, follower_command, read_state

_POLL_S, _CLOSING_POLL_S = 0.5, 0.1
_SHORTEST_TRY_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
# The first try after a failure comes at once: where a cancelled job has ended the package's helper, the next process
# has its imports done when the ranks have saved, and little time is left then (KillWait).
_AT_ONCE_S = 0.5
# Longest that a killed process takes to be gone, unless it hangs in the kernel.
_KILL_S = 5.0


class Trackers:
    """The trackers of a run while it is supervised: a context manager around the supervision.

    Args:
        run: the run.
        names: of the trackers.
        track: how long they may take.
        env: environment of their processes.
        say: prints a line for the person.
        command: gives the command line that follows a run for a tracker until its stdin is closed.
        first_pause_s: seconds from the second failure to the next try; doubles each time.
    """

    def __init__(
        self,
        run: RunDirectory,
        names: Sequence[str],
        *,
        track: TrackSection,
        env: Mapping[str, str],
        say: Callable[[str], None],
        command: Callable[[RunDirectory, str], Sequence[str]] = follower_command,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self.close_timeout_s = track.close_timeout_s
        """Seconds that all of them have to end when the ranks have ended."""
        self._run, self._command, self._env, self._say = run, command, env, say
        self._timeout_s, self._first_pause_s = track.timeout_s, first_pause_s
        self.threads = [
            threading.Thread(target=self._keep_following, args=(name,), name=name, daemon=True) for name in names
        ]
        self._placed: set[str] = set()
        self._closing = threading.Event()
        self._deadline = math.inf
        # stdin of all processes; it ends when the supervisor closes its end, or dies.
        self._stdin = self._held_open = -1

    def __enter__(self) -> Trackers:
        if self.threads:
            self._stdin, self._held_open = os.pipe()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finish_soon(self) -> None:
        """Announces that no line will be added any more; returns at once."""
        if self.threads and not self._closing.is_set():
            self._closing.set()
            os.close(self._held_open)

    def close(self) -> None:
        """Waits for the processes to end, kills those that do not in time, and reports what was not delivered."""
        if self._stdin < 0:
            return
        self._deadline = time.monotonic() + self.close_timeout_s
        self.finish_soon()
        try:
            for thread in self.threads:
                thread.join()
        finally:
            # After a second Ctrl-C: whatever still runs is killed.
            self._deadline = 0.0
            for thread in self.threads:
                thread.join(2 * _KILL_S)
            os.close(self._stdin)
            self._stdin = -1

    def _keep_following(self, name: str) -> None:
        """Runs one process after the other until all is sent; a thread of its own for each tracker.

        One that failed gets a last try when the ranks have ended: when a job ends, Slurm signals every process of it,
        and some trackers have helpers that obey.
        """
        said: set[str] = set()
        pauses, is_last_try = self._pauses_s(), False
        while True:
            try:
                code = self._run_process(name)
                problem = "" if code is None else explain_exit(self._run, name, code, timeout_s=self._timeout_s)
            except Exception as err:
                # A full disk or a torn file: the run has problems of its own then, and trackers add none.
                code, problem = EXIT_FAILURE, f"cannot be started: {err}"
            is_closing = self._closing.is_set()
            if code is None or (code == EXIT_DONE and is_closing):
                break
            if problem not in said and not is_closing:
                said.add(problem)
                self._report_problem(name, problem, is_final=code == EXIT_WRONG_USE)
            if code == EXIT_WRONG_USE or is_last_try:
                break
            if self._closing.wait(next(pauses)):
                is_last_try = True
                if self._deadline - time.monotonic() < _SHORTEST_TRY_S or not self._count_unsent(name):
                    break
        self._closing.wait()
        self._report_unsent(name, is_late=code is None)

    def _pauses_s(self) -> Iterator[float]:
        yield min(_AT_ONCE_S, self._first_pause_s)
        pause_s = self._first_pause_s
        while True:
            yield pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run_process(self, name: str) -> int | None:
        """Returns the exit code of one process, None where it was killed at the deadline."""
        log = self._run.trackers / f"{name}.log"
        make_private(log.parent)
        create_empty(log)
        # A session of its own: no Ctrl-C of the terminal, and what it starts itself can be killed with it.
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(self._command(self._run, name)),
                env=dict(self._env),
                stdin=self._stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        ended = None
        # Without reaping it: its number stays its own until its group is killed.
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            while (ended := os.waitid(os.P_PID, process.pid, peek)) is None and time.monotonic() < self._deadline:
                self._report_place(name)
                if self._closing.wait(_POLL_S):
                    time.sleep(_CLOSING_POLL_S)
        finally:
            if ended is None or ended.si_status != 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
        return None if ended is None else process.returncode

    def _report_place(self, name: str) -> None:
        state = None if name in self._placed else read_state(self._run, name)
        if state is not None and state.place and not state.problem:
            self._placed.add(name)
            self._say(f"{name}: {state.place}")

    def _report_problem(self, name: str, problem: str, *, is_final: bool) -> None:
        """Prints a problem, and adds it to the events of the run."""
        later = "" if is_final else "; tried again later, and nothing is lost: the lines are in metrics.jsonl"
        self._say(f"{name}: {problem}{later}")
        with contextlib.suppress(OSError):
            attempt = max(existing_attempts(self._run), default=0)
            append_event(self._run, "tracker", attempt=attempt, tracker=name, problem=problem)

    def _report_unsent(self, name: str, *, is_late: bool) -> None:
        num = self._count_unsent(name)
        late = f"did not end within {self.close_timeout_s:g} s" if is_late else ""
        left = f"{num} lines of metrics were not delivered" if num else ""
        if late or left:
            more = f"`python -m slurm_train track {self._run.run_id}` sends what is missing, as does the next attempt"
            self._say(f"{name}: {' and '.join(filter(None, (late, left)))}; {more}")

    def _count_unsent(self, name: str) -> int:
        try:
            return count_unsent(self._run, name)
        except Exception as err:
            self._say(f"{name}: cannot be checked for missing lines: {err}")
            return 0
