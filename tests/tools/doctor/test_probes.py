"""Nodes that look at each other, played by threads on the loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.tools.doctor.probe_server import ProbeServer
from slurm_train.tools.doctor.probes import Peer, _Look, peers_of, probe, reach
from slurm_train.tools.doctor.speed import measure

POINT = MeetingPoint(
    master_addr="localhost", ports=[1], run_id="run", attempt=0, timeout_s=5.0, secret="5" * 32, purpose="preflight"
)


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    server = ProbeServer(POINT, "node2", address="127.0.0.1")
    server.start()
    yield server
    server.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def peer(server: ProbeServer, **other: str) -> Peer:
    return Peer(node="node2", address="127.0.0.1", port=server.port, **other)


def test_a_peer_that_answers_is_reached_and_tells_the_time(server: ProbeServer, tmp_path: Path) -> None:
    (tmp_path / "node_1.json").touch()
    found = probe(POINT, "node1", [peer(server, file="node_1.json")], folder=tmp_path, master="node2")
    assert (found.reached, found.unreached, found.unseen) == (["node2"], {}, [])
    assert found.clock_offset_s is not None and abs(found.clock_offset_s) < 1.0
    assert found.seen_after_s["node2"] < 1.0


def test_a_peer_that_refuses_is_named_in_the_words_of_the_kernel(tmp_path: Path) -> None:
    closed = Peer(node="node2", address="127.0.0.1", port=closed_port())
    found = probe(POINT, "node1", [closed], folder=tmp_path, master="node3")
    assert found.unreached == {"node2": "connection refused"} and found.reached == []


def test_somebody_elses_answer_is_no_answer_of_the_peer(server: ProbeServer) -> None:
    line, why = reach(POINT, "node9", "127.0.0.1", server.port)
    assert (line, why) == (None, "somebody else answers there")
    line, why = reach(replace(POINT, secret="6" * 32), "node2", "127.0.0.1", server.port)
    assert (line, why) == (None, "hung up")


def test_a_node_without_an_address_is_not_reached() -> None:
    assert reach(POINT, "node2", "", 1) == (None, "no address")


def test_the_address_that_gloo_would_announce_is_tried_as_well(server: ProbeServer, tmp_path: Path) -> None:
    # The server listens at 127.0.0.1 alone.
    found = probe(POINT, "node1", [peer(server, gloo_address="127.0.0.2")], folder=tmp_path, master="node2")
    assert (found.reached, found.unreached_gloo) == (["node2"], {"node2": "connection refused"})


def test_a_file_that_comes_late_is_seen_late(
    server: ProbeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = _Look._is_seen, list[int]()

    def look_and_write(self: _Look) -> bool:
        looks.append(1)
        if len(looks) == 4:
            (tmp_path / "node_1.json").touch()
        return look(self)

    monkeypatch.setattr(_Look, "_is_seen", look_and_write)
    found = probe(POINT, "node1", [peer(server, file="node_1.json")], folder=tmp_path, master="node3")
    assert 0.2 < found.seen_after_s["node2"] < 4.0


def test_a_file_that_never_comes_is_not_seen(
    server: ProbeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_train.tools.doctor.probes._ANSWER_S", 0.4)
    found = probe(POINT, "node1", [peer(server, file="node_1.json")], folder=tmp_path / "gone", master="node3")
    assert (found.unseen, found.seen_after_s) == (["node2"], {})


def test_speed_and_latency_are_measured(server: ProbeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_train.tools.doctor.speed._WORK", 1000)
    found = measure(POINT, "node1", [peer(server), Peer(node="node3", address="127.0.0.1", port=closed_port())])
    assert found.work_ms > 0
    assert set(found.mb_per_s) == set(found.latency_us) == {"node2"}
    assert found.mb_per_s["node2"] > 1 and found.latency_us["node2"] > 0


def test_a_stranger_is_greeted_and_obeyed_in_nothing(server: ProbeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger, stranger.makefile("rb") as file:
        file.readline()
        stranger.sendall(b"0" * 64 + b"\ngive 1000000\n")
        assert file.read() == b""


@pytest.mark.parametrize("nonsense", [b"take x\n", b"give\n", b"time " + b"y" * 500 + b"\n", b"\xff\xfe\n", b"\n"])
def test_nonsense_ends_a_connection_and_not_the_server(server: ProbeServer, nonsense: bytes) -> None:
    line, _ = reach(POINT, "node2", "127.0.0.1", server.port)
    assert line is not None
    line.connection.sendall(nonsense)
    line.close()
    deadline = time.monotonic() + 5
    again, why = reach(POINT, "node2", "127.0.0.1", server.port)
    assert again is not None and time.monotonic() < deadline, why
    again.close()


def test_a_closed_server_takes_nobody_any_more(server: ProbeServer) -> None:
    port = server.port
    server.close()
    assert reach(POINT, "node2", "127.0.0.1", port)[0] is None


@pytest.mark.parametrize(
    ("index", "num_nodes", "expected"),
    [
        (0, 1, []),
        (0, 3, [1, 2]),
        (15, 16, list(range(15))),
        (0, 17, [1, 2, 4, 8, 16]),
        (10, 40, [0, 2, 11, 12, 14, 18, 26]),
    ],
)
def test_few_nodes_all_look_at_each_other_many_at_some(index: int, num_nodes: int, expected: list[int]) -> None:
    assert peers_of(index, num_nodes) == expected
