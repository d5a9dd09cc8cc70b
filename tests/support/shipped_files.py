"""Compositions of the shipped files, which Hydra makes once for all command lines of a test process.

Hydra takes 0.2 s of processor time to read what a choice of groups gives, and gives the same for the same words. A
command line that names files of its own, or whose person has a folder with site files, is composed as ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import DictConfig

from slurm_train.config.compose import Composer

_SHIPPED = {"hydra", "main", "schema"}
_load = Composer._load
_compositions: dict[tuple[str | None, tuple[str, ...], RunMode], DictConfig] = {}


def compose_once(patch: pytest.MonkeyPatch) -> None:
    """Lets command lines share what Hydra has read, as long as the patch holds."""
    patch.setattr(Composer, "_load", _load_once)


def _load_once(composer: Composer, words: list[str], mode: RunMode) -> DictConfig:
    sources = {source.provider for source in composer.hydra.config_loader.get_sources()}
    if sources != _SHIPPED or any(word.lstrip("+~").startswith("hydra") for word in words):
        return _load(composer, words, mode)
    key = (composer.words.config_name, tuple(words), mode)
    if key not in _compositions:
        _compositions[key] = _load(composer, words, mode)
    runtime: Any = _compositions[key].hydra.runtime
    runtime.cwd = str(Path.cwd())
    return _compositions[key]
