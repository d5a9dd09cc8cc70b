"""A follower sends every line once, in order, and goes on where the one before was sure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.metrics.trackers.follow import Following, follow, outcome_of
from slurm_train.metrics.trackers.state import TrackerState, first_state, read_state
from slurm_train.metrics.trackers.tracker import TrackedRun
from slurm_train.rundir.files import append_line
from slurm_train.rundir.layout import RunDirectory
from tests.support.command_line import REPOSITORY
from tests.support.tracked_runs import add_lines, make_run, steps


@dataclass
class Kept:
    """A tracker in memory that can fail."""

    settle_s: float = 0.0
    fails_at: int | None = None
    tracker_id: str = "theirs"
    place: str = "in memory"
    steps: list[int] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    opened: list[TrackedRun] = field(default_factory=list)

    def open(self, run: TrackedRun) -> Kept:
        self.opened.append(run)
        return self

    def log(self, lines: Sequence[Any]) -> None:
        for line in lines:
            if line["step"] == self.fails_at:
                raise ConnectionError("gone")
            self.steps.append(line["step"])

    def close(self, outcome: str) -> None:
        self.closed.append(outcome)


def describe(run: RunDirectory, state: TrackerState) -> TrackedRun:
    names = {"name": "gpt/3f9a1c07", "path": run.path, "folder": run.trackers, "config": {}, "facts": {}, "group": None}
    return TrackedRun(key=state.key, tracker_id=state.tracker_id, **names)  # type: ignore[arg-type]


def following(run: RunDirectory, tracker: Kept, **changes: Any) -> Following:
    first = Following(
        run=run,
        name="kept",
        describe=lambda state: describe(run, state),
        open=tracker.open,
        timeout_s=100.0,
        is_over=lambda _seconds: True,
    )
    return replace(first, **changes)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def test_all_lines_are_sent_and_the_tracker_closed(run: RunDirectory) -> None:
    add_lines(run, steps(1, 500))
    tracker = Kept()
    follow(following(run, tracker))
    assert tracker.steps == list(range(1, 501)) and tracker.closed == ["paused"]
    state = read_state(run, "kept")
    size = run.metrics.stat().st_size
    assert state is not None
    assert (state.sent_bytes, state.sure_bytes, state.tracker_id, state.place) == (size, size, "theirs", "in memory")


def test_a_second_attempt_gets_the_same_id_and_the_new_lines_alone(run: RunDirectory) -> None:
    tracker = Kept()
    add_lines(run, steps(1, 4))
    follow(following(run, tracker))
    add_lines(run, steps(3, 6, attempt=1))
    follow(following(run, tracker))
    assert tracker.steps == [1, 2, 3, 4, 3, 4, 5, 6]
    first, second = tracker.opened
    assert (first.tracker_id, second.tracker_id) == (None, "theirs") and first.key == second.key


def test_lines_come_as_they_are_written_until_the_run_is_over(run: RunDirectory) -> None:
    tracker, asked = Kept(), []

    def is_over(seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) <= 5:
            add_lines(run, steps(len(asked), len(asked)))
        return len(asked) >= 5

    follow(following(run, tracker, is_over=is_over))
    assert tracker.steps == [1, 2, 3, 4, 5], "also those that came with the end"


def test_what_fails_is_sent_again_by_the_next_process(run: RunDirectory) -> None:
    add_lines(run, steps(1, 300))
    tracker = Kept(fails_at=250)
    with pytest.raises(ConnectionError):
        follow(following(run, tracker))
    again = Kept()
    follow(following(run, again))
    assert again.steps == list(range(1, 301)), "nobody is sure of a part that failed"


def test_what_a_tracker_might_still_lose_is_sent_again(run: RunDirectory) -> None:
    now = 0.0
    tracker = Kept(settle_s=60.0, fails_at=5)

    def is_over(seconds: float) -> bool:
        nonlocal now
        now += 50.0 * (seconds > 0)
        add_lines(run, steps(int(now) // 50 + 1, int(now) // 50 + 1) if seconds else [])
        return False

    with pytest.raises(ConnectionError):
        follow(following(run, tracker, is_over=is_over, clock=lambda: now))
    again = Kept()
    follow(following(run, again))
    assert tracker.steps == [2, 3, 4]
    assert again.steps == [3, 4, 5], "step 2 was older than a minute when the process failed"


def test_a_tracker_that_cannot_be_started_has_its_key_already(run: RunDirectory) -> None:
    def refuses(tracked: TrackedRun) -> Kept:
        state = read_state(run, "kept")
        assert state is not None and state.key == tracked.key, "durable before the first use"
        raise PermissionError("bad key")

    with pytest.raises(PermissionError):
        follow(following(run, Kept(), open=refuses))
    tracker = Kept()
    follow(following(run, tracker))
    assert tracker.opened[0].key == first_state(run, "kept").key


LEDGERS = [
    ([], False, "paused"),
    ([{"reason": "preempted", "action": "requeue"}], False, "paused"),
    ([{"reason": "failed", "action": "relaunch"}], False, "paused"),
    ([{"reason": "failed", "action": "stop"}], False, "failed"),
    ([{"reason": "cancelled", "action": "stop"}], False, "failed"),
    ([{"reason": "done", "action": "finish"}], True, "finished"),
]


@pytest.mark.parametrize(("ends", "is_finished", "outcome"), LEDGERS)
def test_how_a_run_stands(ends: list[dict[str, Any]], is_finished: bool, outcome: str, run: RunDirectory) -> None:
    for attempt, end in enumerate(ends):
        append_line(run.attempts, {"event": "end", "attempt": attempt, "time_unix_s": 1.0, **end})
    if is_finished:
        run.result.write_text("{}")
    assert outcome_of(run) == outcome


HANGS = """
import ctypes, sys, time
from pathlib import Path
from tests.metrics.trackers.test_follow import Kept, following
from slurm_train.metrics.trackers.follow import follow
from slurm_train.rundir.layout import RunDirectory

class Hangs(Kept):
    def log(self, lines):
        ctypes.PyDLL(None).sleep(60)  # PyDLL: nobody else gets a turn meanwhile

follow(following(RunDirectory(Path(sys.argv[1])), Hangs(), timeout_s=0.5))
"""


def test_a_call_that_hangs_ends_the_process_even_where_python_gets_no_turn(run: RunDirectory) -> None:
    add_lines(run, steps(1, 3))
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(run.path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == -signal.SIGALRM, done.stderr.decode()
    state = read_state(run, "kept")
    assert state is not None and state.tracker_id == "theirs" and state.sent_bytes == 0
