"""Runs of a sweep that share jobs, one of which fails for good: their model and words, and the same runs alone."""

from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from tests.support.command_line import TINY, Person
from tests.support.slurm_runs import losses

_MODULE = """
import os, pathlib, time
import tiny

class Fragile(tiny.Tiny):
    def __init__(self, scale: float, fails_with: float, folder: str):
        super().__init__()
        self.scale = scale
        self.hold = pathlib.Path(folder, "hold")
        self.steps_left = 2 if scale == fails_with else -1
        pathlib.Path(folder, f"gpu_of_{scale:g}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        cpus = " ".join(map(str, os.sched_getaffinity(0)))
        pathlib.Path(folder, f"cpus_of_{scale:g}").write_text(cpus)
    def forward(self, x):
        self.steps_left -= 1
        if self.steps_left == 0:
            raise ValueError("this run fails on purpose")
        if self.hold.exists():
            time.sleep(0.5)
        return self.scale * self.layers(x)
"""


def submits_packs(person: Person, *words: str, runs: int, pack: int, steps: int) -> list[Element]:
    """Submits a sweep in packs and returns its table; the last run fails for good, all are slow while `hold` exists."""
    (person.folder / "fragile.py").write_text(_MODULE)
    (person.folder / "hold").touch()
    done = person.types("-m", "+cluster=1x1", *_words(person, runs, steps), f"sweep.pack={pack}", *words)
    assert done.code == 0, done.err
    return read_table(SweepDirectory(Path(done.out.split()[1])))


def losses_alone(person: Person, *, runs: int, steps: int) -> list[dict[int, float]]:
    """Trains the same runs here, one after the other, and returns the losses of each; the last one fails."""
    person.types(
        "-m", *_words(person, runs, steps), "run.processes=1", "sweep.max_parallel=2", "run.name=alone", timeout_s=900
    )
    table = next(path for path in person.folder.glob("runs/sweeps/*") if "alone" in (path / "sweep.jsonl").read_text())
    return [losses(element.run) for element in read_table(SweepDirectory(table))]


def gpus_of(person: Person, runs: int) -> list[str]:
    """Returns what each run was given as CUDA_VISIBLE_DEVICES."""
    return [(person.folder / f"gpu_of_{scale}").read_text() for scale in range(1, runs + 1)]


def cpus_of(person: Person, runs: int) -> list[set[int]]:
    """Returns the CPUs that each run kept to."""
    texts = [(person.folder / f"cpus_of_{scale}").read_text() for scale in range(1, runs + 1)]
    return [set(map(int, text.split())) for text in texts]


def runs_of(table: list[Element]) -> list[RunDirectory]:
    """Returns the runs of a sweep by index."""
    return [element.run for element in table]


def _words(person: Person, runs: int, steps: int) -> list[str]:
    return [
        *TINY[1:],
        "model._target_=fragile.Fragile",
        f"train.max_steps={steps}",
        "train.threads=1",
        f"model.folder={person.folder}",
        f"model.fails_with={runs}",
        f"model.scale=range(1,{runs + 1})",
    ]
