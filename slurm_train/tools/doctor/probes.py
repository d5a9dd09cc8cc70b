"""What one node asks of others once all are there: are you reached, what time is it.

Each peer is asked in a thread of its own, so that a node that is cut off takes as long as one blocked port.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slurm_train.distributed.greeting import Calling, Channel, MeetingPoint
from slurm_train.tools.doctor.facts import ProbeFacts
from slurm_train.tools.doctor.probe_server import probe_point

# A packet that is lost is sent again after a second, and after three.
_CONNECT_S = (1.5, 3.5)
_ANSWER_S = 8.0
_CLOCK_ROUNDS = 3
MOST_PEERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another node, and where it answers."""

    node: str
    address: str
    """Of the route to it."""
    port: int
    gloo_address: str = ""
    """What gloo would announce there, if it is another one."""
    file: str = ""
    """The file that it has written into the shared folder."""


def peers_of(index: int, num_nodes: int) -> list[int]:
    """Returns the nodes that a node probes: all of a few; of many the first one, and those 1, 2, 4, ... places on."""
    if num_nodes <= MOST_PEERS:
        return [other for other in range(num_nodes) if other != index]
    distances = [1 << power for power in range(num_nodes.bit_length()) if 1 << power < num_nodes]
    return sorted({0, *((index + distance) % num_nodes for distance in distances)} - {index})


class Line:
    """A connection to a peer's probe server, after both sides have proved who they are."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file: BinaryIO = connection.makefile("rb")

    def ask(self, words: str) -> bytes:
        """Sends a line and returns the line that comes back."""
        self.connection.sendall(f"{words}\n".encode())
        return self.file.readline(200)

    def close(self) -> None:
        """Hangs up."""
        self.file.close()
        self.connection.close()


def reach(point: MeetingPoint, node: str, address: str, port: int) -> tuple[Line | None, str]:
    """Returns a line to a peer, or None and why packets do not get there, in the kernel's words."""
    why = "no address"
    for timeout_s in _CONNECT_S if address else ():
        try:
            connection = socket.create_connection((address, port), timeout=timeout_s)
        except TimeoutError:
            why = "timed out"
            continue
        except OSError as err:
            return None, in_words(err)
        channel = Channel(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Calling(channel, probe_point(point, node), rank=0, host="").prove(deadline=time.monotonic() + _ANSWER_S)
        except ValueError:
            channel.close()
            return None, "somebody else answers there"
        except ConnectionError:
            why = "hung up"  # once may be for want of room among many callers
        except OSError:
            channel.close()
            return None, ""  # The packets arrive; a node that is busy answers late.
        else:
            connection.settimeout(_ANSWER_S)
            return Line(connection), ""
        channel.close()
    return None, why


def in_words(error: OSError) -> str:
    """Returns why a connection was not made, e.g. "connection refused"."""
    if error.errno == errno.EINVAL:
        return "a route that leads nowhere (blackhole)"
    return (error.strerror or str(error)).lower()


def probe(point: MeetingPoint, node: str, peers: Sequence[Peer], *, folder: Path, master: str) -> ProbeFacts:
    """Returns what this node finds when it looks at its peers.

    Args:
        point: gives the proofs.
        node: this node.
        peers: whom to look at.
        folder: the shared folder with everybody's file.
        master: rank 0's node, whose clock counts.
    """
    looks = [_Look(point, peer, folder, asks_time=peer.node == master) for peer in peers]
    threads = [threading.Thread(target=look.run, daemon=True) for look in looks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    offset_s, error_s = next((look.clock for look in looks if look.clock is not None), (None, 0.0))
    return ProbeFacts(
        node=node,
        reached=[look.peer.node for look in looks if not look.why],
        unreached={look.peer.node: look.why for look in looks if look.why},
        unreached_gloo={look.peer.node: look.gloo_why for look in looks if look.gloo_why},
        seen_after_s={look.peer.node: round(look.seen_s, 3) for look in looks if look.seen_s is not None},
        unseen=[look.peer.node for look in looks if look.peer.file and look.seen_s is None],
        clock_offset_s=offset_s,
        clock_error_s=error_s,
    )


class _Look:
    """One peer, looked at."""

    def __init__(self, point: MeetingPoint, peer: Peer, folder: Path, *, asks_time: bool) -> None:
        self.point, self.peer, self.folder, self.asks_time = point, peer, folder, asks_time
        self.why = self.gloo_why = ""
        self.seen_s: float | None = None
        self.clock: tuple[float, float] | None = None

    def run(self) -> None:
        """Fills in what is found."""
        line, self.why = reach(self.point, self.peer.node, self.peer.address, self.peer.port)
        if line is not None:
            if self.asks_time:
                self._ask_time(line)
            line.close()
            if self.peer.gloo_address and self.peer.gloo_address != self.peer.address:
                self._try_gloo()
        self._look_for_file()

    def _try_gloo(self) -> None:
        line, self.gloo_why = reach(self.point, self.peer.node, self.peer.gloo_address, self.peer.port)
        if line is not None:
            line.close()

    def _ask_time(self, line: Line) -> None:
        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            began_s, began_unix_s = time.monotonic(), time.time()
            try:
                theirs = float(line.ask("time"))
            except (OSError, ValueError):
                return
            trip_s = time.monotonic() - began_s
            rounds.append((trip_s, began_unix_s + trip_s / 2 - theirs))
        trip_s, offset_s = min(rounds)
        self.clock = round(offset_s, 6), round(trip_s / 2, 6)

    def _look_for_file(self) -> None:
        if not self.peer.file:
            return
        began_s = time.monotonic()
        while not self._is_seen():
            if time.monotonic() - began_s > _ANSWER_S / 2:
                return
            time.sleep(0.1)
        self.seen_s = time.monotonic() - began_s

    def _is_seen(self) -> bool:
        try:
            # A network file system keeps in mind that a name was not there; listing the folder makes it look again.
            return any(entry.name == self.peer.file for entry in self.folder.iterdir())
        except OSError:
            return False
