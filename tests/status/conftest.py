"""Runs on disk in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.paths import RunDirectory
from tests.support.run_facts import RunFacts


@pytest.fixture
def has_run(tmp_path: Path) -> Callable[..., RunDirectory]:
    """Puts a run on disk, see `RunFacts`."""

    def write(run_id: str = "3f9a1c07", **facts: Any) -> RunDirectory:
        return RunFacts(**facts).write(RunDirectory(tmp_path / "runs" / "gpt-stdlib" / run_id))

    return write
