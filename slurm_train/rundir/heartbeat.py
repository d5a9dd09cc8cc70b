"""Heartbeats: what each rank is doing, in a small file of its node that anybody can read while the rank hangs.

The loop only sets three fields (0.1 us); a thread writes them twice a second. So a rank that waits in a collective
still beats, and one that was stopped, or whose interpreter is blocked, does not: the two look different from outside.
A rank that has made no progress for long writes down where its threads are. The heartbeat carries the sums of the
rank's pace: in synchronous training all ranks take the same time for a step, and what tells them apart is how much of
it was their own work and how much they waited for the others' gradients. Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurm_train.rundir.files import (
    create_empty,
    listed,
    make_folder,
    open_file,
    read_parts,
    read_record,
    write_part,
    write_record,
)
from slurm_train.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from slurm_train.config.schema import RunConfig

_LOOK_AFTER_S = 0.25
# Shorter stops are no more than a slow step.
_LEAST_AWAY_S = 2.0
_HANDLER_S = 0.02


class AwakeClock:
    """Calling it gives seconds that never run backwards; those in which the process was stopped are left out.

    Args:
        was_continued: whether SIGCONT came since the last call; without it no time is left out.
        monotonic: seconds that go on whatever happens to the process.
    """

    def __init__(
        self, *, was_continued: Callable[[], bool] = lambda: False, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.away_s = 0.0
        """Seconds that the process was stopped for, as far as noticed."""
        self._was_continued = was_continued
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._last = monotonic()

    def __call__(self) -> float:
        """Returns the time; must be called at least every second or two, or busy time looks like a stop."""
        with self._lock:
            now = self._monotonic()
            gap_s = now - self._last
            self._last = now
            # SIGCONT also comes with every TERM of Slurm, without a stop.
            if gap_s > _LOOK_AFTER_S and self._was_stopped(gap_s):
                self.away_s += gap_s
            return now - self.away_s

    def _was_stopped(self, gap_s: float) -> bool:
        was_continued = self._was_continued()
        if gap_s <= _LEAST_AWAY_S:
            return False
        if not was_continued:
            # A handler in another thread gets a moment.
            time.sleep(_HANDLER_S)
            was_continued = self._was_continued()
        return was_continued


class Pace(NamedTuple):
    """Sums over the sampled steps of one rank in one attempt, in seconds."""

    samples: int = 0
    own_s: float = 0.0
    """Everything but the wait for others: data, forward, backward, update."""
    own_squared: float = 0.0
    own_by_wait: float = 0.0
    """Own time times wait: separates a rank's uneven batches from steps that are long for all."""
    wait_s: float = 0.0
    """From the last gradient of its own until the reduced ones were there."""
    data_s: float = 0.0
    """The part of the own time that waited for data."""

    def plus(self, *, own_s: float, wait_s: float, data_s: float) -> Pace:
        """Returns the sums with one more step in them."""
        step = (1, own_s, own_s * own_s, own_s * wait_s, wait_s, data_s)
        return Pace(*map(operator.add, self, step))

    def since(self, earlier: Pace) -> Pace:
        """Returns the sums of the steps after an earlier reading."""
        return Pace(*map(operator.sub, self, earlier))

    @property
    def uneven_s(self) -> float:
        """How much the own time of a step differs from step to step for this rank alone (a standard deviation).

        Where a step is long for this rank only, it waits less in it; where it is long for all, it waits as ever. So
        the part of the spread that the waits follow is its own.
        """
        if self.samples < 2:
            return 0.0
        mean_own = self.own_s / self.samples
        mean_wait = self.wait_s / self.samples
        spread = self.own_squared / self.samples - mean_own * mean_own
        together = self.own_by_wait / self.samples - mean_own * mean_wait
        return math.sqrt(min(max(-together, 0.0), max(spread, 0.0)))


