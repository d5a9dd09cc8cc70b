"""A run directory to write into."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run without any file, below a root of its own."""
    run = RunDirectory(tmp_path / "runs" / "gpt" / "3f9a1c07")
    run.path.mkdir(parents=True)
    return run
