"""A folder in memory where there is one: thousands of fsyncs cost seconds there, minutes on a disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_memory(folder: Path) -> Iterator[Path]:
    """Gives a folder that goes away again; below `folder` where memory is not to be had."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else folder) as name:
        yield Path(name)
