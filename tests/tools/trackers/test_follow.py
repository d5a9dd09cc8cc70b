"""A follower sends every line once, in order, and goes on where the one before was sure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.files import append_line
from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.trackers.follow import (
    TrackerState,
    explain_exit,
    follow,
    load_or_create_state,
    read_new_lines,
    read_state,
    run_outcome,
    write_state,
)
from slurm_train.train.facts import tracker_ids
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
    opened: list[TrackerState] = field(default_factory=list)

    def open(self, state: TrackerState) -> Kept:
        self.opened.append(state)
        return self

    def log(self, lines: Sequence[Any]) -> None:
        for line in lines:
            if line["step"] == self.fails_at:
                raise ConnectionError("gone")
            self.steps.append(line["step"])

    def close(self, outcome: str) -> None:
        self.closed.append(outcome)

    def follows(self, run: RunDirectory, **changes: Any) -> None:
        arguments = {"timeout_s": 100.0, "is_over": lambda _seconds: True} | changes
        follow(run, "kept", self.open, **arguments)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def test_each_attempt_sends_the_new_lines_alone_under_the_same_id(run: RunDirectory) -> None:
    tracker = Kept()
    add_lines(run, steps(1, 500))
    tracker.follows(run)
    size, state = run.metrics.stat().st_size, read_state(run, "kept")
    assert tracker.steps == list(range(1, 501)) and tracker.closed == ["paused"]
    assert state == TrackerState(key=tracker.opened[0].key, tracker_id="theirs", place="in memory", sure_bytes=size)
    add_lines(run, steps(499, 502, attempt=1))
    tracker.follows(run)
    assert tracker.steps[500:] == [499, 500, 501, 502]
    first, second = tracker.opened
    assert (first.tracker_id, second.tracker_id) == (None, "theirs") and first.key == second.key


def test_lines_come_as_they_are_written_until_the_run_is_over(run: RunDirectory) -> None:
    tracker, asked = Kept(), []

    def is_over(seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) <= 5:
            add_lines(run, steps(len(asked), len(asked)))
        return len(asked) >= 5

    tracker.follows(run, is_over=is_over)
    assert tracker.steps == [1, 2, 3, 4, 5], "also those that came with the end"


def test_what_fails_is_sent_again_by_the_next_process(run: RunDirectory) -> None:
    add_lines(run, steps(1, 300))
    with pytest.raises(ConnectionError):
        Kept(fails_at=250).follows(run)
    again = Kept()
    again.follows(run)
    assert again.steps == list(range(1, 301)), "a part that failed is not sure"


def test_what_a_tracker_might_still_lose_is_sent_again(run: RunDirectory) -> None:
    now = 0.0
    tracker, again = Kept(settle_s=60.0, fails_at=5), Kept()

    def is_over(seconds: float) -> bool:
        nonlocal now
        now += 50.0 * (seconds > 0)
        add_lines(run, steps(int(now) // 50 + 1, int(now) // 50 + 1) if seconds else [])
        return False

    with pytest.raises(ConnectionError):
        tracker.follows(run, is_over=is_over, clock=lambda: now)
    again.follows(run)
    assert tracker.steps == [2, 3, 4]
    assert again.steps == [3, 4, 5], "step 2 was older than a minute when the process failed"


def test_a_key_is_durable_before_its_first_use_and_chosen_once(run: RunDirectory) -> None:
    def refuses(state: TrackerState) -> Kept:
        assert read_state(run, "kept") == state
        raise PermissionError("bad key")

    assert read_state(run, "kept") is None
    with pytest.raises(PermissionError):
        follow(run, "kept", refuses, timeout_s=100.0, is_over=lambda _seconds: True)
    first = load_or_create_state(run, "kept")
    assert first.key.startswith("3f9a1c07-") and len(first.key) == 15
    assert load_or_create_state(run, "kept") == first
    assert load_or_create_state(run, "mlflow").key != first.key
    assert run.trackers.stat().st_mode & 0o077 == 0


def test_a_file_that_is_shorter_than_what_was_sent_is_sent_again(run: RunDirectory) -> None:
    add_lines(run, steps(1, 2))
    load_or_create_state(run, "wandb")
    write_state(run, "wandb", TrackerState(key="k", tracker_id="t", sure_bytes=9000))
    assert load_or_create_state(run, "wandb") == TrackerState(key="k", tracker_id="t")


def test_lines_are_read_when_they_are_whole(run: RunDirectory) -> None:
    assert read_new_lines(run.metrics, 0) == ([], 0)
    add_lines(run, steps(1, 2))
    with run.metrics.open("a") as file:
        file.write('{"step": 3')
    lines, end = read_new_lines(run.metrics, 0)
    assert [line["step"] for line in lines] == [1, 2]
    with run.metrics.open("a") as file:
        file.write('}\nno json\n{"no": "step"}\n')
    assert read_new_lines(run.metrics, end) == ([{"step": 3}], run.metrics.stat().st_size)


def test_a_line_that_is_longer_than_a_part_of_the_file_is_sent_as_well(run: RunDirectory) -> None:
    values = {f"eval_class_{number}": number / 7 for number in range(20_000)}
    run.metrics.write_text(f"{json.dumps({'step': 1, **values})}\n{json.dumps({'step': 2})}\n")
    assert run.metrics.stat().st_size > 1 << 18
    lines, end = read_new_lines(run.metrics, 0)
    assert [line["step"] for line in lines] == [1]
    assert read_new_lines(run.metrics, end) == ([{"step": 2}], run.metrics.stat().st_size)


def test_a_checkpoint_gets_the_ids_that_are_known(run: RunDirectory) -> None:
    assert tracker_ids(run) == {}
    load_or_create_state(run, "wandb")
    assert tracker_ids(run) == {}
    write_state(run, "wandb", TrackerState(key="k", tracker_id="k", problem="no network"))
    assert tracker_ids(run) == {"trackers": {"wandb": "k"}}
    assert explain_exit(run, "wandb", 1, timeout_s=5) == "no network"


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ({"reason": "failed", "action": "relaunch"}, "paused"),
        ({"reason": "cancelled", "action": "stop"}, "failed"),
        ({"reason": "done", "action": "finish"}, "finished"),
    ],
)
def test_outcome_of_a_run(end: dict[str, str], outcome: str, run: RunDirectory) -> None:
    assert run_outcome(run) == "paused"
    append_line(run.attempts, {"event": "end", "attempt": 0, "time_unix_s": 1.0, **end})
    if outcome == "finished":
        run.result.write_text("{}")
    assert run_outcome(run) == outcome


HANGS = """
import ctypes, sys
from pathlib import Path
from tests.tools.trackers.test_follow import Kept
from slurm_train.rundir.paths import RunDirectory

class Hangs(Kept):
    def log(self, lines):
        ctypes.PyDLL(None).sleep(60)  # PyDLL: no other thread gets a turn meanwhile

Hangs().follows(RunDirectory(Path(sys.argv[1])), timeout_s=0.5)
"""


def test_a_call_that_hangs_ends_the_process_even_where_it_holds_the_interpreter(run: RunDirectory) -> None:
    add_lines(run, steps(1, 3))
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(run.path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == -signal.SIGALRM, done.stderr.decode()
    state = read_state(run, "kept")
    assert state.tracker_id == "theirs" and state.sure_bytes == 0
