"""Which port the ranks of a job meet at.

Candidates are a deterministic list per job, step and restart, so that every rank can walk the same list, and lie below
the range from which the kernel hands out ports by itself. A free port is found by binding it, on the node where rank 0
lives. Nothing reserves a port between that test and its use: who answers there must still be checked.
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Iterable
from pathlib import Path

from slurm_train.errors import ClusterError

_LOW = 10000
_DEFAULT_EPHEMERAL_LOW = 32768
# Fewer than this many ports below the ephemeral range: the site has widened it, and staying below is no use.
_MIN_SPAN = 1000
# Registered or customary on compute nodes: NFS, kubelet, memcached, databases, exporters, and the default of torchrun.
_CUSTOMARY = frozenset(
    {10000, 10050, 10051, 10110, 11211, 11214, 11215, 11311, 11434, 12345, 15672, 16379, 19999, 20048, 20049, 24224}
    | {25672, 26379, 27017, 27018, 27019, 29400, 29500, 30000}
    | set(range(10248, 10260))
)
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ephemeral_low(path: Path = _RANGE_FILE) -> int | None:
    """Returns the lowest port that the kernel hands out by itself, None where it does not say."""
    try:
        return int(path.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None


def candidate_ports(*, seed: str, count: int, ephemeral_low: int | None) -> list[int]:
    """Returns `count` different ports in the order in which to try them; equal arguments give equal lists.

    Args:
        seed: what tells this attempt from all others, e.g. "1234_5.0:2" (job, step, restart count).
        count: how many; at most 500.
        ephemeral_low: first port of the kernel's own range (`ephemeral_low()`), None if unknown.
    """
    assert 0 < count <= _MIN_SPAN // 2, count
    high = min(_DEFAULT_EPHEMERAL_LOW if ephemeral_low is None else ephemeral_low, 65536)
    if high - _LOW < _MIN_SPAN:
        high = _DEFAULT_EPHEMERAL_LOW
    ports: dict[int, None] = {}
    draw = 0
    while len(ports) < count:
        digest = hashlib.blake2b(f"{seed}/{draw}".encode(), digest_size=8).digest()
        port = _LOW + int.from_bytes(digest, "big") % (high - _LOW)
        if port not in _CUSTOMARY:
            ports[port] = None
        draw += 1
    return list(ports)


def first_free_port(candidates: Iterable[int], host: str = "") -> int:
    """Returns the first port that can be bound on this machine.

    Args:
        candidates: ports in the order to try.
        host: IPv4 address to bind, "" for all.

    Raises:
        ClusterError: every candidate is taken, or the address is not one of this machine.
    """
    tried: list[int] = []
    for port in candidates:
        if _is_free(port, host):
            return port
        tried.append(port)
    raise ClusterError(
        f"none of {len(tried)} ports is free on this node (tried {', '.join(map(str, tried[:5]))} ...)",
        hint="see `ss -ltn` on the first node for what holds them, or ask for whole nodes: cluster.sbatch.exclusive",
    )


def _is_free(port: int, host: str) -> bool:
    # No SO_REUSEADDR: a port in TIME_WAIT is not worth the risk while there are others.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as err:
            if err.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise ClusterError(
                f"cannot bind {host or 'any address'}:{port}: {err.strerror}",
                hint="is that an address of this node? `ip addr` lists them; cluster.network_interface names another",
            ) from err
    return True
