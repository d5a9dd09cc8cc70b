"""The ranks of one attempt meet: on its number, where torchrun started them, and on torch's store.

torch is asked to connect only after the handshake of `meeting`: its client hangs at a silent port and fills the log at
a talking one (seen with 2.13). Rank 0 listens at one socket from the handshake until torch's store takes it over, so
no other program can get its port in between. Every rank resolves the master address itself, so a name that one node
does not know is reported by that node and not by a time-out of all. Nothing falls back to localhost. torch is imported
only where the store is opened and where its agent runs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from slurm_train.distributed.meeting import Meeting, MeetingPoint, PortSearch, answer_timeout_s, listen
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, RendezvousError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_LOOPBACK = "127.0.0.1"
_FILES_PER_PEER = 3
_FILES_OF_A_RANK = 128
_USUAL_FILES = 1024


def open_store(place: RankPlace, point: MeetingPoint) -> tuple[TCPStore, int]:
    """Returns the store that all ranks of this attempt share, and its port. Collective over all ranks.

    The store itself authenticates no client. That of a world on one node listens on the loopback alone.

    Raises:
        RendezvousError: the master's name does not resolve here, no port is free, ranks are missing, or rank 0 may
            not open enough files; each message names the node that saw it.
    """
    import torch.distributed as dist

    addresses = _addresses(place, point)
    listener = None
    if place.is_first:
        listener, port = host_meeting(place, point, addresses=addresses)
        address = addresses[0]
    else:
        allow_files(place.world_size)
        address, port, _ = join_meeting(place, point, addresses=addresses)
    timeout = timedelta(seconds=point.timeout_s)
    make = partial(
        dist.TCPStore,  # type: ignore[attr-defined]  # public in the documentation
        address,
        port,
        is_master=place.is_first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    try:
        return make(), port
    except NotImplementedError:
        # torch 2.7: its store on libuv takes no socket that listens already, the older one does.
        return make(use_libuv=False), port


def agree_on_attempt(place: RankPlace, point: MeetingPoint, *, open_attempt: Callable[[tuple[str, ...]], int]) -> int:
    """Returns the number of this round's attempt. Collective over the ranks that torchrun has started together.

    torchrun gives a rank its number in this round and nothing that names the round: its count of restarts differs from
    node to node. Ranks that are left over from an earlier round have no rank 0 any more that would answer.

    Args:
        place: this rank.
        point: where to meet; its attempt does not matter.
        open_attempt: opens the attempt; called by rank 0 alone, when all are connected, with the nodes in rank order.

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
    """Returns the listening socket and its port after every other rank has connected. Rank 0 only.

    Args:
        place: this rank.
        point: where to meet.
        addresses: what `point.master_addr` resolves to, which decides between IPv4 and IPv6.
        decide: called when all are connected, with the host of each rank; what it returns is sent to all.

    Raises:
        RendezvousError: rank 0 may not open enough files, no candidate port is free, or ranks are missing when the
            time is over.
    """
    require_files(place)
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    listener = listen(point, family=family, address="" if place.spans_nodes else _LOOPBACK)
    if listener is None:
        raise RendezvousError(
            f"rank 0 could bind none of the ports {', '.join(map(str, point.ports))} on {socket.gethostname()}",
            hint="start the job again: another attempt tries other ports; `ss -ltnp` there shows who holds these",
        )
    meeting = Meeting(listener, point, world_size=place.world_size, host=place.host)
    try:
        meeting.gather(deadline=time.monotonic() + point.timeout_s)
        failure = _describe_missing(meeting, point)
        meeting.close({"failure": failure} if failure else {"decision": decide(meeting.hosts)})
        if failure:
            raise RendezvousError(failure["message"], hint=failure["hint"])
    except BaseException:
        meeting.abandon()
        listener.close()
        raise
    return listener, int(listener.getsockname()[1])


