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
        assert (first.host, first.pid, first.phase, first.settled) == ("node2", os.getpid(), "start", False)
        heart.step, heart.settled = 17, True
        heart.mark("data")
        heart.pace = Pace().plus(own_s=1.5, wait_s=0.5, data_s=0.1)
        wait_for(lambda: read_beats(run, 1)[3].step == 17, within_s=60, what="a beat", poll_s=0.05)
        newest = read_beats(run, 1)[3]
        assert (newest.phase, newest.pace, newest.settled, newest.marks) == ("data", heart.pace, True, 1)
        wait_for(lambda: read_beats(run, 1)[3].beats > newest.beats, within_s=60, what="another beat", poll_s=0.05)
        assert read_beats(run, 1)[3].marks == 1, "it beats without progress"
    finally:
        heart.stop()
    assert not run.stacks(1, 3).exists()


def test_a_stall_leaves_the_stacks_and_progress_takes_them_away(tmp_path: Path) -> None:
    run, heart = RunDirectory(tmp_path), Heartbeat()
    heart.settled = True
    heart.start(run, 0, **PLACE, limits=Limits(1.0, 1.0))
    try:
        wait_for(run.stacks(0, 3).exists, within_s=60, what="stacks", poll_s=0.05)
        wait_for(lambda: "test_a_stall" in run.stacks(0, 3).read_text(), within_s=60, what="this function", poll_s=0.05)
        heart.mark("step")
        wait_for(lambda: not run.stacks(0, 3).exists(), within_s=60, what="their removal", poll_s=0.02)
    finally:
        heart.stop()


def test_of_many_nodes_the_oldest_heartbeat_is_read_from_one_file_while_it_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = RunDirectory(tmp_path), time.time
    run.attempt_logs(0).mkdir(parents=True)
    # Rank 1 has saved for the last time, so rank 2 is the oldest at work.
    beats = {rank: beat(rank, age_s=1.0, host=f"n{rank}") for rank in range(64)}
    beats |= {1: beat(1, age_s=500.0, host="n1", phase="end"), 2: beat(2, age_s=90.0, host="n2")}
    note_oldest(run, 0, dict(list(beats.items())[:8]))
    assert read_oldest(run, 0) is None and not list(run.attempt_logs(0).iterdir()), "few nodes need no such file"
    note_oldest(run, 0, beats)
    assert read_oldest(run, 0) == beats[2], "there is nothing else to read"
    heart = Heartbeat()
    heart.start(run, 0, **PLACE, limits=None)
    heart.stop()
    assert read_oldest(run, 0) == beats[2]
    for off_s in (60.0, -60.0):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: real() + off_s)
        assert read_oldest(run, 0) == read_beats(run, 0)[3], "the clock is further: the nodes' files count"


def test_the_ranks_of_a_node_share_a_file_and_one_that_has_not_begun_is_left_out(tmp_path: Path) -> None:
    run, hearts = RunDirectory(tmp_path), {2: Heartbeat(), 0: Heartbeat()}
    for local_rank, heart in hearts.items():
        heart.start(run, 0, rank=8 + local_rank, host="n1", limits=None, local_rank=local_rank)
    hearts[0].mark("save")
    for heart in hearts.values():
        heart.stop()
    assert [path.name for path in run.attempt_logs(0).iterdir()] == ["heartbeats_8"]
    run.heartbeats(0, 1).write_bytes(b"")
    run.heartbeats(0, 2).write_bytes(b"x" * 512)
    assert {rank: beat.phase for rank, beat in read_beats(run, 0).items()} == {8: "save", 10: "start"}


def test_only_what_is_long_for_one_rank_alone_counts_as_uneven() -> None:
    chance = random.Random(1)
    together = alone = Pace()
    for _ in range(4000):
        own_s = chance.gauss(1.0, 0.1)
        together = together.plus(own_s=own_s, wait_s=0.2, data_s=0.0)
        alone = alone.plus(own_s=own_s, wait_s=2.0 - own_s, data_s=0.0)
    assert together.uneven_s == pytest.approx(0.0, abs=1e-6)
    assert alone.uneven_s == pytest.approx(0.1, rel=0.05)


def test_stopped_time_is_left_out_and_busy_time_is_not() -> None:
    now, signals = [100.0], list[bool]()
    clock = AwakeClock(was_continued=lambda: bool(signals) and signals.pop(), monotonic=lambda: now[0])
    start, found = clock(), []
    # A TERM of Slurm, which brings a SIGCONT without a stop; a long step; a stop; work.
    for seconds, continued in ((0.5, True), (60.0, False), (600.0, True), (1.0, False)):
        now[0] += seconds
        signals += [True] * continued
        found.append((clock() - start, clock.away_s))
    assert found == [(0.5, 0.0), (60.5, 0.0), (60.5, 600.0), (61.5, 600.0)]


BLOCKED = "hold_continue(); clock = AwakeClock(was_continued=was_continued)"
HANDLED = "clock = AwakeClock(was_continued=note_continues())"
PROGRAM = """
import sys, threading, time
from slurm_train.session.signals import hold_continue, note_continues, was_continued
from slurm_train.rundir.heartbeat import AwakeClock
{clock}
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # a thread that could swallow the signal
start, begin = clock(), time.monotonic()
print("ready", flush=True)
for line in sys.stdin:
    passed = time.monotonic() - begin
    print(f"{{clock() - start:.3f}} {{clock.away_s:.3f}} {{passed:.3f}}", flush=True)
    break
"""


@pytest.mark.parametrize("clock", [BLOCKED, HANDLED], ids=["the trainer", "a program"])
def test_a_process_that_was_really_stopped_knows_for_how_long(clock: str) -> None:
    argv = [sys.executable, "-c", PROGRAM.format(clock=clock)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.6)
    process.send_signal(signal.SIGCONT)
    process.stdin.write("tell\n")
    process.stdin.flush()
    awake_s, away_s, passed_s = map(float, process.stdout.readline().split())
    assert away_s >= 2.6 and awake_s == pytest.approx(passed_s - away_s, abs=0.5)
    process.kill()
    process.communicate()
