"""Heartbeats: what is written can be read, costs the loop nothing, and a long stall leaves stacks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slurm_train.rundir.heartbeat import BeatSource, Heartbeat, Limits, read_beats
from slurm_train.rundir.layout import RunDirectory
from tests.support.waiting import wait_for

SOURCE = BeatSource(rank=3, host="node2", pid=os.getpid(), step_id="12.0")


def test_a_heartbeat_says_step_phase_and_that_it_runs(tmp_path: Path) -> None:
    run, heart = RunDirectory(tmp_path), Heartbeat()
    heart.start(run, 1, SOURCE, limits=None)
    try:
        first = read_beats(run, 1)[3]
        assert (first.source, first.phase, first.step, first.settled) == (SOURCE, "start", 0, False)
        assert abs(first.written_unix_s - time.time()) < 5
        heart.step, heart.settled = 17, True
        heart.mark("data")
        beat = wait_for(
            lambda: next(b for b in read_beats(run, 1).values()).step, within_s=5, what="a beat", poll_s=0.05
        )
        newest = read_beats(run, 1)[3]
        assert beat == 17 and newest.phase == "data" and newest.settled and newest.marks == 1
        wait_for(lambda: read_beats(run, 1)[3].beats > newest.beats, within_s=5, what="another beat", poll_s=0.05)
        assert read_beats(run, 1)[3].marks == 1, "it beats without progress"
    finally:
        heart.stop()
    assert not run.stacks(1, 3).exists()


def test_a_stall_leaves_the_stacks_and_progress_takes_them_away(tmp_path: Path) -> None:
    run, heart = RunDirectory(tmp_path), Heartbeat()
    heart.settled = True
    heart.start(run, 0, SOURCE, limits=Limits(1.0, 1.0))
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
    run.heartbeat(0, 1).write_bytes(b"")
    run.heartbeat(0, 2).write_bytes(b"x" * 512)
    assert read_beats(run, 0) == {}


def test_a_mark_costs_less_than_a_microsecond() -> None:
    heart = Heartbeat()

    def cost_s() -> float:
        start = time.perf_counter()
        for _ in range(10_000):
            heart.mark("step")
        return (time.perf_counter() - start) / 10_000

    assert min(cost_s() for _ in range(20)) < 1e-6
