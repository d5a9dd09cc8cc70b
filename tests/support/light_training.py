"""A training of one number, without torch: for what Slurm, the supervisor and the ledger do to a run and its ranks.

This file is the ranks' program: it reports each step, saves by the session, stops when asked, and resumes. A rank costs
a tenth of the processor time of one that imports torch. Each loss follows from the one before, so a run that has gone
on from the wrong place has other losses than `undisturbed_losses`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train import session
from slurm_train.config.frozen import load_config
from slurm_train.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from tests.support.command_line import Person

# A file of this name in the folder makes each step take so many seconds.
_SLOW = "slow"
_SLOW_S = 0.5


def words(*, steps: int = 12, save_every: int = 4, step_s: float = 0.0, failing_seed: int = -1) -> tuple[str, ...]:
    """Returns the words of the command line.

    Args:
        steps: how many are trained.
        save_every: steps between two saves.
        step_s: seconds that a step takes.
        failing_seed: the run with this seed raises in the second step of each attempt.
    """
    pace = f"--steps,{steps},--save-every,{save_every},--step-s,{step_s},--failing-seed,{failing_seed}"
    # A check of the nodes costs more than all else that the ranks do; `preflight.enabled=true` after these makes it.
    return (f"script=[light_training.py,{pace}]", "preflight.enabled=false")


def add_program(person: Person) -> None:
    """Puts the ranks' program into somebody's folder."""
    shutil.copy(__file__, person.folder / "light_training.py")


def slow_down(person: Person) -> None:
    """Makes each step of the runs in somebody's folder take half a second, until `speed_up`."""
    (person.folder / _SLOW).touch()


def speed_up(person: Person) -> None:
    """Lets the runs in somebody's folder train at their own speed again."""
    (person.folder / _SLOW).unlink()


def undisturbed_losses(steps: int = 12, *, seed: int = 0) -> dict[int, float]:
    """Returns the loss of each step of a run that nothing has happened to."""
    losses: dict[int, float] = {}
    weight = float(seed)
    for step in range(1, steps + 1):
        weight = _next_weight(weight, step)
        losses[step] = weight
    return losses


def place_line(run: RunDirectory, rank: int, *, attempt: int = 0) -> str:
    """Returns what a rank has printed first: "rank 1 of 2 (local rank 0) on node2; GPU 0; CPUs 0 1"."""
    lines = run.rank_log(attempt, rank).read_text().splitlines()
    return next(line for line in lines if line.startswith("rank "))


def _next_weight(weight: float, step: int) -> float:
    return 0.9 * weight + 1 / step


def main() -> None:
    """Trains as one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--failing-seed", type=int, required=True)
    options = parser.parse_args()
    run = session.join()
    assert run.run_directory is not None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cpus = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    place = f"rank {run.rank} of {run.world_size} (local rank {run.local_rank}) on {run.node}"
    print(f"{place}; GPU {gpu}; CPUs {cpus}", flush=True)
    seed = load_config(RunDirectory(run.run_directory).config).seed
    weight = float(seed)
    done = 0
    newest = run.newest()
    if newest is not None:
        done = newest.step
        # Every rank has written the same; the number of ranks may have changed.
        weight = float((newest.path / "weight_0").read_text())
    for step in range(done + 1, options.steps + 1):
        time.sleep(_SLOW_S if Path(_SLOW).exists() else options.step_s)
        if seed == options.failing_seed and step == done + 2:
            raise ValueError("this run fails on purpose")
        weight = _next_weight(weight, step)
        run.report(step, loss=weight, max_steps=options.steps)
        if run.rank == 0:
            print(f"step {step}", flush=True)
        stop = run.should_stop()
        if stop or step % options.save_every == 0 or step == options.steps:
            with run.save(step) as folder:
                (folder / f"weight_{run.rank}").write_text(repr(weight))
        if stop and step < options.steps:
            run.leave()


if __name__ == "__main__":
    main()
