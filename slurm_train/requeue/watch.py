"""The hang watchdog: a thread of the supervisor reads the ranks' heartbeats while it waits for them to end.

It runs outside the ranks, so a rank that is stopped, or blocked in a driver, cannot keep it from working; what is
stopped cannot answer TERM either, so the ranks are killed. The supervisor then sees a failed step like any other.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from slurm_train.config.schema import RunConfig
from slurm_train.errors import EXIT_FAILURE, ClusterError
from slurm_train.requeue.flight import Flight, read_flight
from slurm_train.requeue.hang import Hang, Observer
from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.heartbeat import Beat, Limits, read_beats
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.marks import FailureMark, leave_mark
from slurm_train.rundir.rounds import newest_round, read_round

EndRanks = Callable[[Mapping[int, Beat]], None]
"""Kills the ranks, whose heartbeats are given; called again every few seconds until they have ended."""
_AGAIN_S = 5.0


def limits_of(config: RunConfig) -> Limits | None:
    """Returns how long ranks may stand still; None where nobody watches, as with a user's own function or script."""
    if config.health.hang_timeout_s is None or not config.trains:
        return None
    return Limits(config.train.start_timeout_s, config.health.hang_timeout_s)


@contextlib.contextmanager
def watching(
    run: RunDirectory, attempt: int, *, limits: Limits | None, world_size: int, end_ranks: EndRanks
) -> Iterator[None]:
    """Watches an attempt's ranks while the body waits for them.

    Args:
        run: the run.
        attempt: number of the attempt.
        limits: how long ranks may stand still; None: nothing is watched.
        world_size: ranks.
        end_ranks: kills them.
    """
    if limits is None:
        yield
        return
    done = threading.Event()
    observer = Observer(limits, world_size=world_size)
    thread = threading.Thread(target=_watch, args=(run, attempt, limits, observer, end_ranks, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def hang_of(run: RunDirectory, attempt: int) -> str:
    """Returns the sentence about an attempt that was ended as hung, "" for others."""
    found = [str(line.get("sentence", "")) for line in read_events(run, "hang") if line.get("attempt") == attempt]
    return found[-1] if found else ""


def _watch(
    run: RunDirectory,
    attempt: int,
    limits: Limits,
    observer: Observer,
    end_ranks: EndRanks,
    done: threading.Event,
) -> None:
    pause_s, watched = min(max(limits.steady_s / 30, 0.2), 3.0), attempt
    while not done.wait(pause_s):
        now_s, newest = time.monotonic(), newest_round(run, attempt)
        if newest != watched and (begun := read_round(run, newest)) is not None:
            # torchrun has started the ranks again.
            watched, observer = newest, Observer(limits, world_size=begun.world_size)
        observer.look(read_beats(run, watched), now_s, pause_s=pause_s)
        if observer.is_hung(now_s):
            break
    else:
        return
    world = read_beats(run, watched)
    stacks, flights = _read_stacks(run, watched, world=world), _read_flights(run, watched, world=world)
    _report(run, watched, observer.explain(time.monotonic(), stacks, flights))
    while not done.is_set():
        try:
            end_ranks(read_beats(run, watched))
        except ClusterError as err:
            _say(f"the hung ranks could not be ended yet: {err.message}")
        done.wait(_AGAIN_S)


def _report(run: RunDirectory, attempt: int, hang: Hang) -> None:
    sentence = str(hang)
    facts = {"ranks": list(hang.ranks), "host": hang.host, "step": hang.step, "phase": hang.phase}
    append_event(run, "hang", attempt=attempt, sentence=sentence, **facts)
    mark = FailureMark(rank=hang.ranks[0], host=hang.host, exit_code=EXIT_FAILURE, message=hang.what)
    leave_mark(run, attempt, mark)
    _say(f"the ranks hang: {sentence}; stacks in {run.attempt_logs(attempt)}; they are ended")


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


def _say(text: str) -> None:
    print(f"slurm_train: {text} ({socket.gethostname()})", file=sys.stderr, flush=True)
