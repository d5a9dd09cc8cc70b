"""Who calls and who answers: how the ranks of one attempt prove to each other that they belong together.

Whoever listens greets every caller with the name of its run and attempt; a caller that hears its own name gives its
rank. A stranger who knows these names is told by a proof that either side gives of the attempt's secret, which lies in
the run directory where only its user reads it. The server speaks first, so a foreign service sees a connection that
closes without a word. What is said afterwards is the callers' affair: `handshake` and the preflight. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm_train.distributed.place import RankPlace

LONGEST_GREETING_TIMEOUT_S = 5.0
_LONGEST_LINE = 65536


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
        """What rank 0 says first; a caller of another run, attempt or purpose hangs up."""
        purpose = f" for={self.purpose}" if self.purpose else ""
        return f"slurm_train run={self.run_id} attempt={self.attempt}{purpose}"

    def proof(self, *words: object) -> str:
        """Returns what only somebody who knows the secret can say about these words, 64 hex digits."""
        text = "\0".join(map(str, (self.greeting, *words)))
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True)
class Callers:
    """Who has called and proved to belong here.

    Args:
        point: where they called.
        world: number of ranks.
    """

    point: MeetingPoint
    world: int
    hosts: dict[int, str] = field(default_factory=dict)
    connections: dict[int, socket.socket] = field(default_factory=dict)
    challenges: dict[socket.socket, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not called."""
        return [rank for rank in range(self.world) if rank not in self.hosts]

    def close(self) -> None:
        """Hangs up on everybody."""
        for connection in self.connections.values():
            connection.close()


def gather(
    listener: socket.socket,
    callers: Callers,
    *,
    deadline: float,
    is_enough: Callable[[], bool] = lambda: False,
    look_every_s: float = 3600.0,
) -> None:
    """Fills `callers` until all ranks called, the deadline (`time.monotonic`) passed, or somebody says it is enough.

    Args:
        listener: where they call.
        callers: who is there.
        deadline: the latest end.
        is_enough: asked every `look_every_s` seconds at least.
        look_every_s: as said.
    """
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while callers.missing and (left_s := deadline - time.monotonic()) > 0 and not is_enough():
            for key, _ in selector.select(min(left_s, look_every_s)):
                if key.fileobj is listener:
                    _greet_caller(listener, selector, callers)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    selector.unregister(key.fileobj)
                    _hear_caller(key.fileobj, callers)
        for key in list(selector.get_map().values()):  # callers that never said who they are
            if key.fileobj is not listener and isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    listener.setblocking(True)


def _greet_caller(listener: socket.socket, selector: selectors.BaseSelector, callers: Callers) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.setblocking(True)
        connection.settimeout(1.0)
        callers.challenges[connection] = secrets.token_hex(16)
        connection.sendall(f"{callers.point.greeting} challenge={callers.challenges[connection]}\n".encode())
        selector.register(connection, selectors.EVENT_READ)


def _hear_caller(connection: socket.socket, callers: Callers) -> None:
    challenge = callers.challenges.pop(connection)
    try:
        rank_text, own_challenge, proof, host = read_line(connection).split(" ", 3)
        rank, point = int(rank_text), callers.point
        if not 0 < rank < callers.world or not hmac.compare_digest(proof, point.proof(challenge, rank, host)):
            raise ValueError("a stranger")
        connection.sendall(point.proof(own_challenge, "rank 0").encode() + b"\n")
    except (OSError, ValueError, TypeError):
        connection.close()  # a port scanner, a caller that hung up, or somebody who does not belong here
        return
    if rank in callers.connections:
        callers.connections[rank].close()
    callers.connections[rank], callers.hosts[rank] = connection, host


def call(
    address: str, port: int, place: RankPlace, point: MeetingPoint, *, patience_s: float
) -> tuple[socket.socket | None, str]:
    """Returns a connection to this attempt's rank 0, or None and what was found instead."""
    try:
        connection = socket.create_connection((address, port), timeout=patience_s)
    except OSError as err:
        return None, str(err)
    try:
        line = read_line(connection)
        greeting, _, challenge = line.partition(" challenge=")
        if greeting == point.greeting:
            if _introduce(connection, place, point, challenge):
                return connection, "found"
            line = "somebody who does not know this attempt's secret"
    except OSError as err:
        connection.close()
        return None, f"no greeting ({err})"
    connection.close()
    return None, f"somebody else: {line[:80]!r}"


def _introduce(connection: socket.socket, place: RankPlace, point: MeetingPoint, challenge: str) -> bool:
    """Says who this rank is, and returns whether the other side proves to be rank 0."""
    own_challenge = secrets.token_hex(16)
    proof = point.proof(challenge, place.rank, place.host)
    connection.sendall(f"{place.rank} {own_challenge} {proof} {place.host}\n".encode())
    # It has greeted, so it is awake; at the head of a large job others are heard before this one.
    connection.settimeout(LONGEST_GREETING_TIMEOUT_S)
    answer = read_line(connection)
    return answer.isascii() and hmac.compare_digest(answer, point.proof(own_challenge, "rank 0"))


def read_line(connection: socket.socket) -> str:
    """Returns one line without its end; "" at a closed connection."""
    received = bytearray()
    # Byte by byte: the line after this one may be there already, and is for the next reader.
    while not received.endswith(b"\n") and len(received) < _LONGEST_LINE:
        chunk = connection.recv(1)
        if not chunk:
            break
        received += chunk
    return received.decode(errors="replace").rstrip("\n")
