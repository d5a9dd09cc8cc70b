"""Ports of this machine, and the environments of ranks that meet at one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def free_port() -> int:
    """Returns a port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def rank_environments(ranks: int, base: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Returns the environment of each of so many ranks on this machine, on top of another one."""
    size = str(ranks)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {**base, **meeting, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
