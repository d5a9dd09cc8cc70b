"""Runs whose ranks need no torch: each logs when it lives, and whether files of its run are replaced meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from slurm_train.rundir.files import read_lines
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import Person
from tests.support.slurm_runs import command

WORDS = ("+cluster=1x1", "script=[light.py]", "batch.global_size=16", "preflight.enabled=false")
_PROGRAM = """
import json, os, signal, time
from pathlib import Path

run = Path(os.environ["SLURM_TRAIN_RUN_DIR"])
log = run / "seen" / f"{os.environ['SLURM_JOB_ID']}_{time.time_ns()}"
log.parent.mkdir(exist_ok=True)

def looks():
    found = {}
    for name in ("config.yaml", "plan.json", "code/light.py"):
        try:
            status = (run / name).stat()
            found[name] = (status.st_ino, status.st_mtime_ns)
        except FileNotFoundError:
            found[name] = None
    return found

def tell(**facts):
    with log.open("a") as file:
        file.write(json.dumps({"job": os.environ["SLURM_JOB_ID"], "time_unix_s": time.time(), **facts}) + "\\n")

asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _frame: asked.append(number))
before = looks()
print("trains", flush=True)
while not asked and not Path("finish").exists():
    now = looks()
    tell(changed=[name for name in now if now[name] != before[name]])
    time.sleep(0.05)
tell(changed=[])
raise SystemExit(75 if asked else 0)
"""


class Life(NamedTuple):
    """What one start of the rank has seen."""

    job: str
    begin_unix_s: float
    end_unix_s: float
    changed: tuple[str, ...]
    """Files of the run that were replaced while it lived."""


def add_program(person: Person) -> None:
    """Puts the ranks' program into somebody's folder; it ends well as soon as a file `finish` is there."""
    (person.folder / "light.py").write_text(_PROGRAM)


def lives(run: RunDirectory) -> list[Life]:
    """Returns what the ranks of a run have told, oldest first."""
    found = []
    for path in (run.path / "seen").glob("*"):
        lines = list(read_lines(path))
        times = [float(line["time_unix_s"]) for line in lines]
        changed = dict.fromkeys(name for line in lines for name in line["changed"])
        if lines:
            found.append(Life(str(lines[0]["job"]), min(times), max(times), tuple(changed)))
    return sorted(found, key=lambda life: life.begin_unix_s)


def problems_of(run: RunDirectory) -> Iterator[str]:
    """Yields where two jobs trained the run at a time, or its files were changed under live ranks."""
    told = lives(run)
    for early, late in itertools.pairwise(told):
        if late.begin_unix_s < early.end_unix_s:
            yield f"jobs {early.job} and {late.job} trained at the same time"
    yield from (f"{', '.join(life.changed)} changed while job {life.job} trained" for life in told if life.changed)


def active_jobs(run: RunDirectory, *states: str) -> list[str]:
    """Returns the jobs of a run that Slurm has queued, running or ending, by their name; or in these states alone."""
    return command("squeue", "--noheader", "--format=%i", f"--name={run.name}-{run.run_id}", *states).split()
