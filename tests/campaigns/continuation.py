"""Campaign `continuation`: a job that cannot be requeued submits the one that takes over, and `cancel` comes meanwhile.

The jobs find programs of the campaign's own on their PATH: `scontrol` refuses to requeue, as a site does with
JobRequeue=0, `sacct` says that there is no accounting, and `sbatch` waits before and after it has submitted the job, so
that a cancel can be put between any two of these moments.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.files import read_json
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.cancel import LATE_S
from tests.campaigns.record import Tally
from tests.support.command_line import Person
from tests.support.ledgers import ledger_lines
from tests.support.light_runs import WORDS, active_jobs, add_program, lives, problems_of
from tests.support.slurm_runs import at_work, command
from tests.support.waiting import wait_for

_AT_ONCE = 5
_PAUSE_S = 0.8
_BEFORE_S, _AFTER_S = 3.0, 7.0
"""In every second trial: time for a whole cancel before the other job is submitted, and longer than KillWait after it,
so that the cancelled job is killed before it has recorded the other."""
_PATIENCE_S = 120.0
_WATCH_S = 14.0
"""KillWait (5 s here), and the start of a job that waited for another's end."""

_PROGRAMS = {
    "sacct": "echo 'Slurm accounting storage is disabled' >&2; exit 1",
    "scontrol": """
case "$1" in requeue|update) echo 'Requested operation is presently disabled' >&2; exit 1;; esac
exec {real} "$@"
""",
    "sbatch": """
case "$*" in *--dependency=afterany:*) ;; *) exec {real} "$@";; esac
trap '' TERM
for script; do :; done
run="${{script%/logs/*}}"
before_s={pause_s} after_s={pause_s}
case "$run" in *[13579]/*) before_s={before_s} after_s={after_s};; esac
touch "$run/asked"; sleep "$before_s"
said=$({real} "$@") || exit 1
touch "$run/submitted"; sleep "$after_s"
echo "$said"
""",
}
# The moment, and the longest time after it: together they cover all from the warning to the other job's start.
_MOMENTS = {"warned": 1.5, "asked": _PAUSE_S, "submitted": _PAUSE_S, "recorded": 1.0, "begun": 1.0}


class _Trial(NamedTuple):
    number: int
    moment: str
    delay_s: float

    def __str__(self) -> str:
        return f"trial {self.number}, cancel {self.delay_s:.2f} s after the other job was {self.moment}"


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Makes the trials, a few at a time."""
    dice, moments = random.Random(seed), list(_MOMENTS)
    names = [moments[number % len(moments)] for number in range(trials)]
    planned = [_Trial(number, name, dice.uniform(0.0, _MOMENTS[name])) for number, name in enumerate(names)]
    counted: Counter[str] = Counter()
    with at_work(folder) as person:
        add_program(person)
        path = _write_programs(folder / "bin")
        tally.try_all(planned, lambda trial: _problems(person, trial, path, counted), at_once=_AT_ONCE)
    return {"another job was submitted": str(counted["submitted"]), "it had begun": str(counted["begun"])}


def _write_programs(folder: Path) -> str:
    folder.mkdir()
    pauses = {"pause_s": _PAUSE_S, "before_s": _BEFORE_S, "after_s": _AFTER_S}
    for name, body in _PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body.format(real=shutil.which(name), **pauses)}\n")
        program.chmod(0o755)
    return str(folder)


def _problems(person: Person, trial: _Trial, programs: str, counted: Counter[str]) -> Iterator[str]:
    try:
        yield from _make(person, trial, programs, counted)
    finally:
        paths = person.folder.glob(f"runs/continued-{trial.number}/*")
        person.runs("scancel", "--quiet", *(job for path in paths for job in active_jobs(RunDirectory(path))))


def _make(person: Person, trial: _Trial, programs: str, counted: Counter[str]) -> Iterator[str]:
    words = (*WORDS, f"run.name=continued-{trial.number}", f"seed={trial.number}")
    env = {"PATH": f"{programs}:{person.environment()['PATH']}"}
    job, run = person.types(*words, env=env).job_and_run
    wait_for(lambda: lives(run), within_s=_PATIENCE_S, what=f"ranks of {run.path}", poll_s=0.05)
    # What the warning before the time limit does.
    command("scancel", "--signal=USR2", job)
    wait_for(lambda: _is_there(run, trial.moment, job), within_s=_PATIENCE_S, what=trial.moment, poll_s=0.02)
    time.sleep(trial.delay_s)  # not a wait for anything: the moment is the trial
    done = person.types("cancel", run.name)
    over_unix_s = time.time()
    if done.code:
        yield f"cancel: {done.err.strip()}"
    time.sleep(_WATCH_S)  # nothing is waited for: nothing must come
    counted.update(submitted=(run.path / "submitted").exists(), begun=len(lives(run)) > 1)
    if active := active_jobs(run):
        yield f"jobs {', '.join(active)} are alive {_WATCH_S:.0f} s after the cancel"
    begun = [(entry["job_id"], float(entry["time_unix_s"])) for entry in ledger_lines(run)]
    # Ranks that were being started get the signal when they are there, and KillWait to end in.
    begun += [(life.job, life.end_unix_s - LATE_S) for life in lives(run)]
    late = [(job, begin - over_unix_s) for job, begin in begun if begin > over_unix_s]
    yield from (f"job {job} began {late_s:.1f} s after the cancel" for job, late_s in late)
    yield from problems_of(run)


def _is_there(run: RunDirectory, moment: str, job: str) -> bool:
    if moment == "warned":
        return True
    if moment == "recorded":
        return len((read_json(run.job) or {}).get("job_ids", ())) == 2
    if moment == "begun":
        return any(life.job != job for life in lives(run))
    return (run.path / moment).exists()
