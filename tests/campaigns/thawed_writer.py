"""Stops a writer of checkpoints and results before each of its file-system calls. Exhaustive: no number, no seed."""

from __future__ import annotations

from pathlib import Path

from tests.campaigns.memory import in_memory
from tests.campaigns.record import Result
from tests.support.thawed_writers import SCENES, results_everywhere, thawed_everywhere


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Tries all of them, with one checkpoint kept and with two."""
    done = []
    figures = {}
    for scene in SCENES:
        before = len(done)
        for keep in (1, 2):
            with in_memory(folder) as memory:
                done += thawed_everywhere(scene, memory, keep=keep)
        figures[scene.name] = f"{len(done) - before} trials"
        print(f"{scene.name}: {figures[scene.name]}", flush=True)
    with in_memory(folder) as memory:
        of_results = list(results_everywhere(memory))
    figures["result"] = f"{len(of_results)} trials"
    problems = tuple(f"{trial.what}: {trial.problem}" for trial in (*done, *of_results) if trial.problem)
    total = len(done) + len(of_results)
    return Result(trials=total, held=total - len(problems), figures=figures, problems=problems)
