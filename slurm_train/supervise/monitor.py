"""Periodic work of the supervisor while it waits for the ranks; errors are caught, and stuck tasks are reported.

Each task has its own thread, so a task that waits for Slurm or for a file server does not delay the others. An error of
a task is printed once per kind, and the task runs again at its next time. The thread that waits for the ranks calls
`check` about once a second: it restarts the thread of a task if that thread has died, and prints which task is stuck.

The tasks:

- the hang watchdog kills ranks that make no progress. It runs outside of the ranks, so it works also if a rank is
  stopped or blocked in a driver; a stopped rank does not react to TERM either
- the search for stragglers changes nothing about the run
- the notice of the job's end for the ranks: the warning before the limit is fixed at submission, and scripts that were
  typed by hand have none
- the preflight's findings for the batch log
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from slurm_train.code.provenance import record_environment
from slurm_train.code.snapshot import MOST_CHANGES_SHOWN
from slurm_train.config.parallel import solve_layout
from slurm_train.config.schema import ParallelSection, RunConfig
from slurm_train.config.secrets import redact
from slurm_train.errors import EXIT_FAILURE, ClusterError
from slurm_train.formatting import shorten
from slurm_train.rundir.attempts import newest_round, read_round
from slurm_train.rundir.events import FailureMark, Finding, append_event, findings_of, leave_mark, read_preflight
from slurm_train.rundir.files import read_tail, write_record
from slurm_train.rundir.heartbeat import NOT_WATCHED, Beat, Limits, limits_of, note_oldest, read_beats
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.signs import Remarks, Signs, note_remarks, read_group, read_signs
from slurm_train.rundir.timing import Notice, append_window
from slurm_train.status.failure import error_at_end
from slurm_train.supervise.hang import Flights, Hang, Observer, read_flights
from slurm_train.supervise.silence import apart_sentence, explain, idle_sentence, is_evident
from slurm_train.supervise.stragglers import Judge, WindowCutter
from slurm_train.trust import read_bytes, read_text

T = TypeVar("T")
_STUCK_AFTER_S = 90.0
_LOG_BYTES = 1 << 16
_LONGEST_QUOTE = 200
_END_WITHIN_S = 10.0
_STOPPED_AFTER_S = 5.0


def say(text: str) -> None:
    """Prints a line for the person to stderr (batch.log in a job); if the log is full, only the line is lost."""
    try:
        print(f"slurm_train: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # The unwritten text stays in the buffer, and would make the exit code 120 at the end.
        with contextlib.suppress(OSError):
            sys.stderr = open(os.dup(2), "w", encoding="utf-8", errors="replace")  # noqa: PTH123, SIM115  # a descriptor


class BestEffort:
    """Carries out reads and writes that a run can do without.

    Between the end of the ranks and the requeue nothing may raise, and nothing may wait for a file server for ever.
    Work that does not return in time stays in its thread. So only reads are allowed, and writes that do no harm when
    they are carried out arbitrarily late (a line of the ledger).

    Args:
        within_s: seconds for all reads and writes together; each has half a second at least.
    """

    def __init__(self, *, within_s: float = 30.0) -> None:
        self._deadline_s = time.monotonic() + within_s

    def __call__(self, subject: str, work: Callable[[], T], default: T, *, asks_slurm: bool = False) -> T:
        """Returns the result of the work, `default` where it raises or does not return in time.

        Args:
            subject: what is read or written, for the message about a failure, e.g. "the ledger".
            work: the read or write; an exception of it is printed.
            default: the result if the work fails.
            asks_slurm: whether it calls Slurm's commands; these have their own time limits, so they are waited for.
        """
        results: list[T] = []
        errors: list[Exception] = []

        def attempt() -> None:
            try:
                results.append(work())
            except Exception as err:  # a broken line, a full disk, a stale handle: nothing here is worth the run
                errors.append(err)

        if asks_slurm:
            attempt()
        else:
            thread = threading.Thread(target=attempt, daemon=True)
            thread.start()
            thread.join(max(self._deadline_s - time.monotonic(), 0.5))
        if results:
            return results[0]
        reason = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "the file system does not answer"
        say(f"{subject}: {reason}; continuing without it")
        return default


class Task:
    """Work that is done every few seconds while the ranks run."""

    name = ""
    """For messages, e.g. "the hang watchdog"."""
    every_s = 1.0
    """Pause between two looks."""

    def look(self) -> None:
        """Does the work once."""
        raise NotImplementedError

    def end(self) -> None:
        """Called instead of `look` when the ranks have ended."""


class CheckedClock:
    """A clock that stops while `tick` is not called, as in a suspended job, whose ranks are stopped as well.

    Args:
        monotonic: seconds that go on whatever happens to the process.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._away_s = 0.0
        self._ticked_s = monotonic()

    def tick(self) -> None:
        """Records that this process runs; called about once a second."""
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
    look_began_s: float | None = None
    """When the present look began; None between two looks."""
    reported: set[str] = field(default_factory=set)
    """Kinds of errors that were printed, and "stuck"."""


