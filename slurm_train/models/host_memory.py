"""How much host memory a process may still take: what the machine has left, and what the job's cgroups leave of it.

Slurm limits a job's memory by cgroups of version 2 or 1. A limit of a group also holds for all groups below it, so
every group up to the root is read. A file that cannot be read counts as no limit.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """Where one version of cgroups keeps its numbers."""

    line: str
    """Pattern of the line of /proc/self/cgroup that has the group's path."""
    root: str
    limit: str
    used: str
    cache: str
    """Entry of memory.stat: files that the kernel drops before it refuses memory."""


_VERSIONS = (
    _Version(
        line=r"^0::/(?P<group>.*)$",
        root="sys/fs/cgroup",
        limit="memory.max",
        used="memory.current",
        cache="inactive_file",
    ),
    _Version(
        line=r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(?P<group>.*)$",
        root="sys/fs/cgroup/memory",
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        cache="total_inactive_file",
    ),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process may still take, None where the system does not say.

    Args:
        root: of the file system; another one in tests.
    """
    limits: list[int | None] = []
    with contextlib.suppress(OSError):
        available = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
        if available is not None:
            limits.append(1024 * int(available[1]))
    groups = ""
    with contextlib.suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text()
    for version in _VERSIONS:
        line = re.search(version.line, groups, re.MULTILINE)
        if line is not None:
            top = root / version.root
            group = top / line["group"]
            folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
            limits += [_free_bytes(folder, version) for folder in folders]
    return min((limit for limit in limits if limit is not None), default=None)


def _free_bytes(group: Path, version: _Version) -> int | None:
    """Returns the bytes that a group may still take; None where it has no limit, or its files cannot be read."""
    try:
        limit = (group / version.limit).read_text().strip()
        if limit == "max":
            return None
        used = int((group / version.used).read_text())
        cache = re.search(rf"^{version.cache} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return max(0, int(limit) - used + (int(cache[1]) if cache else 0))
