"""A node's small server for the others' probes: it proves who it is, tells the time, takes and gives bytes.

Callers prove themselves as at a meeting; each that has is served by a thread, for the seconds that the preflight takes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace
from typing import BinaryIO

from slurm_train.distributed.greeting import Channel, MeetingPoint
from slurm_train.distributed.meeting import Door

_TIMEOUT_S = 20.0
_BLOCK = bytes(1 << 18)
LONGEST_TRANSFER = 1 << 30


def probe_point(point: MeetingPoint, node: str) -> MeetingPoint:
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
        self._door = Door(self._listener, probe_point(point, node), ranks=range(1), admit=self._admit)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="probe-server", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Takes no more callers; those that are being answered are let go."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)
        self._door.close()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            self._door.step(1.0)

    def _admit(self, channel: Channel, _rank: int, _host: str) -> None:
        threading.Thread(target=self._answer, args=(channel.connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, IndexError), connection.makefile("rb") as file:
            connection.settimeout(_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while words := file.readline(200).split():
                self._obey(connection, file, words)

    def _obey(self, connection: socket.socket, file: BinaryIO, words: list[bytes]) -> None:
        if words[0] == b"time":
            connection.sendall(f"{time.time()!r}\n".encode())
        elif words[0] == b"take":
            size = min(int(words[1]), LONGEST_TRANSFER)
            while size > 0 and (block := file.read(min(size, len(_BLOCK)))):
                size -= len(block)
            connection.sendall(b"taken\n")
        elif words[0] == b"give":
            size = min(int(words[1]), LONGEST_TRANSFER)
            while size > 0:
                connection.sendall(_BLOCK[: min(size, len(_BLOCK))])
                size -= len(_BLOCK)