class Monitor:
    """The tasks of one attempt; use it as a context manager around the wait for the ranks.

    Args:
        say: prints a line for the person; it may be slow.
        stuck_after_s: a look that takes longer is reported as stuck.
    """

    def __init__(self, *, say: Callable[[str], None] = say, stuck_after_s: float = _STUCK_AFTER_S) -> None:
        self.clock = CheckedClock()
        """For tasks that count how long the ranks make no progress."""
        self._say = say
        self._stuck_after_s = stuck_after_s
        self._workers: list[_Worker] = []
        self._ended = threading.Event()

    def add(self, task: Task) -> None:
        """Adds a task, before the context is entered."""
        self._workers.append(_Worker(task))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the tasks while the body waits for the ranks; at the end all tasks together get some seconds."""
        self.clock.tick()
        for worker in self._workers:
            self._start(worker)
        try:
            yield
        finally:
            self._ended.set()
            deadline = time.monotonic() + _END_WITHIN_S
            for worker in self._workers:
                if worker.thread is not None:
                    worker.thread.join(max(0.0, deadline - time.monotonic()))
                    if worker.thread.is_alive():
                        self._say_apart(f"{worker.task.name} did not end in time and is abandoned")

    def check(self) -> None:
        """Checks the tasks; called about once a second by the thread that waits for the ranks. Never waits."""
        self.clock.tick()
        for worker in self._workers:
            if worker.thread is not None and not worker.thread.is_alive():
                self._say_apart(f"{worker.task.name} had died and is started again")
                self._start(worker)
            look_began_s = worker.look_began_s
            if look_began_s is None or "stuck" in worker.reported:
                continue
            if time.monotonic() - look_began_s > self._stuck_after_s:
                worker.reported.add("stuck")
                self._say_apart(
                    f"{worker.task.name} has waited for {self._stuck_after_s:.0f} s for a file system or for Slurm, "
                    "and goes on when it answers"
                )

    def _start(self, worker: _Worker) -> None:
        worker.thread = threading.Thread(target=self._work, args=(worker,), name=worker.task.name, daemon=True)
        try:
            worker.thread.start()
        except RuntimeError as err:
            # There are too many threads now; `check` tries again.
            self._say(f"{worker.task.name} could not be started: {err}")

    def _work(self, worker: _Worker) -> None:
        while not self._ended.wait(worker.task.every_s):
            self._guarded(worker, worker.task.look)
        self._guarded(worker, worker.task.end)

    def _guarded(self, worker: _Worker, work: Callable[[], None]) -> None:
        worker.look_began_s = time.monotonic()
        try:
            work()
        except Exception as err:  # of any class: the task must run again at its next time
            kind = f"{type(err).__name__} {getattr(err, 'errno', '')}"
            if kind not in worker.reported:
                worker.reported.add(kind)
                self._say(f"{worker.task.name}: {type(err).__name__}: {err}; it goes on")
        finally:
            worker.look_began_s = None

    def _say_apart(self, text: str) -> None:
        # The log may be on the file system that does not answer.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._say, args=(text,), daemon=True).start()


EndRanks = Callable[[Mapping[int, Beat]], None]
"""Kills the ranks with these heartbeats; called again every few seconds until they have ended."""


def watch_ranks(
    run: RunDirectory,
    attempt: int,
    config: RunConfig,
    *,
    world_size: int,
    end_ranks: EndRanks,
    is_halted: Callable[[], bool] = lambda: False,
) -> Monitor:
    """Returns a monitor with what every launch needs: the hang watchdog and the search for stragglers.

    Args:
        run: the run.
        attempt: number of the attempt.
        config: which of them are wanted. A user's own program is watched from outside, and from its first report to
            the session on by its heartbeats.
        world_size: ranks.
        end_ranks: kills them.
        is_halted: see `HangWatchdog`.
    """
    monitor = Monitor()
    limits = limits_of(config)
    if limits is not None:
        for kind in (HangWatchdog,) if config.trains else (HangWatchdog, SilenceWatchdog):
            dog = kind(
                run,
                attempt,
                limits,
                world_size=world_size,
                end_ranks=end_ranks,
                clock=monitor.clock,
                is_halted=is_halted,
            )
            monitor.add(dog)
    if config.health.pace_every_steps is not None:
        excess = config.health.straggler_excess
        # How a user's own program cuts its model is not known here.
        parallel = config.parallel if config.trains else ParallelSection(dp_shard=1)
        monitor.add(StragglerSearch(run, attempt, excess=excess, world_size=world_size, parallel=parallel))
    return monitor


class _RankTask(Task):
    """A task about the ranks of a step; torchrun may restart them as another attempt of another size."""

    def __init__(self, run: RunDirectory, attempt: int, world_size: int) -> None:
        self._run = run
        self._first_attempt = attempt
        self._attempt = attempt
        self.begin(world_size)

    def begin(self, world_size: int) -> None:
        """Starts with new ranks and drops all that is known of earlier ones; called for each attempt."""
        raise NotImplementedError

    def follow_restarts(self) -> None:
        """Calls `begin` if torchrun has restarted the ranks."""
        newest = newest_round(self._run, self._first_attempt)
        if newest == self._attempt:
            return
        restart = read_round(self._run, newest)
        if restart is not None:
            self._attempt = newest
            self.begin(restart.world_size)


class HangWatchdog(_RankTask):
    """Ends an attempt's ranks when they hang, also if the record of the hang cannot be written.

    Args:
        run: the run.
        attempt: number of the attempt.
        limits: how long ranks may make no progress.
        world_size: ranks.
        end_ranks: kills them.
        clock: seconds, not counting those in which the job is suspended.
        is_halted: asks whether somebody has stopped the ranks through Slurm, and not this process; they have the whole
            time-out again then.
        read: returns the newest heartbeats; it may take long.
    """

    name = "the hang watchdog"
    _KILL_AGAIN_S = 5.0
    _REPORT_WITHIN_S = 5.0
    """Longest time that the ranks are kept alive for the report; the promise is time-out + 10 s."""
    _STACKS_WITHIN_S = 2.0
    """Longest time that the report waits for missing stacks: the processes that write them may wait for a CPU."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        limits: Limits,
        *,
        world_size: int,
        end_ranks: EndRanks,
        clock: Callable[[], float],
        is_halted: Callable[[], bool] = lambda: False,
        read: Callable[[RunDirectory, int], Mapping[int, Beat]] = read_beats,
    ) -> None:
        self.every_s = min(max(limits.steady_s / 30, 0.2), 3.0)
        self._limits = limits
        self._end_ranks = end_ranks
        self._clock = clock
        self._is_halted = is_halted
        self._read = read
        self._report: threading.Thread | None = None
        self._again_s = 0.0
        super().__init__(run, attempt, world_size)

    def begin(self, world_size: int) -> None:
        """Watches new ranks from now on."""
        self._observer = Observer(self._limits, world_size=world_size)
        self._beats: dict[int, Beat] = {}
        """The newest readable heartbeat of each rank; they name the processes that are killed."""

    def look(self) -> None:
        """Reads the heartbeats; if the ranks hang, kills them, every few seconds until they have ended."""
        if self._report is None:
            # If restarts cannot be read now, the known ranks are watched further.
            with contextlib.suppress(Exception):
                self.follow_restarts()
            began_s = self._clock()
            beats = self._read(self._run, self._attempt)
            self._beats |= beats
            self._observer.look(beats, began_s=began_s, ended_s=self._clock())
            if not self.is_hung():
                return
            if self._is_halted():
                self._observer.restart()
                return
            # The report comes before the kill, since ranks that lose a peer leave marks, too. But a file system that
            # does not answer must not delay the kill.
            self._report = threading.Thread(target=self._write_report, daemon=True)
            self._report.start()
            self._report.join(self._REPORT_WITHIN_S)
        if time.monotonic() >= self._again_s:
            self._again_s = time.monotonic() + self._KILL_AGAIN_S
            try:
                self._end_ranks(self._beats)
            except ClusterError as err:
                say(f"the hung ranks could not be ended yet: {err.message}")

    def is_hung(self) -> bool:
        """Returns whether the ranks are to be ended."""
        return self._observer.is_hung()

    def explain(self, stacks: Mapping[int, str], flights: Mapping[int, Flights]) -> Hang:
        """Returns which ranks are behind, and where they are."""
        return self._observer.explain(stacks, flights)

    def end(self) -> None:
        """Waits a few seconds for a report that is still being written."""
        if self._report is not None:
            self._report.join(self._REPORT_WITHIN_S)

    def _left_by_ranks(self, *, within_s: float = 0.0) -> tuple[dict[int, str], dict[int, Flights]]:
        """Returns the stacks and the flight records of the ranks that have left some.

        Args:
            within_s: how long to wait for the stacks of all ranks; a stopped rank writes none.
        """
        run = self._run
        attempt = self._attempt
        deadline_s = time.monotonic() + within_s
        stacks: dict[int, str] = {}
        while True:
            for rank in self._beats.keys() - stacks.keys():
                with contextlib.suppress(OSError):
                    stack = read_text(run.stacks(attempt, rank), errors="replace")
                    # The file is there, empty, before it is written.
                    if stack:
                        stacks[rank] = stack
            if len(stacks) == len(self._beats) or time.monotonic() >= deadline_s:
                break
            time.sleep(0.1)
        flights: dict[int, Flights] = {}
        for rank in self._beats:
            with contextlib.suppress(OSError):
                flights[rank] = read_flights(read_bytes(run.flight(attempt, rank)))
        return stacks, flights

    def _write_report(self) -> None:
        run = self._run
        attempt = self._attempt
        hang = self.explain(*self._left_by_ranks(within_s=self._STACKS_WITHIN_S))
        with contextlib.suppress(OSError):
            hang = _with_words(hang, read_tail(run.rank_log(attempt, hang.ranks[0]), _LOG_BYTES))
        mark = FailureMark(rank=hang.ranks[0], host=hang.host, exit_code=EXIT_FAILURE, message=hang.activity)
        facts = {"ranks": list(hang.ranks), "host": hang.host, "step": hang.step, "phase": hang.phase}
        # The mark comes before the message: where rank 0 shares this process's log, a line counts as a sign of life of
        # that rank, and its watcher removes its stacks unless the hang is on record.
        self._write_down(lambda: leave_mark(run, attempt, mark))
        say(f"the ranks hang: {hang}; stacks in {run.attempt_logs(attempt)}; they are ended ({socket.gethostname()})")
        self._write_down(lambda: append_event(run, "hang", attempt=attempt, sentence=str(hang), **facts))

    def _write_down(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as err:
            say(f"the hang could not be written down: {err}")


def _with_words(hang: Hang, log: str) -> Hang:
    """Returns a hang with the error at the end of the rank's log.

    A thread or a process of the rank may have failed, and the rank waits for what that was to bring.
    """
    error = redact(error_at_end(log))[:_LONGEST_QUOTE]
    is_news = error and error not in hang.activity
    return replace(hang, activity=f"{hang.activity}; its log ends with {error}") if is_news else hang


class SilenceWatchdog(HangWatchdog):
    """Ends the ranks of a script or function if none shows a sign of life and one waits for a rank that cannot arrive.

    If a program was silent for some time and then continued, it may later be silent for twice that time. Ranks that are
    silent without proof that one waits for another are not ended; `status` reports them, and which GPUs are idle.
    """

    name = "the watch over the program"
    _IDLE_GPU_S = 1800.0

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        limits: Limits,
        *,
        world_size: int,
        end_ranks: EndRanks,
        clock: Callable[[], float],
        is_halted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            run,
            attempt,
            limits,
            world_size=world_size,
            end_ranks=end_ranks,
            clock=clock,
            is_halted=is_halted,
            read=self._read_signs,
        )

    def begin(self, world_size: int) -> None:
        """Watches new ranks from now on."""
        super().begin(world_size)
        self._signs: dict[int, Signs] = {}
        self._silent_s = 0.0
        self._longest_s = 0.0
        self._remarks = Remarks()
        self._reports = False
        """Whether all ranks report to the session: then they are watched by their heartbeats."""
        self._has_said = False
        """Whether the silence was printed: on this machine rank 0 may share its log, where a line is a sign of life."""
        self._has_said_apart = False

    def _read_signs(self, run: RunDirectory, attempt: int) -> Mapping[int, Beat]:
        """Returns the newest signs as heartbeats; marks of the program itself count as well."""
        signs = read_signs(run, attempt)
        marks = read_beats(run, attempt)
        self._signs |= signs
        self._reports = len(marks) >= len(signs) and all(mark.phase not in NOT_WATCHED for mark in marks.values())
        beats = {}
        for rank, rank_signs in signs.items():
            mark = marks.get(rank)
            beats[rank] = Beat(
                rank=rank,
                host=rank_signs.host,
                pid=rank_signs.pid,
                step_id=rank_signs.step_id,
                step=0 if mark is None else mark.step,
                # The end of a rank counts as progress, too.
                marks=rank_signs.signs + int(rank_signs.has_ended) + (0 if mark is None else mark.marks),
                phase="end" if rank_signs.has_ended else "script",
                settled=True,
                beats=rank_signs.looks,
            )
        return beats

    def is_hung(self) -> bool:
        """Returns whether all ranks are silent for too long, and one of them waits for a rank that cannot arrive."""
        self._remark(replace(self._remarks, apart=apart_sentence(self._signs, read_group(self._run, self._attempt))))
        silent_s = self._observer.silent_s()
        if silent_s is None or self._reports:
            return False
        if silent_s < self._silent_s:
            self._longest_s = max(self._longest_s, self._silent_s)
        self._silent_s = silent_s
        is_too_long = silent_s > max(self._limits.steady_s, 2 * self._longest_s)
        if is_too_long and is_evident(self._signs):
            return True
        silence = ""
        if is_too_long:
            silence = self._remarks.silence or f"{self.explain(*self._left_by_ranks())}; it may wait for something"
        idle_gpus = idle_sentence(self._signs, after_s=self._IDLE_GPU_S)
        self._remark(replace(self._remarks, silence=silence, idle_gpus=idle_gpus))
        return False

    def explain(self, stacks: Mapping[int, str], flights: Mapping[int, Flights]) -> Hang:
        """Returns for which ranks the others wait, and where they are."""
        return explain(self._signs, silent_s=self._silent_s, stacks=stacks, flights=flights)

    def _remark(self, remarks: Remarks) -> None:
        """Writes remarks for `status` if others are made than before; a longer time in one is no difference."""
        kinds = [name for name, text in asdict(remarks).items() if text]
        if kinds == [name for name, text in asdict(self._remarks).items() if text]:
            return
        self._remarks = remarks
        if remarks.silence and not self._has_said:
            self._has_said = True
            say(f"{remarks.silence}; nothing is ended")
        if remarks.apart and not self._has_said_apart:
            self._has_said_apart = True
            say(remarks.apart)
        with contextlib.suppress(OSError):
            note_remarks(self._run, self._attempt, remarks)


