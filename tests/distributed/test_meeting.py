"""Ranks find their own rank 0 beside foreign services, other jobs, zombies and strangers; threads play the ranks."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from slurm_train.distributed.meeting import CallerHandshake, Channel, MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import host_meeting, join_meeting
from slurm_train.errors import RendezvousError
from tests.support.ports import free_port


def place(rank: int, world: int) -> RankPlace:
    return RankPlace(
        rank=rank, local_rank=rank, node_rank=0, world_size=world, local_world_size=world, host=f"host{rank}"
    )


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def point(ports: list[int], *, run: str = "run", attempt: int = 0, timeout_s: float = 20.0) -> MeetingPoint:
    return MeetingPoint(master_addr="localhost", ports=ports, run_id=run, attempt=attempt, timeout_s=timeout_s)


def meet(rank: int, world: int, where: MeetingPoint) -> int:
    if rank:
        return join_meeting(place(rank, world), where, addresses=["127.0.0.1"])[1]
    listener, port = host_meeting(place(0, world), where, addresses=["127.0.0.1"])
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


def serve(behaviour: Callable[[socket.socket], None], address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[int]:
    server = socket.create_server(address)
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


OTHERS = {"job": point([1], run="other"), "attempt": point([1], attempt=7)}


def drip(connection: socket.socket) -> None:
    """Sends a byte now and then, for ever."""

    def go_on() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"s")
                time.sleep(0.05)

    threading.Thread(target=go_on, daemon=True).start()


BEHAVIOURS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda _: None,
    "dripping": drip,
    "closing": lambda connection: connection.close(),
    "talking": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 9000),
    "endless line": lambda connection: connection.sendall(b"x" * 100_000),
    "another job": lambda connection: connection.sendall(f"{OTHERS['job'].greeting} nonce=1\n".encode()),
    "a zombie": lambda connection: connection.sendall(f"{OTHERS['attempt'].greeting} nonce=1\n".encode()),
}


@pytest.fixture(params=list(BEHAVIOURS))
def foreign_port(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from serve(BEHAVIOURS[request.param])


def test_callers_of_the_store_are_not_greeted_while_the_meeting_closes() -> None:
    """torch's store listens on the same socket afterwards, and tries much later again with whom it does not know."""
    where, callers = point(free_ports(1)), list[socket.socket]()

    def call_early(_: object) -> None:
        callers.append(socket.create_connection(("127.0.0.1", where.ports[0])))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, 1, 2, where)
        listener, _ = host_meeting(place(0, 2), where, addresses=["127.0.0.1"], decide=call_early)
        other.result()
    with listener, callers[0] as caller:
        caller.settimeout(0.3)
        with pytest.raises(TimeoutError):
            caller.recv(1)
        accepted, _ = listener.accept()
        accepted.close()


