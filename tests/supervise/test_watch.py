"""The watchdog on real ranks: one is stopped as by SIGSTOP, and is found, named and ended; a slow one is not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_train.rundir.attempts import AttemptStart, begin_round, open_attempt, read_ledger
from slurm_train.rundir.events import first_mark, read_events
from slurm_train.rundir.heartbeat import Beat, BeatSource, Heartbeat, Limits, read_beats
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise.monitor import Monitor, hang_watchdog
from tests.support.command_line import TINY, TINY_MODULE, Person, new_project
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.faults]
TIMEOUT_S = 4.0


def trains(person: Person, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "slurm_train", *TINY, *words, "run.processes=2"]
    return subprocess.Popen(
        argv, cwd=person.folder, env=person.environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def the_run(person: Person) -> RunDirectory:
    paths = wait_for(lambda: list(person.folder.glob("runs/*/*/config.yaml")), within_s=60, what="a run directory")
    return RunDirectory(paths[0].parent)


def settled_beats(run: RunDirectory) -> dict[int, Beat]:
    beats = {rank: beat for rank, beat in read_beats(run, 0).items() if beat.step > 3 and beat.settled}
    return beats if len(beats) == 2 else {}


def test_a_stopped_rank_is_named_and_the_ranks_are_ended(tmp_path: Path) -> None:
    rank = 0
    person = Person(new_project(tmp_path / "project"))
    trainer = trains(
        person,
        "model.step_s=0.1",
        "train.max_steps=2000",
        "checkpoint.every_steps=null",
        f"health.hang_timeout_s={TIMEOUT_S}",
    )
    run = the_run(person)
    try:
        beats = wait_for(lambda: settled_beats(run), within_s=90, what="steps")
        stopped_s = time.monotonic()
        os.kill(beats[rank].source.pid, signal.SIGSTOP)
        _, err = trainer.communicate(timeout=TIMEOUT_S + 30)
        assert time.monotonic() - stopped_s < TIMEOUT_S + 10, err
    finally:
        for beat in read_beats(run, 0).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.source.pid, signal.SIGKILL)
        trainer.kill()
        trainer.communicate(timeout=20)
    assert trainer.returncode not in (0, 75)
    (event,) = read_events(run, "hang")
    assert event["ranks"] == [rank]
    where = r"in (step|data loading|save) at step \d+ since \d+ s; 1 rank waits"
    pattern = rf"rank {rank} on \S+ does not run \(stopped or lost\), {where}"
    assert re.match(pattern, event["sentence"]), event["sentence"]
    assert event["sentence"] in err
    mark = first_mark(run, 0)
    assert mark is not None and mark.rank == rank
    assert event["sentence"] in read_ledger(run)[0]["note"]
    assert "_engine_run_backward" in run.stacks(0, 1 - rank).read_text(), "the other one says where it waits"


def test_a_slow_run_that_makes_progress_is_left_alone(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    # All steps together take longer than the time-out, no step does, not even on a machine that is busy otherwise.
    trainer = trains(person, "model.step_s=1.5", "train.max_steps=5", "health.hang_timeout_s=5", "train.evaluate=false")
    _, err = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, err
    assert read_events(the_run(person), "hang") == []


STUCK_READER = """
class StuckNumbers(Numbers):
    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and os.path.exists("stick"):
            time.sleep(3600)
        return super().__getitem__(index)
"""


def test_a_rank_that_reads_for_ever_is_said_to_be_in_data_loading(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    (person.folder / "tiny.py").write_text(TINY_MODULE + STUCK_READER)
    words = (
        "data._target_=tiny.StuckNumbers",
        "model.step_s=0.1",
        "train.max_steps=2000",
        "checkpoint.every_steps=null",
    )
    trainer = trains(person, *words, f"health.hang_timeout_s={TIMEOUT_S}")
    run = the_run(person)
    try:
        wait_for(lambda: settled_beats(run), within_s=120, what="steps")
        (person.folder / "stick").touch()
        _, err = trainer.communicate(timeout=TIMEOUT_S + 60)
    finally:
        for beat in read_beats(run, 0).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.source.pid, signal.SIGKILL)
        trainer.kill()
        trainer.communicate(timeout=20)
    (event,) = read_events(run, "hang")
    where = r"is in data loading at step \d+ since \d+ s; 1 rank waits for it in all_reduce"
    # Torch before 2.9 records nothing between gloo ranks.
    pattern = rf"rank 1 on \S+ {where}( #\d+ of 1\d\d elements)?"
    assert re.fullmatch(pattern, event["sentence"]), event["sentence"]
    assert event["ranks"] == [1] and "StuckNumbers" not in err
    mark = first_mark(run, 0)
    assert mark is not None and mark.rank == 1
    assert "in __getitem__" in run.stacks(0, 1).read_text(), "its stack shows where it reads"


def test_ranks_that_torchrun_has_started_again_are_the_ones_that_are_watched(tmp_path: Path) -> None:
    run, ended = RunDirectory(tmp_path), threading.Event()
    start = AttemptStart(job_id="7", restart_count=0, nodes=("here",), world_size=1)
    begin_round(run, start, first=open_attempt(run, start))
    # What is left of the round before looks hung, and is over.
    beating(run, 0).stop()
    assert begin_round(run, start, first=0) == 1
    limits, asked = Limits(0.6, 0.6), []

    def end_ranks(beats: Mapping[int, Beat]) -> None:
        asked.append({rank: beat.step for rank, beat in beats.items()})
        ended.set()

    heart = beating(run, 1)
    monitor = Monitor()
    monitor.add(hang_watchdog(run, 0, limits=limits, world_size=1, end_ranks=end_ranks, clock=time.monotonic))
    with monitor.running():
        for heart.step in range(1, 8):
            heart.mark("step")
            assert not ended.wait(0.2), "it makes progress"
        assert ended.wait(20)
    heart.stop()
    assert asked[0] == {0: 7}
    assert [event["attempt"] for event in read_events(run, "hang")] == [1]
    assert first_mark(run, 0) is None and first_mark(run, 1) is not None


def beating(run: RunDirectory, attempt: int) -> Heartbeat:
    heart = Heartbeat()
    heart.settled = True
    heart.mark("step")
    heart.start(run, attempt, BeatSource(rank=0, host="here", pid=1), limits=None)
    return heart
