"""How reports and verdict travel: over proven connections to rank 0, and through shared files where those fail.

    every rank                          rank 0
    report  ------------------------->  waits for all, and reads the files of those that do not get through
    first rank of a node:
            <-------------------------  whom to probe
    what it found  ------------------>  what is wrong is decided here
            <-------------------------  the verdict, to everybody

Rank 0 waits as long as the meeting of the ranks would; what is asked after all have come has a budget. A rank that
loses its connection goes on without a verdict: the meeting of the ranks has its own words for a rank 0 that died.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from slurm_train.distributed.greeting import Callers, MeetingPoint, call, gather
from slurm_train.doctor.evidence import PortFacts
from slurm_train.doctor.facts import (
    NodeFacts,
    ProbeFacts,
    RankFacts,
    SpeedFacts,
    Trouble,
    read_node,
    read_probe,
    read_rank,
    read_speed,
)
from slurm_train.doctor.interfaces import resolve
from slurm_train.doctor.participant import Participant, nodes_of, read_file
from slurm_train.doctor.port_holder import holder_of
from slurm_train.doctor.probes import Peer, probe
from slurm_train.doctor.speed import measure
from slurm_train.doctor.trouble import LOOK_EVERY_S, Tell, Watcher, tell_trouble
from slurm_train.errors import ConfigError

_PATIENCE_S = 1.0
_TROUBLE_AFTER_S = 2.0
_TRIES_AT_FIRST = 8
_REPORT_S = 10.0
_LEAST_WAIT_S = 1.0


@dataclass(slots=True)
class Heard:
    """What rank 0 knows so far."""

    ranks: list[RankFacts] = field(default_factory=list)
    nodes: list[NodeFacts] = field(default_factory=list)
    probes: list[ProbeFacts] = field(default_factory=list)
    speeds: list[SpeedFacts] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    mute: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    port: PortFacts | None = None


class Lines:
    """Rank 0's connections to the others, a line of JSON at a time."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = dict(connections)
        self._files: dict[int, BinaryIO] = {rank: line.makefile("rb") for rank, line in connections.items()}

    def send(self, rank: int, value: Mapping[str, Any]) -> None:
        """Sends to one rank; one that has ended is missed by the meeting of the ranks."""
        with contextlib.suppress(OSError, KeyError):
            self._connections[rank].settimeout(_REPORT_S)
            self._connections[rank].sendall(json.dumps(value).encode() + b"\n")

    def receive(self, rank: int, *, deadline: float) -> dict[str, Any] | None:
        """Returns what a rank says, None where it says nothing until the deadline (`time.monotonic`)."""
        try:
            # After a suspension the deadline is over, and what was sent meanwhile is still on its way.
            self._connections[rank].settimeout(max(deadline - time.monotonic(), _LEAST_WAIT_S))
            value = json.loads(self._files[rank].readline())
        except (OSError, ValueError, KeyError):
            return None
        return value if isinstance(value, dict) else None

    def send_all(self, value: Mapping[str, Any]) -> None:
        """Sends to everybody."""
        for rank in self._connections:
            self.send(rank, value)

    def close(self) -> None:
        """Hangs up."""
        for file in self._files.values():
            file.close()
        for connection in self._connections.values():
            connection.close()


def open_port(
    point: MeetingPoint, *, address: str, family: socket.AddressFamily
) -> tuple[socket.socket | None, PortFacts]:
    """Returns rank 0's listening socket at the first port that is free, None where none is."""
    asked = point.ports[0]
    for port in point.ports:
        with contextlib.suppress(OSError):
            listener = socket.create_server((address, port), family=family, backlog=4096)
            holder = "" if port == asked else holder_of(asked)
            return listener, PortFacts(asked=asked, bound=port, holder=holder)
    return None, PortFacts(asked=asked, bound=0)


def hear_all(participant: Participant, listener: socket.socket, heard: Heard, *, tell: Tell) -> Lines:
    """Fills `heard` with everybody's report, or with what the files say of those who do not come. Rank 0 only.

    Args:
        participant: rank 0.
        listener: where the others call.
        heard: what is known.
        tell: gets what is worth a word meanwhile.
    """
    callers = Callers(participant.point, participant.place.world_size, hosts={0: participant.place.host})
    watcher = Watcher(participant, callers, bound=listener.getsockname()[1], tell=tell)
    deadline = time.monotonic() + participant.point.timeout_s
    gather(listener, callers, deadline=deadline, is_enough=watcher.is_enough, look_every_s=LOOK_EVERY_S)
    lines = Lines(callers.connections)
    deadline = time.monotonic() + _REPORT_S
    for number in sorted(callers.connections):
        _take_report(lines.receive(number, deadline=deadline), heard)
    told = {facts.rank for facts in heard.ranks}
    heard.mute = nodes_of([number for number in sorted(callers.connections) if number not in told], participant)
    came = {facts.node for facts in heard.nodes}
    missing = nodes_of(callers.missing, participant)
    heard.troubles = [trouble for trouble in watcher.believed if trouble.node in missing]
    heard.nodes += [facts for name, facts in watcher.facts.items() if name in missing and name not in came]
    if callers.missing and not heard.troubles:
        heard.silent = missing
    return lines


