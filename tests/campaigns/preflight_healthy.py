"""Campaign `preflight-healthy`: runs on a healthy cluster, of several sizes, with and without measuring: no finding.

python -m tests.campaigns preflight-healthy --trials 20
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.preflight import read_record
from tests.campaigns.on_slurm import at_work
from tests.campaigns.result import Result
from tests.campaigns.trial import Trial, say, sum_up
from tests.support.command_line import TINY, Person
from tests.support.slurm_runs import wait_until_finished

_SIZES = ("2x2", "4x2", "1x4", "3x1", "4x8")
_PATIENCE_S = 300.0


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Runs so many trials; every fourth run measures speeds, too."""
    made = []
    with at_work(folder) as person:
        for number in range(trials):
            made.append(make_trial(person, number, seed=seed))
            say(number, made[-1])
    return sum_up(made, figures_of(made))


def make_trial(person: Person, number: int, *, seed: int) -> Trial:
    """Runs the job of a number to its end."""
    size, measures = _SIZES[(number + seed) % len(_SIZES)], number % 4 == 3
    words = (*TINY, "train.threads=1", "batch.global_size=96", f"run.name=healthy-{number}")
    # The training behind it shows that a healthy job is not kept from it; 32 ranks would import torch for a minute.
    short = ("preflight.only=true",) if size == "4x8" else ("train.max_steps=2",)
    speeds = f"preflight.bandwidth={str(measures).lower()}"
    what = f"{size}{' with measuring' if measures else ''}"
    _, run = person.types(f"+cluster={size}", *words, *short, speeds).job_and_run
    try:
        wait_until_finished(run, within_s=_PATIENCE_S)
    except AssertionError as err:
        return Trial(what=what, problems=(str(err).partition("\n")[0],), seconds={})
    record = read_record(run, 0)
    took_s = float(record.get("seconds", 0.0))
    problems = tuple(problems_of(run, record))
    return Trial(what=f"{what}, looked for {took_s:.2f} s", problems=problems, seconds={what: took_s})


def figures_of(trials: Sequence[Trial]) -> dict[str, str]:
    """Returns how long rank 0 looked at most, by size; the wait for the last rank is in it."""
    longest: dict[str, float] = {}
    for trial in trials:
        for what, took_s in trial.seconds.items():
            longest[what] = max(took_s, longest.get(what, 0.0))
    return {"longest look": ", ".join(f"{what} {took_s:.2f} s" for what, took_s in sorted(longest.items()))}


def problems_of(run: RunDirectory, record: dict[str, object]) -> list[str]:
    """Returns what speaks against a healthy run."""
    problems = [] if record else ["nobody looked"]
    if findings := record.get("findings"):
        problems.append(f"false alarm: {findings}")
    if len(read_ledger(run)) != 1:
        problems.append(f"{len(read_ledger(run))} attempts")
    return problems
