"""Campaign `hang`: a random rank of a run on Slurm is stopped at a random moment; the watchdog must name it and go on.

Several runs at once, each in a thread. The rank gets SIGSTOP, so it answers nothing but KILL.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.metrics.writer import read_metrics
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import Beat, Limits, read_beats
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Result, Tally
from tests.campaigns.victims import at_work
from tests.support.command_line import TINY, Person
from tests.support.process_faults import rank_pid
from tests.support.slurm_runs import wait_until_finished, wait_until_step
from tests.support.waiting import wait_for
from tests.support.wide_model import WIDE_MODULE

_AT_ONCE = 5
_PATIENCE_S = 300.0
HANG_S, START_S = 8.0, 60.0
"""Time-outs after the first step and before it; two cores, shared with others, import torch for several runs."""
SLACK_S = 10.0
_LIMITS = Limits(START_S, HANG_S)
STEPS = 24

_SAVES_OFTEN = ("checkpoint.every_steps=2", "model.step_s=0.05")
PHASES: dict[str, tuple[str, ...]] = {
    "start": ("model.step_s=0.1",),
    "step": ("model.step_s=0.2",),
    "save": (*_SAVES_OFTEN, "checkpoint.background=false", "model.width=1536"),
    "save in the background": (*_SAVES_OFTEN, "model.width=1536"),
    "evaluate": ("model.step_s=0.05", "train.eval_every_steps=2"),
}
"""What a run is given, so that it is in this phase often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run, and the rank of it that is stopped."""

    number: int
    phase: str
    rank: int
    nodes: int
    delay_s: float
    """After the first beat (phase start) or the second step; then comes the next moment in the phase."""

    @property
    def words(self) -> tuple[str, ...]:
        """What a person types for it, but for its name."""
        words = [word for word in TINY if not word.startswith("train.max_steps")]
        health = (f"health.hang_timeout_s={HANG_S}", f"train.start_timeout_s={START_S}")
        size = (f"+cluster={self.nodes}x{2 // self.nodes}", f"train.max_steps={STEPS}")
        return (*size, *words, *PHASES[self.phase], *health)

    def __str__(self) -> str:
        return f"trial {self.number} ({self.phase} + {self.delay_s:.2f} s, rank {self.rank}, {self.nodes} nodes)"


def plan_trials(*, seed: int, trials: int) -> list[Trial]:
    """Returns the trials: the phases in turn, ranks and moments at random."""
    chance = random.Random(seed)
    return [
        Trial(
            number=number,
            phase=list(PHASES)[number % len(PHASES)],
            rank=chance.randrange(2),
            nodes=chance.choice((1, 2)),
            delay_s=chance.uniform(0.0, 1.5),
        )
        for number in range(trials)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there is to see of a run when it is over."""

    rank: int
    """Who was stopped."""
    host: str
    limit_s: float
    """The time-out that held for where the ranks were."""
    ended_s: float
    """From the stop to the end of the attempt."""
    events: Sequence[dict[str, Any]]
    stacks: Sequence[int]
    """Ranks that wrote their stacks down, with a frame of theirs in it."""
    ledger: Sequence[dict[str, Any]] = field(default=())
    steps: Sequence[int]
    """Of the lines of metrics that count, in order."""


def what_is_wrong(seen: Seen) -> list[str]:
    """Returns how the promise was broken."""
    found = []
    if seen.ended_s > seen.limit_s + SLACK_S:
        found.append(f"ended after {seen.ended_s:.1f} s, the time-out is {seen.limit_s:.0f} s")
    if len(seen.events) != 1:
        found.append(f"{len(seen.events)} hangs on record")
    for event in seen.events[:1]:
        beginning = f"rank {seen.rank} on {seen.host} does not run (stopped or lost), in "
        sentence = event["sentence"]
        if event["ranks"] != [seen.rank] or not sentence.startswith(beginning) or "\n" in sentence:
            found.append(f"said {sentence!r}")
    if 1 - seen.rank not in seen.stacks:
        found.append(f"no stacks of rank {1 - seen.rank}")
    story = [(entry.get("reason"), entry.get("action")) for entry in seen.ledger]
    if story != [("failed", "relaunch"), ("done", "finish")]:
        found.append(f"the ledger says {story}")
    if list(seen.steps) != list(range(1, STEPS + 1)):
        found.append(f"its steps are {list(seen.steps)}")
    return found


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Runs the trials and returns how often the promise was kept."""
    tally, over = Tally(), list[float]()
    with at_work(folder) as person, ThreadPoolExecutor(_AT_ONCE) as pool:
        (person.folder / "tiny.py").write_text(WIDE_MODULE)

        def judge(trial: Trial) -> None:
            with tally.trial(str(trial)) as problems:
                seen = _try(person, trial)
                over.append(seen.ended_s - seen.limit_s)
                problems += what_is_wrong(seen)
                print(f"   {trial}: {'; '.join(event['sentence'] for event in seen.events)}", flush=True)

        list(pool.map(judge, plan_trials(seed=seed, trials=trials)))
    return tally.result({"end of the step after the time-out": f"{max(over):.1f} s at most"} if over else {})


def _try(person: Person, trial: Trial) -> Seen:
    name = f"{person.folder.parent.name}-{trial.number}"
    job, run = person.types(*trial.words, f"run.name={name}").job_and_run
    pid = 0
    try:
        _wait_for_the_moment(run, trial)
        pid = rank_pid(run, trial.rank)
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        beats = wait_for(lambda: _two(run), within_s=START_S, what="the beats of both ranks")
        limit_s = max(_LIMITS.of(settled=beat.settled) for beat in beats.values())
        wait_for(lambda: "reason" in read_ledger(run)[0], within_s=limit_s + 3 * SLACK_S, what="the end of the step")
        ended_s = time.monotonic() - stopped_s
        wait_until_finished(run, within_s=_PATIENCE_S)
    finally:
        person.runs("scancel", "--quiet", job)
    return Seen(
        rank=trial.rank,
        host=beats[trial.rank].source.host,
        limit_s=limit_s,
        ended_s=ended_s,
        events=read_events(run, "hang"),
        stacks=[rank for rank in range(2) if _has_frames(run, rank)],
        ledger=read_ledger(run),
        steps=[line["step"] for line in read_metrics(run.metrics) if "loss" in line],
    )


def _wait_for_the_moment(run: RunDirectory, trial: Trial) -> None:
    if trial.phase == "start":
        wait_for(lambda: trial.rank in read_beats(run, 0), within_s=_PATIENCE_S, what="a beat", poll_s=0.1)
        time.sleep(trial.delay_s)  # not a wait for anything: the moment is the trial
        return
    wait_until_step(run, 2, within_s=_PATIENCE_S)
    time.sleep(trial.delay_s)  # likewise
    if trial.phase in ("save", "evaluate"):
        wait_for(lambda: _phase(run, trial.rank) == trial.phase, within_s=60, what=trial.phase, poll_s=0.02)


def _two(run: RunDirectory) -> dict[int, Beat]:
    beats = read_beats(run, 0)
    return beats if len(beats) == 2 else {}


def _phase(run: RunDirectory, rank: int) -> str:
    beat = read_beats(run, 0).get(rank)
    return "" if beat is None else beat.phase


def _has_frames(run: RunDirectory, rank: int) -> bool:
    path = run.stacks(0, rank)
    return path.exists() and "  File " in path.read_text(errors="replace")
