"""Nodes that have started and do not get through to rank 0: they say so in the shared folder, and rank 0 looks there.

Nothing is believed that was tried before rank 0 listened, or at another port than its own.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from slurm_train.distributed.meeting import Meeting
from slurm_train.errors import ConfigError
from slurm_train.tools.doctor.facts import NodeFacts, Trouble, read_node, read_trouble
from slurm_train.tools.doctor.finding import Finding
from slurm_train.tools.doctor.participant import Participant, nodes_of, read_file

LOOK_EVERY_S = 0.5
_PATIENCE_S = 1.0
_BELIEVED_TRIES = 2
_GRACE_S = 2.0
_MOST_LOOKED_AT = 4
# Slow starts are common: until then nobody needs to hear of them.
_WAITED_S = 20.0

Tell = Callable[[Finding], None]
"""Gets what is worth a word while the ranks are still waited for."""


class Watcher:
    """Looks into the shared folder for nodes that have started and do not get through."""

    def __init__(self, participant: Participant, meeting: Meeting, *, bound: int, tell: Tell) -> None:
        self._participant, self._meeting, self._bound, self._tell = participant, meeting, bound, tell
        self._began_s = self._looked_s = time.monotonic()
        self._first: dict[str, int] = {}
        self._believed_since_s: float | None = None
        self._has_told = False
        self.believed: list[Trouble] = []
        self.facts: dict[str, NodeFacts] = {}

    def is_enough(self) -> bool:
        """Returns whether the ranks that are missing will not come."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return False
        missing = nodes_of(self._meeting.missing, self._participant)
        self._look(missing)
        # A slow file system must not take all the time from those who call.
        self._looked_s = time.monotonic()
        if now_s - self._began_s > _WAITED_S and not self._has_told:
            self._has_told = True
            self._tell(_waited_for(missing))
        if not self.believed:
            return False
        self._believed_since_s = self._believed_since_s or now_s
        # What is wrong with one node is often wrong with others; they get a moment to say so.
        return {trouble.node for trouble in self.believed} >= set(missing) or now_s - self._believed_since_s > _GRACE_S

    def _look(self, missing: Sequence[str]) -> None:
        believed = []
        for name in missing:
            value = read_file(self._participant.folder, self._participant.nodes.index(name))
            with contextlib.suppress(ConfigError, KeyError, TypeError):
                self.facts[name] = read_node(value["node"])
                trouble = read_trouble(value["trouble"])
                if self._is_believed(trouble):
                    believed.append(trouble)
        self.believed = believed

    def _is_believed(self, trouble: Trouble) -> bool:
        # What was tried before this rank listened, or at another port, says nothing.
        is_about_here = trouble.port in (0, self._bound)
        first = self._first.setdefault(trouble.node, trouble.tries)
        return is_about_here and trouble.tries >= first + _BELIEVED_TRIES


def _waited_for(nodes: Sequence[str]) -> Finding:
    return Finding(
        code="NODE_MISSING",
        level="warning",
        node=", ".join(nodes),
        seen=f"not all of its ranks have come within {_WAITED_S:.0f} s; they are waited for",
        todo="look at their logs and at the node: a slow file system, or a step that was not started there",
    )


def tell_trouble(participant: Participant, tries: int, addresses: Sequence[str], port: int, error: str) -> None:
    """Says in the shared folder that this node does not get through; ranks but the first of a node say nothing.

    Args:
        participant: this rank.
        tries: how often it has tried.
        addresses: what rank 0's name resolves to here.
        port: rank 0's port, 0 where that is not to be seen.
        error: what came of the last try.
    """
    if participant.facts is None:
        return
    reached, unreached = _look_around(participant) if addresses and port else ([], [])
    trouble = Trouble(
        node=participant.node,
        tries=tries,
        address=addresses[0] if addresses else "",
        port=port,
        error=_in_words(error),
        reached=reached,
        unreached=unreached,
    )
    participant.write({"trouble": asdict(trouble)})


def _in_words(error: str) -> str:
    """Returns the kernel's words without the number: "[Errno 111] Connection refused" -> "connection refused"."""
    text = error.partition("] ")[2].lower() or error
    return "a route that leads nowhere (blackhole)" if text == "invalid argument" else text


def _look_around(participant: Participant) -> tuple[list[str], list[str]]:
    """Returns which of a few other nodes this one reaches, by what they have written into the shared folder."""
    reached, unreached = [], []
    for index in range(1, min(len(participant.nodes), _MOST_LOOKED_AT)):
        name = participant.nodes[index]
        if name == participant.node:
            continue
        value = read_file(participant.folder, index)
        network = value.get("node", {}).get("network", {})
        if not network.get("probe_port"):
            continue
        try:
            socket.create_connection((network["address"], network["probe_port"]), timeout=_PATIENCE_S).close()
            reached.append(name)
        except OSError:
            unreached.append(name)
    return reached, unreached
