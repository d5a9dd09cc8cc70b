"""The trackers' processes: started again when they fail, told of once, ended in time, and never in the way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_train.metrics.trackers.beside import Surroundings, Trackers, tracking
from slurm_train.metrics.trackers.state import read_state
from slurm_train.rundir.events import read_events
from slurm_train.rundir.layout import RunDirectory
from tests.support.command_line import REPOSITORY
from tests.support.process_faults import wait_until_gone
from tests.support.tracked_runs import add_lines, make_run, steps
from tests.support.waiting import wait_for

# Follows a run for a tracker whose words are given, as `track --beside` does.
FOLLOWER = """
import os, sys, time
from functools import partial
from pathlib import Path
from slurm_train.cli import trackers
from slurm_train.config.schema import TrackSection
from slurm_train.rundir.layout import RunDirectory

run, how, descriptor = RunDirectory(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
out = run.path / "sent"

class Tracker:
    tracker_id, place, settle_s = "theirs", "a file", 0.0
    def log(self, lines):
        if how == "hangs":
            time.sleep(600)
        if how == "raises" or how == "raises-once" and not out.exists():
            out.touch()
            raise ConnectionError("no route to https://ada:secret@host/")
        with out.open("a") as file:
            file.writelines(f"{line['step']}\\n" for line in lines)
    def close(self, outcome):
        if how == "never-ends":
            (run.path / "pid").write_text(str(os.getpid()))
            time.sleep(600)

trackers.opener = lambda *_: lambda _run: Tracker()
trackers.configured = lambda *_: type("C", (), {"track": TrackSection(timeout_s=1.0 if how == "hangs" else 100.0)})
sys.exit(trackers.run_beside(run, "fake", descriptor, [], os.environ))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(run: RunDirectory, said: list[str]) -> Iterator[Callable[..., Trackers]]:
    """Starts a tracker of a kind; what is left of it is ended."""
    started: list[Trackers] = []

    def begin(how: str, *, first_pause_s: float = 0.2) -> Trackers:
        around = Surroundings(
            run=run,
            names=["fake"],
            command=lambda _name, descriptor: [sys.executable, "-c", FOLLOWER, str(run.path), how, str(descriptor)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            timeout_s=1.0,
            say=said.append,
            first_pause_s=first_pause_s,
        )
        started.append(Trackers(around))
        started[-1].start()
        return started[-1]

    yield begin
    for trackers in started:
        trackers.close(0.0)


def sent(run: RunDirectory) -> list[int]:
    return [int(line) for line in (run.path / "sent").read_text().split()]


def test_lines_are_sent_while_they_come_and_all_of_them_at_the_end(
    run: RunDirectory, said: list[str], start: Callable[..., Trackers]
) -> None:
    add_lines(run, steps(1, 3))
    trackers = start("works")
    wait_for(lambda: (run.path / "sent").exists() and said, within_s=30, what="the first lines")
    add_lines(run, steps(4, 6))
    trackers.close(30.0)
    assert sent(run) == [1, 2, 3, 4, 5, 6]
    assert said == ["fake: a file"]


def test_one_that_raises_is_told_of_once_and_tried_again(
    run: RunDirectory, said: list[str], start: Callable[..., Trackers]
) -> None:
    add_lines(run, steps(1, 3))
    trackers = start("raises")
    log = run.trackers / "fake.log"
    wait_for(lambda: log.exists() and log.read_text().count("Traceback") == 2, within_s=60, what="a second try")
    trackers.close(30.0)
    assert said == [
        "fake: ConnectionError: no route to https://[redacted]@host/; tried again later, and nothing is lost: the "
        "lines are in metrics.jsonl",
        "fake: 3 lines of metrics were not delivered; `python -m slurm_train track 3f9a1c07` sends what is missing, as "
        "does the next attempt",
    ]
    (event,) = read_events(run, "tracker")
    assert event["tracker"] == "fake" and event["problem"] == "ConnectionError: no route to https://[redacted]@host/"


def test_one_that_recovers_has_lost_nothing(run: RunDirectory, said: list[str], start: Callable[..., Trackers]) -> None:
    add_lines(run, steps(1, 300))
    trackers = start("raises-once")
    wait_for(lambda: "fake: a file" in said, within_s=60, what="a second try that works")
    trackers.close(30.0)
    assert sent(run) == list(range(1, 301))
    assert len(said) == 2


def test_one_that_failed_has_a_last_try_when_the_ranks_have_ended(
    run: RunDirectory, said: list[str], start: Callable[..., Trackers]
) -> None:
    add_lines(run, steps(1, 3))
    trackers = start("raises-once", first_pause_s=1000.0)
    wait_for(lambda: said, within_s=60, what="the end of the first process")
    add_lines(run, steps(4, 5))
    trackers.close(60.0)
    assert sent(run) == [1, 2, 3, 4, 5]
    assert len(said) == 1


def test_one_that_fails_for_good_has_one_last_try(
    run: RunDirectory, said: list[str], start: Callable[..., Trackers]
) -> None:
    add_lines(run, steps(1, 3))
    trackers = start("raises", first_pause_s=1000.0)
    wait_for(lambda: said, within_s=60, what="the end of the first process")
    trackers.close(60.0)
    assert (run.trackers / "fake.log").read_text().count("Traceback") == 2
    assert said[-1].startswith("fake: 3 lines of metrics were not delivered;")


def test_one_that_hangs_is_ended_and_told_of(
    run: RunDirectory, said: list[str], start: Callable[..., Trackers]
) -> None:
    add_lines(run, steps(1, 3))
    trackers = start("hangs")
    wait_for(lambda: len(said) > 1, within_s=60, what="the end of the first process")
    began = time.monotonic()
    trackers.close(0.0)
    assert time.monotonic() - began < 5.0
    assert "fake: it did not answer within 1 s; tried again later" in said[1]
    assert "fake: 3 lines of metrics were not delivered" in said[-1]


def test_one_that_never_ends_is_killed_with_what_it_started(
    run: RunDirectory, said: list[str], start: Callable[..., Trackers]
) -> None:
    add_lines(run, steps(1, 3))
    trackers = start("never-ends")
    wait_for(lambda: "fake: a file" in said, within_s=30, what="the start")
    trackers.finish_soon()
    wait_for(lambda: (run.path / "pid").exists(), within_s=30, what="the closing")
    trackers.close(0.0)
    wait_until_gone(int((run.path / "pid").read_text()), within_s=5.0)
    assert said[-1].startswith("fake: did not end within 0 s;")
    state = read_state(run, "fake")
    assert state is not None and sent(run) == [1, 2, 3]


def test_a_follower_whose_supervisor_is_gone_ends_by_itself(run: RunDirectory, start: Callable[..., Trackers]) -> None:
    add_lines(run, steps(1, 3))
    trackers = start("works")
    wait_for(lambda: (run.path / "sent").exists(), within_s=30, what="the first lines")
    # A pipe is closed by the kernel when its last holder is gone.
    trackers.finish_soon()
    (follower,) = trackers._followers
    assert follower.process is not None
    assert follower.process.wait(30) == 0


def test_without_trackers_nothing_is_started(run: RunDirectory) -> None:
    around = Surroundings(run=run, names=[], command=lambda *_: ["false"], env={}, timeout_s=1, say=print)
    with tracking(around, close_timeout_s=0.0):
        pass
    assert not run.trackers.exists()
