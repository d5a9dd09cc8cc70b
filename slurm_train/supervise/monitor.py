"""Periodic work of the supervisor while it waits for the ranks: guarded, and watched itself.

Each task has a thread of its own, so one that waits for Slurm or for a file server delays no other. What a task raises
is printed once per kind, and the task is run again at its next time. The thread that waits for the ranks calls `check`
about once a second: it starts a task's thread again that has died, and prints which task does not come back.

The tasks: the hang watchdog, which kills ranks that make no progress (it runs outside of them, so a rank that is
stopped or blocked in a driver cannot keep it from working, and what is stopped cannot answer TERM either); the search
for stragglers, which changes nothing about the run; the notice of the job's end for the ranks, since the warning before
the limit is fixed at submission and missing in scripts typed by hand; the preflight's findings for the batch log.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_FAILURE, ClusterError
from slurm_train.rundir.attempts import newest_round, read_round
from slurm_train.rundir.events import FailureMark, append_event, finding_lines, leave_mark, read_events, read_preflight
from slurm_train.rundir.heartbeat import Beat, Limits, read_beats
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.step_times import Finding, PaceWindow, append_window
from slurm_train.rundir.timing import Notice, write_notice
from slurm_train.supervise.hang import Flight, Observer, read_flight
from slurm_train.supervise.stragglers import Judge, WindowCutter

T = TypeVar("T")
_WITHIN_S = 30.0
_LEAST_S = 0.5


class BestEffort:
    """Carries out reads and writes that a run can do without.

    What does not come back is left behind in its thread: only reads, and writes that do no harm when they are carried
    out arbitrarily late (a line of the ledger).

    Args:
        say: prints a line for the person.
        within_s: seconds that all of them have together.
    """

    def __init__(self, say: Callable[[str], None], *, within_s: float = _WITHIN_S) -> None:
        self._say, self._deadline_s = say, time.monotonic() + within_s

    def __call__(self, what: str, work: Callable[[], T], default: T, *, asks_slurm: bool = False) -> T:
        """Returns what the work gives, `default` where it raises or does not come back in time.

        Args:
            what: what cannot be read or written then, e.g. "the ledger".
            work: whatever it raises is said.
            default: what is taken for granted then.
            asks_slurm: commands have time limits of their own, and are waited for.
        """
        found: list[T] = []
        failed: list[Exception] = []

        def attempt() -> None:
            try:
                found.append(work())
            except Exception as err:  # a broken line, a full disk, a stale handle: nothing here is worth the run
                failed.append(err)

        if asks_slurm:
            attempt()
        else:
            thread = threading.Thread(target=attempt, daemon=True)
            thread.start()
            thread.join(max(self._deadline_s - time.monotonic(), _LEAST_S))
        if found:
            return found[0]
        why = f"{type(failed[0]).__name__}: {failed[0]}" if failed else "the file system does not answer"
        self._say(f"{what}: {why}; the run goes on without")
        return default


def say(text: str) -> None:
    """Prints a line for the person to stderr (batch.log in a job); a log that is full costs the line, nothing else."""
    try:
        print(f"slurm_train: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # What could not be written stays in the buffer, and would turn the exit code into 120 at the end.
        with contextlib.suppress(OSError):
            sys.stderr = open(os.dup(2), "w", encoding="utf-8", errors="replace")  # noqa: PTH123, SIM115  # a descriptor


_STUCK_AFTER_S = 90.0
_END_WITHIN_S = 10.0
_STOPPED_AFTER_S = 5.0


def _nothing() -> None:
    """The last look of a task that needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to do every few seconds."""

    name: str
    """For messages, e.g. "the hang watchdog"."""
    every_s: float
    """Pause between two looks."""
    look: Callable[[], None]
    end: Callable[[], None] = _nothing
    """Called instead of `look` when the ranks have ended."""


class CheckedClock:
    """Seconds that stand still while nobody calls `tick`: a suspended job, whose ranks are stopped as well.

    Args:
        monotonic: seconds that go on whatever happens to the process.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._away_s = monotonic, 0.0
        self._ticked_s = monotonic()

    def tick(self) -> None:
        """Says that this process runs; called about once a second."""
        now_s = self._monotonic()
        self._away_s += max(0.0, now_s - self._ticked_s - _STOPPED_AFTER_S)
        self._ticked_s = now_s

    def __call__(self) -> float:
        """Returns the time."""
        return min(self._monotonic(), self._ticked_s + _STOPPED_AFTER_S) - self._away_s


