"""Programs that write beside their own file, stopped again and again and continued in every way that a person has.

The program is unmodified: it knows nothing of runs. Its checkpoint, a log, a copy of its sources and a link lie beside
`__file__`. Each way to continue must find the steps that were done, and every file that the program has written.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally
from tests.support.command_line import Person

STEPS = 30
_PROGRAM = """
import os, shutil, sys
from pathlib import Path
import helper

here = Path(__file__).resolve().parent
out = here / "out"
(out / "sources").mkdir(parents=True, exist_ok=True)
shutil.copy(__file__, out / "sources" / "train.py")
if not (here / "latest").is_symlink():
    (here / "latest").symlink_to("out")
checkpoint = out / "last.pth"
done = int(checkpoint.read_text()) if checkpoint.exists() else 0
stop = done + int((Path(sys.argv[1]) / "lives").read_text())
with (here / "train.log").open("a") as log:
    for step in range(done + 1, {steps} + 1):
        log.write(f"{{sys.argv[2]}} {{step}}\\n")
        checkpoint.write_text(str(step))
        if step == stop and step < {steps}:
            log.flush()
            sys.exit(75)
"""


@dataclass(slots=True)
class Project:
    """A person's folder with the program, and the root of the runs.

    Args:
        folder: an empty folder.
        in_git: whether it is a repository.
    """

    folder: Path
    in_git: bool
    num_edits: int = 0

    def begin(self) -> None:
        """Writes the program."""
        self.source.mkdir()
        (self.source / "train.py").write_text(_PROGRAM.format(steps=STEPS))
        (self.source / "helper.py").write_text("")
        if self.in_git:
            for words in (("init", "-q"), ("add", ".")):
                subprocess.run(["git", *words], cwd=self.source, check=True)

    @property
    def source(self) -> Path:
        """Where the person types."""
        return self.folder / "project"

    def words(self, *, is_sweep: bool) -> list[str]:
        """Returns the command of the run, or of a sweep of two."""
        if is_sweep:
            script = ["-m", f"script=[train.py,{self.folder},${{seed}}]", "seed=1,2"]
        else:
            script = [f"script=[train.py,{self.folder},1]", "seed=1"]
        return [*script, "run.processes=1", f"run.root={self.folder}/runs", "run.name=beside"]

    def runs(self) -> list[RunDirectory]:
        """Returns the runs that there are."""
        return [RunDirectory(path.parent) for path in self.folder.glob("runs/beside/*/config.yaml")]

    def go_on(self, way: str, *, is_sweep: bool) -> None:
        """Continues in one of the ways."""
        person = Person(self.source)
        if way in ("same command", "same command, other code"):
            if way != "same command":
                self.num_edits += 1
                (self.source / "helper.py").write_text(f"number = {self.num_edits}\n")
                (self.source / f"new_{self.num_edits}.py").write_text("")
            person.types(*self.words(is_sweep=is_sweep))
            return
        accepts = ["--accept", "code"] if way == "accept code" else []
        for run in self.runs():
            if not run.result.exists():
                person.types("resume", run.run_id, *accepts, "--root", f"{self.folder}/runs")


WAYS = ("resume", "same command", "same command, other code", "accept code")


def problems_of(run: RunDirectory, *, seed: str) -> Iterator[str]:
    """Yields what is wrong with the files of a run that is finished."""
    expected = {
        "train.log": "".join(f"{seed} {step}\n" for step in range(1, STEPS + 1)),
        "out/last.pth": str(STEPS),
        "latest/last.pth": str(STEPS),
        "out/sources/train.py": _PROGRAM.format(steps=STEPS),
    }
    for name, text in expected.items():
        path = run.code / name
        present = path.read_text() if path.exists() else None
        if present != text:
            yield f"{name} is not what the program has written: {str(present)[:60]!r}"


def live(project: Project, dice: random.Random, *, is_sweep: bool, ways: Counter[str]) -> Iterator[str]:
    """Lets a run or a sweep live to its end, and yields what is wrong."""
    project.begin()
    lives = project.folder / "lives"
    lives.write_text(str(dice.randint(4, 12)))
    project.go_on("same command", is_sweep=is_sweep)
    for _ in range(STEPS):
        runs = project.runs()
        if all(run.result.exists() for run in runs):
            break
        lives.write_text(str(dice.randint(4, 12)))
        way = dice.choice(WAYS)
        ways[way] += 1
        project.go_on(way, is_sweep=is_sweep)
    if len(runs) != 1 + is_sweep:
        yield f"there are {len(runs)} runs"
    seeds = []
    for run in runs:
        if not run.result.exists():
            yield f"{run.run_id} did not come to its end"
        log = run.code / "train.log"
        seeds.append(log.read_text().split()[0] if log.exists() else "")
        yield from problems_of(run, seed=seeds[-1])
    if len(set(seeds)) != len(seeds):
        yield f"two runs have written into one log: {seeds}"


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials: runs and sweeps in turn, inside and outside of git."""
    dice = random.Random(seed)
    ways: Counter[str] = Counter()
    for number in range(trials):
        place = folder / f"trial-{number}"
        place.mkdir(parents=True)
        project = Project(place, in_git=number % 4 < 2)
        is_sweep = bool(number % 2)
        with tally.trial(
            f"{'a sweep' if is_sweep else 'a run'}, {'in git' if project.in_git else 'no git'}"
        ) as problems:
            problems += live(project, dice, is_sweep=is_sweep, ways=ways)
        shutil.rmtree(place)
    return {"continued by": ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))}
