"""Probes between nodes once all are there: whether a node is reached, its clock, and the speed of the connection.

Each node runs a small server that proves its identity, returns its time, and receives and sends bytes. Callers prove
their identity as at a meeting of ranks; then a thread serves each of them, for the seconds that the preflight takes.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedRWPair
from pathlib import Path

from slurm_train.distributed.meeting import AuthenticatedListener, CallerHandshake, Channel, MeetingPoint
from slurm_train.tools.doctor.facts import ProbeFacts, SpeedFacts

_SERVER_TIMEOUT_S = 20.0
_BLOCK = bytes(1 << 18)
_MOST_BYTES = 1 << 30
# A packet that is lost is sent again after a second, and after three.
_CONNECT_S = (1.5, 3.5)
_ANSWER_S = 8.0
_CLOCK_ROUNDS = 3
_MOST_PEERS = 16
_PING_ROUNDS = 20
_FIRST_TRANSFER = 1 << 20
_LONG_ENOUGH_S = 0.05
_LONGEST_TRANSFER = 1 << 27
_WORK_ROUNDS = 9
_WORK = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another node, and where it answers."""

    node: str
    address: str
    """Of the route to it."""
    port: int
    gloo_address: str = ""
    """What gloo would announce there."""
    file: str = ""
    """The file that it has written into the shared folder, "" where there is none to look for."""


def peers_of(index: int, num_nodes: int) -> list[int]:
    """Returns the nodes that a node probes: all of a few; of many the first one, and those 1, 2, 4, ... places on."""
    if num_nodes <= _MOST_PEERS:
        return [other for other in range(num_nodes) if other != index]
    distances = [1 << power for power in range(num_nodes.bit_length()) if 1 << power < num_nodes]
    return sorted({0, *((index + distance) % num_nodes for distance in distances)} - {index})


def _point_of(point: MeetingPoint, node: str) -> MeetingPoint:
    """Returns what the proofs between a node's server and its callers are about."""
    return replace(point, purpose=f"probe of {node}")


