"""Stragglers among real ranks: one is stopped again and again, or reads slowly, and is named while the run goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.stragglers import read_windows
from tests.support.command_line import TINY, TINY_MODULE, Person, new_project
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.faults, pytest.mark.slow]
FOREVER = ("train.max_steps=100000", "train.log_every_steps=50", "checkpoint.every_steps=null", "model.step_s=0.03")
# Rank 1's samples come late.
SLOW_READER = """
class SlowNumbers(Numbers):
    def __getitem__(self, index):
        time.sleep(0.004 * int(os.environ["RANK"]))
        return super().__getitem__(index)
"""


@contextlib.contextmanager
def running(folder: Path, *words: str) -> Iterator[tuple[Person, RunDirectory]]:
    """A run of two ranks on this machine; it is asked to stop at the end."""
    person = Person(new_project(folder / "project"))
    (person.folder / "tiny.py").write_text(TINY_MODULE + SLOW_READER)
    argv = [sys.executable, "-m", "slurm_train", *TINY, *FOREVER, "run.processes=2", *words]
    with subprocess.Popen(argv, cwd=person.folder, env=person.environment(), stderr=subprocess.PIPE) as process:
        try:
            paths = wait_for(lambda: list(person.folder.glob("runs/*/*/config.yaml")), within_s=60, what="a run")
            yield person, RunDirectory(paths[0].parent)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()


@contextlib.contextmanager
def stopped_most_of_the_time(pid: int) -> Iterator[None]:
    """Stops a process for 60 ms, lets it run for 20 ms, and so on: a core that something else uses, too."""
    done = threading.Event()

    def disturb() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            done.wait(0.06)
            os.kill(pid, signal.SIGCONT)
            done.wait(0.02)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def test_a_rank_that_is_stopped_now_and_then_is_named_and_a_healthy_run_is_not(tmp_path: Path) -> None:
    with running(tmp_path) as (person, run):
        wait_for(lambda: len(read_windows(run)) >= 3, within_s=120, what="windows of a healthy run")
        healthy = read_windows(run)
        assert not any(window.findings for window in healthy), healthy
        assert healthy[-1].ranks[1].own_s > 0.03, "the forward pass sleeps so long"
        with stopped_most_of_the_time(read_beats(run, 0)[1].source.pid):
            event = wait_for(lambda: read_events(run, "slow"), within_s=120, what="the finding")[0]
            assert event["kind"] == "straggler" and event["ranks"] == [1], event
            assert event["sentence"].startswith(f"rank 1 on {os.uname().nodename} is ")
            assert "because computing takes longer" in event["sentence"]
            note = person.types("status").out
            assert event["sentence"].split(" is ")[0] in note and "x as slow as the others" in note
    window = read_windows(run)[-2]
    assert window.ranks[1].wait_s < window.ranks[0].wait_s, "whoever holds the others up waits least"


def test_a_rank_whose_data_come_late_is_told_to_read_ahead(tmp_path: Path) -> None:
    with running(tmp_path, "data._target_=tiny.SlowNumbers") as (_, run):
        event = wait_for(lambda: read_events(run, "slow"), within_s=120, what="the finding")[0]
    assert event["ranks"] == [1] and "because data come late" in event["sentence"], event
    assert event["advice"].startswith("read ahead with more workers: data.num_workers=N")
