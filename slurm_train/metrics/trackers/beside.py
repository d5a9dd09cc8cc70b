"""Keeps the trackers' processes beside the ranks: starts them, starts them again, says once what is wrong, ends them.

Called where the supervisor runs. Nothing here waits for a tracker, except for a moment when the ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurm_train.errors import EXIT_WRONG_USE
from slurm_train.metrics.trackers.follower import Follower
from slurm_train.metrics.trackers.state import num_unsent, read_state, why_ended
from slurm_train.rundir.events import append_event
from slurm_train.rundir.layout import RunDirectory, existing_attempts

_LOOK_S = 0.5
_CLOSING_LOOK_S = 0.1
_SHORTEST_TRY_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0

MakeCommand = Callable[[str, int], Sequence[str]]
"""Gives the command line that follows the run for a tracker until a pipe, given by its descriptor, is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the trackers' processes are started with."""

    run: RunDirectory
    names: Sequence[str]
    command: MakeCommand
    env: Mapping[str, str]
    timeout_s: float
    """Longest that a call of a tracker takes before its process ends itself."""
    say: Callable[[str], None]
    """Prints a line for the person."""
    first_pause_s: float = _FIRST_PAUSE_S


class Trackers:
    """The trackers of a run while it is supervised.

    Args:
        surroundings: what they are started with.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        pause_s = surroundings.first_pause_s
        self._followers = [Follower(name, pause_s) for name in surroundings.names]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trackers", daemon=True)

    def start(self) -> None:
        """Begins to start them, in a thread."""
        if self._followers:
            self._thread.start()

    def finish_soon(self) -> None:
        """Tells them that no line will be added any more; returns at once."""
        self._closing.set()
        with self._lock:
            for follower in self._followers:
                follower.close_pipe()

    def close(self, within_s: float) -> None:
        """Waits for them to end, kills those that do not, and says what was not delivered.

        One that has failed gets a last try: when a job is ended, Slurm signals every process of it, and some trackers
        have helpers that obey.

        Args:
            within_s: seconds that they have together.
        """
        if not self._followers:
            return
        self.finish_soon()
        self._thread.join()
        deadline = time.monotonic() + within_s
        try:
            left = list(self._followers)
            while left and time.monotonic() < deadline:
                left = [follower for follower in left if not self._has_ended(follower, deadline)]
                time.sleep(_CLOSING_LOOK_S if left else 0.0)
        finally:
            for follower in self._followers:
                is_late = follower.is_running
                follower.end()
                self._report(follower, within_s, is_late=is_late)

    def _has_ended(self, follower: Follower, deadline: float) -> bool:
        """Returns whether nothing is left to wait for; starts the last try where one is due."""
        if follower.is_running:
            return False
        has_worked = follower.process is not None and follower.process.returncode == 0
        if has_worked or follower.is_given_up or follower.had_last_try:
            return True
        if deadline - time.monotonic() < _SHORTEST_TRY_S or not num_unsent(self._surroundings.run, follower.name):
            return True
        follower.end()
        follower.had_last_try = True
        self._spawn(follower)
        follower.close_pipe()
        return False

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_S):
            for follower in self._followers:
                try:
                    self._look_after(follower)
                except Exception as err:
                    # A full disk, say: the run has troubles of its own then, and trackers add none.
                    self._note(follower, f"cannot be looked after: {err}")

    def _look_after(self, follower: Follower) -> None:
        now = time.monotonic()
        if follower.process is None:
            if now >= follower.due_s and not follower.is_given_up:
                self._start(follower)
        elif (code := follower.process.poll()) is not None:
            with self._lock:
                follower.end()
            follower.due_s, follower.pause_s = now + follower.pause_s, min(2 * follower.pause_s, _LONGEST_PAUSE_S)
            self._note_end(follower, code)
        else:
            self._note_place(follower)

    def _start(self, follower: Follower) -> None:
        # Between its start and that of the closing there would be no pipe to close.
        with self._lock:
            if not self._closing.is_set():
                self._spawn(follower)

    def _spawn(self, follower: Follower) -> None:
        reader, follower.pipe = os.pipe()
        try:
            around = self._surroundings
            log = around.run.trackers / f"{follower.name}.log"
            follower.start(around.command(follower.name, reader), reader, env=around.env, log=log)
        except OSError as err:
            follower.close_pipe()
            self._note(follower, f"cannot be started: {err}")
            follower.due_s = time.monotonic() + follower.pause_s
        finally:
            os.close(reader)

    def _note_end(self, follower: Follower, code: int) -> None:
        state = read_state(self._surroundings.run, follower.name)
        follower.is_given_up = code == EXIT_WRONG_USE
        self._note(follower, why_ended(state, code, timeout_s=self._surroundings.timeout_s))

    def _note(self, follower: Follower, problem: str) -> None:
        """Says a problem once, and keeps it among the events of the run."""
        if problem in follower.said:
            return
        follower.said.add(problem)
        waits = "tried again later, and nothing is lost: the lines are in metrics.jsonl"
        again = "" if follower.is_given_up else f"; {waits}"
        self._surroundings.say(f"{follower.name}: {problem}{again}")
        with contextlib.suppress(OSError):
            attempt = max(existing_attempts(self._surroundings.run), default=0)
            append_event(self._surroundings.run, "tracker", attempt=attempt, tracker=follower.name, problem=problem)

    def _note_place(self, follower: Follower) -> None:
        if follower.is_placed:
            return
        state = read_state(self._surroundings.run, follower.name)
        if state is not None and state.place and not state.problem:
            follower.is_placed = True
            self._surroundings.say(f"{follower.name}: {state.place}")

    def _report(self, follower: Follower, within_s: float, *, is_late: bool) -> None:
        run = self._surroundings.run
        num = num_unsent(run, follower.name)
        late = f"did not end within {within_s:g} s" if is_late else ""
        left = f"{num} lines of metrics were not delivered" if num else ""
        if late or left:
            text = " and ".join(filter(None, (late, left)))
            more = f"`python -m slurm_train track {run.run_id}` sends what is missing, as does the next attempt"
            self._surroundings.say(f"{follower.name}: {text}; {more}")


@contextlib.contextmanager
def tracking(surroundings: Surroundings, *, close_timeout_s: float) -> Iterator[Trackers]:
    """Keeps the trackers of a run going while the body supervises it.

    Args:
        surroundings: what they are started with.
        close_timeout_s: seconds that they have to end, all together.
    """
    trackers = Trackers(surroundings)
    trackers.start()
    try:
        yield trackers
    finally:
        try:
            trackers.close(close_timeout_s)
        except Exception as err:
            # How the run has ended stays as it is.
            surroundings.say(f"the trackers could not be closed in order: {err}")
