"""Ranks find their own rank 0 beside foreign services, other jobs and zombies; threads play the ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.handshake import call_rank_zero, serve_greeting
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RendezvousError


def place(rank: int, world: int) -> RankPlace:
    return RankPlace(
        rank=rank, local_rank=rank, node_rank=0, world_size=world, local_world_size=world, host=f"host{rank}"
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def point(ports: list[int], *, run: str = "run", attempt: int = 0, timeout_s: float = 20.0) -> MeetingPoint:
    return MeetingPoint(master_addr="localhost", ports=ports, run_id=run, attempt=attempt, timeout_s=timeout_s)


def meet(rank: int, world: int, where: MeetingPoint) -> int:
    if rank:
        return call_rank_zero(place(rank, world), where, addresses=["127.0.0.1"])[1]
    listener, port = serve_greeting(place(0, world), where, family=socket.AF_INET)
    listener.close()
    return port


def meet_all(world: int, where: MeetingPoint, *, without: tuple[int, ...] = ()) -> list[int | RendezvousError]:
    def one(rank: int) -> int | RendezvousError:
        try:
            return meet(rank, world, where)
        except RendezvousError as err:
            return err

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, [rank for rank in range(world) if rank not in without]))


def serve(behaviour: Callable[[socket.socket], None]) -> Iterator[int]:
    server = socket.create_server(("127.0.0.1", 0))
    kept = []

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            kept.append(connection)
            try:
                behaviour(connection)
            except OSError:
                continue

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)
    for connection in kept:
        connection.close()


BEHAVIOURS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda _: None,
    "closing": lambda connection: connection.close(),
    "talking": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 9000),
    "endless line": lambda connection: connection.sendall(b"x" * 100_000),
    "another job": lambda connection: connection.sendall(b"slurm_train run=other attempt=0\n"),
    "a zombie": lambda connection: connection.sendall(b"slurm_train run=run attempt=7\n"),
}


@pytest.fixture(params=list(BEHAVIOURS))
def foreign_port(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from serve(BEHAVIOURS[request.param])


def test_all_ranks_meet_at_the_first_free_port() -> None:
    ports = free_ports(3)
    assert meet_all(4, point(ports)) == [ports[0]] * 4


def test_a_foreign_service_on_the_first_port_is_passed_over(foreign_port: int) -> None:
    second = free_ports(1)[0]
    assert meet_all(3, point([foreign_port, second])) == [second] * 3


def test_two_jobs_with_the_same_candidates_do_not_mix() -> None:
    ports = free_ports(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda run: meet_all(3, point(ports, run=run)), ["a", "b"])
    assert len(set(first)) == len(set(second)) == 1
    assert {type(value) for value in (*first, *second)} == {int}


def test_nobody_is_sent_a_word_before_the_greeting() -> None:
    heard: list[bytes] = []

    def listen(connection: socket.socket) -> None:
        connection.settimeout(5)
        heard.append(connection.recv(100))

    server = serve(listen)
    port = next(server)
    with pytest.raises(RendezvousError, match="found nobody of run run, attempt 0"):
        call_rank_zero(place(1, 2), point([port], timeout_s=0.6), addresses=["127.0.0.1"])
    next(server, None)
    assert set(heard) == {b""}


def test_missing_ranks_are_named_on_every_rank_that_came() -> None:
    found = meet_all(4, point(free_ports(1), timeout_s=0.5), without=(2,))
    assert [str(err).splitlines()[0] for err in found] == [
        "1 of 4 ranks did not come to localhost within 0.5 s: missing 2; there: 0 (host0), 1 (host1), 3 (host3)"
    ] * 3


def test_no_free_port_is_an_error_with_the_ports() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"could bind none of the ports {port}"):
            serve_greeting(place(0, 2), point([port]), family=socket.AF_INET)


SECRET = "5" * 32


def test_ranks_that_know_the_secret_meet() -> None:
    ports = free_ports(1)
    assert meet_all(4, replace(point(ports), secret=SECRET)) == [ports[0]] * 4


def say(port: int, text: str) -> str:
    """Plays a stranger who knows run, attempt and protocol, and returns what rank 0 answers."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with connection, connection.makefile("rb") as file:
        file.readline()
        connection.sendall(f"{text}\n".encode())
        return file.readline().decode()


@pytest.mark.parametrize("rank", ["1", "0", "-1", "99", "x"])
@pytest.mark.parametrize("proof", ["", "0" * 64, "\u00e9"])
def test_a_stranger_takes_no_rank_and_no_rank_is_lost_by_it(rank: str, proof: str) -> None:
    where = replace(point(free_ports(1)), secret=SECRET)
    with ThreadPoolExecutor(4) as pool:
        zero = pool.submit(meet, 0, 3, where)
        guessed = proof or where.proof("", rank, "stranger")
        assert [say(where.ports[0], f"{rank} c {guessed} stranger") for _ in range(3)] == ["", "", ""]
        others = [pool.submit(meet, number, 3, where) for number in (1, 2)]
        assert {task.result(timeout=20) for task in (zero, *others)} == {where.ports[0]}


def test_a_recorded_introduction_is_worth_nothing_a_second_time() -> None:
    where = replace(point(free_ports(1), timeout_s=2.0), secret=SECRET)
    recorded = f"1 c {where.proof('of another connection', 1, 'host1')} host1"
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(meet, 0, 2, where)
        assert say(where.ports[0], recorded) == ""
        with pytest.raises(RendezvousError, match="missing 1"):
            zero.result(timeout=20)


@pytest.mark.parametrize("answer", [b"", b"0" * 64 + b"\n", "\u00e9\n".encode(), b"null\n"])
def test_an_impostor_of_rank_zero_is_passed_over(answer: bytes) -> None:
    where = replace(point(free_ports(1)), secret=SECRET)

    def pose(connection: socket.socket) -> None:
        connection.sendall(f"{where.greeting} challenge=abc\n".encode())
        connection.recv(4096)
        connection.sendall(answer)
        connection.close()

    for port in serve(pose):
        assert meet_all(2, replace(where, ports=[port, *where.ports])) == [where.ports[0]] * 2


def test_without_the_secret_nobody_joins() -> None:
    where = replace(point(free_ports(1), timeout_s=2.0), secret=SECRET)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, 0, 2, where)
        stranger = pool.submit(meet, 1, 2, replace(where, secret="6" * 32))
        for task in (zero, stranger):
            with pytest.raises(RendezvousError):
                task.result(timeout=30)