def _take_report(value: Mapping[str, Any] | None, heard: Heard) -> None:
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        if value is not None:
            heard.ranks.append(read_rank(value["rank"]))
            if value.get("node") is not None:
                heard.nodes.append(read_node(value["node"]))


def ask_nodes(
    participant: Participant,
    lines: Lines,
    heard: Heard,
    words: str,
    leaders: Sequence[int],
    peers: Mapping[str, Sequence[Peer]],
) -> dict[str, dict[str, Any]]:
    """Asks the first ranks of nodes, and does this node's own part meanwhile; returns the answers by node. Rank 0 only.

    Args:
        participant: rank 0.
        lines: to the others.
        heard: gets the nodes that were late.
        words: "probe" or "measure".
        leaders: the ranks to ask; rank 0 itself may be among them.
        peers: whom each node is to look at.
    """
    deadline = time.monotonic() + participant.budget_s
    names = {facts.rank: facts.node for facts in heard.ranks}
    for leader in leaders:
        lines.send(leader, {words: [asdict(peer) for peer in peers[names[leader]]]})
    answers = {}
    for leader in leaders:
        own = answer(participant, words, peers[names[leader]]) if leader == participant.place.rank else None
        value = own or lines.receive(leader, deadline=deadline)
        if value is None:
            heard.late.append(names[leader])
        else:
            answers[names[leader]] = value
    return answers


def answer(participant: Participant, words: str, peers: Sequence[Peer]) -> dict[str, Any]:
    """Returns what this node finds when it does what rank 0 has asked for."""
    if words == "measure":
        return asdict(measure(participant.point, participant.node, peers))
    return asdict(
        probe(participant.point, participant.node, peers, folder=participant.folder, master=participant.nodes[0])
    )


def take_answers(heard: Heard, words: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts the nodes' answers to what is known."""
    for value in answers.values():
        with contextlib.suppress(ConfigError):
            if words == "measure":
                heard.speeds.append(read_speed(value))
            else:
                heard.probes.append(read_probe(value))


def follow(participant: Participant) -> dict[str, Any] | None:
    """Reports to rank 0, does what it asks, and returns its verdict. All ranks but 0.

    Returns:
        None where the connection was lost on the way.
    """
    connection = _knock(participant)
    if connection is None:
        return None
    with connection, connection.makefile("rb") as file:
        try:
            connection.settimeout(participant.point.timeout_s + _REPORT_S)
            facts = None if participant.facts is None else asdict(participant.facts)
            connection.sendall(json.dumps({"rank": asdict(participant.report), "node": facts}).encode() + b"\n")
            while line := file.readline():
                value = json.loads(line)
                if "verdict" in value:
                    verdict: dict[str, Any] = value["verdict"]
                    return verdict
                ((words, peers),) = value.items()
                found = answer(participant, words, [Peer(**peer) for peer in peers])
                connection.sendall(json.dumps(found).encode() + b"\n")
        except (OSError, ValueError, TypeError):
            pass
    return None


def _ports_to_try(point: MeetingPoint, known: int, tries: int) -> Sequence[int]:
    """Returns the port that rank 0 has written down; while none is seen, the likely one, and later all in turn."""
    if known:
        return [known]
    return point.ports[:1] if tries < _TRIES_AT_FIRST else point.ports


def _knock(participant: Participant) -> socket.socket | None:
    """Returns a connection to rank 0; while there is none, the first rank of a node says in its file what it meets."""
    began_s = time.monotonic()
    pause_s, tries, told_s = 0.005, 0, began_s
    while time.monotonic() - began_s < participant.point.timeout_s:
        addresses, error = (
            resolve(participant.point.master_addr) if participant.place.spans_nodes else (["127.0.0.1"], "")
        )
        known = int(read_file(participant.folder, 0).get("listens", 0))
        for address in addresses:
            for port in _ports_to_try(participant.point, known, tries):
                connection, error = call(address, port, participant.place, participant.point, patience_s=_PATIENCE_S)
                if connection is not None:
                    return connection
        tries += 1
        if time.monotonic() - began_s > _TROUBLE_AFTER_S and time.monotonic() - told_s > LOOK_EVERY_S:
            tell_trouble(participant, tries, addresses, known, error)
            told_s = time.monotonic()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.25)
    return None
