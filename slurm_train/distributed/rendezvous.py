"""One store for the ranks of one attempt: found by handshake, then handed to torch on the same listening socket.

Every rank resolves the master address itself, so a name that one node does not know is reported by that node and not
by a time-out of all. Nothing falls back to localhost.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.handshake import call_rank_zero, serve_greeting
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RendezvousError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

_HERE = "127.0.0.1"


def open_store(place: RankPlace, point: MeetingPoint) -> tuple[Store, int]:
    """Returns the store that all ranks of this attempt share, and its port. Collective over all ranks.

    Raises:
        RendezvousError: the master's name does not resolve here, no port is free, or ranks are missing; each
            message names the node that saw it.
    """
    # The store knows no passwords. On one node nobody outside needs to reach it.
    addresses = resolve_master(place, point.master_addr) if place.spans_nodes else [_HERE]
    if place.is_first:
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        own_address = "" if place.spans_nodes else _HERE
        listener, port = serve_greeting(place, point, family=family, address=own_address)
        return _hidden(_serve_store(listener, addresses[0], port, timeout_s=point.timeout_s), point), port
    address, port = call_rank_zero(place, point, addresses=addresses)
    return _hidden(_join_store(address, port, timeout_s=point.timeout_s), point), port


def _hidden(store: TCPStore, point: MeetingPoint) -> Store:
    """Puts a word that strangers do not know in front of every key."""
    import torch.distributed as dist

    hidden: Store = dist.PrefixStore(point.proof("store"), store)  # type: ignore[attr-defined]  # as below
    return hidden


def _serve_store(listener: socket.socket, address: str, port: int, *, timeout_s: float) -> TCPStore:
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]  # public in the documentation
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _join_store(address: str, port: int, *, timeout_s: float) -> TCPStore:
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]  # public in the documentation
        address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def resolve_master(place: RankPlace, master_addr: str) -> list[str]:
    """Returns the addresses of the master as seen from this node, IPv4 first, e.g. ["10.0.0.7"].

    Raises:
        RendezvousError: the name does not resolve here, or to this machine itself although rank 0 is elsewhere.
    """
    try:
        found = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError as err:
        raise RendezvousError(
            f"node {place.host} (rank {place.rank}) cannot resolve the master address {master_addr!r}: {err}",
            hint=f"check with `getent hosts {master_addr}` on {place.host}, or exclude the node with cluster.exclude",
        ) from err
    addresses = sorted({str(entry[4][0]) for entry in found}, key=lambda address: (":" in address, address))
    # Debian maps a node's own name to 127.0.1.1: harmless on the head node itself, fatal elsewhere.
    if place.node_rank > 0 and all(_is_loopback(address) for address in addresses):
        raise RendezvousError(
            f"node {place.host} (rank {place.rank}) resolves the master address {master_addr!r} to itself "
            f"({', '.join(addresses)}), but rank 0 runs on another node",
            hint=f"fix /etc/hosts on {place.host}, or exclude the node with cluster.exclude",
        )
    return addresses


def check_gloo_address(place: RankPlace, env: Mapping[str, str]) -> None:
    """Does nothing where gloo will announce an address that other nodes can reach.

    Gloo announces what this host's own name resolves to, unless GLOO_SOCKET_IFNAME names an interface; a loopback
    address there makes every other node wait until the time-out.

    Raises:
        RendezvousError: the host's own name is a loopback address and no interface is named.
    """
    if not place.spans_nodes or env.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    if all(_is_loopback(address) for address in addresses):
        found = ", ".join(sorted(addresses)) or "nothing"
        raise RendezvousError(
            f"node {place.host} resolves its own name {name!r} to {found}: other nodes could not reach it",
            hint="name the interface of the cluster's network: cluster.network_interface=eth0 (see `ip -br addr`)",
        )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