def join_meeting(place: RankPlace, point: MeetingPoint, *, addresses: Sequence[str]) -> tuple[str, int, Any]:
    """Returns rank 0's address and port, and what it has decided, once all ranks are connected. All ranks but 0.

    Args:
        place: this rank.
        point: where to meet.
        addresses: what `point.master_addr` resolves to, e.g. ["10.0.0.7"].

    Raises:
        RendezvousError: rank 0 of this attempt was not found in time, or ranks are missing.
    """
    search = PortSearch(place, point)
    search.set_targets([(address, port) for port in point.ports for address in addresses])
    with contextlib.closing(search):
        connection = search.run(until=time.monotonic() + point.timeout_s)
    if connection is None:
        raise RendezvousError(
            f"rank {place.rank} on {place.host} timed out after {point.timeout_s:g} s waiting for rank 0 of run "
            f"{point.run_id}, attempt {point.attempt}, at {point.master_addr} ({', '.join(addresses)}): "
            f"{search.describe()}",
            hint="look at rank 0's log; if it waits for the others, at the firewall between the nodes",
        )
    deadline = time.monotonic() + answer_timeout_s(point, place.world_size)
    channel, target = connection
    try:
        with contextlib.closing(channel):
            channel.send_value(None, deadline=deadline)
            value = channel.receive_value(deadline=deadline)
    except (OSError, ValueError) as err:
        raise RendezvousError(
            f"rank {place.rank} on {place.host}: connection to rank 0 failed after the handshake ({err})",
            hint="look at rank 0's log: it ended while it waited for the others",
        ) from err
    if "failure" in value:
        raise RendezvousError(value["failure"]["message"], hint=value["failure"]["hint"])
    return *target, value["decision"]


def _describe_missing(meeting: Meeting, point: MeetingPoint) -> dict[str, str] | None:
    """Returns the words of the error that every rank raises where ranks are missing, None where all are connected."""
    missing = meeting.missing
    if not missing:
        return None
    here = ", ".join(f"{rank} ({meeting.hosts[rank]})" for rank in sorted(meeting.hosts))
    return {
        "message": f"{len(missing)} of {meeting.world_size} ranks did not connect to {point.master_addr} within "
        f"{point.timeout_s:g} s: missing {', '.join(map(str, missing))}; connected: {here}",
        "hint": "look at the missing ranks' logs; if they never started, at their nodes; if they wait for rank 0, at "
        "name resolution and firewall between the nodes",
    }


def files_needed(world_size: int) -> int:
    """Returns how many files a rank may have to keep open: a connection per peer in gloo's groups and in the store."""
    return _FILES_OF_A_RANK + _FILES_PER_PEER * world_size


def allow_files(world_size: int) -> int | None:
    """Raises this process's soft limit of open files to what a rank needs, as far as its hard limit allows.

    Returns:
        The limit that holds then, None for no limit.
    """
    needed = max(_USUAL_FILES, files_needed(world_size))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def require_files(place: RankPlace) -> None:
    """Raises the limit of open files, and checks that rank 0 can hold a connection to every rank.

    Raises:
        RendezvousError: the hard limit is too low.
    """
    limit = allow_files(place.world_size)
    if limit is not None and limit < _FILES_OF_A_RANK + place.world_size:
        raise RendezvousError(
            f"rank 0 on {place.host} may open {limit} files, but needs a connection to each of "
            f"{place.world_size} ranks",
            hint=f"raise the hard limit: `ulimit -n {files_needed(place.world_size)}` before submitting or in "
            "cluster.setup, or LimitNOFILE of slurmd's service",
        )


def _addresses(place: RankPlace, point: MeetingPoint) -> list[str]:
    # On one node no rank outside needs to reach rank 0.
    return resolve_master(place, point.master_addr) if place.spans_nodes else [_LOOPBACK]


def resolve_master(place: RankPlace, master_addr: str) -> list[str]:
    """Returns the addresses of the master as seen from this node, IPv4 first, e.g. ["10.0.0.7"].

    Raises:
        RendezvousError: the name does not resolve here, or to this machine itself although rank 0 is elsewhere.
    """
    try:
        addresses = addresses_of(master_addr)
    except OSError as err:
        raise RendezvousError(
            f"node {place.host} (rank {place.rank}) cannot resolve the master address {master_addr!r}: {err}",
            hint=f"check with `getent hosts {master_addr}` on {place.host}, or exclude the node with cluster.exclude",
        ) from err
    # Debian maps a node's own name to 127.0.1.1: harmless on the head node itself, fatal elsewhere.
    if place.node_rank > 0 and all(map(is_loopback, addresses)):
        raise RendezvousError(
            f"node {place.host} (rank {place.rank}) resolves the master address {master_addr!r} to itself "
            f"({', '.join(addresses)}), but rank 0 runs on another node",
            hint=f"fix /etc/hosts on {place.host}, or exclude the node with cluster.exclude",
        )
    return addresses


