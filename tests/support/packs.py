"""Runs of a sweep that share jobs, the last of which fails for good; all are slow until `light_training.speed_up`."""

from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table
from tests.support import light_training
from tests.support.command_line import Person


def submits_packs(person: Person, *words: str, runs: int, pack: int, steps: int) -> list[Element]:
    """Submits a sweep over the seeds 1 to `runs` in packs and returns its table."""
    light_training.add_program(person)
    light_training.slow_down(person)
    training = light_training.words(steps=steps, save_every=steps, failing_seed=runs)
    done = person.types("-m", "+cluster=1x1", *training, f"seed=range(1,{runs + 1})", f"sweep.pack={pack}", *words)
    assert done.code == 0, done.err
    return read_table(SweepDirectory(Path(done.out.split()[1])))


def runs_of(table: list[Element]) -> list[RunDirectory]:
    """Returns the runs of a sweep by index."""
    return [element.run for element in table]


def gpus_of(runs: list[RunDirectory]) -> list[str]:
    """Returns what each run was given as CUDA_VISIBLE_DEVICES."""
    return [_parts(run)[1].removeprefix("GPU ") for run in runs]


def cpus_of(runs: list[RunDirectory]) -> list[set[int]]:
    """Returns the CPUs that each run kept to."""
    return [set(map(int, _parts(run)[2].split()[1:])) for run in runs]


def _parts(run: RunDirectory) -> list[str]:
    return light_training.place_line(run, 0).split("; ")
