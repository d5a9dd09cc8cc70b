"""A folder in memory for checkpoints, and the means to make small ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.small_checkpoints import make_checkpoint, make_header, stage


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs cost seconds there, minutes on a disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def root(fast_path: Path) -> Path:
    return fast_path / "checkpoints"


@pytest.fixture
def kit() -> SimpleNamespace:
    """Short names for what most tests here use."""
    return SimpleNamespace(
        header=make_header,
        stage=stage,
        make=make_checkpoint,
    )
