"""When and where the campaign `hang` stops a rank, and what it looks at afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.command_line import TINY

HANG_S, START_S = 8.0, 60.0
"""Time-outs after the first step and before it; two cores, shared with others, import torch for several runs."""
SLACK_S = 10.0
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


def what_is_wrong(seen: Seen) -> str:
    """Returns how the promise was broken, "" if it was kept."""
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
    return "; ".join(found)
