"""Campaign `preflight-healthy`: runs on a healthy cluster, of several sizes, with and without measuring: no finding.

python -m tests.campaigns preflight-healthy --trials 20
"""

from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.preflight import read_record
from tests.campaigns.on_slurm import Tally, at_work
from tests.campaigns.result import Result
from tests.support.command_line import TINY, Person
from tests.support.slurm_runs import wait_until_finished

_SIZES = ("2x2", "4x2", "1x4", "3x1", "4x8")
_PATIENCE_S = 300.0


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Runs so many trials; every fourth run measures speeds, too."""
    tally, seconds = Tally(), list[float]()
    with at_work(folder) as person:
        for number in range(trials):
            size, measures = _SIZES[(number + seed) % len(_SIZES)], number % 4 == 3
            problems, took_s = _try(person, number, size, measures=measures)
            if not measures:
                seconds.append(took_s)
            tally.add(f"{size}{' with measuring' if measures else ''}, looked for {took_s:.2f} s", problems)
    figures = {"seconds of the look at most": f"{max(seconds):.2f} s"} if seconds else {}
    return tally.result(figures)


def _try(person: Person, number: int, size: str, *, measures: bool) -> tuple[list[str], float]:
    words = (*TINY, "train.threads=1", "batch.global_size=96", f"run.name=healthy-{number}")
    # The training behind it shows that a healthy job is not kept from it; 32 ranks would import torch for a minute.
    short = ("preflight.only=true",) if size == "4x8" else ("train.max_steps=2",)
    _, run = person.types(
        f"+cluster={size}", *words, *short, f"preflight.bandwidth={str(measures).lower()}"
    ).job_and_run
    try:
        wait_until_finished(run, within_s=_PATIENCE_S)
    except AssertionError as err:
        return [str(err).partition("\n")[0]], 0.0
    record = read_record(run, 0)
    return problems_of(run, record), float(record.get("seconds", 0.0))


def problems_of(run: RunDirectory, record: dict[str, object]) -> list[str]:
    """Returns what speaks against a healthy run."""
    problems = [] if record else ["nobody looked"]
    if findings := record.get("findings"):
        problems.append(f"false alarm: {findings}")
    if len(read_ledger(run)) != 1:
        problems.append(f"{len(read_ledger(run))} attempts")
    return problems
