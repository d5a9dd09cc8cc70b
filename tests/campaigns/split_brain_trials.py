"""What the campaign `split_brain` does to a run whose node is lost, and what it looks at afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 60
GONE_WITHIN_S = 10.0
VISIBLE_FOR_S = 1.0
"""A commit that is taken back at once, before anybody chose it, counts as not visible."""

MODES: dict[str, str] = {
    "alive": "",
    "training": "",
    "saving": "",
    "before the rename": "rename",
    "after the rename": "renamed",
    "at the last step": "last",
}
"""Where the old ranks are when their node is lost, and where the model's module holds them for that."""

# In attempt 0 steps are slow, and the process can be held at a line of the commit or in its last step.
ZOMBIE_MODULE = """
ATTEMPT = os.environ.get("SLURM_TRAIN_ATTEMPT", "0")

class Hold:
    def __init__(self, place, folder):
        self.is_on, self.folder = ATTEMPT == "0" and place != "none", folder
        self.place = place if self.is_on else ""
        if self.place in ("rename", "renamed"):
            import slurm_train.checkpoint.commit as module
            original, commits = module._rename, []
            def held(source, target):
                if source.name == target.name + ".tmp":
                    commits.append(target)
                is_third = source.name == target.name + ".tmp" and len(commits) == 3
                if is_third and self.place == "rename":
                    self.wait()
                original(source, target)
                if is_third and self.place == "renamed":
                    self.wait()
            module._rename = held
    def wait(self):
        open(os.path.join(self.folder, "held"), "w").close()
        while not os.path.exists(os.path.join(self.folder, "go")):
            time.sleep(0.002)

class Zombie(nn.Module):
    def __init__(self, place: str = "", folder: str = "", last: int = 0, width: int = 256):
        super().__init__()
        self.hold, self.last, self.num_calls = Hold(place, folder), last, 0
        self.layers = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 1))
    def forward(self, x):
        self.num_calls += 1
        if self.hold.is_on and self.training:
            time.sleep(0.01 if self.hold.place == "last" else 0.4)
            if self.num_calls >= self.last and self.hold.place in ("", "last"):
                self.hold.wait()
        return self.layers(x)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run whose ranks outlive their node.

    Args:
        is_stopped: the old processes are stopped before their node is lost, and go on when the new attempt has begun.
        go_on_s: after the begin of the new attempt, until they go on (or are let out of where they are held).
    """

    number: int
    mode: str
    num_ranks: int
    is_stopped: bool
    go_on_s: float

    def __str__(self) -> str:
        stopped = ", stopped" if self.is_stopped else ""
        return f"trial {self.number} ({self.mode}{stopped}, {self.num_ranks} ranks, goes on after {self.go_on_s:.1f} s)"


def plan_trials(*, seed: int, trials: int) -> list[Trial]:
    """Returns the trials: the modes in turn, sizes and moments at random."""
    chance = random.Random(seed)
    planned = []
    for number in range(trials):
        mode = list(MODES)[number % len(MODES)]
        is_stopped = {"alive": False, "training": True, "saving": True}.get(mode, chance.random() < 0.7)
        # One that is not stopped finds out by itself within some seconds.
        go_on_s = chance.uniform(0.0, 12.0 if is_stopped else 3.0)
        ranks = chance.choice((1, 1, 2))
        planned.append(Trial(number=number, mode=mode, num_ranks=ranks, is_stopped=is_stopped, go_on_s=go_on_s))
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint that was seen under an attempt's name."""

    name: str
    attempt: int
    time_unix_s: float
    seen_for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What there is to see of a run when it is over; the old attempt is 0, the new one 1."""

    begin_unix_s: float
    """When attempt 1 took its number."""
    commits: Sequence[Commit]
    metrics: Sequence[tuple[int, int, float]]
    """(attempt, step, time) of the lines that count."""
    ledger: Sequence[tuple[str, int]]
    """(event, attempt) of its lines, in the order of the file."""
    result_attempt: int
    gone_s: float
    """From the begin of attempt 1, or from when they went on, to the end of the last old rank."""
    digest: str
    golden: str


def what_is_wrong(seen: History) -> str:
    """Returns what of the old attempt became visible, "" if nothing did."""
    found = []
    first = min((time_s for attempt, _, time_s in seen.metrics if attempt == 1), default=float("inf"))
    for one in seen.commits:
        # One that got its name before attempt 1 had claimed what it goes on from was claimed with the others.
        if one.attempt == 0 and one.time_unix_s > first and one.seen_for_s > VISIBLE_FOR_S:
            found.append(f"{one.name} got its name {one.time_unix_s - first:.2f} s after attempt 1's first step")
    late = [step for attempt, step, time_s in seen.metrics if attempt == 0 and time_s > first]
    if late:
        found.append(f"attempt 0's lines of steps {late} count, written after attempt 1's first")
    begin = seen.ledger.index(("start", 1)) if ("start", 1) in seen.ledger else len(seen.ledger)
    if ("end", 0) in seen.ledger[begin:]:
        found.append("attempt 0 wrote to the ledger after attempt 1 had begun")
    if seen.result_attempt != 1:
        found.append(f"the result is attempt {seen.result_attempt}'s")
    if seen.gone_s > GONE_WITHIN_S:
        found.append(f"the old ranks were there for {seen.gone_s:.1f} s")
    if [step for _, step, _ in seen.metrics] != list(range(1, STEPS + 1)):
        found.append(f"its steps are {[step for _, step, _ in seen.metrics]}")
    if seen.digest != seen.golden:
        found.append(f"weights {seen.digest}, undisturbed {seen.golden}")
    return "; ".join(found)
