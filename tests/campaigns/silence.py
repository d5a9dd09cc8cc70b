"""Campaigns `script-hang` and `script-healthy`: a user's own script on Slurm, which nothing marks, is watched.

Two ranks with gloo. In the first campaign a random rank hangs at a random step: stopped, asleep, in a read that gets no
answer, in a lock, in a data loader whose worker hangs. In the second one a rank is slow by right while the other waits.
The time-out is scaled down from 300 s to `LIMIT_S`, and the slow phases with it, to `SLOW_LIMITS` time-outs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.rundir.events import read_events
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally, only_true
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work
from tests.support.waiting import wait_for

LIMIT_S = 10.0
SLOW_LIMITS = 3.5
SLACK_S = 10.0
_AT_ONCE = 7
_PATIENCE_S = 400.0
HANGS = ("stop", "sleep", "read", "lock", "loader")
SLOW = ("reading", "evaluation", "compilation", "save")

PROGRAM = """
import os, signal, subprocess, sys, threading, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

def sleep():
    while True:
        time.sleep(60)

def read():
    os.mkfifo(mine) if not os.path.exists(mine) else None
    open(mine).read()

def lock():
    waiting = threading.Lock()
    waiting.acquire()
    waiting.acquire()

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

class Stuck(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        time.sleep(1000)

def loader():
    for batch in DataLoader(Stuck(), num_workers=1):
        pass

def until(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield

def reading():
    with open(mine, "wb") as file:
        file.write(bytes(1 << 22))
    with open(mine, "rb", buffering=0) as file:
        for _ in until(slow_s):
            if not file.read(65536):
                file.seek(0)
            time.sleep(0.5)

def evaluation():
    model = torch.nn.Linear(64, 64)
    for _ in until(slow_s):
        model(torch.randn(64, 64)).sum().item()

def compilation():
    for _ in until(slow_s):
        subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"])

def save():
    with open(mine, "wb") as file:
        for _ in until(slow_s):
            file.seek(0)
            file.write(os.urandom(1 << 19))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.5)

kind, who, when, slow_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
is_first = os.environ["SLURM_TRAIN_ATTEMPT"] == "0"
dist.init_process_group("gloo")
rank = dist.get_rank()
mine = os.path.join(os.environ["SLURM_TRAIN_RUN_DIR"], f"of_rank_{rank}")
for step in range(8):
    total = torch.ones(1000)
    dist.all_reduce(total)
    if step == when and rank == who and is_first:
        print("now", flush=True)
        with open(mine + "_time", "w") as file:
            file.write(str(time.time()))
        globals()[kind]()
    dist.barrier()
    time.sleep(0.2)
print("the last line")
"""


class Trial(NamedTuple):
    """One run, and what one of its ranks does at one of its steps."""

    number: int
    kind: str
    rank: int
    step: int
    nodes: int

    @property
    def words(self) -> tuple[str, ...]:
        """What a person types for it, but for its name."""
        slow_s = SLOW_LIMITS * LIMIT_S
        size = f"+cluster={self.nodes}x{2 // self.nodes}"
        return size, f"script=[program.py,{self.kind},{self.rank},{self.step},{slow_s}]"

    def __str__(self) -> str:
        return f"trial {self.number} ({self.kind}, rank {self.rank}, step {self.step}, {self.nodes} nodes)"


def plan_trials(kinds: Sequence[str], *, seed: int, trials: int) -> list[Trial]:
    """Returns the trials: the kinds in turn, ranks, steps and nodes at random."""
    chance = random.Random(seed)
    return [
        Trial(number, kinds[number % len(kinds)], chance.randrange(2), chance.randrange(8), chance.choice((1, 2)))
        for number in range(trials)
    ]


def what_is_wrong_with_hang(
    trial: Trial, *, events: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]], stacks: set[int]
) -> list[str]:
    """Returns how the promise for a rank that hangs was broken.

    Args:
        trial: what was done.
        events: the hangs on record.
        ledger: the run's attempts.
        stacks: ranks whose stacks are there.
    """
    story = [(entry.get("reason"), entry.get("action")) for entry in ledger]
    # A stopped process writes no stack.
    wanted = {0, 1} - ({trial.rank} if trial.kind == "stop" else set())
    sentences = [str(event["sentence"]) for event in events]
    return only_true(
        {
            f"{len(events)} hangs on record": len(events) != 1,
            f"said {sentences}": any(
                event["ranks"] != [trial.rank] or "; 1 rank waits for it in " not in event["sentence"]
                for event in events
            ),
            f"stacks of {sorted(stacks)} only": not wanted <= stacks,
            f"the ledger says {story}": story != [("failed", "relaunch"), ("done", "finish")],
        }
    )


def what_is_wrong_with_slowness(
    *, events: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]], slow_s: float
) -> list[str]:
    """Returns how the promise for a rank that is slow by right was broken.

    Args:
        events: the hangs on record.
        ledger: the run's attempts.
        slow_s: from the begin of the slow phase to the end of the attempt.
    """
    story = [(entry.get("reason"), entry.get("action")) for entry in ledger]
    return only_true(
        {
            f"a false alarm: {[event['sentence'] for event in events]}": bool(events),
            f"the ledger says {story}": story != [("done", "finish")],
            f"slow for {slow_s:.0f} s only": slow_s < SLOW_LIMITS * LIMIT_S,
        }
    )


def hang(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials in which a rank hangs."""
    seconds: list[float] = []
    _run(tally, plan_trials(HANGS, seed=seed, trials=trials), folder, seconds)
    if not seconds:
        return {}
    return {"from the hang to the sentence": f"{max(seconds):.1f} s at most, of which {LIMIT_S:.0f} s are the time-out"}


def healthy(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials in which a rank is slow by right."""
    seconds: list[float] = []
    _run(tally, plan_trials(SLOW, seed=seed, trials=trials), folder, seconds)
    return {"slow phases": f"{min(seconds):.0f} s at least, with a time-out of {LIMIT_S:.0f} s"} if seconds else {}


def _run(tally: Tally, planned: Sequence[Trial], folder: Path, seconds: list[float]) -> None:
    with at_work(folder) as person:
        (person.folder / "program.py").write_text(PROGRAM)
        tally.try_all(planned, lambda trial: _try(person, trial, seconds), at_once=_AT_ONCE)


def _try(person: Person, trial: Trial, seconds: list[float]) -> list[str]:
    name = f"{person.folder.parent.name}-{trial.number}"
    limit = f"health.hang_timeout_s={LIMIT_S}"
    job, run = person.types(*trial.words, limit, f"run.name={name}", timeout_s=_PATIENCE_S).job_and_run
    try:
        begun_unix_s = wait_for(lambda: _begun(run, trial.rank), within_s=_PATIENCE_S, what="the moment")
        wait_for(lambda: _is_over(run), within_s=_PATIENCE_S, what="the end", poll_s=0.5)
    finally:
        person.runs("scancel", "--quiet", job)
    events, ledger = read_events(run, "hang"), ledger_lines(run)
    print(f"   {trial}: {'; '.join(event['sentence'] for event in events) or 'no hang'}")
    if trial.kind in SLOW:
        slow_s = float(ledger[0]["end_time_unix_s"]) - begun_unix_s
        seconds.append(slow_s)
        return what_is_wrong_with_slowness(events=events, ledger=ledger, slow_s=slow_s)
    late_s = max((float(event["time_unix_s"]) for event in events), default=time.time()) - begun_unix_s
    seconds.append(late_s)
    stacks = {rank for rank in range(2) if _has_frames(run, rank)}
    late = {f"named after {late_s:.1f} s": late_s > LIMIT_S + SLACK_S}
    return [*what_is_wrong_with_hang(trial, events=events, ledger=ledger, stacks=stacks), *only_true(late)]


def _begun(run: RunDirectory, rank: int) -> float:
    path = run.path / f"of_rank_{rank}_time"
    text = path.read_text() if path.exists() else ""
    return float(text) if text else 0.0


def _is_over(run: RunDirectory) -> bool:
    ledger = ledger_lines(run)
    return bool(ledger) and ledger[-1].get("action") in ("finish", "stop")


def _has_frames(run: RunDirectory, rank: int) -> bool:
    path = run.stacks(0, rank)
    return path.exists() and "  File " in path.read_text(errors="replace")
