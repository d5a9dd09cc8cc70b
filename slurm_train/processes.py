"""Which processes of this machine run, and below which: read from /proc, without a package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def start_ticks(pid: int) -> str:
    """Returns when a process started, in clock ticks since boot; "" where there is none.

    Number and start together name a process: its number is given to another one later.
    """
    try:
        # Field 22 of proc(5) stat; the command name before it may hold spaces, so count after the last ")".
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def cpu_s(pid: int) -> float:
    """Returns how long a process has computed, with those of its children that have ended; 0 where there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Fields 14 to 17: its own time and its children's, each in user and kernel mode.
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int, started: str) -> bool:
    """Returns whether a process still runs; a zombie has ended.

    Args:
        pid: its number.
        started: its start, by `start_ticks`.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] not in ("Z", "X") and words[19] == started


def descendants(pid: int) -> Iterator[int]:
    """Yields the children of a process and all their descendants."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def environment_of(pid: int) -> dict[str, str]:
    """Returns the variables that a process was started with, {} where it has ended or belongs to somebody else."""
    try:
        words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)