NOT_WATCHED = ("end", "joined")
"""Phases without progress: after the last save; of a user's own program that has not begun to report its steps."""
_EVERY_S = 0.5
_FLUSH_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One reading of a rank's heartbeat."""

    rank: int
    host: str
    pid: int
    step_id: str = ""
    """Slurm's id of the step, e.g. "123.0"; "" without Slurm."""
    step: int
    """The optimizer step that the rank is at."""
    marks: int
    """Counts every change of phase: while it does not change, the rank makes no progress."""
    phase: str
    """"start", "group" (NCCL or gloo connect the ranks), "data", "step", "evaluate", "gather" (the exchange after an
    evaluation), "save", "end": everything after the last save; or "joined": a user's own program has told nothing but
    that it is there."""
    settled: bool
    """Whether the rank has done its first step."""
    beats: int
    """Counts the writings: while it does not change, the process does not run at all."""
    written_unix_s: float = 0.0
    """When it was written, by the clock of the rank's node: for people, since clocks differ."""
    pace: Pace = field(default_factory=Pace)
    """What its sampled steps were spent on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may make no progress, in seconds."""

    start_s: float
    """Until the first step is done (rendezvous, compile)."""
    steady_s: float
    """From then on."""
    save_s: float = 0.0
    """In a save, whose bytes may take long without any other progress."""

    def of(self, *, settled: bool, phase: str = "step") -> float:
        """Returns the limit of a phase before or after the first step; going back to a checkpoint is a start."""
        starts = not settled or phase == "start"
        return max(self.steady_s, self.start_s if starts else 0.0, self.save_s if phase == "save" else 0.0)


def limits_of(config: RunConfig) -> Limits | None:
    """Returns how long ranks may make no progress; None if there is no watchdog."""
    if config.health.hang_timeout_s is None:
        return None
    return Limits(config.train.start_timeout_s, config.health.hang_timeout_s, config.checkpoint.save_timeout_s)


