"""Damages every file-system call of save, commit, prune and resume. Exhaustive: no number, no seed.

Each call is killed before and after, refused with four errors, and the last one before a power cut; also the calls
that torch makes for the tensors of a real save and a real resume.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.memory import in_memory
from tests.campaigns.record import Result
from tests.support.crash_points import (
    ERRORS,
    SCENES,
    Scene,
    Trial,
    killed_everywhere,
    power_lost_everywhere,
    refused_everywhere,
)


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Tries all of them."""
    import torch

    from tests.support.torch_scenes import TORCH_SCENES

    # The forked children of a process with a pool of threads would wait for it.
    torch.set_num_threads(1)
    # It would print a stack for each of a thousand reads that are refused on purpose.
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)
    num_trials = 0
    problems: list[str] = []
    figures: dict[str, str] = {}
    for scene in (*SCENES, *TORCH_SCENES):
        with in_memory(folder) as memory:
            done = list(all_of(scene, memory))
        num_trials += len(done)
        problems += [f"{trial.what}: {trial.problem}" for trial in done if trial.problem]
        figures[scene.name] = f"{len(done)} trials"
        print(f"{scene.name}: {len(done)} trials, {sum(bool(trial.problem) for trial in done)} problems", flush=True)
    figures["damages"] = f"kill before and after, {', '.join(errno.errorcode[number] for number in ERRORS)}, power cut"
    return Result(trials=num_trials, held=num_trials - len(problems), figures=figures, problems=tuple(problems))


def all_of(scene: Scene, folder: Path) -> Iterator[Trial]:
    """Yields every trial of a scene."""
    refused = (refused_everywhere(scene, folder, number) for number in ERRORS)
    return itertools.chain(killed_everywhere(scene, folder), *refused, power_lost_everywhere(scene, folder))
