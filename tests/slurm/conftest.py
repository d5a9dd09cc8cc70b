"""Recorded answers of a real Slurm 22.05.8, and a real one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_train.slurm.commands import SlurmCommands

_RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def recorded() -> Callable[[str], str]:
    return lambda name: (_RECORDED / f"{name}.txt").read_text(encoding="utf-8")


@pytest.fixture
def recorded_env(recorded: Callable[[str], str]) -> Callable[[str], dict[str, str]]:
    """Environments of real batch scripts and tasks, e.g. "het_rank8"."""
    return lambda name: dict(line.split("=", 1) for line in recorded(f"env_{name}").splitlines())


@pytest.fixture
def real_slurm(slurm_cluster: object) -> SlurmCommands:
    return SlurmCommands(os.environ)
