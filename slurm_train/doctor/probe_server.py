"""A node's small server for the others' probes: it proves who it is, tells the time, takes and gives bytes.

One thread for each caller, for the seconds that the preflight takes; only a caller that knows the attempt's secret is
given more than a greeting.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from typing import BinaryIO

from slurm_train.distributed.greeting import MeetingPoint

_TIMEOUT_S = 20.0
_BLOCK = bytes(1 << 18)
LONGEST_TRANSFER = 1 << 30


class ProbeServer:
    """Answers until `close`.

    Args:
        point: gives the proofs.
        node: this node's name, which the proof is about.
        address: to listen at; "": at all of this machine.
        family: of that address.
    """

    def __init__(
        self, point: MeetingPoint, node: str, *, address: str = "", family: socket.AddressFamily = socket.AF_INET
    ) -> None:
        self._point, self._node = point, node
        # A port that the kernel hands out, as those of the collectives will be.
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._thread = threading.Thread(target=self._serve, name="probe-server", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Takes no more callers; those that are being answered are let go."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, IndexError), connection.makefile("rb") as file:
            connection.settimeout(_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(f"{self._point.proof('probe', self._node)}\n".encode())
            proof = file.readline(200).decode(errors="replace").strip()
            if not hmac.compare_digest(proof.encode(), self._point.proof("caller", self._node).encode()):
                return
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
