"""The hang watchdog: a task of the supervisor reads the ranks' heartbeats while it waits for them to end.

It runs outside the ranks, so a rank that is stopped, or blocked in a driver, cannot keep it from working; what is
stopped cannot answer TERM either, so the ranks are killed. The supervisor then sees a failed step like any other. The
ranks are ended whether or not what was found can be written down.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping

from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_FAILURE, ClusterError
from slurm_train.requeue.best_effort import say
from slurm_train.requeue.flight import Flight, read_flight
from slurm_train.requeue.hang import Observer
from slurm_train.requeue.monitor import Task
from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.heartbeat import Beat, Limits, read_beats
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.marks import FailureMark, leave_mark
from slurm_train.rundir.rounds import newest_round, read_round

EndRanks = Callable[[Mapping[int, Beat]], None]
"""Kills the ranks, whose heartbeats are given; called again every few seconds until they have ended."""
_AGAIN_S = 5.0
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
            self._again_s = time.monotonic() + _AGAIN_S
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
