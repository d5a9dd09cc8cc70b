"""The trackers' processes: restarted when they fail, reported once, ended in time, and never in each other's way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_train.config.schema import TrackSection
from slurm_train.rundir.events import read_events
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.trackers.follow import Trackers, read_state
from tests.support.command_line import REPOSITORY
from tests.support.process_faults import wait_until_gone
from tests.support.tracked_runs import add_lines, make_run, steps
from tests.support.waiting import wait_for

# Follows a run, as `track --beside` does, for a tracker that is named after what it does.
FOLLOWER = """
import atexit, os, sys, time
from pathlib import Path
from slurm_train.tools.trackers import follow as trackers
from slurm_train.config.schema import TrackSection
from slurm_train.rundir.paths import RunDirectory

run, how = RunDirectory(Path(sys.argv[1])), sys.argv[2]
out = run.path / f"sent-{how}"

if how == "raises":
    atexit.register(time.sleep, 600)
if how == "is-missing":
    sys.exit(2)

class Tracker:
    tracker_id, place, settle_s = "theirs", "a file", 60.0 * (how == "loses-once")
    def log(self, lines):
        if how == "hangs":
            time.sleep(600)
        if how == "crashes":
            os.abort()
        if how == "exits":
            os._exit(0)
        if how == "raises" or how == "raises-once" and not out.exists():
            out.touch()
            raise ConnectionError("no route to https://ada:secret@host/")
        with out.open("a") as file:
            file.writelines(f"{line['step']}\\n" for line in lines)
    def close(self, outcome):
        if how == "loses-once" and len(out.read_text().split()) == 3:
            raise ConnectionError("the helper was killed, with what it had")
        if how == "never-ends":
            (run.path / "pid").write_text(str(os.getpid()))
            time.sleep(600)

trackers.TRACKERS = {how: lambda *_: Tracker()}
trackers.configured = lambda *_: type("C", (), {"track": TrackSection(timeout_s=1.0 if how == "hangs" else 100.0)})
sys.exit(trackers.follow_run(run, how, [], os.environ))
"""
LATER = "; tried again later, and nothing is lost: the lines are in metrics.jsonl"
UNSENT = (
    "3 lines of metrics were not delivered; `python -m slurm_train track 3f9a1c07` sends what is missing, as does the "
    "next attempt"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = make_run(tmp_path)
    add_lines(run, steps(1, 3))
    return run


@pytest.fixture
def said() -> list[str]:
    return []


Start = Callable[..., Trackers]


@pytest.fixture
def start(run: RunDirectory, said: list[str]) -> Iterator[Start]:
    """Starts trackers; what is left of them is killed."""
    started: list[Trackers] = []

    def begin(*names: str, first_pause_s: float = 0.2, close_timeout_s: float = 30.0) -> Trackers:
        trackers = Trackers(
            run,
            names,
            command=lambda _run, name: [sys.executable, "-c", FOLLOWER, str(run.path), name],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            track=TrackSection(timeout_s=1.0, close_timeout_s=close_timeout_s),
            say=said.append,
            first_pause_s=first_pause_s,
        )
        started.append(trackers)
        return trackers.__enter__()

    yield begin
    for trackers in started:
        trackers.close_timeout_s = 0.0
        trackers.close()


def sent(run: RunDirectory, name: str = "works") -> list[int]:
    path = run.path / f"sent-{name}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def num_failures(run: RunDirectory, name: str) -> int:
    log = run.trackers / f"{name}.log"
    return log.read_text().count("Traceback") if log.exists() else 0


def test_a_bad_tracker_takes_no_other_with_it(run: RunDirectory, said: list[str], start: Start) -> None:
    """All at once: each problem is reported once, and the good one has every line exactly once."""
    problems = {
        "raises": "ConnectionError: no route to https://[redacted]@host/",
        "hangs": "it did not answer within 1 s",
        "crashes": "its process ended with code -6",
        "exits": "its process ended with code 0",
    }
    trackers = start(*problems, "works", first_pause_s=1.0)
    wait_for(lambda: len(read_events(run, "tracker")) == 4, within_s=60, what="four problems")
    wait_for(lambda: num_failures(run, "raises") > 1, within_s=60, what="a second try")
    add_lines(run, steps(4, 6))
    wait_for(lambda: sent(run) == [1, 2, 3, 4, 5, 6], within_s=30, what="the good one's lines")
    trackers.close_timeout_s = 0.0
    began = time.monotonic()
    trackers.close()
    assert time.monotonic() - began < 20.0, "the one that hangs is not waited for"
    assert {event["tracker"]: event["problem"] for event in read_events(run, "tracker")} == problems
    for name, problem in problems.items():
        of_it = [text.removeprefix(f"{name}: ") for text in said if text.startswith(f"{name}: ")]
        assert of_it.count(problem + LATER) == 1 and "6 lines of metrics were not delivered" in of_it[-1]


@pytest.mark.parametrize("first_pause_s", [0.2, 1000.0])
def test_one_that_recovers_has_lost_nothing(
    first_pause_s: float, run: RunDirectory, said: list[str], start: Start
) -> None:
    """After its pause, or in a last try when the ranks have ended."""
    trackers = start("raises-once", first_pause_s=first_pause_s)
    wait_for(lambda: len(said) > (first_pause_s < 1), within_s=60, what="the failure, or the second try")
    add_lines(run, steps(4, 300))
    trackers.close()
    assert sent(run, "raises-once") == list(range(1, 301))


def test_one_that_may_have_lost_what_it_took_has_a_last_try(run: RunDirectory, said: list[str], start: Start) -> None:
    trackers = start("loses-once")
    wait_for(lambda: sent(run, "loses-once") and said, within_s=30, what="the first lines")
    trackers.close()
    assert sent(run, "loses-once") == [1, 2, 3, 1, 2, 3]
    assert said == ["loses-once: a file"]


def test_one_that_never_ends_is_killed(run: RunDirectory, said: list[str], start: Start) -> None:
    trackers = start("never-ends", close_timeout_s=0.0)
    wait_for(lambda: said == ["never-ends: a file"], within_s=30, what="the start")
    trackers.finish_soon()
    wait_for(lambda: (run.path / "pid").exists(), within_s=30, what="the closing")
    trackers.close()
    wait_until_gone(int((run.path / "pid").read_text()), within_s=60)
    assert said[-1].startswith("never-ends: did not end within 0 s;")
    assert read_state(run, "never-ends") is not None and sent(run, "never-ends") == [1, 2, 3]


def test_one_whose_package_is_missing_is_not_tried_again(run: RunDirectory, said: list[str], start: Start) -> None:
    trackers = start("is-missing")
    wait_for(lambda: said, within_s=30, what="the problem")
    trackers.close()
    assert said == ["is-missing: its process ended with code 2", f"is-missing: {UNSENT}"]


def test_a_follower_whose_supervisor_is_gone_ends_by_itself(run: RunDirectory, start: Start) -> None:
    trackers = start("works")
    wait_for(lambda: sent(run), within_s=30, what="the first lines")
    # The kernel closes it when the last process that has it open is gone.
    trackers.finish_soon()
    assert trackers.threads
    for thread in trackers.threads:
        thread.join(30)
        assert not thread.is_alive()
