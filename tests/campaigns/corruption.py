"""Damages a small checkpoint in every way of a kind; every damage must be found. Exhaustive: no number, no seed."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.campaigns.memory import in_memory
from tests.campaigns.record import Result
from tests.support.corruption import Variants, damage_everywhere, flips, holes, truncations
from tests.support.small_checkpoints import make_checkpoint

_KINDS: tuple[tuple[str, Variants, int], ...] = (
    ("truncations", truncations, 24),
    ("flipped bits", flips, 24),
    ("512-byte holes", holes, 20_000),
)


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Tries all of them, on a checkpoint without torch and on one that torch has written."""
    from tests.support import torch_scenes

    figures: dict[str, str] = {}
    tried = undetected = 0
    with in_memory(folder) as memory:
        for kind, variants, size in _KINDS:
            small = damage_everywhere(make_checkpoint(memory / kind / "small", 1, size=size), variants)
            real = damage_everywhere(torch_scenes.save(memory / kind / "torch", 1).path, variants)
            figures[kind] = f"{small.tried + real.tried} tried, {small.undetected + real.undetected} not found"
            print(f"{kind}: {figures[kind]}", flush=True)
            tried += small.tried + real.tried
            undetected += small.undetected + real.undetected
            shutil.rmtree(memory / kind)
    problems = tuple(f"{kind}: {words}" for kind, words in figures.items() if not words.endswith(" 0 not found"))
    return Result(trials=tried, held=tried - undetected, figures=figures, problems=problems)
