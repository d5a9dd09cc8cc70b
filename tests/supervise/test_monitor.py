"""The supervisor's periodic work goes on whatever one look meets, and a hang is ended whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import Beat, BeatSource, Limits, read_beats
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise import monitor as module
from slurm_train.supervise.monitor import CheckedClock, Monitor, Task, hang_watchdog
from tests.support.faulty_files import FaultyFiles
from tests.support.waiting import wait_for


def task(name: str, look: Callable[[], None]) -> Task:
    return Task(name=name, every_s=0.01, look=look)


def test_a_look_that_raises_is_followed_by_the_next_and_said_once_per_kind() -> None:
    said, looks = list[str](), iter([OSError(errno.ESTALE, "stale")] * 3 + [KeyError("x")] * 2 + [None] * 9999)

    def look() -> None:
        if (error := next(looks)) is not None:
            raise error
        ended.set()

    ended, monitor = threading.Event(), Monitor(say=said.append)
    monitor.add(task("the dog", look))
    with monitor.running():
        assert ended.wait(5)
    assert said == ["the dog: OSError: [Errno 116] stale; it goes on", "the dog: KeyError: 'x'; it goes on"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_started_again() -> None:
    said, looks = list[str](), [0]

    def look() -> None:
        looks[0] += 1
        if looks[0] == 1:
            raise SystemExit

    monitor = Monitor(say=said.append)
    monitor.add(task("the dog", look))

    def goes_on() -> bool:
        monitor.check()
        return looks[0] > 3

    with monitor.running():
        wait_for(goes_on, within_s=5, what="more looks", poll_s=0.01)
    assert said == ["the dog had died and is started again"]


def test_a_look_that_does_not_return_is_said_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_END_WITHIN_S", 0.2)
    said, looks, stuck = list[str](), [0], threading.Event()
    monitor = Monitor(say=said.append, stuck_after_s=0.1)

    def count() -> None:
        looks[0] += 1

    def all_said() -> bool:
        monitor.check()
        return bool(said)

    monitor.add(task("the notice", lambda: stuck.wait(30) and None))
    monitor.add(task("the dog", count))
    began_s = time.monotonic()
    with monitor.running():
        wait_for(all_said, within_s=5, what="a line", poll_s=0.01)
        before = looks[0]
        wait_for(lambda: looks[0] > before + 3, within_s=5, what="looks of the other task", poll_s=0.01)
    assert time.monotonic() - began_s < 10
    wait_for(lambda: len(said) == 2, within_s=5, what="the second line", poll_s=0.01)
    assert "the notice waits since 0 s for a file system or for Slurm" in said[0]
    assert said[1] == "the notice did not come to its end and is left behind"
    stuck.set()


def test_the_clock_stands_still_while_the_process_was_stopped() -> None:
    now = [100.0]
    clock = CheckedClock(lambda: now[0])
    begin_s = clock()
    for now[0] in (101.0, 102.0, 3000.0):
        before_s = clock()
        clock.tick()
        assert clock() == before_s
    assert clock() - begin_s == 7.0, "of the stop, no more than what a busy process may take"


LIMITS = Limits(0.5, 0.5)


def has_beat(run: RunDirectory) -> dict[int, Beat]:
    """Leaves the heartbeat of a rank that does not go on, and returns it."""
    from slurm_train.rundir.heartbeat import Heartbeat

    heart = Heartbeat()
    heart.settled = True
    heart.mark("step")
    heart.start(run, 0, BeatSource(rank=0, host="here", pid=1, step_id="7.0"), limits=None)
    heart.stop()
    return read_beats(run, 0)


def watchdog(
    run: RunDirectory, ended: list[Mapping[int, Beat]], now: list[float], **read: Callable[..., Mapping[int, Beat]]
) -> Task:
    found = hang_watchdog(
        run, 0, limits=LIMITS, world_size=1, end_ranks=lambda beats: ended.append(beats), clock=lambda: now[0], **read
    )
    assert found is not None
    return found


def looks_until(dog: Task, ended: list[Mapping[int, Beat]], now: list[float]) -> None:
    for now[0] in range(12):
        with contextlib.suppress(Exception):
            dog.look()
        if ended:
            dog.end()
            return


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_an_error_at_any_call_does_not_keep_hung_ranks_alive(number: int, tmp_path: Path) -> None:
    at = 0
    while True:
        at += 1
        run, ended, now = RunDirectory(tmp_path / f"run_{at}"), list[Mapping[int, Beat]](), [0.0]
        beats = has_beat(run)
        dog = watchdog(run, ended, now)

        def fail(moment: str, name: str) -> None:
            if moment == "before":
                raise OSError(number, os.strerror(number), name)

        with FaultyFiles().installed(at=at, fault=fail) as files:
            looks_until(dog, ended, now)
        assert ended and dict(ended[0]).keys() == beats.keys(), f"call {at}: {files.names[at - 1 : at]}"
        if files.num_calls < at:
            break
    assert at > 15, "the mark and the event were among the calls"
    assert [event["ranks"] for event in read_events(run, "hang")] == [[0]]


def test_hung_ranks_are_ended_though_the_run_directory_is_gone(tmp_path: Path) -> None:
    run, ended, now = RunDirectory(tmp_path / "run"), list[Mapping[int, Beat]](), [0.0]
    beats = has_beat(run)
    shutil.rmtree(run.path)
    looks_until(watchdog(run, ended, now, read=lambda _run, _attempt: beats), ended, now)
    assert ended == [beats]


def test_a_hang_is_found_where_a_look_takes_a_good_part_of_the_time_out(tmp_path: Path) -> None:
    run, ended = RunDirectory(tmp_path / "run"), threading.Event()
    beats = has_beat(run)

    def slow(_run: RunDirectory, _attempt: int) -> Mapping[int, Beat]:
        time.sleep(0.4)
        return beats

    monitor = Monitor()
    monitor.add(
        hang_watchdog(
            run,
            0,
            limits=Limits(1.0, 1.0),
            world_size=1,
            end_ranks=lambda _: ended.set(),
            clock=monitor.clock,
            read=slow,
        )
    )
    with monitor.running():
        assert ended.wait(10)
