"""A training on several ranks as a whole, and the same one with stops that each reach one rank alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from slurm_train.rundir.paths import RunDirectory
from tests.support.joined_runs import evaluated_steps

Attempt = Callable[[str, RunDirectory, int | None], tuple[int, list[Any]]]
"""Runs an attempt of the training of a name, in a run, in which this rank is asked to stop in a step, if any.

Returns the exit code and what this rank has trained on, as lists and numbers.
"""
UNDISTURBED = "undisturbed"
STOPPED = "stopped"


def leave_steps(folder: Path, stops: dict[str, list[int]], attempt: Attempt, *, unfinished: str = "") -> NoReturn:
    """Runs trainings on all ranks of the process group, writes the steps of this rank to OUT, and ends the process.

    Args:
        folder: where the runs are put.
        stops: by the name of a training the steps at which it is stopped, each in another attempt.
        attempt: runs one.
        unfinished: the name of that which stays as the last stop has left it.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    answer = {}
    for name, steps_of_stops in stops.items():
        runs = [RunDirectory(folder / name / kind) for kind in (UNDISTURBED, STOPPED)]
        for run in runs if rank == 0 else ():
            run.path.mkdir(parents=True)
        dist.barrier()
        undisturbed, stopped = runs
        whole = attempt(name, undisturbed, None)[1]
        steps = []
        for number, stop_at in enumerate(steps_of_stops):
            code, some = attempt(name, stopped, stop_at if rank == number % ranks else None)
            assert code == 75, (name, stop_at, code)
            steps += some
        if name != unfinished:
            steps += attempt(name, stopped, None)[1]
        dist.barrier()
        evaluations = [evaluated_steps(run) if run.metrics.exists() else [] for run in runs]
        answer[name] = {"whole": whole, "steps": steps, "evaluations": evaluations}
    Path(os.environ["OUT"]).write_text(json.dumps(answer))
    os._exit(0)


def require_undisturbed(left: list[dict[str, Any]], name: str) -> None:
    """Checks that the stops of a training have changed no step and no evaluation on any rank.

    Args:
        left: by rank what `leave_steps` has written.
        name: of the training.
    """
    for of_rank in left:
        training = of_rank[name]
        assert training["steps"] == training["whole"]
        undisturbed, stopped = training["evaluations"]
        assert stopped == undisturbed
