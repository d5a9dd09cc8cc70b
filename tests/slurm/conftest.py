"""Recorded answers of a real Slurm 22.05.8, and the real one where it is up."""

from __future__ import annotations

import os
import shutil
import subprocess
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
def real_slurm() -> SlurmCommands:
    if shutil.which("scontrol") is None:
        pytest.skip("no Slurm commands on this machine")
    ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, check=False)
    if ping.returncode or " is UP" not in ping.stdout:
        pytest.skip("no Slurm controller answers: run `python -m slurm_train devcluster up`")
    return SlurmCommands(os.environ)