def test_a_foreign_service_on_the_first_port_is_passed_over(foreign_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other port is tried while this one does not answer."""
    monkeypatch.setattr("slurm_train.distributed.meeting._ANSWER_S", 600.0)
    (second,) = free_ports(1)
    assert meet_all(3, point([foreign_port, second], timeout_s=60.0)) == [second] * 3


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
    with pytest.raises(RendezvousError, match=r"timed out after 0\.6 s waiting for rank 0 of run run, attempt 0"):
        join_meeting(place(1, 2), point([port], timeout_s=0.6), addresses=["127.0.0.1"])
    next(server, None)
    assert set(heard) == {b""}


def test_missing_ranks_are_named_on_every_rank_that_came() -> None:
    found = meet_all(4, point(free_ports(1), timeout_s=0.5), without=(2,))
    assert [str(err).splitlines()[0] for err in found] == [
        "1 of 4 ranks did not connect to localhost within 0.5 s: missing 2; connected: 0 (host0), 1 (host1), 3 (host3)"
    ] * 3


def test_no_free_port_is_an_error_with_the_ports() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"could bind none of the ports {port}"):
            host_meeting(place(0, 2), point([port]), addresses=["127.0.0.1"])


SECRET = "5" * 32


def secret_point(count: int = 1, *, timeout_s: float = 20.0) -> MeetingPoint:
    return replace(point(free_ports(count), timeout_s=timeout_s), secret=SECRET)


def test_ranks_that_know_the_secret_meet() -> None:
    where = secret_point()
    assert meet_all(4, where) == [where.ports[0]] * 4


def dial(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def say(port: int, text: str) -> bytes:
    """Plays a stranger who knows run, attempt and protocol, and returns what rank 0 answers."""
    with dial(port) as connection, connection.makefile("rb") as file:
        file.readline()
        with contextlib.suppress(OSError):
            connection.sendall(f"{text}\n".encode())
            return file.readline()
        return b""


@pytest.mark.parametrize(
    ("rank", "proof"), [("1", ""), ("1", "0" * 64), ("1", "\u00e9"), ("0", ""), ("-1", ""), ("99", ""), ("x", "")]
)
def test_a_stranger_takes_no_rank_and_no_rank_is_lost_by_it(rank: str, proof: str) -> None:
    where = secret_point()
    with ThreadPoolExecutor(4) as pool:
        zero = pool.submit(meet, 0, 3, where)
        guessed = proof or where.proof("", rank, "stranger")
        assert [say(where.ports[0], f"{rank} c {guessed} stranger") for _ in range(3)] == [b"", b"", b""]
        others = [pool.submit(meet, number, 3, where) for number in (1, 2)]
        assert {task.result(timeout=20) for task in (zero, *others)} == {where.ports[0]}


@pytest.mark.parametrize("answer", [b"", b"0" * 64 + b"\n", "\u00e9\n".encode(), b"null\n"])
def test_an_impostor_of_rank_zero_is_passed_over(answer: bytes) -> None:
    where = secret_point()

    def pose(connection: socket.socket) -> None:
        connection.sendall(f"{where.greeting} nonce=abc\n".encode())
        connection.recv(4096)
        connection.sendall(answer)
        connection.close()

    for port in serve(pose):
        assert meet_all(2, replace(where, ports=[port, *where.ports])) == [where.ports[0]] * 2


def test_without_the_secret_nobody_joins() -> None:
    where = secret_point(timeout_s=2.0)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, 0, 2, where)
        stranger = pool.submit(meet, 1, 2, replace(where, secret="6" * 32))
        for task in (zero, stranger):
            with pytest.raises(RendezvousError):
                task.result(timeout=30)


def test_a_recorded_introduction_is_worth_nothing_a_second_time() -> None:
    where = secret_point(timeout_s=2.0)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, 0, 3, where)
        # A network tap sees a proof that rank 0 takes.
        channel = Channel(dial(where.ports[0]))
        real, calling = channel.connection, CallerHandshake(channel, where, rank=1, host="host1")
        channel.connection = tapped = Tap(real)  # type: ignore[assignment]
        calling.prove(deadline=time.monotonic() + 10)
        recorded = tapped.sent.decode().strip()
        real.close()
        assert recorded.startswith("1 ") and say(where.ports[0], recorded) == b""
        with pytest.raises(RendezvousError, match="missing 1, 2"):
            zero.result(timeout=20)


class Tap:
    """A socket whose sent bytes are kept."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.sent = connection, b""

    def send(self, data: bytes) -> int:
        count = self.connection.send(data)
        self.sent += bytes(data[:count])
        return count

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


def drip_into(port: int, stop: threading.Event) -> None:
    """Keeps connected to a port and sends it a byte now and then."""
    while not stop.is_set():
        with contextlib.suppress(OSError), dial(port) as connection:
            while not stop.wait(0.05):
                connection.sendall(b"1")


def test_somebody_who_sends_a_byte_now_and_then_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_train.distributed.meeting._PROOF_S", 600.0)
    where, stop = secret_point(timeout_s=60.0), threading.Event()
    with ThreadPoolExecutor(6) as pool:
        zero = pool.submit(meet, 0, 3, where)
        dripping = [pool.submit(drip_into, where.ports[0], stop) for _ in range(2)]
        time.sleep(0.3)  # the strangers are first
        others = [pool.submit(meet, rank, 3, where) for rank in (1, 2)]
        try:
            # A stranger has ten minutes.
            assert {task.result(timeout=60) for task in (zero, *others)} == {where.ports[0]}
        finally:
            stop.set()
        assert [task.result(timeout=60) for task in dripping] == [None, None]


def test_a_stranger_s_connection_is_closed_after_seconds_whatever_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_train.distributed.meeting._PROOF_S", 0.5)
    where = secret_point(timeout_s=60.0)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, 0, 2, where)
        with dial(where.ports[0]) as stranger, pytest.raises(OSError):
            deadline_s = time.monotonic() + 30
            while time.monotonic() < deadline_s:
                stranger.sendall(b"1")
                time.sleep(0.05)
        other = pool.submit(meet, 1, 2, where)
        assert zero.result(timeout=60) == other.result(timeout=60) == where.ports[0]


def test_a_line_without_end_is_not_read_to_its_end() -> None:
    where = secret_point(timeout_s=2.0)
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(meet, 0, 2, where)
        with dial(where.ports[0]) as stranger, pytest.raises(OSError):
            for _ in range(1000):
                stranger.sendall(b"1" * 1024)
                time.sleep(0.001)
        with pytest.raises(RendezvousError, match="missing 1"):
            zero.result(timeout=20)


CHILD = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (140, 140))
from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import host_meeting
place = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=4, local_world_size=4, host="host0")
point = dict(master_addr="localhost", ports=[{port}], run_id="run", attempt=0, timeout_s=60.0, secret="{secret}")
host_meeting(place, MeetingPoint(**point), addresses=["127.0.0.1"], decide=lambda hosts: len(hosts))
"""


def test_strangers_who_take_all_descriptors_keep_no_rank_away() -> None:
    where = secret_point(timeout_s=60.0)
    code = CHILD.format(port=where.ports[0], secret=SECRET)
    with subprocess.Popen([sys.executable, "-c", code]) as child, contextlib.ExitStack() as opened:
        opened.callback(child.kill)
        dial(where.ports[0]).close()
        for _ in range(200):
            opened.enter_context(dial(where.ports[0]))
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda rank: join_meeting(place(rank, 4), where, addresses=["127.0.0.1"]), (1, 2, 3)))
        assert found == [("127.0.0.1", where.ports[0], 4)] * 3
        assert child.wait(60) == 0


def test_rank_zero_that_may_not_open_enough_files_says_so() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "from slurm_train.distributed.rendezvous import allow_files, require_files\n"
        "from slurm_train.distributed.place import RankPlace\n"
        "place = RankPlace(rank=0, local_rank=0, node_rank=0, world_size=500, local_world_size=8, host='n7')\n"
        "assert allow_files(500) == 200 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "require_files(place)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "rank 0 on n7 may open 200 files" in done.stderr and "ulimit -n 1628" in done.stderr
