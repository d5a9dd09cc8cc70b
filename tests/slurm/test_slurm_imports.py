from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "allocation",
    "commands",
    "environment",
    "nodelist",
    "partitions",
    "ports",
    "records",
    "script_text",
    "states",
    "verdicts",
]
PROGRAM = "import sys; sys.path.insert(0, '.'); import slurm_train.slurm.{0}; print(' '.join(sys.modules))"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_this_room_loads_nothing_heavy(module: str) -> None:
    argv = [sys.executable, "-S", "-c", PROGRAM.format(module)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert f"slurm_train.slurm.{module}" in loaded
    assert not loaded & {"torch", "submitit", "hydra", "omegaconf", "numpy", "rich", "asyncio", "logging", "json"}
    assert all(name.split(".")[1] in ("errors", "slurm") for name in loaded if name.startswith("slurm_train."))
