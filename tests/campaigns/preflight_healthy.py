"""Campaign `preflight-healthy`: runs on a healthy cluster, of several sizes, with and without measuring: no finding.

python -m tests.campaigns preflight-healthy --trials 20
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import read_preflight
from slurm_train.rundir.layout import RunDirectory
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
    record = read_preflight(run, 0)
    took_s, waited_s = (float(record.get(name, 0.0)) for name in ("seconds", "waited_s"))
    problems = tuple(problems_of(run, record))
    said = f"{what}, looked for {took_s:.2f} s, {waited_s:.2f} s of them until the last rank had come"
    return Trial(what=said, problems=problems, seconds={what: took_s, f"{what} alone": took_s - waited_s})


def figures_of(trials: Sequence[Trial]) -> dict[str, str]:
    """Returns how long rank 0 looked at most, by size, with and without its wait for the last rank."""
    longest: dict[str, float] = {}
    for trial in trials:
        for what, took_s in trial.seconds.items():
            longest[what] = max(took_s, longest.get(what, 0.0))
    sizes = sorted(what for what in longest if not what.endswith(" alone"))
    shown = (f"{what} {longest[what]:.2f} s ({longest[f'{what} alone']:.2f} s)" for what in sizes)
    return {"longest look (after the last rank came)": ", ".join(shown)}


def problems_of(run: RunDirectory, record: dict[str, object]) -> list[str]:
    """Returns what speaks against a healthy run."""
    problems = [] if record else ["nobody looked"]
    if findings := record.get("findings"):
        problems.append(f"false alarm: {findings}")
    if len(read_ledger(run)) != 1:
        problems.append(f"{len(read_ledger(run))} attempts")
    return problems
