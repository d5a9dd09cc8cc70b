"""Follows metrics.jsonl and sends its lines to one tracker, until the run's ranks have ended.

The file is the queue: it is durable, no memory grows while a tracker is slow, and lines that one attempt could not send
are sent by the next. trackers/NAME.json holds the tracker's id of the run and how far the file was sent; it has one
writer at a time, the process that follows. A call that takes too long ends that process (by the kernel's alarm, so that
even code that never releases the interpreter cannot hold it); whoever started it tries again:
`Trackers`, where the supervisor runs. A process each, since a package that hangs, crashes or exits takes its whole
process with it. Nothing there waits for a tracker, except for `track.close_timeout_s` when the ranks have ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig, TrackSection
from slurm_train.config.secrets import redact
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_WRONG_USE, SlurmTrainError
from slurm_train.rundir.events import append_event
from slurm_train.rundir.files import (
    create_empty,
    fsync_directory,
    make_private,
    parse_lines,
    read_json,
    read_record,
    size_of,
    write_record,
)
from slurm_train.rundir.ledger import Action, Reason, read_ledger
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.sweep import sweep_of
from slurm_train.tools.trackers import require_installed
from slurm_train.tools.trackers.adapters import TRACKERS, Line, Outcome, TrackedRun, Tracker
from slurm_train.trust import open_to_read, read_text

_POLL_S = 1.0
_MOST_LINES = 200
_CHUNK_BYTES = 1 << 18
# Below the ranks, whose cores these processes share.
_NICE = 5
_LONGEST_PROBLEM = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState:
    """What trackers/NAME.json holds: one tracker of one run."""

    key: str
    """Chosen once, see `TrackedRun`."""
    tracker_id: str | None = None
    place: str = ""
    sure_bytes: int = 0
    """Length of the part of metrics.jsonl that the tracker can no longer lose; a new process begins here."""
    problem: str = ""
    """Why the newest attempt to reach it failed; "" when it works."""


def follower_command(run: RunDirectory, name: str, *, settings: Sequence[str] = ()) -> list[str]:
    """Returns the command line of the process that follows a run for one tracker, until its stdin ends.

    Args:
        run: the run.
        name: of the tracker.
        settings: words that change the run's own settings, e.g. "track.wandb.mode=online".
    """
    return [sys.executable, "-m", "slurm_train", "track", str(run.path), "--only", name, "--beside", *settings]


def configured(run: RunDirectory, settings: Sequence[str]) -> RunConfig:
    """Returns a run's configuration, changed by words."""
    config = load_config(run.config)
    if not settings:
        return config
    from slurm_train.config.compose import apply_words

    return apply_words(config, list(settings))


def follow_run(run: RunDirectory, name: str, settings: Sequence[str], env: Mapping[str, str]) -> int:
    """Follows a run for one tracker until stdin ends; a problem is left in the tracker's state, for the parent."""
    os.nice(_NICE)
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm signals every process of a job; this one ends when it has sent what there is.
        signal.signal(number, signal.SIG_IGN)
    try:
        track = configured(run, settings).track
        require_installed(track, only=name)
        follow(
            run,
            name,
            lambda state: TRACKERS[name](_describe(run, state), track, env),
            timeout_s=track.timeout_s,
            # Nothing is ever written to stdin; /dev/null is at its end.
            is_over=lambda within_s: bool(select.select([0], [], [], within_s)[0]),
        )
    except Exception as err:
        # Whatever a tracker raises, it ends this process alone.
        print(redact(traceback.format_exc()), file=sys.stderr, end="", flush=True)
        problem = err.message if isinstance(err, SlurmTrainError) else f"{type(err).__name__}: {err}"
        problem = redact(" ".join(problem.split()))[:_LONGEST_PROBLEM]
        write_state(run, name, replace(load_or_create_state(run, name), problem=problem))
        sys.stdout.flush()
        # Not by the way of exit handlers, in which a package may wait for a helper or a network that is gone.
        os._exit(err.exit_code if isinstance(err, SlurmTrainError) else EXIT_FAILURE)
    return EXIT_DONE


