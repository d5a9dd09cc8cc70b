"""Who types the command lines on the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import Person
from tests.support.slurm_runs import at_work


@pytest.fixture
def person(slurm_cluster: object, tmp_path: Path) -> Iterator[Person]:
    """Somebody with the tiny model, whose jobs are cancelled at the end."""
    with at_work(tmp_path) as person:
        yield person
