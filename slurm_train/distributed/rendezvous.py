"""The ranks of one attempt meet: on a number for it, where they have none yet, and on torch's store.

Two jobs on one node, what is left of an earlier attempt, a foreign service on the port and strangers are told apart
before torch is asked to connect anywhere: its client hangs at a silent port and fills the log at a talking one (seen
with 2.13). Rank 0 listens at one socket from then on until torch's store takes it over, so nobody can get its port in
between. Every rank resolves the master address itself, so a name that one node does not know is reported by that node
and not by a time-out of all. Nothing falls back to localhost. torch is imported where the store is opened alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slurm_train.distributed.calling import Caller, Search, latest_word_s
from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.meeting import Meeting, listen, raise_open_files
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RendezvousError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_HERE = "127.0.0.1"
_FILES_PER_PEER = 3
_FILES_OF_A_RANK = 128
_USUAL_FILES = 1024


def files_needed(world_size: int) -> int:
    """Returns how many files a rank may have to keep open: a connection per peer in gloo's groups and in the store."""
    return _FILES_OF_A_RANK + _FILES_PER_PEER * world_size


def allow_files(world_size: int) -> int | None:
    """Raises this process's soft limit of open files to what a rank needs, as far as its hard limit allows.

    Returns:
        The limit that holds then, None for no limit.
    """
    return raise_open_files(max(_USUAL_FILES, files_needed(world_size)))


def open_store(place: RankPlace, point: MeetingPoint) -> tuple[TCPStore, int]:
    """Returns the store that all ranks of this attempt share, and its port. Collective over all ranks.

    The store itself asks nobody who they are. That of a world on one node listens on the loopback alone.

    Raises:
        RendezvousError: the master's name does not resolve here, no port is free, ranks are missing, or rank 0 may
            not open enough files; each message names the node that saw it.
    """
    import torch.distributed as dist

    addresses = _addresses(place, point)
    limit = allow_files(place.world_size)
    timeout = timedelta(seconds=point.timeout_s)
    if place.is_first:
        _require_files(place, limit)
        listener, port = host_meeting(place, point, addresses=addresses)
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public in the documentation
            addresses[0],
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return store, port
    address, port, _ = join_meeting(place, point, addresses=addresses)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # as above
        address, port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return store, port


def agree_on_attempt(place: RankPlace, point: MeetingPoint, *, open_attempt: Callable[[tuple[str, ...]], int]) -> int:
    """Returns the number of this round's attempt. Collective over the ranks that torchrun has started together.

    torchrun gives a rank its number in this round and nothing that names the round: its count of restarts differs from
    node to node. What is left of an earlier round has no rank 0 any more that would answer.

    Args:
        place: this rank.
        point: where to meet; its attempt is of no importance.
        open_attempt: opens the attempt; called by rank 0 alone, when all have come, with the nodes in rank order.

    Raises:
        RendezvousError: ranks are missing, or rank 0 is not found.
    """
    addresses = _addresses(place, point)
    if not place.is_first:
        return int(join_meeting(place, point, addresses=addresses)[2])
    opened: list[int] = []

    def open_once(hosts: Mapping[int, str]) -> int:
        opened.append(open_attempt(tuple(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))))
        return opened[0]

    listener, _ = host_meeting(place, point, addresses=addresses, decide=open_once)
    listener.close()
    return opened[0]


