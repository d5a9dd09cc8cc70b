"""Who listens at a port of this machine, as far as /proc tells this user."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def holder_of(port: int) -> str:
    """Returns who listens at a port of this machine, e.g. "pid 7 (python)", "" where that cannot be told."""
    inodes = {
        fields[9] for fields in _tcp_rows() if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }
    for entry in Path("/proc").iterdir() if inodes else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _has_socket(entry, inodes):
                return f"pid {entry.name} ({(entry / 'comm').read_text().strip()})"
    return ""


def _tcp_rows() -> list[list[str]]:
    rows = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return rows


def _has_socket(process: Path, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return any(os.readlink(link) in wanted for link in (process / "fd").iterdir())  # noqa: PTH115  # str out