class StragglerSearch(_RankTask):
    """Compares the ranks' heartbeats, window by window, and reports once which ranks delay the others.

    The ranks spend time on their own sampling only. All heartbeats are read here anyway, so this task also records the
    oldest one for `status`.

    Args:
        run: the run.
        attempt: number of the attempt.
        excess: see `Judge`.
        world_size: ranks; a single rank waits for no other.
        parallel: how they cut the model.
        first_window_s: length of the first window; later ones grow.
    """

    name = "the search for stragglers"
    every_s = 2.0
    _NOTE_EVERY_S = 5.0

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        *,
        excess: float,
        world_size: int,
        parallel: ParallelSection,
        first_window_s: float = 3.0,
    ) -> None:
        self._excess = excess
        self._first_window_s = first_window_s
        self._parallel = parallel
        self._reported: set[tuple[str, tuple[int, ...]]] = set()
        self._note_s = 0.0
        super().__init__(run, attempt, world_size)

    def begin(self, world_size: int) -> None:
        """Begins the first window of new ranks."""
        # A line has some 50 bytes per rank: a thousand ranks get one in eight minutes.
        longest_s = 60.0 * max(1.0, world_size / 128)
        layout = solve_layout(self._parallel, world_size=world_size)
        # Stages of a pipeline and parts of a sequence have work of different sizes.
        alike = None if layout.is_replicated else list(layout.groups(("dp_replicate", "dp_shard", "tp")))
        self._judge = Judge(excess=self._excess, alike=alike)
        self._cutter = WindowCutter(
            self._attempt, world_size=world_size, first_s=self._first_window_s, longest_s=longest_s
        )

    def look(self) -> None:
        """Reads the heartbeats; a window that is full is judged and written."""
        self.follow_restarts()
        beats = read_beats(self._run, self._attempt)
        if time.monotonic() >= self._note_s:
            self._note_s = time.monotonic() + self._NOTE_EVERY_S
            # This is not done by the hang watchdog, which must not write while it watches: a write may wait for a file
            # server for ever.
            with contextlib.suppress(OSError):
                note_oldest(self._run, self._attempt, beats)
        window = self._cutter.look(beats, time.time())
        if window is None:
            return
        judged = self._judge.take(window)
        append_window(self._run, judged)
        for finding in judged.findings:
            if (finding.kind, finding.ranks) in self._reported:
                continue
            self._reported.add((finding.kind, finding.ranks))
            with contextlib.suppress(OSError):
                append_event(self._run, "slow", attempt=self._attempt, **asdict(finding))
            say(f"{finding.sentence}; {finding.advice}")

    def end(self) -> None:
        """Reads the last heartbeats of the ranks."""
        self.look()
        last_window = self._cutter.last_window()
        if last_window is not None:
            # It is shorter than the others, so nothing is concluded from it.
            append_window(self._run, last_window)


