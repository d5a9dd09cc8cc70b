"""Runs a campaign on Slurm in parts: `python -m tests.campaigns.in_parts preflight --notes FILE --within-s 200`.

The outcome of each trial is a line of FILE. Called again with the same file it makes the trials that are missing, so a
cluster that others need, too, is taken for minutes. Trials of another revision or seed do not count and are made again.
The last part keeps the result and rewrites docs/reliability.md. Ends with 3 while trials are missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from slurm_train.rundir.files import read_lines
from tests.campaigns.__main__ import keep, revision, today
from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.on_slurm import at_work
from tests.campaigns.result import Record
from tests.campaigns.trial import Trial, TrialByTrial, read_trial, say, sum_up

_IN_PARTS = ("preflight", "preflight-healthy")
_MISSING = 3


def main() -> int:
    """Makes trials until the time is over or none is missing; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=_IN_PARTS)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--within-s", type=float, default=200.0, help="no trial is begun later than this")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    module = cast(TrialByTrial, importlib.import_module(f"tests.campaigns.{CAMPAIGNS[asked.name].module}"))
    count, until_s = CAMPAIGNS[asked.name].trials, time.monotonic() + asked.within_s
    with at_work(Path(tempfile.mkdtemp(prefix=f"slurm_train-{asked.name}-"))) as person:
        for number in range(count):
            if number in made(asked) or time.monotonic() > until_s:
                continue
            began_s = time.monotonic()
            trial = module.make_trial(person, number, seed=asked.seed)
            note(asked, number, replace(trial, wall_s=time.monotonic() - began_s))
            say(number, trial)
    trials = made(asked)
    if len(trials) < count:
        print(f"{asked.name}: {len(trials)} of {count} trials are made")
        return _MISSING
    return finish(asked, module, [trials[number] for number in range(count)])


def made(asked: argparse.Namespace) -> dict[int, Trial]:
    """Returns the trials that count, by number."""
    same = {"name": asked.name, "seed": asked.seed, "revision": revision()}
    lines = read_lines(asked.notes) if asked.notes.exists() else []
    return {line["number"]: read_trial(line["trial"]) for line in lines if same.items() <= line.items()}


def note(asked: argparse.Namespace, number: int, trial: Trial) -> None:
    """Adds the outcome of a trial to the notes."""
    line = {"name": asked.name, "seed": asked.seed, "revision": revision(), "number": number, "trial": trial.as_json()}
    with asked.notes.open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(line) + "\n")


def finish(asked: argparse.Namespace, module: TrialByTrial, trials: list[Trial]) -> int:
    """Keeps the result, says it, and returns the exit code."""
    result = sum_up(trials, module.figures_of(trials))
    wall_s = sum(trial.wall_s for trial in trials)
    keep(Record(name=asked.name, date=today(), seed=asked.seed, wall_s=wall_s, revision=revision(), result=result))
    for line in (f"{asked.name}: {result.held} of {result.trials} held", *result.problems):
        print(line)
    return int(not result.is_kept)


if __name__ == "__main__":
    sys.exit(main())
