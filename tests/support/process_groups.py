"""Ends a process group inside the test process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# gloo's threads end with their group. The garbage collector may be what ends it: it waits for them and holds the
# interpreter's lock, for which they wait in turn (torch 2.13). So a group that was used stays until the process ends.
_LEFT: list[Any] = []


def leave_group() -> None:
    """Makes room for another default group."""
    _LEFT.append(dist.group.WORLD)
    dist.destroy_process_group()
