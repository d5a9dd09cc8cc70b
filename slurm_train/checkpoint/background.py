"""One thread that saves while training goes on.

At most one save is under way. All exchanges between ranks happen in this thread, on a group that nothing else uses,
and every rank hands over the same saves in the same order; so they meet whatever the training threads do meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from queue import SimpleQueue

from slurm_train.checkpoint.save import Saved
from slurm_train.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended.

    Args:
        step: which one.
        result: what was saved, or why not.
        duration_s: from the hand-over to the end.
    """

    step: int
    result: Saved | Exception
    duration_s: float

    @property
    def is_fatal(self) -> bool:
        """The run cannot go on: a newer attempt has taken over, or the exchange between the ranks broke.

        A CheckpointError is none: all ranks have agreed on it, and the checkpoint before it is untouched.
        """
        return isinstance(self.result, Exception) and not isinstance(self.result, CheckpointError)


class BackgroundSaver:
    """Runs one piece of work after the other in its thread, which lives as long as the process.

    A daemon: a process that ends on an error does not wait for it, and what it wrote so far is nobody's checkpoint.

    Args:
        clock: seconds that never run backwards.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._works: SimpleQueue[tuple[Callable[[], object], Future[object]]] = SimpleQueue()
        self._preparation: Future[object] | None = None
        self._save: tuple[int, float, Future[object]] | None = None
        threading.Thread(target=_work_off, args=(self._works,), name="checkpoint", daemon=True).start()

    def prepare(self, work: Callable[[], None]) -> None:
        """Runs something that makes the first save cheaper; if it fails, that save is dearer."""
        assert self._save is None, "a save is under way"
        self._preparation = self._hand_over(work)

    def start(self, work: Callable[[], Saved], *, step: int) -> None:
        """Begins a save; the one before must have been taken note of with `wait` or `poll`."""
        assert self._save is None, f"the save of step {self._save[0]} is under way"
        self._save = (step, self._clock(), self._hand_over(work))

    def poll(self) -> Outcome | None:
        """Returns how the save ended, once; None while it runs or where there is none."""
        return self.wait() if self._save is not None and self._save[2].done() else None

    def is_done_within(self, limit_s: float) -> bool:
        """Waits for the save under way, but not longer, and returns whether it has ended, or there was none."""
        return self._save is None or not wait_for_all([self._save[2]], timeout=limit_s).not_done

    def wait(self) -> Outcome | None:
        """Returns how the save ended, when it has; None where there is none. Waits for a preparation too."""
        if self._preparation is not None:
            self._preparation.exception()
            self._preparation = None
        if self._save is None:
            return None
        step, started_s, future = self._save
        error = future.exception()
        self._save = None
        if error is not None and not isinstance(error, Exception):
            raise error
        result = error or future.result()
        assert isinstance(result, (Saved, Exception))
        return Outcome(step, result, self._clock() - started_s)

    def _hand_over(self, work: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        self._works.put((work, future))
        return future


def _work_off(works: SimpleQueue[tuple[Callable[[], object], Future[object]]]) -> None:
    while True:
        work, future = works.get()
        try:
            future.set_result(work())
        except BaseException as err:  # whatever it is, it is raised where the outcome is asked for
            future.set_exception(err)
        del work, future  # nothing of a save stays alive while the thread waits for the next