class NoticeKeeper(Task):
    """Asks Slurm when the job will be ended, and writes that time down for the ranks.

    A limit that was extended, or moved by a suspension, is noticed here. Slurm is asked once in ten minutes, and once a
    minute when the end is near.

    Args:
        run: the run.
        attempt: number of the attempt.
        ask: asks Slurm; raises ClusterError where it does not answer.
    """

    name = "the notice of the job's end"
    every_s = 2.0
    _FAR_S = 600.0
    _NEAR_S = 60.0
    _IS_NEAR_S = 1200.0
    _ASK_AGAIN_S = 20.0

    def __init__(self, run: RunDirectory, attempt: int, *, ask: Callable[[], Notice]) -> None:
        self._run = run
        self._first_attempt = attempt
        self._written_for = attempt
        self._ask = ask
        self._newest_notice: Notice | None = None
        self._due_s = time.monotonic()
        self._looked_s = self._due_s

    def look(self) -> None:
        """Asks Slurm where that is due, and writes what has changed."""
        now_s = time.monotonic()
        # A long pause means that the job, with this process, was suspended; then the limit has moved.
        if now_s >= self._due_s or now_s - self._looked_s > 5 * self.every_s:
            self._due_s = now_s + self._ASK_AGAIN_S
            # Until Slurm answers, the notice before stays valid.
            with contextlib.suppress(ClusterError):
                notice = self._ask()
                if notice != self._newest_notice:
                    write_record(self._run.notice(self._written_for), notice)
                    self._newest_notice = notice
                is_near = notice.end_unix_s is not None and notice.end_unix_s - time.time() < self._IS_NEAR_S
                self._due_s = time.monotonic() + (self._NEAR_S if is_near else self._FAR_S)
        self._looked_s = time.monotonic()
        if self._newest_notice is None:
            return
        newest = newest_round(self._run, self._first_attempt)
        if newest != self._written_for:
            # torchrun has restarted the ranks as another attempt, whose folder may not be there yet.
            write_record(self._run.notice(newest), self._newest_notice)
            self._written_for = newest


class FindingsRelay(Task):
    """Prints each of the preflight's findings once, as soon as rank 0 has written it down.

    Args:
        run: the run.
        attempt: number of the attempt.
        say: prints a line.
    """

    name = "the preflight's findings"

    def __init__(self, run: RunDirectory, attempt: int, *, say: Callable[[str], None] = say) -> None:
        self._run = run
        self._attempt = attempt
        self._say = say
        self._printed: set[Finding] = set()

    def look(self) -> None:
        """Reads the record."""
        for finding in findings_of(read_preflight(self._run, self._attempt)):
            if finding not in self._printed:
                self._printed.add(finding)
                self._say(finding.line)

    end = look


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
