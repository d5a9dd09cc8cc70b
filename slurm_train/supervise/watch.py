"""The watch over the ranks while the supervisor waits for them: a look a second, judges, and what they ask for.

A judge is given a `Look` and returns what is to be done, if anything. It reads no file and asks nobody, so the thread
that waits for the ranks asks all judges, and never waits itself: the end of the ranks and a signal are noticed whatever
a file server does. What may wait has threads: each kind of file is read by one, and what a judge asks for is done in
one. While that lasts its judge is not asked again, and the other judges are. Errors are printed once per kind, and what
has waited for long is printed once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.best_effort import say
from slurm_train.supervise.look import CheckedClock, LiveFiles, Look

# A little less than a second: whoever waits for the ranks comes by once a second.
_LOOK_EVERY_S = 0.9
_STUCK_AFTER_S = 90.0
_END_WITHIN_S = 10.0

Verdict = Callable[[], None]
"""Carries out what a judge asks for: to end the ranks, to stop them, or a remark. May wait for Slurm or for files."""


class Judge:
    """Concludes from what is seen of the ranks what is to be done."""

    name = ""
    """For messages, e.g. "the hang watchdog"."""

    def __call__(self, look: Look) -> Verdict | None:
        """Returns what is to be done now, None for nothing; neither reads nor waits."""
        raise NotImplementedError

    def last(self, look: Look) -> Verdict | None:  # noqa: ARG002  # a judge may need it
        """Returns what is to be done now that the ranks have ended."""
        return None


@dataclass(slots=True)
class _Helper:
    """Does one piece of work at a time in a thread."""

    name: str
    say: Callable[[str], None]
    thread: threading.Thread | None = None
    began_s: float = 0.0
    reported: set[str] = field(default_factory=set)
    """Kinds of errors that were printed, and "stuck"."""

    @property
    def is_busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def begin(self, work: Callable[[], None]) -> None:
        """Begins a piece of work, after the present one if that still goes on."""
        before = self.thread if self.is_busy else None

        def do() -> None:
            if before is not None:
                before.join()
            with self.errors_said():
                work()

        thread = threading.Thread(target=do, name=self.name, daemon=True)
        # If there are too many threads now, it is tried again at the next look.
        with self.errors_said():
            thread.start()
            self.thread = thread
            self.began_s = time.monotonic()

    def join(self, deadline_s: float) -> None:
        if self.thread is not None:
            self.thread.join(max(0.0, deadline_s - time.monotonic()))

    @contextlib.contextmanager
    def errors_said(self) -> Iterator[None]:
        """Prints an error of any class, once per kind."""
        try:
            yield
        except Exception as err:
            self.say_once(
                f"{type(err).__name__} {getattr(err, 'errno', '')}",
                f"{self.name}: {type(err).__name__}: {err}; it goes on",
            )

    def say_once(self, kind: str, text: str) -> None:
        if kind in self.reported:
            return
        self.reported.add(kind)
        # The log may be on the file system that does not answer.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.say, args=(text,), daemon=True).start()


class Watch:
    """Watches the ranks of one attempt; use `running` around the wait for them.

    Args:
        run: the run.
        attempt: number of the attempt.
        world_size: ranks.
        has_watchers: see `LiveFiles`.
        say: prints a line for the person; it may be slow.
        every_s: pause between two looks.
        stuck_after_s: what waits for longer is printed.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        *,
        world_size: int,
        has_watchers: bool = False,
        say: Callable[[str], None] = say,
        every_s: float = _LOOK_EVERY_S,
        stuck_after_s: float = _STUCK_AFTER_S,
    ) -> None:
        self._clock = CheckedClock()
        self._say = say
        self._every_s = every_s
        self._stuck_after_s = stuck_after_s
        self._files = LiveFiles(run, attempt, world_size=world_size, clock=self._clock, has_watchers=has_watchers)
        self._readers = [(_Helper(name, say), read) for name, read in self._files.readings.items()]
        self._judges: list[tuple[Judge, _Helper]] = []
        self._due_s = 0.0

    @property
    def look(self) -> Look:
        """What was read last."""
        return self._files.look()

    def add(self, *judges: Judge) -> None:
        """Adds judges, before the ranks run."""
        self._judges += [(judge, _Helper(judge.name, self._say)) for judge in judges]

    def check(self) -> None:
        """Looks, and asks the judges, if a second has passed. Called at least once a second; never waits."""
        self._clock.tick()
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._every_s
        for reader, read in self._readers:
            if not reader.is_busy:
                reader.begin(read)
        look = self.look
        for judge, helper in self._judges:
            if not helper.is_busy:
                self._ask(judge, helper, look)
        for helper in self._helpers():
            if helper.is_busy and now_s - helper.began_s > self._stuck_after_s:
                text = f"{helper.name} has waited for {self._stuck_after_s:.0f} s for a file system or for Slurm"
                helper.say_once("stuck", f"{text}, and goes on when it answers")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """At the end of the body, reads once more and asks the judges for the last time, which takes some seconds."""
        self._clock.tick()
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        now_s = time.monotonic()
        for reader, read in self._readers:
            reader.begin(read)
        for reader, _ in self._readers:
            reader.join(now_s + _END_WITHIN_S / 2)
        look = self.look
        for judge, helper in self._judges:
            self._ask(judge, helper, look, is_last=True)
        for _, helper in self._judges:
            helper.join(now_s + _END_WITHIN_S)
        for helper in self._helpers():
            if helper.is_busy:
                helper.say_once("abandoned", f"{helper.name} did not end in time and is abandoned")

    def _ask(self, judge: Judge, helper: _Helper, look: Look, *, is_last: bool = False) -> None:
        with helper.errors_said():
            verdict = judge.last(look) if is_last else judge(look)
            if verdict is not None:
                helper.begin(verdict)

    def _helpers(self) -> Sequence[_Helper]:
        return [reader for reader, _ in self._readers] + [helper for _, helper in self._judges]