class ProbeServer:
    """Answers until `close`.

    Args:
        point: of the preflight.
        node: this node's name.
        address: to listen at; "": at all of this machine.
        family: of that address.
    """

    def __init__(
        self, point: MeetingPoint, node: str, *, address: str = "", family: socket.AddressFamily = socket.AF_INET
    ) -> None:
        # A port that the kernel hands out, as those of the collectives will be.
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        callers = range(1)
        self._server = AuthenticatedListener(self._listener, _point_of(point, node), ranks=callers, admit=self._admit)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="probe-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accepts no more callers; those that are being served are finished in the background."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_SERVER_TIMEOUT_S)
        self._server.close()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            self._server.step(1.0)

    def _admit(self, channel: Channel, _rank: int, _host: str) -> None:
        threading.Thread(target=self._answer, args=(channel.connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), _line(connection, timeout_s=_SERVER_TIMEOUT_S) as line:
            while command := line.readline(200).strip():
                if command == b"time":
                    line.write(f"{time.time()!r}\n".encode())
                else:
                    size = min(int(command), _MOST_BYTES)
                    _receive(line, size)
                    _send(line, size)
                line.flush()


def _line(connection: socket.socket, *, timeout_s: float) -> BufferedRWPair:
    """Returns a connection as a file, whose `close` hangs up."""
    with connection:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection.makefile("rwb")


def _send(line: BufferedRWPair, size: int) -> None:
    for begin in range(0, size, len(_BLOCK)):
        line.write(_BLOCK[: size - begin])
    line.flush()


def _receive(line: BufferedRWPair, size: int) -> None:
    while size > 0:
        block = line.read(min(size, len(_BLOCK)))
        if not block:
            raise OSError("the peer hung up")
        size -= len(block)


def _ask_time(line: BufferedRWPair) -> float:
    line.write(b"time\n")
    line.flush()
    return float(line.readline(200))


def _swap(line: BufferedRWPair, size: int) -> float:
    """Sends so many bytes to the peer, which then sends as many; returns the seconds of the slower direction."""
    began_s = time.monotonic()
    line.write(f"{size}\n".encode())
    _send(line, size)
    line.peek(1)  # the peer answers when it has all
    turned_s = time.monotonic()
    _receive(line, size)
    return max(turned_s - began_s, time.monotonic() - turned_s)


def reach(point: MeetingPoint, node: str, address: str, port: int) -> tuple[BufferedRWPair | None, str]:
    """Returns a line to a peer's server after both sides have proved who they are, or None.

    Returns:
        With None, why packets do not get there, as the kernel says it; "" if they do and no program answers.
    """
    why = "no address"
    for timeout_s in _CONNECT_S if address else ():
        try:
            connection = socket.create_connection((address, port), timeout=timeout_s)
        except TimeoutError:
            why = "timed out"
            continue
        except OSError as err:
            return None, describe_error(str(err))
        try:
            handshake = CallerHandshake(Channel(connection), _point_of(point, node), rank=0, host="")
            handshake.prove(deadline=time.monotonic() + _ANSWER_S)
            return _line(connection, timeout_s=_ANSWER_S), ""
        except ValueError:
            connection.close()
            return None, "another program answers there"
        except ConnectionError:
            connection.close()
            why = "hung up"  # once may be for want of room among many callers
        except OSError:
            connection.close()
            return None, ""  # The packets arrive; a node that is busy answers late.
    return None, why


def describe_error(error: str) -> str:
    """Returns why a connection was not made: "[Errno 111] Connection refused" -> "connection refused"."""
    text = error.partition("] ")[2].lower() or error
    return "a route that leads nowhere (blackhole)" if text == "invalid argument" else text


def probe(point: MeetingPoint, node: str, peers: Sequence[Peer], *, folder: Path, master: str) -> ProbeFacts:
    """Returns what this node finds when it probes its peers.

    Each is probed in a thread of its own, so that a node that is cut off takes as long as one blocked port.

    Args:
        point: gives the proofs.
        node: this node.
        peers: the nodes to probe.
        folder: the shared folder with every node's file.
        master: rank 0's node, whose clock counts.
    """
    unreached = dict[str, str]()
    unreached_gloo = dict[str, str]()
    seen_s = dict[str, float]()
    clock = list[tuple[float, float]]()

    def look(peer: Peer) -> None:
        line, why = reach(point, peer.node, peer.address, peer.port)
        if why:
            unreached[peer.node] = why
        if line is not None:
            with contextlib.suppress(OSError, ValueError), line:
                if peer.node == master:
                    clock.append(_clock_offset(line))
            if peer.gloo_address not in ("", peer.address):
                line, why = reach(point, peer.node, peer.gloo_address, peer.port)
                if line is not None:
                    line.close()
                if why:
                    unreached_gloo[peer.node] = why
        began_s = time.monotonic()
        while peer.file and peer.node not in seen_s and time.monotonic() - began_s <= _ANSWER_S / 2:
            if _is_seen(folder, peer.file):
                seen_s[peer.node] = round(time.monotonic() - began_s, 3)
            else:
                time.sleep(0.1)

    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        list(pool.map(look, peers))
    offset_s, error_s = clock[0] if clock else (None, 0.0)
    return ProbeFacts(
        node=node,
        unreached=unreached,
        unreached_gloo=unreached_gloo,
        seen_after_s=seen_s,
        unseen=[peer.node for peer in peers if peer.file and peer.node not in seen_s],
        clock_offset_s=offset_s,
        clock_error_s=error_s,
    )


def _clock_offset(line: BufferedRWPair) -> tuple[float, float]:
    """Returns how far this clock is ahead of the peer's in seconds, and the error, by the quickest of a few answers."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        began_s = time.monotonic()
        began_unix_s = time.time()
        peer_unix_s = _ask_time(line)
        trip_s = time.monotonic() - began_s
        rounds.append((trip_s, began_unix_s + trip_s / 2 - peer_unix_s))
    trip_s, offset_s = min(rounds)
    return round(offset_s, 6), round(trip_s / 2, 6)


def _is_seen(folder: Path, file: str) -> bool:
    try:
        # A network file system remembers that a name was not there; listing the folder makes it look again.
        return any(entry.name == file for entry in folder.iterdir())
    except OSError:
        return False


def measure(point: MeetingPoint, node: str, peers: Sequence[Peer]) -> SpeedFacts:
    """Returns how fast this node computes, and how fast its connections are; takes about half a second a peer."""
    rates = []
    latencies = []
    for peer in peers:
        line, _ = reach(point, peer.node, peer.address, peer.port)
        if line is not None:
            with contextlib.suppress(OSError, ValueError), line:
                trip_s = statistics.median(_seconds(_ask_time, line) for _ in range(_PING_ROUNDS))
                latencies.append(round(1e6 * trip_s / 2, 1))
                rates.append(round(_rate(line) / 1e6, 3))
    # The quickest round: what else runs for a moment is not the node's speed.
    work_ms = 1e3 * min(_seconds(_work, _WORK) for _ in range(_WORK_ROUNDS))
    return SpeedFacts(
        node=node,
        work_ms=round(work_ms, 2),
        mb_per_s=max(rates, default=None),
        latency_us=min(latencies, default=None),
    )


def _seconds(action: Callable[..., object], *arguments: object) -> float:
    began_s = time.monotonic()
    action(*arguments)
    return time.monotonic() - began_s


def _rate(line: BufferedRWPair) -> float:
    """Returns bytes a second of the slower direction; the amount grows until it takes long enough to be measured."""
    size = _FIRST_TRANSFER
    took_s = _swap(line, size)
    while took_s <= _LONG_ENOUGH_S and size < _LONGEST_TRANSFER:
        size *= 4
        took_s = _swap(line, size)
    return size / took_s


def _work(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number & 7
    return total
