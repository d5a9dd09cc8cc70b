"""The lobby: the ranks that torchrun has started meet before any of them knows which attempt they are.

torchrun tells a rank its number in this round and nothing that names the round: its count of restarts differs from node
to node. So all ranks come to rank 0, which opens the attempt when they are there and tells them its number. What is
left of an earlier round has no rank 0 any more that would answer. Imports no torch, so it costs a rank milliseconds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.handshake import hear_rank_zero, serve_greeting
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import resolve_master

_HERE = "127.0.0.1"


def agree_on_attempt(place: RankPlace, point: MeetingPoint, *, open_attempt: Callable[[tuple[str, ...]], int]) -> int:
    """Returns the number of this round's attempt. Collective over the ranks that torchrun has started together.

    Args:
        place: this rank.
        point: where to meet; its attempt is of no importance.
        open_attempt: opens the attempt; called by rank 0 alone, when all have come, with the nodes in rank order.

    Raises:
        RendezvousError: ranks are missing, or rank 0 is not found.
    """
    addresses = resolve_master(place, point.master_addr) if place.spans_nodes else [_HERE]
    if not place.is_first:
        return hear_rank_zero(place, point, addresses=addresses)["attempt"]
    opened: list[int] = []

    def news(hosts: Mapping[int, str]) -> dict[str, int]:
        opened.append(open_attempt(tuple(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))))
        return {"attempt": opened[0]}

    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    listener, _ = serve_greeting(place, point, family=family, address="" if place.spans_nodes else _HERE, news=news)
    listener.close()
    return opened[0]
