"""Campaign `hang`: a random rank of a run on Slurm is stopped at a random moment; the watchdog must name it and go on.

Several runs at once, each in a thread. The rank gets SIGSTOP, so it answers nothing but KILL.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import Limits, read_beats
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally, only_true
from tests.support.command_line import TINY, WIDE_MODULE, Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import rank_pid
from tests.support.slurm_runs import at_work, step_lines, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

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
    # Wide enough that a beat, of which there is one a second, is mostly within a save on a fast machine, too.
    "save": (*_SAVES_OFTEN, "checkpoint.background=false", "model.width=3584"),
    "save in the background": (*_SAVES_OFTEN, "model.width=1536"),
    "evaluate": ("model.step_s=0.15", "train.eval_every_steps=2"),
}
"""What a run is given, so that it is in this phase often."""


class Trial(NamedTuple):
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
    phases = [list(PHASES)[number % len(PHASES)] for number in range(trials)]
    return [
        Trial(number, phase, chance.randrange(2), chance.choice((1, 2)), chance.uniform(0.0, 1.5))
        for number, phase in enumerate(phases)
    ]


def what_is_wrong(
    *,
    rank: int,
    host: str,
    limit_s: float,
    ended_s: float,
    events: Sequence[dict[str, Any]],
    stacks: Sequence[int],
    ledger: Sequence[dict[str, Any]],
    steps: Sequence[int],
) -> list[str]:
    """Returns how the promise was broken, from what there is to see of a run when it is over.

    Args:
        rank: who was stopped.
        host: where.
        limit_s: the time-out that held for where the ranks were.
        ended_s: from the stop to the end of the attempt.
        events: the hangs on record.
        stacks: ranks that wrote their stacks down, with a frame of theirs in it.
        ledger: the run's attempts.
        steps: of the lines of metrics that count, in order.
    """
    beginning = f"rank {rank} on {host} does not run (stopped or lost), in "
    said = {
        f"said {one['sentence']!r}": one["ranks"] != [rank]
        or not one["sentence"].startswith(beginning)
        or "\n" in one["sentence"]
        for one in events[:1]
    }
    story = [(entry.get("reason"), entry.get("action")) for entry in ledger]
    return only_true(
        {
            f"ended after {ended_s:.1f} s, the time-out is {limit_s:.0f} s": ended_s > limit_s + SLACK_S,
            f"{len(events)} hangs on record": len(events) != 1,
            **said,
            f"no stacks of rank {1 - rank}": 1 - rank not in stacks,
            f"the ledger says {story}": story != [("failed", "relaunch"), ("done", "finish")],
            f"its steps are {list(steps)}": list(steps) != list(range(1, STEPS + 1)),
        }
    )


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials and returns how often the promise was kept."""
    over: list[float] = []
    with at_work(folder) as person:
        (person.folder / "tiny.py").write_text(WIDE_MODULE)
        planned = plan_trials(seed=seed, trials=trials)
        tally.try_all(planned, lambda trial: _try(person, trial, over), at_once=_AT_ONCE)
    return {"end of the step after the time-out": f"{max(over):.1f} s at most"} if over else {}


def _try(person: Person, trial: Trial, over: list[float]) -> list[str]:
    name = f"{person.folder.parent.name}-{trial.number}"
    job, run = person.types(*trial.words, f"run.name={name}").job_and_run
    try:
        _wait_for_the_moment(run, trial)
        os.kill(rank_pid(run, trial.rank), signal.SIGSTOP)
        stopped_s = time.monotonic()
        wait_for(lambda: len(read_beats(run, 0)) == 2, within_s=START_S, what="the beats of both ranks")
        beats = read_beats(run, 0)
        limit_s = max(_LIMITS.of(settled=beat.settled) for beat in beats.values())
        wait_for(lambda: "reason" in ledger_lines(run)[0], within_s=limit_s + 3 * SLACK_S, what="the end of the step")
        ended_s = time.monotonic() - stopped_s
        wait_until_finished(run, within_s=_PATIENCE_S)
    finally:
        person.runs("scancel", "--quiet", job)
    over.append(ended_s - limit_s)
    events = read_events(run, "hang")
    print(f"   {trial}: {'; '.join(event['sentence'] for event in events)}")
    return what_is_wrong(
        rank=trial.rank,
        host=beats[trial.rank].host,
        limit_s=limit_s,
        ended_s=ended_s,
        events=events,
        stacks=[rank for rank in range(2) if _has_frames(run, rank)],
        ledger=ledger_lines(run),
        steps=[line["step"] for line in step_lines(run)],
    )


def _wait_for_the_moment(run: RunDirectory, trial: Trial) -> None:
    if trial.phase == "start":
        wait_for(lambda: trial.rank in read_beats(run, 0), within_s=_PATIENCE_S, what="a beat", poll_s=0.1)
        time.sleep(trial.delay_s)  # not a wait for anything: the moment is the trial
        return
    wait_until_step(run, 2, within_s=_PATIENCE_S)
    time.sleep(trial.delay_s)  # likewise
    if trial.phase in ("save", "evaluate"):
        wait_for(
            lambda: (beat := read_beats(run, 0).get(trial.rank)) and beat.phase == trial.phase,
            within_s=60,
            what=trial.phase,
            poll_s=0.02,
        )


def _has_frames(run: RunDirectory, rank: int) -> bool:
    path = run.stacks(0, rank)
    return path.exists() and "  File " in path.read_text(errors="replace")
