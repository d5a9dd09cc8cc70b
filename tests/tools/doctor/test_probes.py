"""Nodes that probe each other, played by threads on the loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.tools.doctor import probes
from slurm_train.tools.doctor.probes import Peer, ProbeServer, measure, peers_of, probe, reach

POINT = MeetingPoint(
    master_addr="localhost", ports=[1], run_id="run", attempt=0, timeout_s=5.0, secret="5" * 32, purpose="preflight"
)
FILE = "node_1.json"


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    server = ProbeServer(POINT, "node2", address="127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def closed() -> Peer:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return Peer(node="node3", address="127.0.0.1", port=taken.getsockname()[1])


def peer(server: ProbeServer, **other: str) -> Peer:
    return Peer(node="node2", address="127.0.0.1", port=server.port, **other)


def test_peers_answer_or_are_named_with_the_reason(server: ProbeServer, closed: Peer, tmp_path: Path) -> None:
    (tmp_path / FILE).touch()
    # The server listens at 127.0.0.1 alone.
    there = peer(server, file=FILE, gloo_address="127.0.0.2")
    found = probe(POINT, "node1", [there, closed], folder=tmp_path, master="node2")
    assert (found.unreached, found.unseen) == ({"node3": "connection refused"}, [])
    assert found.unreached_gloo == {"node2": "connection refused"}
    assert abs(found.clock_offset_s) < 5.0 and found.seen_after_s["node2"] < 5.0


@pytest.mark.parametrize("looks", [4, 1000])
def test_a_file_that_comes_late_or_never(
    server: ProbeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    left = [False] * looks
    monkeypatch.setattr(probes, "_is_seen", lambda *_: left.pop() if len(left) > 1 else True)
    monkeypatch.setattr(probes, "_ANSWER_S", 60.0 if looks == 4 else 2.0)
    found = probe(POINT, "node1", [peer(server, file=FILE)], folder=tmp_path, master="node3")
    if looks == 4:
        assert found.seen_after_s["node2"] > 0.2
    else:
        assert (found.unseen, found.seen_after_s) == (["node2"], {})


def test_an_answer_of_another_program_is_no_answer_of_the_peer(server: ProbeServer) -> None:
    assert reach(POINT, "node9", "127.0.0.1", server.port) == (None, "another program answers there")
    assert reach(replace(POINT, secret="6" * 32), "node2", "127.0.0.1", server.port) == (None, "hung up")
    assert reach(POINT, "node2", "", 1) == (None, "no address")
    server.close()
    assert reach(POINT, "node2", "127.0.0.1", server.port)[0] is None


def test_speed_and_latency_are_measured(server: ProbeServer, closed: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_WORK", 1000)
    found = measure(POINT, "node1", [peer(server), closed])
    assert found.work_ms > 0 and found.mb_per_s > 1 and found.latency_us


def test_a_caller_without_a_proof_gets_nothing(server: ProbeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as stranger, stranger.makefile("rb") as file:
        file.readline()
        stranger.sendall(b"0" * 64 + b"\n1000000\n")
        assert file.read() == b""


@pytest.mark.parametrize("nonsense", [b"x\n", b"-5\n", b"time " + b"y" * 500 + b"\n", b"\n"])
def test_nonsense_ends_a_connection_and_not_the_server(server: ProbeServer, nonsense: bytes) -> None:
    line, _ = reach(POINT, "node2", "127.0.0.1", server.port)
    line.write(nonsense)
    line.close()
    again, why = reach(POINT, "node2", "127.0.0.1", server.port)
    assert again is not None, why
    again.close()


@pytest.mark.parametrize(
    ("index", "num_nodes", "expected"),
    [(15, 16, list(range(15))), (0, 17, [1, 2, 4, 8, 16]), (10, 40, [0, 2, 11, 12, 14, 18, 26])],
)
def test_few_nodes_probe_all_others_and_many_probe_some(index: int, num_nodes: int, expected: list[int]) -> None:
    assert peers_of(index, num_nodes) == expected
