"""What tests of the session begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """An empty run directory."""
    run = RunDirectory(tmp_path / "runs" / "mine" / "0123456789ab")
    run.path.mkdir(parents=True)
    return run
