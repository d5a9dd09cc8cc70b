"""Heartbeats: written and read, stacks after a long stall; the sums of a rank's pace; the clock."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.heartbeat import (
    AwakeClock,
    Beat,
    Heartbeat,
    Limits,
    Pace,
    note_oldest,
    read_beats,
    read_oldest,
)
from slurm_train.rundir.paths import RunDirectory
from tests.support.run_facts import beat
from tests.support.waiting import wait_for

PLACE: dict[str, Any] = {"rank": 3, "host": "node2", "step_id": "12.0"}


def test_a_heartbeat_says_step_phase_and_that_it_runs(tmp_path: Path) -> None:
    run, heart = RunDirectory(tmp_path), Heartbeat()
    heart.start(run, 1, **PLACE, limits=None)
    try:
        first = read_beats(run, 1)[3]
        assert (first.rank, first.host, first.step_id, first.pid) == (3, "node2", "12.0", os.getpid())
        assert (first.phase, first.step, first.settled) == ("start", 0, False)
        assert abs(first.written_unix_s - time.time()) < 5
        heart.step, heart.settled = 17, True
        heart.mark("data")
        heart.pace = summed((1.5, 0.5), (2.0, 0.0))
        step = wait_for(
            lambda: next(b for b in read_beats(run, 1).values()).step, within_s=5, what="a beat", poll_s=0.05
        )
        newest = read_beats(run, 1)[3]
        assert (
            step == 17 and newest.phase == "data" and newest.pace == heart.pace and newest.settled and newest.marks == 1
        )
        wait_for(lambda: read_beats(run, 1)[3].beats > newest.beats, within_s=5, what="another beat", poll_s=0.05)
        assert read_beats(run, 1)[3].marks == 1, "it beats without progress"
    finally:
        heart.stop()
    assert not run.stacks(1, 3).exists()


def test_a_stall_leaves_the_stacks_and_progress_takes_them_away(tmp_path: Path) -> None:
    run, heart = RunDirectory(tmp_path), Heartbeat()
    heart.settled = True
    heart.start(run, 0, **PLACE, limits=Limits(1.0, 1.0))
    try:
        wait_for(run.stacks(0, 3).exists, within_s=10, what="stacks", poll_s=0.05)
        wait_for(lambda: "test_a_stall" in run.stacks(0, 3).read_text(), within_s=5, what="this function", poll_s=0.05)
        heart.mark("step")
        wait_for(lambda: not run.stacks(0, 3).exists(), within_s=5, what="their removal", poll_s=0.02)
    finally:
        heart.stop()


def test_files_that_are_none_are_passed_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_beats(run, 0) == {}
    run.attempt_logs(0).mkdir(parents=True)
    run.heartbeats(0, 1).write_bytes(b"")
    run.heartbeats(0, 2).write_bytes(b"x" * 512)
    assert read_beats(run, 0) == {}


def one_per_node(nodes: int) -> dict[int, Beat]:
    """Returns heartbeats of as many nodes; rank 1 has saved for the last time, rank 2 is the oldest at work."""
    ages_s, ends = {1: 500.0, 2: 90.0}, {1: "end"}
    return {
        rank: beat(rank, age_s=ages_s.get(rank, 1.0), host=f"n{rank}", phase=ends.get(rank, "step"))
        for rank in range(nodes)
    }


def test_of_many_nodes_the_oldest_heartbeat_is_read_from_one_file_while_it_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, beats, real = RunDirectory(tmp_path), one_per_node(64), time.time
    run.attempt_logs(0).mkdir(parents=True)
    assert read_oldest(run, 0) is None
    note_oldest(run, 0, beats)
    assert read_oldest(run, 0) == beats[2], "there is nothing else to read"
    heart = Heartbeat()
    heart.start(run, 0, **PLACE, limits=None)
    heart.stop()
    assert read_oldest(run, 0) == beats[2]
    for off_s in (60.0, -60.0):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda off_s=off_s: real() + off_s)
            later = read_oldest(run, 0)
        assert later is not None and later.rank == 3, f"the clock is {off_s} s further: the nodes' files count"
    run.oldest_heartbeat(0).write_text("{")
    assert read_oldest(run, 0) == read_beats(run, 0)[3]


def test_of_few_nodes_nothing_is_noted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    note_oldest(run, 0, one_per_node(8))
    note_oldest(run, 0, {})
    assert list(run.attempt_logs(0).iterdir()) == []


def test_the_ranks_of_a_node_share_a_file_and_one_that_has_not_begun_is_left_out(tmp_path: Path) -> None:
    run, hearts = RunDirectory(tmp_path), {2: Heartbeat(), 0: Heartbeat()}
    for local_rank, heart in hearts.items():
        heart.start(run, 0, rank=8 + local_rank, host="n1", limits=None, local_rank=local_rank)
    hearts[0].mark("save")
    for heart in hearts.values():
        heart.stop()
    assert {rank: beat.phase for rank, beat in read_beats(run, 0).items()} == {8: "save", 10: "start"}
    assert [path.name for path in run.attempt_logs(0).iterdir()] == ["heartbeats_8"]


def test_a_mark_costs_less_than_a_microsecond() -> None:
    heart = Heartbeat()

    def cost_s() -> float:
        start = time.perf_counter()
        for _ in range(10_000):
            heart.mark("step")
        return (time.perf_counter() - start) / 10_000

    assert min(cost_s() for _ in range(20)) < 1e-6


def summed(*steps: tuple[float, float]) -> Pace:
    pace = Pace()
    for own_s, wait_s in steps:
        pace = pace.plus(own_s=own_s, wait_s=wait_s, data_s=0.25 * own_s)
    return pace


def test_only_what_is_long_for_one_rank_alone_counts_as_uneven() -> None:
    chance = random.Random(1)
    mine = [chance.gauss(1.0, 0.1) for _ in range(4000)]
    together = summed(*((own_s, 0.2) for own_s in mine))
    alone = summed(*((own_s, 2.0 - own_s) for own_s in mine))
    assert together.uneven_s == pytest.approx(0.0, abs=1e-6)
    assert alone.uneven_s == pytest.approx(0.1, rel=0.05)
    assert summed((1.0, 1.0)).uneven_s == 0.0


class FakeTime:
    """A clock to be moved, and a process that may be stopped for a while."""

    def __init__(self) -> None:
        self.now, self.continued = 100.0, False
        self.clock = AwakeClock(was_continued=self._was_continued, monotonic=lambda: self.now)

    def _was_continued(self) -> bool:
        was, self.continued = self.continued, False
        return was

    def passes(self, seconds: float, *, stopped: bool = False, continued: bool = False) -> None:
        self.now += seconds
        self.continued = self.continued or stopped or continued


def test_stopped_time_is_left_out_and_kept_apart() -> None:
    fake = FakeTime()
    start = fake.clock()
    fake.passes(0.5)
    assert fake.clock() - start == 0.5
    fake.passes(600.0, stopped=True)
    assert fake.clock() - start == 0.5 and fake.clock.away_s == 600.0
    fake.passes(1.0)
    assert fake.clock() - start == 1.5


@pytest.mark.parametrize("continued", [False, True], ids=["busy", "TERM with its SIGCONT, then busy"])
def test_busy_time_is_no_stop(continued: bool) -> None:
    fake = FakeTime()
    start = fake.clock()
    fake.passes(0.5, continued=continued)
    fake.clock()
    fake.passes(60.0)
    assert fake.clock() - start == 60.5 and fake.clock.away_s == 0.0


PROGRAM = """
import sys, threading, time
from slurm_train.train.signals import hold_continue, was_continued
from slurm_train.rundir.heartbeat import AwakeClock
hold_continue()
clock = AwakeClock(was_continued=was_continued)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # a thread that could swallow the signal
print("ready", flush=True)
start = clock()
for line in sys.stdin:
    print(f"{clock() - start:.3f} {clock.away_s:.3f}", flush=True)
    break
"""


def test_a_process_that_was_really_stopped_knows_for_how_long() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.6)
    process.send_signal(signal.SIGCONT)
    process.stdin.write("tell\n")
    process.stdin.flush()
    awake_s, away_s = map(float, process.stdout.readline().split())
    assert away_s >= 2.6 and awake_s < 2.0
    process.kill()
    process.communicate()