def host_meeting(
    place: RankPlace,
    point: MeetingPoint,
    *,
    addresses: Sequence[str],
    decide: Callable[[Mapping[int, str]], Any] = lambda _: None,
) -> tuple[socket.socket, int]:
    """Returns the listening socket and its port after every other rank has come. Rank 0 only.

    Args:
        place: this rank.
        point: where to meet.
        addresses: what `point.master_addr` resolves to, which says whether to listen by IPv4 or IPv6.
        decide: called when all have come, with the host of each rank; what it returns is sent to all.

    Raises:
        RendezvousError: no candidate port is free, or ranks are missing when the time is over.
    """
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    listener = listen(point, family=family, address="" if place.spans_nodes else _HERE)
    if listener is None:
        raise RendezvousError(
            f"rank 0 could bind none of the ports {', '.join(map(str, point.ports))} on {socket.gethostname()}",
            hint="start the job again: another attempt tries other ports; `ss -ltnp` there shows who holds these",
        )
    meeting = Meeting(listener, point, world_size=place.world_size, host=place.host)
    try:
        meeting.gather(deadline=time.monotonic() + point.timeout_s)
        failure = _who_is_missing(meeting, point)
        meeting.close({"failure": failure} if failure else {"decision": decide(meeting.hosts)})
        if failure:
            raise RendezvousError(failure["message"], hint=failure["hint"])
    except BaseException:
        meeting.abandon()
        listener.close()
        raise
    return listener, int(listener.getsockname()[1])


def join_meeting(place: RankPlace, point: MeetingPoint, *, addresses: Sequence[str]) -> tuple[str, int, Any]:
    """Returns rank 0's address and port, and what it has decided, once all ranks are there. All ranks but 0.

    Args:
        place: this rank.
        point: where to meet.
        addresses: what `point.master_addr` resolves to, e.g. ["10.0.0.7"].

    Raises:
        RendezvousError: nobody of this attempt was found in time, or rank 0 says that ranks are missing.
    """
    search = Search(place, point)
    search.aim([(address, port) for port in point.ports for address in addresses])
    try:
        found = search.run(until=time.monotonic() + point.timeout_s)
    finally:
        search.close()
    if found is None:
        raise RendezvousError(
            f"rank {place.rank} on {place.host} found nobody of run {point.run_id}, attempt {point.attempt}, at "
            f"{point.master_addr} ({', '.join(addresses)}) within {point.timeout_s:g} s: {search.in_words()}",
            hint="look at rank 0's log; if it waits for the others, at the firewall between the nodes",
        )
    deadline = time.monotonic() + latest_word_s(point, place.world_size)
    channel, target = found
    try:
        caller = Caller(channel, target, place, point, deadline=deadline)
        with contextlib.closing(caller):
            value = caller.receive(deadline=deadline)
    except (OSError, ValueError) as err:
        raise RendezvousError(
            f"rank {place.rank} on {place.host} met rank 0, which then fell silent ({err})",
            hint="look at rank 0's log: it ended while it waited for the others",
        ) from err
    if "failure" in value:
        raise RendezvousError(value["failure"]["message"], hint=value["failure"]["hint"])
    return *target, value["decision"]


def _who_is_missing(meeting: Meeting, point: MeetingPoint) -> dict[str, str] | None:
    """Returns None when all ranks have come, else the words of the error that every rank raises."""
    missing = meeting.missing
    if not missing:
        return None
    here = ", ".join(f"{rank} ({meeting.hosts[rank]})" for rank in sorted(meeting.hosts))
    return {
        "message": f"{len(missing)} of {meeting.world_size} ranks did not come to {point.master_addr} within "
        f"{point.timeout_s:g} s: missing {', '.join(map(str, missing))}; there: {here}",
        "hint": "look at the missing ranks' logs; if they never started, at their nodes; if they wait for rank 0, at "
        "name resolution and firewall between the nodes",
    }


def _require_files(place: RankPlace, limit: int | None) -> None:
    if limit is not None and limit < _FILES_OF_A_RANK + place.world_size:
        raise RendezvousError(
            f"rank 0 on {place.host} may open {limit} files, but torch's store keeps a connection open for each of "
            f"{place.world_size} ranks",
            hint=f"raise the hard limit: `ulimit -n {files_needed(place.world_size)}` before submitting or in "
            "cluster.setup, or LimitNOFILE of slurmd's service",
        )


def _addresses(place: RankPlace, point: MeetingPoint) -> list[str]:
    # On one node nobody outside needs to reach rank 0.
    return resolve_master(place, point.master_addr) if place.spans_nodes else [_HERE]


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