def check_gloo_address(place: RankPlace, env: Mapping[str, str]) -> None:
    """Checks that gloo will announce an address that other nodes can reach.

    Gloo announces what this host's own name resolves to, unless GLOO_SOCKET_IFNAME names an interface; a loopback
    address there makes every other node wait until the time-out.

    Raises:
        RendezvousError: the host's own name is a loopback address and no interface is named.
    """
    if not place.spans_nodes or env.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    addresses = list[str]()
    with contextlib.suppress(OSError):
        addresses = addresses_of(name)
    if all(map(is_loopback, addresses)):
        address_list = ", ".join(addresses) or "nothing"
        raise RendezvousError(
            f"node {place.host} resolves its own name {name!r} to {address_list}: other nodes could not reach it",
            hint="name the interface of the cluster's network: cluster.network_interface=eth0 (see `ip -br addr`)",
        )


def addresses_of(name: str) -> list[str]:
    """Returns the addresses of a name as seen from this node, IPv4 first.

    Raises:
        OSError: the name does not resolve here.
    """
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    return sorted(addresses, key=lambda address: (":" in address, address))


def is_loopback(address: str) -> bool:
    """Returns whether an address leads back to the machine that uses it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """The ranks that torch's elastic agent starts on one node, and where the nodes' agents meet."""

    run_id: str
    """Distinguishes this step from others at the same endpoint."""
    num_nodes: int
    node_rank: int
    """0 on the node that holds the endpoint."""
    host: str
    """Name of this node."""
    address: str
    """Name or address by which the others reach it."""
    num_ranks: int
    """Of this node."""
    endpoint: str
    """ "host:port" on the first node."""
    max_restarts: int
    timeout_s: float
    """For the nodes' agents to meet."""


def run_ranks(node: NodeRanks, command: Sequence[str], *, on_failed: Callable[[int, int], None]) -> int:
    """Runs this node's ranks to their end and returns an exit code: 0 when all ended well. On every node, together.

    torch's agent, which is what torchrun runs, starts the node's ranks, and starts them again when one of them fails.
    It runs in a thread here, so that its process can handle the signals that Slurm sends: the agent's own handlers,
    which it installs in a main thread only, would kill the ranks after 30 s, while they are saving.

    Args:
        node: the ranks.
        command: what each of them runs.
        on_failed: called with each rank of this node that has failed and its exit code, the negative number of the
            signal if one ended it, where the ranks are not started again.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    timeout_s = int(node.timeout_s)
    config = LaunchConfig(
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        nproc_per_node=node.num_ranks,
        run_id=node.run_id,
        role="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint=node.endpoint,
        rdzv_configs={"is_host": node.node_rank == 0, "join_timeout": timeout_s, "read_timeout": timeout_s},
        max_restarts=node.max_restarts,
        monitor_interval=0.5,
        local_addr=node.address,
    )
    # At each start of the ranks it warns that it installs no signal handlers, which is the purpose of the thread.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not record.getMessage().startswith("Failed to register signal handlers")
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as err:
        failures = ", ".join(f"rank {rank}: exit code {failure.exitcode}" for rank, failure in err.failures.items())
        print(f"error: ranks failed after {node.max_restarts} restarts on {node.host}: {failures}", file=sys.stderr)
        first_rank, _ = err.get_first_failure()
        for rank, failure in err.failures.items():
            # The agent ends the others by signals. Which one came first is known to the second only.
            if failure.exitcode > 0 or rank == first_rank:
                on_failed(rank, failure.exitcode)
        return EXIT_FAILURE
    except Exception:
        # Whatever it is, the other nodes wait for this one's exit code.
        traceback.print_exc()
        return EXIT_FAILURE
    return EXIT_DONE
