"""Campaign `two-starters`: the same run is started twice at a random offset, and cancelled in between.

One trains at a time, `cancel` finds whatever lives, nothing is written under live ranks, and `resume` finishes the run.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally
from tests.support.command_line import Person
from tests.support.light_runs import WORDS, active_jobs, add_program, lives, problems_of
from tests.support.slurm_runs import at_work
from tests.support.waiting import wait_for

_AT_ONCE = 3
_LONGEST_OFFSET_S, _LONGEST_LIFE_S = 1.5, 4.0
_END_S, _PATIENCE_S = 20.0, 90.0


class _Trial(NamedTuple):
    number: int
    kind: str
    offset_s: float
    cancel_s: float

    def __str__(self) -> str:
        return f"{self.kind}, the second {self.offset_s:.2f} s later, cancel after {self.cancel_s:.2f} s"


def _kinds(number: int) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Returns what is typed: words of the program, or of the shell in the run directory."""
    first = (*WORDS, f"run.name=starters-{number}", f"seed={number}")
    resume, sbatch = ("resume", f"starters-{number}"), ("sbatch", "--parsable", "submit.sh")
    return {
        "first command twice": (first, first),
        "sbatch submit.sh twice": (sbatch, sbatch),
        "resume twice": (resume, resume),
        "first command and resume": (first, resume),
        "resume and sbatch submit.sh": (resume, sbatch),
    }


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Makes the trials, a few at a time."""
    dice, kinds = random.Random(seed), list(_kinds(0))
    planned = [
        _Trial(
            number,
            kinds[number % len(kinds)],
            dice.choice((0.0, dice.uniform(0.0, _LONGEST_OFFSET_S))),
            dice.uniform(0.0, _LONGEST_LIFE_S),
        )
        for number in range(trials)
    ]
    counted: Counter[str] = Counter()
    with at_work(folder) as person:
        tally.try_all(planned, lambda trial: _problems(person, trial, counted), at_once=_AT_ONCE)
    return {"starts": str(counted["starts"]), "jobs cancelled": str(counted["cancelled"])}


def _problems(person: Person, trial: _Trial, counted: Counter[str]) -> Iterator[str]:
    here = Person(person.folder / str(trial.number))
    here.folder.mkdir()
    add_program(here)
    try:
        yield from _make(here, trial, counted)
    finally:
        # What is left over must not take the nodes of the next trials.
        names = {f"{path.parent.parent.name}-{path.parent.name}" for path in here.folder.glob("runs/*/*/config.yaml")}
        here.runs("scancel", "--quiet", f"--name={','.join(names) or 'none'}")


def _make(here: Person, trial: _Trial, counted: Counter[str]) -> Iterator[str]:
    first, second = _kinds(trial.number)[trial.kind]
    if trial.kind != "first command twice":
        # A run that is there already: begun and cancelled.
        _, run = here.types(*_kinds(trial.number)["first command twice"][0]).job_and_run
        here.types("cancel", run.name)
        wait_for(lambda: not active_jobs(run), within_s=_END_S, what=f"the end of the first job of {run.path}")
    with ThreadPoolExecutor(3) as pool:
        started = [pool.submit(_start, here, first, 0.0), pool.submit(_start, here, second, trial.offset_s)]
        between = pool.submit(_cancel_after, here, trial)
        wait_for(lambda: all(one.done() for one in started), within_s=_PATIENCE_S, what="both starters")
    (run,) = (RunDirectory(path.parent) for path in here.folder.glob("runs/*/*/config.yaml"))
    counted.update(starts=2, cancelled=between.result() == 0)
    # Whatever lives now was started after that cancel, or not found by it.
    if active_jobs(run):
        wait_for(
            lambda: _has_trained_or_ended(run),
            within_s=_PATIENCE_S,
            what=f"a job of {run.path} that trains",
            poll_s=0.5,
        )
    if alive := active_jobs(run, "--states=PD,R"):
        done = here.types("cancel", run.name)
        counted.update(cancelled=1)
        # It may have ended by itself between the two looks.
        if done.code and active_jobs(run, "--states=PD,R"):
            yield f"cancel does not find {alive}: {done.err.strip()}"
    wait_for(lambda: not active_jobs(run), within_s=_END_S, what=f"the end of the jobs of {run.path} after the cancel")
    yield from problems_of(run)
    yield from _finishes(here, run)


def _start(here: Person, words: tuple[str, ...], after_s: float) -> int:
    time.sleep(after_s)  # not a wait for anything: the offset is the trial
    if words[0] != "sbatch":
        return here.types(*words).code
    (script,) = here.folder.glob("runs/*/*/submit.sh")
    return Person(script.parent).runs(*words).code


def _cancel_after(here: Person, trial: _Trial) -> int:
    time.sleep(trial.cancel_s)  # likewise
    return here.types("cancel", f"starters-{trial.number}").code


def _has_trained_or_ended(run: RunDirectory) -> bool:
    active = active_jobs(run)
    return not active or any(life.job in active for life in lives(run))


def _finishes(here: Person, run: RunDirectory) -> Iterator[str]:
    (here.folder / "finish").touch()
    done = here.types("resume", run.name)
    if done.code:
        yield f"resume: {done.err.strip()[-300:]}"
        return
    wait_for(run.result.exists, within_s=_PATIENCE_S, what=f"{run.result}")
