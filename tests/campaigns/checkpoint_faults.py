"""Campaigns `crash-points`, `thawed-writer` and `corruption`: all that can happen to a save. Exhaustive: no number.

Each file-system call of save, commit, prune and resume is killed before and after, refused with four errors, and the
last one before a power cut; or its writer is stopped there and goes on beside its successor. And each file of a small
checkpoint is damaged in every way of a kind.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.campaigns.record import Tally
from tests.support import thawed_writers
from tests.support.corruption import Variants, damage_everywhere, flips, holes, truncations
from tests.support.crash_points import (
    ERRORS,
    SCENES,
    Trial,
    killed_everywhere,
    power_lost_everywhere,
    refused_everywhere,
)
from tests.support.small_checkpoints import make_checkpoint


@contextmanager
def in_memory(folder: Path) -> Iterator[Path]:
    """Gives a folder in memory that goes away again; below `folder` where memory is not to be had.

    Thousands of fsyncs cost seconds there, minutes on a disk.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else folder) as name:
        yield Path(name)


def crash_points(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Damages every call, also those that torch makes for the tensors of a real save and a real resume."""
    import torch

    from tests.support.torch_scenes import TORCH_SCENES

    # The forked children of a process with a pool of threads would wait for it.
    torch.set_num_threads(1)
    # It would print a stack for each of a thousand reads that are refused on purpose.
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)
    figures: dict[str, str] = {}
    for scene in (*SCENES, *TORCH_SCENES):
        with in_memory(folder) as memory:
            refused = (refused_everywhere(scene, memory, number) for number in ERRORS)
            every = (killed_everywhere(scene, memory), *refused, power_lost_everywhere(scene, memory))
            figures[scene.name] = _count(tally, scene.name, itertools.chain(*every))
    figures["damages"] = f"kill before and after, {', '.join(errno.errorcode[number] for number in ERRORS)}, power cut"
    return figures


def thawed_writer(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Stops a writer of checkpoints, with one checkpoint kept and with two, and one of results."""
    figures: dict[str, str] = {}
    for scene in thawed_writers.SCENES:
        done: list[Trial] = []
        for keep in (1, 2):
            with in_memory(folder) as memory:
                done += thawed_writers.thawed_everywhere(scene, memory, keep=keep)
        figures[scene.name] = _count(tally, scene.name, done)
    with in_memory(folder) as memory:
        figures["result"] = _count(tally, "result", thawed_writers.results_everywhere(memory))
    return figures


def _count(tally: Tally, name: str, done: Iterable[Trial]) -> str:
    made = list(done)
    bad = [trial for trial in made if trial.problem]
    tally.add(f"{name}: {len(made)} trials, {len(bad)} problems", trials=len(made) - len(bad))
    for trial in bad:
        tally.add(trial.what, [trial.problem])
    return f"{len(made)} trials"


_KINDS: tuple[tuple[str, Variants, int], ...] = (
    ("truncations", truncations, 24),
    ("flipped bits", flips, 24),
    ("512-byte holes", holes, 20_000),
)


def corruption(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Damages a checkpoint without torch and one that torch has written."""
    from tests.support import torch_scenes

    figures: dict[str, str] = {}
    with in_memory(folder) as memory:
        for kind, variants, size in _KINDS:
            small = damage_everywhere(make_checkpoint(memory / kind / "small", 1, size=size), variants)
            real = damage_everywhere(torch_scenes.save(memory / kind / "torch", 1).path, variants)
            tried, undetected = small.tried + real.tried, small.undetected + real.undetected
            figures[kind] = f"{tried} tried, {undetected} not found"
            tally.add(kind, trials=tried - undetected)
            if undetected:
                tally.add(kind, [f"{undetected} not found"], trials=undetected)
            shutil.rmtree(memory / kind)
    return figures
