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
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slurm_train.distributed.calling import Caller, Search, Target, latest_word_s
from slurm_train.distributed.greeting import Channel, MeetingPoint
from slurm_train.distributed.meeting import Meeting, listen
from slurm_train.errors import ConfigError
from slurm_train.tools.doctor.evidence import PortFacts
from slurm_train.tools.doctor.facts import (
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
from slurm_train.tools.doctor.interfaces import resolve
from slurm_train.tools.doctor.participant import Participant, nodes_of, read_file
from slurm_train.tools.doctor.port_holder import holder_of
from slurm_train.tools.doctor.probes import Peer, probe
from slurm_train.tools.doctor.speed import measure
from slurm_train.tools.doctor.trouble import LOOK_EVERY_S, Tell, Watcher, tell_trouble

_TROUBLE_AFTER_S = 2.0
_REPORT_S = 10.0


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


def open_port(
    point: MeetingPoint, *, address: str, family: socket.AddressFamily
) -> tuple[socket.socket | None, PortFacts]:
    """Returns rank 0's listening socket at the first port that is free, None where none is."""
    asked = point.ports[0]
    listener = listen(point, family=family, address=address)
    bound = 0 if listener is None else int(listener.getsockname()[1])
    return listener, PortFacts(asked=asked, bound=bound, holder="" if bound in (0, asked) else holder_of(asked))


def hear_all(participant: Participant, meeting: Meeting, heard: Heard, *, tell: Tell) -> None:
    """Fills `heard` with everybody's report, or with what the files say of those who do not come. Rank 0 only.

    Args:
        participant: rank 0.
        meeting: with the others.
        heard: what is known.
        tell: gets what is worth a word meanwhile.
    """
    assert heard.port is not None
    watcher = Watcher(participant, meeting, bound=heard.port.bound, tell=tell)
    deadline = time.monotonic() + participant.point.timeout_s
    meeting.gather(deadline=deadline, is_enough=watcher.is_enough, look_every_s=LOOK_EVERY_S)
    absent = meeting.missing
    meeting.gather_reports(deadline=time.monotonic() + _REPORT_S)
    for number in sorted(meeting.reports):
        _take_report(meeting.reports[number], heard)
    told = {facts.rank for facts in heard.ranks}
    heard.mute = nodes_of(sorted(set(range(meeting.world_size)) - told - set(absent)), participant)
    came = {facts.node for facts in heard.nodes}
    missing = nodes_of(absent, participant)
    heard.troubles = [trouble for trouble in watcher.believed if trouble.node in missing]
    heard.nodes += [facts for name, facts in watcher.facts.items() if name in missing and name not in came]
    if missing and not heard.troubles:
        heard.silent = missing


def _take_report(value: Mapping[str, Any] | None, heard: Heard) -> None:
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        if value is not None:
            heard.ranks.append(read_rank(value["rank"]))
            if value.get("node") is not None:
                heard.nodes.append(read_node(value["node"]))


def ask_nodes(
    participant: Participant,
    meeting: Meeting,
    heard: Heard,
    words: str,
    leaders: Sequence[int],
    peers: Mapping[str, Sequence[Peer]],
) -> dict[str, dict[str, Any]]:
    """Asks the first ranks of nodes, and does this node's own part meanwhile; returns the answers by node. Rank 0 only.

    Args:
        participant: rank 0.
        meeting: with the others.
        heard: gets the nodes that were late.
        words: "probe" or "measure".
        leaders: the ranks to ask; rank 0 itself may be among them.
        peers: whom each node is to look at.
    """
    deadline = time.monotonic() + participant.budget_s
    names = {facts.rank: facts.node for facts in heard.ranks}
    for leader in leaders:
        meeting.send(leader, {words: [asdict(peer) for peer in peers[names[leader]]]})
    answers = {}
    for leader in leaders:
        own = answer(participant, words, peers[names[leader]]) if leader == participant.place.rank else None
        value = own or meeting.receive(leader, deadline=deadline)
        if not isinstance(value, dict):
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
        None where rank 0 was not found, or the connection was lost on the way.
    """
    found = _find(participant)
    if found is None:
        return None
    facts = None if participant.facts is None else asdict(participant.facts)
    report = {"rank": asdict(participant.report), "node": facts}
    place, point = participant.place, participant.point
    patience_s = latest_word_s(point, place.world_size)
    try:
        deadline = time.monotonic() + patience_s
        with contextlib.closing(Caller(*found, place, point, report=report, deadline=deadline)) as caller:
            while "verdict" not in (value := caller.receive(deadline=time.monotonic() + patience_s)):
                ((words, peers),) = value.items()
                answered = answer(participant, words, [Peer(**peer) for peer in peers])
                caller.send(answered, deadline=time.monotonic() + patience_s)
            verdict: dict[str, Any] = value["verdict"]
            return verdict
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _find(participant: Participant) -> tuple[Channel, Target] | None:
    """Returns a channel to rank 0; while there is none, the first rank of a node says in its file what it meets."""
    point, began_s = participant.point, time.monotonic()
    told_s = began_s
    search = Search(participant.place, point)
    try:
        while time.monotonic() - began_s < point.timeout_s:
            addresses, error = resolve(point.master_addr) if participant.place.spans_nodes else (["127.0.0.1"], "")
            known = int(read_file(participant.folder, 0).get("listens", 0))
            # The port that rank 0 has written down; while none is seen, any.
            ports = [known] if known else point.ports
            search.aim([(address, port) for port in ports for address in addresses])
            found = search.run(until=min(time.monotonic() + LOOK_EVERY_S, began_s + point.timeout_s))
            if found is not None:
                return found
            now_s = time.monotonic()
            if now_s - began_s > _TROUBLE_AFTER_S and now_s - told_s > LOOK_EVERY_S:
                error = error or (search.answers.get((addresses[0], ports[0]), "") if addresses else "")
                tries = search.tries if addresses else round((now_s - began_s) / LOOK_EVERY_S)
                tell_trouble(participant, tries, addresses, known, error)
                told_s = now_s
    finally:
        search.close()
    return None
