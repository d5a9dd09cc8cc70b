from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.ports import candidate_ports, ephemeral_low, first_free_port


def test_equal_seeds_give_equal_lists_and_a_longer_list_starts_the_same() -> None:
    short = candidate_ports(seed="12.0:0", count=5, ephemeral_low=32768)
    assert candidate_ports(seed="12.0:0", count=20, ephemeral_low=32768)[:5] == short


def test_the_list_is_the_same_on_every_machine_and_python() -> None:
    assert candidate_ports(seed="1234_5.0:2", count=3, ephemeral_low=32768) == [18638, 28481, 26965]


@pytest.mark.parametrize(
    ("low", "high"), [(32768, 32768), (None, 32768), (15000, 15000), (1024, 32768), (10500, 32768)]
)
def test_ports_are_below_the_ephemeral_range_where_there_is_room(low: int | None, high: int) -> None:
    ports = candidate_ports(seed="7", count=500, ephemeral_low=low)
    assert len(set(ports)) == 500
    assert min(ports) >= 10000
    assert max(ports) < high
    assert not {10000, 11211, 20049, 27017, 29500} & set(ports)


def test_customary_ports_are_avoided_whatever_the_seed() -> None:
    drawn = {port for job in range(300) for port in candidate_ports(seed=str(job), count=300, ephemeral_low=32768)}
    assert len(drawn) > 20000
    assert not {10000, 10250, 11211, 20049, 27017, 29500} & drawn


def test_jobs_submitted_together_rarely_share_a_first_port() -> None:
    firsts = [candidate_ports(seed=f"{job}.0:0", count=1, ephemeral_low=32768)[0] for job in range(2000)]
    neighbours = sum(one == next_one for one, next_one in itertools.pairwise(firsts))
    # 2000 draws of 22,700 ports: 86 repeats are expected, and of 1,999 pairs of neighbours 0.09.
    assert 2000 - len(set(firsts)) < 130
    assert neighbours <= 1


def test_a_restart_tries_other_ports_first() -> None:
    lists = [candidate_ports(seed=f"99.0:{restart}", count=10, ephemeral_low=32768) for restart in range(20)]
    assert len({ports[0] for ports in lists}) == 20


@pytest.mark.parametrize(("text", "low"), [("32768\t60999\n", 32768), ("1024 65535", 1024), ("", None), ("x y", None)])
def test_the_kernels_range_is_read(text: str, low: int | None, tmp_path: Path) -> None:
    (tmp_path / "range").write_text(text)
    assert ephemeral_low(tmp_path / "range") == low


def test_a_kernel_without_the_file_has_no_known_range(tmp_path: Path) -> None:
    assert ephemeral_low(tmp_path / "none") is None


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens, with SO_REUSEADDR as servers have it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_a_taken_port_is_passed_over(taken: int) -> None:
    free = _free_port()
    assert first_free_port([taken, free]) == free
    assert first_free_port([free, taken]) == free


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_port_taken_on_all_ipv6_and_ipv4_addresses_is_passed_over() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        taken, free = server.getsockname()[1], _free_port()
        assert first_free_port([taken, free]) == free


def test_the_probe_leaves_the_port_free() -> None:
    port = first_free_port([_free_port()])
    with socket.create_server(("", port), reuse_port=False):
        pass


def test_no_free_port_is_an_error_that_names_the_ports(taken: int) -> None:
    with pytest.raises(ClusterError, match=rf"none of 2 ports is free on this node \(tried {taken}, {taken}"):
        first_free_port([taken, taken])


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"cannot bind 192\.0\.2\.1:\d+: Cannot assign requested address"):
        first_free_port([_free_port()], host="192.0.2.1")


def test_twenty_jobs_on_one_node_get_twenty_ports() -> None:
    servers: list[socket.socket] = []
    try:
        for job in range(20):
            # All from one list: the worst case, every job wants the same port first.
            port = first_free_port(candidate_ports(seed="same", count=100, ephemeral_low=ephemeral_low()))
            servers.append(socket.create_server(("", port), reuse_port=False))
            assert len(servers) == job + 1
        assert len({server.getsockname()[1] for server in servers}) == 20
    finally:
        for server in servers:
            server.close()
