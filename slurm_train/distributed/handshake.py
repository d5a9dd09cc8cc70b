"""Who answers at a port: the ranks of one attempt find their rank 0 before torch is asked to connect anywhere.

Rank 0 listens on the first candidate port that it can bind and greets every caller with the name of its run and
attempt; a caller that hears its own name gives its rank, and all are let go together when all are there. Two jobs on
one node, a zombie of an earlier attempt and a foreign service on the port are told apart by the greeting; a stranger
who knows these names is told by a proof that either side gives of the attempt's secret, which lies in the run directory
where only its user reads it. The server speaks first, so a foreign service (which may be another job's store) sees a
connection that closes without a word: torch's own client hangs at a silent port and fills the log at a talking one
(seen with 2.13). Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RendezvousError

_GREETING_TIMEOUT_S = 0.5
_LONGEST_GREETING_TIMEOUT_S = 5.0
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

    @property
    def greeting(self) -> str:
        """What rank 0 says first; a caller of another run or attempt hangs up."""
        return f"slurm_train run={self.run_id} attempt={self.attempt}"

    def proof(self, *words: object) -> str:
        """Returns what only somebody who knows the secret can say about these words, 64 hex digits."""
        text = "\0".join(map(str, (self.greeting, *words)))
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True)
class _Callers:
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


def serve_greeting(
    place: RankPlace, point: MeetingPoint, *, family: socket.AddressFamily, address: str = ""
) -> tuple[socket.socket, int]:
    """Returns the listening socket and its port after every other rank has called. Rank 0 only.

    The socket stays open: torch's store takes it over, so nobody else can get the port in between.

    Args:
        place: this rank.
        point: where to meet.
        family: of the addresses at which the others call.
        address: to listen at; "": at all of this machine.

    Raises:
        RendezvousError: no candidate port is free, or ranks are missing when the time is over.
    """
    listener = _listen(point, family, address)
    callers = _Callers(point, place.world_size, hosts={place.rank: place.host})
    deadline = time.monotonic() + point.timeout_s
    try:
        _gather(listener, callers, deadline=deadline)
        verdict = _verdict(place, point, callers.hosts)
        for connection in callers.connections.values():
            with contextlib.suppress(OSError):  # a caller that died now is missed by the process group
                connection.sendall(json.dumps(verdict).encode() + b"\n")
    finally:
        for connection in callers.connections.values():
            connection.close()
    if verdict is not None:
        listener.close()
        raise RendezvousError(**verdict)
    return listener, listener.getsockname()[1]


def _listen(point: MeetingPoint, family: socket.AddressFamily, address: str) -> socket.socket:
    for port in point.ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=4096)
    raise RendezvousError(
        f"rank 0 could bind none of the ports {', '.join(map(str, point.ports))} on {socket.gethostname()}",
        hint="start the job again: another attempt tries other ports",
    )


def _gather(listener: socket.socket, callers: _Callers, *, deadline: float) -> None:
    """Fills `callers` until all ranks called or the deadline passed."""
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(callers.hosts) < callers.world and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
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


def _greet_caller(listener: socket.socket, selector: selectors.BaseSelector, callers: _Callers) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.setblocking(True)
        connection.settimeout(1.0)
        callers.challenges[connection] = secrets.token_hex(16)
        connection.sendall(f"{callers.point.greeting} challenge={callers.challenges[connection]}\n".encode())
        selector.register(connection, selectors.EVENT_READ)


def _hear_caller(connection: socket.socket, callers: _Callers) -> None:
    challenge = callers.challenges.pop(connection)
    try:
        rank_text, own_challenge, proof, host = _read_line(connection).split(" ", 3)
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


def _verdict(place: RankPlace, point: MeetingPoint, joined: dict[int, str]) -> dict[str, str] | None:
    """Returns None when all ranks are there, else the words of the error that every rank raises."""
    missing = [rank for rank in range(place.world_size) if rank not in joined]
    if not missing:
        return None
    here = ", ".join(f"{rank} ({joined[rank]})" for rank in sorted(joined))
    return {
        "message": f"{len(missing)} of {place.world_size} ranks did not come to {point.master_addr} within "
        f"{point.timeout_s:g} s: missing {', '.join(map(str, missing))}; there: {here}",
        "hint": "look at the missing ranks' logs; if they never started, at their nodes; if they wait for rank 0, at "
        "name resolution and firewall between the nodes",
    }


def call_rank_zero(place: RankPlace, point: MeetingPoint, *, addresses: Sequence[str]) -> tuple[str, int]:
    """Returns address and port of this attempt's rank 0 once all ranks are there. All ranks but 0.

    Args:
        place: this rank.
        point: where to look.
        addresses: what `point.master_addr` resolves to, e.g. ["10.0.0.7"].

    Raises:
        RendezvousError: nobody of this attempt answered in time, or rank 0 says that ranks are missing.
    """
    deadline = time.monotonic() + point.timeout_s
    patience_s, pause_s = _GREETING_TIMEOUT_S, 0.005
    answers: dict[int, str] = {}
    while time.monotonic() < deadline:
        for address in addresses:
            for port in point.ports:
                connection, answers[port] = _call(address, port, place, point, patience_s=patience_s)
                if connection is not None:
                    _wait_for_all(connection, place, deadline=deadline)
                    return address, port
        time.sleep(pause_s)
        # Short at first, because rank 0 is usually milliseconds away; gentle on the head node of a large job later.
        pause_s, patience_s = min(pause_s * 1.5, 0.25), min(patience_s * 1.2, _LONGEST_GREETING_TIMEOUT_S)
    found = "; ".join(f"port {port}: {answer}" for port, answer in answers.items())
    raise RendezvousError(
        f"rank {place.rank} on {place.host} found nobody of run {point.run_id}, attempt {point.attempt}, at "
        f"{point.master_addr} ({', '.join(addresses)}) within {point.timeout_s:g} s: {found}",
        hint="look at rank 0's log; if it waits for the others, at the firewall between the nodes",
    )


def _call(
    address: str, port: int, place: RankPlace, point: MeetingPoint, *, patience_s: float
) -> tuple[socket.socket | None, str]:
    """Returns a connection to this attempt's rank 0, or None and what was found instead."""
    try:
        connection = socket.create_connection((address, port), timeout=patience_s)
    except OSError as err:
        return None, str(err)
    try:
        line = _read_line(connection)
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
    connection.settimeout(_LONGEST_GREETING_TIMEOUT_S)
    answer = _read_line(connection)
    return answer.isascii() and hmac.compare_digest(answer, point.proof(own_challenge, "rank 0"))


def _wait_for_all(connection: socket.socket, place: RankPlace, *, deadline: float) -> None:
    with connection:
        try:
            # Rank 0 began to wait after this rank at most; its verdict comes a little after this rank's deadline.
            connection.settimeout(max(deadline - time.monotonic(), 0.0) + 10.0)
            verdict = json.loads(_read_line(connection))
        except (OSError, ValueError) as err:
            raise RendezvousError(
                f"rank {place.rank} on {place.host} met rank 0, which then fell silent ({err})",
                hint="look at rank 0's log: it ended while it waited for the others",
            ) from err
    if verdict is not None:
        raise RendezvousError(**verdict)


def _read_line(connection: socket.socket) -> str:
    """Returns one line without its end; "" at a closed connection."""
    received = bytearray()
    # Byte by byte: the line after this one may be there already, and is for the next reader.
    while not received.endswith(b"\n") and len(received) < _LONGEST_LINE:
        chunk = connection.recv(1)
        if not chunk:
            break
        received += chunk
    return received.decode(errors="replace").rstrip("\n")