@dataclass(slots=True)
class _Worker:
    """A task and its thread."""

    task: Task
    thread: threading.Thread | None = None
    begun_s: float | None = None
    """When the look under way began."""
    said: set[str] = field(default_factory=set)


class Monitor:
    """The tasks of one attempt; use it as a context manager around the wait for the ranks.

    Args:
        say: prints a line for the person; it may be slow.
        stuck_after_s: a look that takes longer is said to be stuck.
    """

    def __init__(self, *, say: Callable[[str], None] = say, stuck_after_s: float = _STUCK_AFTER_S) -> None:
        self.clock = CheckedClock()
        """For tasks that count how long the ranks stand still."""
        self._say, self._stuck_after_s = say, stuck_after_s
        self._workers: list[_Worker] = []
        self._done = threading.Event()

    def add(self, task: Task | None) -> None:
        """Adds a task, before the context is entered; None is no task."""
        if task is not None:
            self._workers.append(_Worker(task))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the tasks while the body waits for the ranks; their last looks have a few seconds together."""
        self.clock.tick()
        for worker in self._workers:
            self._start(worker)
        try:
            yield
        finally:
            self._done.set()
            deadline = time.monotonic() + _END_WITHIN_S
            for worker in self._workers:
                if worker.thread is not None:
                    worker.thread.join(max(0.0, deadline - time.monotonic()))
                    if worker.thread.is_alive():
                        self._say_apart(f"{worker.task.name} did not come to its end and is left behind")

    def check(self) -> None:
        """Looks after the tasks; called about once a second by the thread that waits for the ranks. Never waits."""
        self.clock.tick()
        for worker in self._workers:
            if worker.thread is not None and not worker.thread.is_alive():
                self._say_apart(f"{worker.task.name} had died and is started again")
                self._start(worker)
            begun_s = worker.begun_s
            if begun_s is not None and time.monotonic() - begun_s > self._stuck_after_s and "stuck" not in worker.said:
                worker.said.add("stuck")
                self._say_apart(
                    f"{worker.task.name} waits since {self._stuck_after_s:.0f} s for a file system or for Slurm, "
                    "and goes on when it answers"
                )

    def _start(self, worker: _Worker) -> None:
        worker.thread = threading.Thread(target=self._work, args=(worker,), name=worker.task.name, daemon=True)
        try:
            worker.thread.start()
        except RuntimeError as err:
            # No room for a thread now; `check` tries again.
            self._say(f"{worker.task.name} could not be started: {err}")

    def _work(self, worker: _Worker) -> None:
        while not self._done.wait(worker.task.every_s):
            self._guarded(worker, worker.task.look)
        self._guarded(worker, worker.task.end)

    def _guarded(self, worker: _Worker, work: Callable[[], None]) -> None:
        worker.begun_s = time.monotonic()
        try:
            work()
        except Exception as err:  # whatever it is, the task is needed again in a moment
            kind = f"{type(err).__name__} {getattr(err, 'errno', '')}"
            if kind not in worker.said:
                worker.said.add(kind)
                self._say(f"{worker.task.name}: {type(err).__name__}: {err}; it goes on")
        finally:
            worker.begun_s = None

    def _say_apart(self, text: str) -> None:
        # The log may be on the file system that does not answer.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._say, args=(text,), daemon=True).start()


EndRanks = Callable[[Mapping[int, Beat]], None]
"""Kills the ranks, whose heartbeats are given; called again every few seconds until they have ended."""
_KILL_AGAIN_S = 5.0
_REPORT_WITHIN_S = 5.0
"""So long the end of the ranks waits for the report; the promise is time-out + 10 s."""


def limits_of(config: RunConfig) -> Limits | None:
    """Returns how long ranks may stand still; None where nobody watches, as with a user's own function or script."""
    if config.health.hang_timeout_s is None or not config.trains:
        return None
    return Limits(config.train.start_timeout_s, config.health.hang_timeout_s)


