"""Periodic work of the supervisor while it waits for the ranks: guarded, and watched itself.

Each task has a thread of its own, so one that waits for Slurm or for a file server delays no other. What a task raises
is said once per kind, and the task is run again at its next time. The thread that waits for the ranks calls `check`
about once a second: it starts a task's thread again that has died, and says which task does not come back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slurm_train.requeue.best_effort import say

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