class Heartbeat:
    """This rank's heartbeat; until `start` it only takes marks.

    Args:
        clock: this process's; once started, the heartbeat asks it often enough.
    """

    def __init__(self, *, clock: AwakeClock | None = None) -> None:
        self.clock = AwakeClock() if clock is None else clock
        self.step = 0
        self.phase = "start"
        self.marks = 0
        self.settled = False
        self.periodic_work: Callable[[], None] | None = None
        """Called after each beat, in the heartbeat's thread: what else is to be written now and then."""
        self.pace = Pace()
        """What the sampled steps were spent on; a new value each time, so the thread never sees half of one."""
        self.record: Callable[[], bytes | None] | None = None
        """Gives what is known of the newest collectives; asked by the heartbeat's thread in a long stall."""
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, phase: str) -> None:
        """Records what this rank does from now on; the same phase again is progress, too."""
        self.phase = phase
        self.marks += 1

    def start(
        self,
        run: RunDirectory,
        attempt: int,
        *,
        rank: int,
        host: str,
        limits: Limits | None,
        step_id: str = "",
        local_rank: int | None = None,
    ) -> None:
        """Begins to write; called before anything slow.

        Args:
            run: the run.
            attempt: number of the attempt.
            rank: this rank.
            host: its node.
            limits: after nine tenths of them the stacks are written down; None: never.
            step_id: Slurm's id of the step, e.g. "123.0"; "" without Slurm.
            local_rank: its position on the node; None: that of the only node, which is its rank.
        """
        facts = {"rank": rank, "host": host, "pid": os.getpid(), "step_id": step_id}
        part = rank if local_rank is None else local_rank
        path = run.heartbeats(attempt, rank - part)
        writer = _Writer(self, run, attempt, limits, facts, path=path, part=part)
        self._thread = threading.Thread(target=writer.run, args=(self._done,), name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the writing."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()


class _Writer:
    """Writes a heartbeat in a thread of its own, and the stacks of a rank that makes no progress."""

    def __init__(
        self,
        heart: Heartbeat,
        run: RunDirectory,
        attempt: int,
        limits: Limits | None,
        facts: dict[str, Any],
        *,
        path: Path,
        part: int,
    ) -> None:
        self._heart = heart
        self._limits = limits
        self._facts = facts
        self._stacks = run.stacks(attempt, facts["rank"])
        self._flight = run.flight(attempt, facts["rank"])
        self._main = threading.main_thread().ident or 0
        make_folder(path.parent, within=run.path)
        self._file = open_file(path, os.O_WRONLY | os.O_CREAT)
        self._part = part
        self._beats = 0
        now = heart.clock()
        self._last = now
        self._flushed = now
        # When the marks last changed, and how many there were then.
        self._since = now
        self._marks = -1
        self._has_dumped = False
        self._write()

    def run(self, done: threading.Event) -> None:
        """Writes until `done` is set; a file system that refuses costs the heartbeat, never the training."""
        while not done.wait(_EVERY_S):
            with contextlib.suppress(OSError):
                self._beat()
        with contextlib.suppress(OSError):
            self._beat()
        os.close(self._file)

    def _beat(self) -> None:
        now = self._heart.clock()
        self._beats += 1
        self._write()
        # A network file system keeps a file that stays open to itself for half a minute. One rank sends what all ranks
        # of the node have written; where it does not run, the others' records come after that time.
        if self._part == 0 and now - self._flushed > _FLUSH_EVERY_S:
            self._flushed = now
            os.fdatasync(self._file)
        self._look_at_own_progress(now)
        if self._heart.periodic_work is not None:
            self._heart.periodic_work()

    def _write(self) -> None:
        heart = self._heart
        beat = {
            **self._facts,
            "step": heart.step,
            "marks": heart.marks,
            "phase": heart.phase,
            "settled": heart.settled,
            "beats": self._beats,
            "written_unix_s": time.time(),
            "pace": heart.pace,
        }
        write_part(self._file, self._part, beat)

    def _look_at_own_progress(self, now: float) -> None:
        # Time in which the job was suspended is not on the clock; other long absences do not count either.
        was_away = now - self._last > 10 * _EVERY_S
        self._last = now
        if was_away or self._heart.marks != self._marks:
            if self._has_dumped:  # it went on after all: the stacks are no longer where its threads are
                self._stacks.unlink(missing_ok=True)
                self._flight.unlink(missing_ok=True)
            self._marks = self._heart.marks
            self._since = now
            self._has_dumped = False
            return
        if self._limits is None or self._has_dumped or self._heart.phase in NOT_WATCHED:
            return
        if now - self._since > 0.9 * self._limits.of(settled=self._heart.settled) - _EVERY_S:
            self._has_dumped = True
            create_empty(self._stacks)
            with self._stacks.open("w") as file:
                file.write(f"main thread {self._main:#018x}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            self._keep_record()

    def _keep_record(self) -> None:
        # After the stacks: whatever torch does now, those are written.
        try:
            record = None if self._heart.record is None else self._heart.record()
        except Exception:  # a private interface of torch; an autopsy without it is still one
            return
        if record is not None:
            create_empty(self._flight)
            self._flight.write_bytes(record)


def has_joined(run: RunDirectory, attempt: int) -> bool:
    """Returns whether ranks of an attempt have heartbeats: a user's own program has them from `session.join` on."""
    return any(re.fullmatch(r"heartbeats_\d+", path.name) for path in listed(run.attempt_logs(attempt)))


def read_beats(run: RunDirectory, attempt: int) -> dict[int, Beat]:
    """Returns the newest heartbeat of every rank that has one, by rank; one that cannot be read now is left out."""
    beats = {beat.rank: beat for beat in read_parts(run.attempt_logs(attempt), "heartbeats", Beat)}
    return dict(sorted(beats.items()))


# Below this, reading the nodes' files takes a person's `status` less than 50 ms at 1 ms each.
_MANY_NODES = 32
_NOTED_FOR_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Oldest:
    """What the supervisor leaves for `status`, which would have to read a file per node otherwise."""

    seen_unix_s: float
    """When the supervisor read the heartbeats."""
    beat: Beat


def oldest_of(beats: Mapping[int, Beat]) -> Beat | None:
    """Returns the oldest heartbeat of the ranks that are at work; where all have saved for the last time, of those."""
    # A rank that has saved for the last time stops beating while others may still be at it.
    at_work = [beat for beat in beats.values() if beat.phase != "end"]
    return min(at_work or beats.values(), key=lambda beat: beat.written_unix_s, default=None)


def note_oldest(run: RunDirectory, attempt: int, beats: Mapping[int, Beat]) -> None:
    """Writes the oldest heartbeat for `read_oldest`; nothing for few nodes, whose files are read as quickly.

    Raises:
        OSError: the file system refuses.
    """
    beat = oldest_of(beats)
    if beat is not None and len({beat.host for beat in beats.values()}) >= _MANY_NODES:
        write_record(run.oldest_heartbeat(attempt), _Oldest(seen_unix_s=time.time(), beat=beat))


def read_oldest(run: RunDirectory, attempt: int) -> Beat | None:
    """Returns the oldest heartbeat of the ranks that are at work, None where there is none.

    With many nodes it is the one that the supervisor has seen a few seconds ago.
    """
    with contextlib.suppress(OSError):
        noted = read_record(run.oldest_heartbeat(attempt), _Oldest)
        # Two nodes' clocks: where they differ by more, the nodes' files are read.
        if noted is not None and abs(time.time() - noted.seen_unix_s) < _NOTED_FOR_S:
            return noted.beat
    return oldest_of(read_beats(run, attempt))