def follow(
    run: RunDirectory,
    name: str,
    open_tracker: Callable[[TrackerState], Tracker],
    *,
    timeout_s: float,
    is_over: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Sends every line, from where the last process was sure, and closes the tracker when the run has ended.

    Args:
        run: the run.
        name: of the tracker.
        open_tracker: starts or continues the run at the tracker.
        timeout_s: longest that a call of the tracker may take.
        is_over: waits so many seconds at most, and returns whether no line will be added any more.
        clock: seconds that never run backwards.
    """
    state = load_or_create_state(run, name)
    with _time_limit(timeout_s):
        tracker = open_tracker(state)
    state = replace(state, tracker_id=tracker.tracker_id, place=tracker.place, problem="")
    write_state(run, name, state, durable=True)
    sent = state.sure_bytes
    # When the tracker took the lines up to each offset.
    taken: deque[tuple[float, int]] = deque()
    while True:
        was_over = is_over(0.0)
        lines, end = read_new_lines(run.metrics, sent)
        for start in range(0, len(lines), _MOST_LINES):
            with _time_limit(timeout_s):
                tracker.log(lines[start : start + _MOST_LINES])
        if end > sent:
            taken.append((clock(), end))
        sure = state.sure_bytes
        while taken and taken[0][0] <= clock() - tracker.settle_s:
            sure = taken.popleft()[1]
        if sure > state.sure_bytes:
            state = replace(state, sure_bytes=sure)
            write_state(run, name, state)
        if end == sent:
            if was_over:
                break
            is_over(_POLL_S)
        sent = end
    with _time_limit(timeout_s):
        tracker.close(run_outcome(run))
    write_state(run, name, replace(state, sure_bytes=sent))


def run_outcome(run: RunDirectory) -> Outcome:
    """Returns the state of a run for its trackers: finished, failed, or to be continued."""
    if run.result.exists():
        return "finished"
    for newest in read_ledger(run)[-1:]:
        if newest.action is Action.STOP and newest.reason in (Reason.FAILED, Reason.CANCELLED):
            return "failed"
    return "paused"


def read_state(run: RunDirectory, name: str) -> TrackerState | None:
    """Returns what is known of a tracker, None where nothing was ever sent to it."""
    return read_record(run.trackers / f"{name}.json", TrackerState)


def write_state(run: RunDirectory, name: str, state: TrackerState, *, durable: bool = False) -> None:
    """Replaces what is known of a tracker."""
    write_record(run.trackers / f"{name}.json", state, durable=durable)


def load_or_create_state(run: RunDirectory, name: str) -> TrackerState:
    """Returns what is known of a tracker; chooses its key, durably, where nothing is."""
    state = read_state(run, name)
    if state is None:
        make_private(run.trackers)
        fsync_directory(run.path)
        state = TrackerState(key=f"{run.run_id}-{secrets.token_hex(3)}")
        write_state(run, name, state, durable=True)
    # The file may be shorter than what was sent, in a run directory that was restored from a copy.
    return state if state.sure_bytes <= size_of(run.metrics) else replace(state, sure_bytes=0)


def read_new_lines(path: Path, offset: int) -> tuple[Sequence[Line], int]:
    """Returns whole lines of metrics behind an offset, and the offset behind them; a part of a file at a time.

    Args:
        path: a metrics.jsonl; an absent one has no lines.
        offset: bytes that are known already.
    """
    try:
        with open(open_to_read(path), "rb") as file:  # noqa: PTH123  # a descriptor
            file.seek(offset)
            # To the end of the last line: one alone may be longer than a part.
            data = file.read(_CHUNK_BYTES) + file.readline()
    except FileNotFoundError:
        return [], offset
    whole_lines = data[: data.rfind(b"\n") + 1]
    lines = [line for line in parse_lines(whole_lines.splitlines()) if isinstance(line.get("step"), int)]
    return lines, offset + len(whole_lines)


def count_unsent(run: RunDirectory, name: str) -> int:
    """Returns how many lines a tracker has not taken for sure; while it has the run open, it may have taken more."""
    state = read_state(run, name)
    offset = 0 if state is None else state.sure_bytes
    count = 0
    while True:
        lines, end = read_new_lines(run.metrics, offset)
        if end == offset:
            return count
        offset = end
        count = count + len(lines)


def explain_exit(run: RunDirectory, name: str, code: int, *, timeout_s: float) -> str:
    """Returns why a process that followed a run for a tracker failed.

    Args:
        run: the run.
        name: of the tracker.
        code: its return code, negative for a signal.
        timeout_s: longest that a call of the tracker was to take.
    """
    if code == -signal.SIGALRM:
        return f"it did not answer within {timeout_s:g} s"
    state = read_state(run, name)
    return state.problem if state is not None and state.problem else f"its process ended with code {code}"


def _describe(run: RunDirectory, state: TrackerState) -> TrackedRun:
    provenance = read_json(run.provenance) or {}
    sweep = sweep_of(run)
    facts = {"run": str(run.path), "commit": provenance.get("git_commit"), "user": provenance.get("user")}
    return TrackedRun(
        run=run,
        key=state.key,
        tracker_id=state.tracker_id,
        config=yaml.safe_load(read_text(run.config)),
        facts={name: str(value) for name, value in facts.items() if value},
        group=None if sweep is None else sweep.sweep_id,
    )


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends this process by SIGALRM where the body takes longer."""
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


_POLL_S = 0.5
_CLOSING_POLL_S = 0.1
_SHORTEST_TRY_S = 2.0
_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 600.0
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
        self._run = run
        self._command = command
        self._env = env
        self._say = say
        self._timeout_s = track.timeout_s
        self._first_pause_s = first_pause_s
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
        reported: set[str] = set()
        pauses = self._pauses_s()
        is_last_try = False
        while True:
            try:
                code = self._run_process(name)
                problem = "" if code is None else explain_exit(self._run, name, code, timeout_s=self._timeout_s)
            except Exception as err:
                # A full disk or a torn file: the run has problems of its own then, and trackers add none.
                code = EXIT_FAILURE
                problem = f"cannot be started: {err}"
            is_closing = self._closing.is_set()
            if code is None or (code == EXIT_DONE and is_closing):
                break
            if problem not in reported and not is_closing:
                reported.add(problem)
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
        end_info = None
        # The process is not reaped yet: nobody else gets its id until its group is killed.
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            while True:
                end_info = os.waitid(os.P_PID, process.pid, peek)
                if end_info is not None or time.monotonic() >= self._deadline:
                    break
                self._report_place(name)
                if self._closing.wait(_POLL_S):
                    time.sleep(_CLOSING_POLL_S)
        finally:
            if end_info is None or end_info.si_status != 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
        return None if end_info is None else process.returncode

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
