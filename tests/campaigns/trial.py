"""One trial of a campaign that is made of trials which know nothing of each other, and their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tests.campaigns.result import Result
from tests.support.command_line import Person


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of one trial.

    Args:
        what: was tried, in words.
        problems: why it did not hold; empty where it did.
        seconds: what it measured, by name; absent where it did not come so far.
        wall_s: how long it took.
    """

    what: str
    problems: tuple[str, ...] = ()
    seconds: Mapping[str, float]
    wall_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns it for a file."""
        return asdict(self)


class TrialByTrial(Protocol):
    """What a module of such a campaign has."""

    def make_trial(self, person: Person, number: int, *, seed: int) -> Trial:
        """Makes the trial of a number."""

    def figures_of(self, trials: Sequence[Trial]) -> dict[str, str]:
        """Returns what was measured over all of them."""


def read_trial(value: Mapping[str, Any]) -> Trial:
    """Returns what `as_json` gave."""
    return Trial(
        what=value["what"], problems=tuple(value["problems"]), seconds=value["seconds"], wall_s=value["wall_s"]
    )


def say(number: int, trial: Trial) -> None:
    """Prints a trial as it ends."""
    print(f"{number + 1}. {': '.join([trial.what, *trial.problems])}", flush=True)


def sum_up(trials: Sequence[Trial], figures: Mapping[str, str]) -> Result:
    """Returns the campaign's result."""
    problems = tuple(f"{trial.what}: {problem}" for trial in trials for problem in trial.problems)
    held = sum(not trial.problems for trial in trials)
    return Result(trials=len(trials), held=held, figures=figures, problems=problems)
