"""Ports of this machine, and the environments of ranks that meet at one."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping

# Below the range that the kernel takes for outgoing connections (32768 to 60999): a port of that range may be in use by
# the time that somebody listens at it.
_PORTS = range(27_000, 32_700)


def free_port() -> int:
    """Returns a port that nobody listens at now."""
    while True:
        # Not by the seed of the test: several processes of tests look for ports at the same time.
        port = random.SystemRandom().choice(_PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def rank_environments(ranks: int, base: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Returns the environment of each of so many ranks on this machine, on top of another one."""
    size = str(ranks)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {**base, **meeting, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