def hang_watchdog(
    run: RunDirectory,
    attempt: int,
    *,
    limits: Limits | None,
    world_size: int,
    end_ranks: EndRanks,
    clock: Callable[[], float],
    read: Callable[[RunDirectory, int], Mapping[int, Beat]] = read_beats,
) -> Task | None:
    """Returns the task that ends an attempt's ranks when they hang; None where nobody watches.

    Args:
        run: the run.
        attempt: number of the attempt.
        limits: how long ranks may stand still; None: nothing is watched.
        world_size: ranks.
        end_ranks: kills them.
        clock: seconds that stand still while the job is suspended.
        read: gives the newest heartbeats; it may take long.
    """
    if limits is None:
        return None
    dog = _Watchdog(run, attempt, limits, world_size, end_ranks, clock, read)
    every_s = min(max(limits.steady_s / 30, 0.2), 3.0)
    return Task(name="the hang watchdog", every_s=every_s, look=dog.look, end=dog.end)


def hang_of(run: RunDirectory, attempt: int) -> str:
    """Returns the sentence about an attempt that was ended as hung, "" for others."""
    found = [str(line.get("sentence", "")) for line in read_events(run, "hang") if line.get("attempt") == attempt]
    return found[-1] if found else ""


class _Watchdog:
    """The task's state."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        limits: Limits,
        world_size: int,
        end_ranks: EndRanks,
        clock: Callable[[], float],
        read: Callable[[RunDirectory, int], Mapping[int, Beat]],
    ) -> None:
        self._run, self._first, self._attempt, self._limits = run, attempt, attempt, limits
        self._end_ranks, self._clock, self._read = end_ranks, clock, read
        self._observer = Observer(limits, world_size=world_size)
        self._beats: dict[int, Beat] = {}
        """The newest heartbeat of each rank that could ever be read: what is killed is known from them."""
        self._report: threading.Thread | None = None
        self._again_s = 0.0

    def look(self) -> None:
        """Reads the heartbeats; ends the ranks once they are hung, again and again until they have ended."""
        if self._report is None:
            self._follow_restarts()
            began_s = self._clock()
            beats = self._read(self._run, self._attempt)
            self._beats |= beats
            self._observer.look(beats, began_s=began_s, ended_s=self._clock())
            if not self._observer.is_hung():
                return
            # Before the ranks die: those that lose a peer leave marks, too. But the ranks wait for no file system.
            self._report = threading.Thread(target=self._write_report, daemon=True)
            self._report.start()
            self._report.join(_REPORT_WITHIN_S)
        if time.monotonic() >= self._again_s:
            self._again_s = time.monotonic() + _KILL_AGAIN_S
            try:
                self._end_ranks(self._beats)
            except ClusterError as err:
                say(f"the hung ranks could not be ended yet: {err.message}")

    def end(self) -> None:
        """Lets a report that is still being written become whole, for a while."""
        if self._report is not None:
            self._report.join(_REPORT_WITHIN_S)

    def _follow_restarts(self) -> None:
        try:
            newest = newest_round(self._run, self._first)
            begun = read_round(self._run, newest) if newest != self._attempt else None
        except Exception:  # unreadable now: the ranks that are known are watched all the same
            return
        if begun is not None:
            # torchrun has started the ranks again.
            self._attempt, self._beats = newest, {}
            self._observer = Observer(self._limits, world_size=begun.world_size)

    def _write_report(self) -> None:
        run, attempt = self._run, self._attempt
        stacks, flights = _read_stacks(run, attempt, self._beats), _read_flights(run, attempt, self._beats)
        hang = self._observer.explain(stacks, flights)
        where = f"({socket.gethostname()})"
        say(f"the ranks hang: {hang}; stacks in {run.attempt_logs(attempt)}; they are ended {where}")
        facts = {"ranks": list(hang.ranks), "host": hang.host, "step": hang.step, "phase": hang.phase}
        mark = FailureMark(rank=hang.ranks[0], host=hang.host, exit_code=EXIT_FAILURE, message=hang.what)
        try:
            leave_mark(run, attempt, mark)
        except OSError as err:
            say(f"the hang could not be marked: {err}")
        try:
            append_event(run, "hang", attempt=attempt, sentence=str(hang), **facts)
        except OSError as err:
            say(f"the hang could not be written to the events: {err}")


def _read_stacks(run: RunDirectory, attempt: int, world: Mapping[int, Beat]) -> dict[int, str]:
    stacks = {}
    for rank in world:
        with contextlib.suppress(OSError):
            stacks[rank] = run.stacks(attempt, rank).read_text(encoding="utf-8", errors="replace")
    return stacks


def _read_flights(run: RunDirectory, attempt: int, world: Mapping[int, Beat]) -> dict[int, Flight]:
    flights: dict[int, Flight] = {}
    for rank in world:
        with contextlib.suppress(OSError):
            flight = read_flight(run.flight(attempt, rank).read_bytes())
            if flight is not None:
                flights[rank] = flight
    return flights


_LONGEST_WINDOW_S = 60.0
# A line has some 40 bytes per rank: a thousand ranks get one in eight minutes.
_RANKS_PER_LONGEST = 128


def straggler_watch(
    run: RunDirectory,
    attempt: int,
    *,
    config: RunConfig,
    world_size: int,
    look_every_s: float = 2.0,
    first_window_s: float = 3.0,
) -> Task | None:
    """Returns the task that looks for stragglers among an attempt's ranks; None where nothing is measured.

    Args:
        run: the run.
        attempt: number of the attempt.
        config: says whether and how; a user's own function or script measures nothing.
        world_size: ranks; one alone has nobody to wait for.
        look_every_s: seconds between looks at the heartbeats.
        first_window_s: length of the first window; later ones grow.
    """
    if config.health.pace_every_steps is None or not config.trains:
        return None

    def build_cutter(of_attempt: int, ranks: int) -> WindowCutter:
        longest_s = _LONGEST_WINDOW_S * max(1.0, ranks / _RANKS_PER_LONGEST)
        return WindowCutter(of_attempt, world_size=ranks, first_s=first_window_s, longest_s=longest_s)

    watch = _StragglerWatch(run, attempt, config.health.straggler_excess, build_cutter, world_size)
    return Task(name="the look for stragglers", every_s=look_every_s, look=watch.look, end=watch.end)


class _StragglerWatch:
    """The task's state."""

    def __init__(
        self, run: RunDirectory, attempt: int, excess: float, build: Callable[[int, int], WindowCutter], world_size: int
    ) -> None:
        self._run, self._first, self._attempt, self._build, self._excess = run, attempt, attempt, build, excess
        self._cutter, self._judge = build(attempt, world_size), Judge(excess=excess)
        self._said: set[tuple[str, tuple[int, ...]]] = set()

    def end(self) -> None:
        """Takes what the ranks have left."""
        self.look()
        if (rest := self._cutter.rest()) is not None:
            # What is left is shorter than a window, so nothing is concluded from it.
            append_window(self._run, rest)

    def look(self) -> None:
        """Reads the heartbeats."""
        newest = newest_round(self._run, self._first)
        if newest != self._attempt and (begun := read_round(self._run, newest)) is not None:
            # torchrun has started the ranks again: other processes, and at times other numbers.
            self._attempt, self._judge = newest, Judge(excess=self._excess)
            self._cutter = self._build(newest, begun.world_size)
        self._take(self._cutter.look(read_beats(self._run, self._attempt), time.time()))

    def _take(self, window: PaceWindow | None) -> None:
        if window is None:
            return
        judged = self._judge.take(window)
        append_window(self._run, judged)
        for finding in judged.findings:
            if (finding.kind, finding.ranks) not in self._said:
                self._said.add((finding.kind, finding.ranks))
                self._say(finding)

    def _say(self, finding: Finding) -> None:
        facts: dict[str, Any] = {"kind": finding.kind, "ranks": list(finding.ranks), "hosts": list(finding.hosts)}
        facts |= {"factor": finding.factor, "lost_share": finding.lost_share}
        with contextlib.suppress(OSError):
            append_event(
                self._run, "slow", attempt=self._attempt, sentence=finding.sentence, advice=finding.advice, **facts
            )
        say(f"{finding.sentence}; {finding.advice}")


