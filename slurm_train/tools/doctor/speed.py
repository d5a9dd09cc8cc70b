"""How fast a node computes, and how fast its connections to peers are; measured on request."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.tools.doctor.facts import SpeedFacts
from slurm_train.tools.doctor.probes import Line, Peer, reach

_PING_ROUNDS = 20
_FIRST_TRANSFER = 1 << 20
_LONG_ENOUGH_S = 0.05
_LONGEST_TRANSFER = 1 << 27
_WORK_ROUNDS = 9
_WORK = 400_000


def measure(point: MeetingPoint, node: str, peers: Sequence[Peer]) -> SpeedFacts:
    """Returns how fast this node computes, and how fast its connections are; takes about half a second a peer."""
    rates: dict[str, float] = {}
    latencies: dict[str, float] = {}
    for peer in peers:
        line, _ = reach(point, peer.node, peer.address, peer.port)
        if line is None:
            continue
        try:
            latencies[peer.node] = round(_latency_us(line), 1)
            rates[peer.node] = round(min(_rate(line, sends=True), _rate(line, sends=False)) / 1e6, 3)
        except (OSError, ValueError):
            continue
        finally:
            line.close()
    return SpeedFacts(node=node, work_ms=_work_ms(), mb_per_s=rates, latency_us=latencies)


def _latency_us(line: Line) -> float:
    trips = []
    for _ in range(_PING_ROUNDS):
        began_s = time.monotonic()
        line.ask("time")
        trips.append(time.monotonic() - began_s)
    return 1e6 * statistics.median(trips) / 2


def _rate(line: Line, *, sends: bool) -> float:
    """Returns bytes a second; the amount grows until it takes long enough to say something."""
    size = _FIRST_TRANSFER
    while True:
        began_s = time.monotonic()
        _send(line, size) if sends else _receive(line, size)
        took_s = time.monotonic() - began_s
        if took_s > _LONG_ENOUGH_S or size >= _LONGEST_TRANSFER:
            return size / took_s
        size *= 4


def _send(line: Line, size: int) -> None:
    line.connection.sendall(f"take {size}\n".encode())
    block = bytes(1 << 18)
    for _ in range(size // len(block)):
        line.connection.sendall(block)
    line.file.readline(200)


def _receive(line: Line, size: int) -> None:
    line.connection.sendall(f"give {size}\n".encode())
    while size > 0:
        block = line.file.read(min(size, 1 << 18))
        if not block:
            raise OSError("the peer hung up")
        size -= len(block)


def _work_ms() -> float:
    times = []
    for _ in range(_WORK_ROUNDS):
        began_s = time.monotonic()
        total = 0
        for number in range(_WORK):
            total += number & 7
        times.append(time.monotonic() - began_s)
    # The quickest: what else runs for a moment is not the node's speed.
    return round(1e3 * min(times), 2)
