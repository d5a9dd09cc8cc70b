"""How two processes of one attempt prove to each other who they are, before either believes a word.

    rank 0  ->  slurm_train run=<digest> attempt=<k> for=<purpose> nonce=<n0>
    caller  ->  <rank> <n1> <proof of the caller> <host>
    rank 0  ->  <proof of rank 0>

A proof is an HMAC with the attempt's secret, which lies in the run directory where only its user reads it. It covers
role, both nonces, rank and host, and the address and port at which the connection ends, as each side sees them. So a
recorded proof is worth nothing, and neither is one passed on by a relay: that listens at another address or port.
The listener speaks first, so a foreign service sees a connection that closes without a word. Imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_LINE = 512
"""Bytes that a line of somebody who has proved nothing may have."""
_LONGEST_PROVED_LINE = 1 << 24
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where the ranks of one attempt meet, the same on every rank."""

    master_addr: str
    """Host name or address of rank 0's node."""
    ports: Sequence[int]
    """Candidate ports in the order in which all ranks try them."""
    run_id: str
    attempt: int
    timeout_s: float
    """Seconds until the ranks that are there give up on the others."""
    secret: str = ""
    """Known to the ranks of this attempt alone; "" where there is none, and anybody may join."""
    purpose: str = ""
    """What they meet for, if not for the training itself; meetings for different ends are never mixed up."""

    @property
    def greeting(self) -> str:
        """What the listener says first; a caller of another run, attempt or purpose hangs up."""
        purpose = f" for={self.purpose}" if self.purpose else ""
        run = hashlib.sha256(self.run_id.encode(errors="surrogateescape")).hexdigest()[:16]
        return f"slurm_train run={run} attempt={self.attempt}{purpose}"

    def proof(self, *words: object) -> str:
        """Returns what only somebody who knows the secret can compute from these words, 64 hex digits."""
        text = json.dumps([self.run_id, self.greeting, *map(str, words)])
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()


class Channel:
    """A non-blocking connection that is read and written a line at a time; lines are short until `trust`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._received, self._unsent, self._longest = bytearray(), bytearray(), LONGEST_LINE

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the connection can be written to."""
        return bool(self._unsent)

    def trust(self) -> None:
        """Allows long lines from now on."""
        self._longest = _LONGEST_PROVED_LINE

    def pull(self) -> None:
        """Takes in what has arrived.

        Raises:
            OSError: the other side has hung up.
        """
        try:
            block = self.connection.recv(min(self._longest, _BLOCK))
        except BlockingIOError:
            return
        if not block:
            raise ConnectionError("the connection was closed")
        self._received += block

    def line(self) -> str | None:
        """Returns the next whole line of what was taken in, without its end; None while there is none.

        Raises:
            ValueError: the line is too long.
        """
        end = self._received.find(b"\n")
        if (len(self._received) if end < 0 else end) >= self._longest:
            raise ValueError(f"a line of more than {self._longest} bytes")
        if end < 0:
            return None
        text = self._received[:end].decode(errors="replace")
        del self._received[: end + 1]
        return text

    def write(self, line: str) -> None:
        """Sends a line, or as much of it as fits now; `flush` sends the rest."""
        self._unsent += line.encode(errors="replace") + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the connection takes it."""
        while self._unsent:
            try:
                del self._unsent[: self.connection.send(self._unsent)]
            except BlockingIOError:
                return

    def send_value(self, value: Any, *, deadline: float) -> None:
        """Sends a line of JSON whole.

        Raises:
            OSError: the other side has hung up, or does not read until the deadline (`time.monotonic`).
        """
        self.write(json.dumps(value))
        while self._unsent:
            self._wait(select.POLLOUT, deadline)
            self.flush()

    def read_line(self, *, deadline: float) -> str:
        """Returns the next line.

        Raises:
            OSError: the other side has hung up, or there is no whole line at the deadline (`time.monotonic`).
            ValueError: the line is too long.
        """
        while (line := self.line()) is None:
            self._wait(select.POLLIN, deadline)
            self.pull()
        return line

    def _wait(self, events: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        poll = select.poll()  # select() knows no descriptors above 1023
        poll.register(self.connection, events)
        if left_s <= 0 or not poll.poll(max(1, round(left_s * 1000))):
            raise TimeoutError("timed out")

    def close(self) -> None:
        """Hangs up."""
        self.connection.close()


class Listening:
    """The listener's side of the proof on one connection.

    Args:
        channel: to the caller; the greeting is sent at once.
        point: what the proofs are about.
    """

    def __init__(self, channel: Channel, point: MeetingPoint) -> None:
        self.channel, self._point = channel, point
        self._nonce = secrets.token_hex(16)
        channel.write(f"{point.greeting} nonce={self._nonce}")

    def introduced(self) -> tuple[int, str] | None:
        """Returns rank and host of a caller that has proved to belong here; None while its line is not whole.

        Raises:
            OSError: the caller has hung up.
            ValueError: the caller is a stranger.
        """
        self.channel.pull()
        line = self.channel.line()
        if line is None:
            return None
        rank, nonce, proof, host = line.split(" ", 3)
        about = (nonce, self._nonce, _end(self.channel.connection.getsockname()), int(rank), host)
        if not hmac.compare_digest(proof.encode(), self._point.proof("caller", *about).encode()):
            raise ValueError("no proof")
        self.channel.write(self._point.proof("rank 0", *about))
        self.channel.trust()
        return int(rank), host


class Calling:
    """The caller's side of the proof on one connection.

    Args:
        channel: to whoever listens there.
        point: what the proofs are about.
        rank: of the caller.
        host: name of its node.
    """

    def __init__(self, channel: Channel, point: MeetingPoint, *, rank: int, host: str) -> None:
        self.channel, self._point, self._rank, self._host = channel, point, rank, host
        self._expected = ""

    def is_proved(self) -> bool:
        """Returns whether the listener has proved to be the one; to be asked again when more has arrived.

        Raises:
            OSError: the listener has hung up.
            ValueError: it is somebody else; the message says who, as far as is known.
        """
        self.channel.pull()
        while (line := self.channel.line()) is not None:
            if self._expected:
                if not hmac.compare_digest(line.encode(), self._expected.encode()):
                    raise ValueError("somebody who does not know this attempt's secret, or a relay")
                self.channel.trust()
                return True
            self._introduce(line)
        return False

    def prove(self, *, deadline: float) -> None:
        """Waits until `is_proved`.

        Raises:
            OSError: the listener has hung up, or is not proved at the deadline (`time.monotonic`).
            ValueError: it is somebody else.
        """
        while not self.is_proved():
            self.channel._wait(select.POLLIN, deadline)

    def _introduce(self, line: str) -> None:
        greeting, _, nonce = line.partition(" nonce=")
        if greeting != self._point.greeting:
            raise ValueError(f"somebody else: {line[:80]!r}")
        own = secrets.token_hex(16)
        about = (own, nonce, _end(self.channel.connection.getpeername()), self._rank, self._host)
        self.channel.write(f"{self._rank} {own} {self._point.proof('caller', *about)} {self._host}")
        self._expected = self._point.proof("rank 0", *about)


def _end(address: tuple[Any, ...]) -> str:
    """Returns where a connection ends in words that are the same on both of its sides, e.g. "10.0.0.7 20480"."""
    numeric = ipaddress.ip_address(str(address[0]).partition("%")[0])
    return f"{getattr(numeric, 'ipv4_mapped', None) or numeric} {address[1]}"
