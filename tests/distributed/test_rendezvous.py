"""Torch's store, the attempt that torchrun's ranks agree on, and addresses that mean the same on every node."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm_train.distributed.master import candidate_ports
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import agree_on_attempt, check_gloo_address, open_store, resolve_master
from slurm_train.errors import RendezvousError, RunError
from tests.support.ports import free_port


def place(*, rank: int, node_rank: int = 0, world: int = 2, local_world: int = 2) -> RankPlace:
    return RankPlace(
        rank=rank, local_rank=0, node_rank=node_rank, world_size=world, local_world_size=local_world, host="n7"
    )


def test_a_name_that_does_not_resolve_names_node_and_address() -> None:
    with pytest.raises(RendezvousError, match=r"node n7 .rank 1. cannot resolve the master address 'nowhere.invalid'"):
        resolve_master(place(rank=1), "nowhere.invalid")


def test_loopback_is_refused_on_other_nodes_only() -> None:
    assert resolve_master(place(rank=0, local_world=1), "127.0.0.1") == ["127.0.0.1"]
    with pytest.raises(RendezvousError, match=r"resolves the master address '127\.0\.1\.1' to itself"):
        resolve_master(place(rank=1, node_rank=1, local_world=1), "127.0.1.1")


def test_gloo_needs_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    check_gloo_address(place(rank=0), {})
    across = place(rank=0, local_world=1)
    check_gloo_address(across, {"GLOO_SOCKET_IFNAME": "eth0"})
    with pytest.raises(RendezvousError, match=r"cluster\.network_interface"):
        check_gloo_address(across, {})


@pytest.mark.parametrize("secret", ["", "5" * 32])
def test_the_store_is_shared_on_the_port_of_the_handshake_and_on_one_node_nobody_outside_reaches_it(
    secret: str,
) -> None:
    port = free_port()
    point = MeetingPoint(master_addr="127.0.0.1", ports=[port], run_id="run", attempt=0, timeout_s=20, secret=secret)
    with ThreadPoolExecutor(2) as pool:
        (first, *ports), (second, *more) = pool.map(lambda rank: open_store(place(rank=rank), point), range(2))
    assert ports == more == [port]
    first.set("key", "value")
    assert second.get("key") == b"value"
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    addresses = {line.split()[1] for line in listening.splitlines() if line.split()[1].endswith(f":{port:04X}")}
    assert f"0100007F:{port:04X}" in addresses
    assert f"00000000:{port:04X}" not in addresses


HOSTS = ("node3", "node3", "node1", "node1")


def place_on(rank: int) -> RankPlace:
    # One machine as far as the addresses go.
    return RankPlace(rank=rank, local_rank=rank, node_rank=0, world_size=4, local_world_size=4, host=HOSTS[rank])


def test_one_rank_opens_the_attempt_and_all_hear_its_number() -> None:
    point = MeetingPoint(
        master_addr="localhost", ports=candidate_ports("this test"), run_id="run", attempt=0, timeout_s=20.0, secret="s"
    )
    opened: list[tuple[str, ...]] = []

    def open_attempt(nodes: tuple[str, ...]) -> int:
        opened.append(nodes)
        return 40 + len(opened)

    def agree(rank: int) -> int:
        return agree_on_attempt(place_on(rank), point, open_attempt=open_attempt)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(agree, range(4))) == [41] * 4
        assert opened == [("node3", "node1")], "nodes in the order of the ranks, once"
        assert list(pool.map(agree, range(4))) == [42] * 4


def test_the_reason_why_nothing_is_opened_is_rank_0_s_to_tell() -> None:
    alone = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="here")
    point = MeetingPoint(master_addr="", ports=candidate_ports("alone"), run_id="run", attempt=0, timeout_s=5.0)

    def refuse(_nodes: tuple[str, ...]) -> int:
        raise RunError("no", hint="none")

    with pytest.raises(RunError, match="no"):
        agree_on_attempt(alone, point, open_attempt=refuse)
