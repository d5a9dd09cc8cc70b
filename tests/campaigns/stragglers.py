"""Campaign `stragglers`: a rank, a node or its reading is slowed down, and must be named; healthy runs must not.

Runs of two nodes with two ranks. Slow ranks are stopped most of the time, so their cores are there for the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import read_windows
from tests.campaigns.record import Tally
from tests.campaigns.victims import PATIENCE_S
from tests.support.command_line import TINY, TINY_MODULE
from tests.support.process_faults import rank_pid
from tests.support.slurm_runs import at_work
from tests.support.waiting import repeating, wait_for

# Whoever reads on the second node reads slowly.
SLOW_READER = """
import socket
class SlowThere(Numbers):
    def __getitem__(self, index):
        if socket.gethostname().endswith("2"):
            time.sleep(0.02)
        return super().__getitem__(index)
"""
KINDS = ("rank", "node", "data", "healthy")
_WORDS = (
    "+cluster=2x2",
    "cluster.nodelist=node[1-2]",
    "train.max_steps=100000",
    "train.log_every_steps=50",
    "checkpoint.every_steps=null",
    "model.step_s=0.05",
    "cluster.time_limit_min=10",
)
_HEALTHY_WINDOWS = 6


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials and returns how often the right one was named."""
    took: list[float] = []
    with at_work(folder) as person:
        (person.folder / "tiny.py").write_text(TINY_MODULE + SLOW_READER)
        for number in range(trials):
            kind = KINDS[number % len(KINDS)]
            words = ["data._target_=tiny.SlowThere"] if kind == "data" else []
            with tally.trial(f"{kind} {number}") as problems:
                named = (f"run.name=s{number}", f"seed={seed + number}")
                job, own = person.types(*TINY, *_WORDS, *words, *named).job_and_run
                problems += _try(kind, own, took)
            person.runs("scancel", "--quiet", job)
    return {"from the first slow step to the finding": f"{max(took):.0f} s at most"} if took else {}


def _try(kind: str, run: RunDirectory, took: list[float]) -> list[str]:
    wait_for(lambda: len(read_windows(run)) >= 2, within_s=PATIENCE_S, what="two windows")
    if kind == "healthy":
        wait_for(lambda: len(read_windows(run)) >= _HEALTHY_WINDOWS, within_s=PATIENCE_S, what="windows")
        return [f"said {event['sentence']}" for event in read_events(run, "slow") if event["kind"] == "straggler"]
    began_s = time.monotonic()
    slow = {"rank": [3], "node": [2, 3], "data": []}[kind]
    with stopped_most_of_the_time([rank_pid(run, rank) for rank in slow]):
        event = wait_for(lambda: read_events(run, "slow"), within_s=PATIENCE_S, what="a finding")[0]
    took.append(time.monotonic() - began_s)
    expected = slow or [2, 3]
    host = read_beats(run, 0)[3].host
    cause = "data come late" if kind == "data" else "computing takes longer"
    is_right = event["ranks"] == expected and event["hosts"] == [host] and cause in event["sentence"]
    return [] if is_right else [f"said {event['sentence']!r}, slow were ranks {expected} on {host}"]


@contextmanager
def stopped_most_of_the_time(pids: Sequence[int]) -> Iterator[None]:
    """Stops processes for 60 ms, lets them run for 20 ms, and so on."""

    def disturb() -> None:
        for number, for_s in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.0)):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(for_s)

    with repeating(disturb, every_s=0.02):
        yield