ReadNotice = Callable[[], Notice]
"""Asks Slurm; raises ClusterError where it does not answer."""
_NOTICE_EVERY_S = 2.0
_FAR_S, _NEAR_S = 600.0, 60.0
_IS_NEAR_S = 1200.0
_ASK_AGAIN_S = 20.0


def notice_keeper(run: RunDirectory, attempt: int, *, read: ReadNotice) -> Task:
    """Returns the task that keeps an attempt's notice up to date.

    Args:
        run: the run.
        attempt: number of the attempt.
        read: asks Slurm.
    """
    return Task(name="the notice of the job's end", every_s=_NOTICE_EVERY_S, look=_Keeper(run, attempt, read).look)


def next_look_s(notice: Notice, *, now_unix_s: float) -> float:
    """Returns the seconds after which Slurm is to be asked again."""
    if notice.end_unix_s is None:
        return _FAR_S
    return _NEAR_S if notice.end_unix_s - now_unix_s < _IS_NEAR_S else _FAR_S


class _Keeper:
    """The task's state."""

    def __init__(self, run: RunDirectory, attempt: int, read: ReadNotice) -> None:
        self._run, self._first, self._written_for, self._read = run, attempt, attempt, read
        self._known: Notice | None = None
        self._due_s = self._looked_s = time.monotonic()

    def look(self) -> None:
        """Asks Slurm where that is due, and writes what has changed."""
        now_s = time.monotonic()
        # After a suspension, of which this process was a part, the limit has moved.
        if now_s >= self._due_s or now_s - self._looked_s > 5 * _NOTICE_EVERY_S:
            self._due_s = now_s + _ASK_AGAIN_S
            # What was known stays true until somebody answers.
            with contextlib.suppress(ClusterError):
                found = self._read()
                if found != self._known:
                    write_notice(self._run, self._written_for, found)
                    self._known = found
                self._due_s = time.monotonic() + next_look_s(found, now_unix_s=time.time())
        self._looked_s = time.monotonic()
        if self._known is not None and (newest := newest_round(self._run, self._first)) != self._written_for:
            # torchrun has started the ranks again, as another attempt, whose folder may not be there yet.
            write_notice(self._run, newest, self._known)
            self._written_for = newest


_RELAY_EVERY_S = 1.0


def findings_relay(run: RunDirectory, attempt: int, *, say: Callable[[str], None]) -> Task:
    """Returns the task that says each finding of an attempt once.

    Args:
        run: the run.
        attempt: number of the attempt.
        say: gets a line.
    """
    said = set[str]()

    def look() -> None:
        for line in finding_lines(read_preflight(run, attempt)):
            if line not in said:
                said.add(line)
                say(line)

    return Task(name="the preflight's findings", every_s=_RELAY_EVERY_S, look=look, end=look)
