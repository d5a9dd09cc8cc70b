"""How the ranks of one attempt find each other and exchange short messages with rank 0, without torch.

Two jobs on one node, processes left over from an earlier attempt, foreign services and strangers are told apart by a
handshake before either side believes anything:

    rank 0  ->  slurm_train run=<digest> attempt=<k> for=<purpose> nonce=<n0>
    caller  ->  <rank> <n1> <proof of the caller> <host>
    rank 0  ->  <proof of rank 0>

A proof is an HMAC with the attempt's secret, which lies in the run directory where only its user can read it. It covers
role, both nonces, rank and host, so a recorded proof is worth nothing. The listener sends first, so a foreign service
sees a connection that closes without a byte.

After the handshake each side sends JSON values, a line each; the caller's first is its report. These lines are not
authenticated, and neither is torch's store, which the ranks use next: a relay that passes the handshake on can read and
change both (docs/security.md).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import math
import os
import random
import resource
import secrets
import select
import selectors
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurm_train.distributed.place import RankPlace

Target = tuple[str, int]
"""Address and port."""

_LONGEST_UNPROVED_LINE = 512
_LONGEST_LINE = 1 << 24
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where the ranks of one attempt meet, the same on every rank."""

    master_addr: str
    """Host name or address of rank 0's node."""
    ports: Sequence[int]
    """Candidate ports in the order in which all ranks try them."""
    run_id: str
    attempt: int
    timeout_s: float
    """Seconds until the ranks that are connected give up on the others."""
    secret: str = ""
    """Known to the ranks of this attempt alone; "" where there is none, and anybody may join."""
    purpose: str = ""
    """What they meet for, if not for the training itself; meetings for different purposes are never mixed up."""

    @property
    def greeting(self) -> str:
        """What the listener sends first; a caller of another run, attempt or purpose hangs up."""
        purpose = f" for={self.purpose}" if self.purpose else ""
        run = hashlib.sha256(self.run_id.encode(errors="surrogateescape")).hexdigest()[:16]
        return f"slurm_train run={run} attempt={self.attempt}{purpose}"

    def proof(self, *words: object) -> str:
        """Returns what only somebody who knows the secret can compute from these words, 64 hex digits."""
        text = json.dumps([self.run_id, self.greeting, *map(str, words)])
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def answer_timeout_s(point: MeetingPoint, world_size: int) -> float:
    """Returns how many seconds a rank may wait for a message of rank 0, which may have begun to wait after it."""
    return point.timeout_s + _close_timeout_s(world_size)


def _close_timeout_s(world_size: int) -> float:
    """Returns how many seconds the ranks are given to take the last message."""
    return 10.0 + world_size / 100


class Channel:
    """A non-blocking connection that is read and written a line at a time; lines are short until `trust`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self._longest = _LONGEST_UNPROVED_LINE

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the connection can be written to."""
        return bool(self._unsent)

    def trust(self) -> None:
        """Allows long lines from now on."""
        self._longest = _LONGEST_LINE

    def pull(self) -> None:
        """Takes in what has arrived.

        Raises:
            OSError: the other side has hung up.
        """
        try:
            block = self.connection.recv(min(self._longest, _BLOCK))
        except BlockingIOError:
            return
        if not block:
            raise ConnectionError("the connection was closed")
        self._received += block

    def line(self) -> str | None:
        """Returns the next whole line that was taken in, without its end; None while there is none.

        Raises:
            ValueError: the line is too long.
        """
        end = self._received.find(b"\n")
        length = end if end >= 0 else len(self._received)
        if length >= self._longest:
            raise ValueError(f"a line of more than {self._longest} bytes")
        if end < 0:
            return None
        text = self._received[:end].decode(errors="replace")
        del self._received[: end + 1]
        return text

    def write(self, line: str) -> None:
        """Sends a line, or as much of it as fits now; `flush` sends the rest."""
        self._unsent += line.encode(errors="replace") + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the connection takes it."""
        while self._unsent:
            try:
                del self._unsent[: self.connection.send(self._unsent)]
            except BlockingIOError:
                return

    def send_value(self, value: Any, *, deadline: float) -> None:
        """Sends a JSON value whole.

        Raises:
            OSError: the other side has hung up, or does not read until the deadline (`time.monotonic`).
        """
        self.write(json.dumps(value))
        while self._unsent:
            self.wait(select.POLLOUT, deadline)
            self.flush()

    def receive_value(self, *, deadline: float) -> Any:
        """Returns the next JSON value.

        Raises:
            OSError: the other side has hung up, or there is no whole line at the deadline (`time.monotonic`).
            ValueError: the line is too long or no JSON.
        """
        line = self.line()
        while line is None:
            self.wait(select.POLLIN, deadline)
            self.pull()
            line = self.line()
        return json.loads(line)

    def wait(self, events: int, deadline: float) -> None:
        """Waits until the connection can be read from or written to.

        Raises:
            TimeoutError: at the deadline.
        """
        left_s = deadline - time.monotonic()
        poll = select.poll()  # select() knows no descriptors above 1023
        poll.register(self.connection, events)
        if left_s <= 0 or not poll.poll(max(1, round(left_s * 1000))):
            raise TimeoutError("timed out")

    def close(self) -> None:
        """Hangs up."""
        self.connection.close()


class ListenerHandshake:
    """The listener's side of a handshake on one connection.

    Args:
        channel: to the caller; the greeting is sent at once.
        point: what the proofs are about.
    """

    def __init__(self, channel: Channel, point: MeetingPoint) -> None:
        self.channel = channel
        self._point = point
        self._nonce = secrets.token_hex(16)
        channel.write(f"{point.greeting} nonce={self._nonce}")

    def caller(self) -> tuple[int, str] | None:
        """Returns rank and host of a caller that has proved to belong here; None while its line is not whole.

        Raises:
            OSError: the caller has hung up.
            ValueError: the caller is a stranger.
        """
        self.channel.pull()
        line = self.channel.line()
        if line is None:
            return None
        rank, nonce, proof, host = line.split(" ", 3)
        about = (nonce, self._nonce, int(rank), host)
        if not hmac.compare_digest(proof.encode(), self._point.proof("caller", *about).encode()):
            raise ValueError("no proof")
        self.channel.write(self._point.proof("rank 0", *about))
        self.channel.trust()
        return int(rank), host


class CallerHandshake:
    """The caller's side of a handshake on one connection.

    Args:
        channel: to whoever listens there.
        point: what the proofs are about.
        rank: of the caller.
        host: name of its node.
    """

    def __init__(self, channel: Channel, point: MeetingPoint, *, rank: int, host: str) -> None:
        self.channel = channel
        self._point = point
        self._rank = rank
        self._host = host
        self._expected = ""

    def is_proved(self) -> bool:
        """Returns whether the listener has proved to be the one; to be called again when more has arrived.

        Raises:
            OSError: the listener has hung up.
            ValueError: another program listens there; the message says which, as far as is known.
        """
        self.channel.pull()
        while True:
            line = self.channel.line()
            if line is None:
                return False
            if self._expected:
                if not hmac.compare_digest(line.encode(), self._expected.encode()):
                    raise ValueError("a program that does not know this attempt's secret")
                self.channel.trust()
                return True
            greeting, _, nonce = line.partition(" nonce=")
            if greeting != self._point.greeting:
                raise ValueError(f"another program: {line[:80]!r}")
            caller_nonce = secrets.token_hex(16)
            about = (caller_nonce, nonce, self._rank, self._host)
            self.channel.write(f"{self._rank} {caller_nonce} {self._point.proof('caller', *about)} {self._host}")
            self._expected = self._point.proof("rank 0", *about)

    def prove(self, *, deadline: float) -> None:
        """Waits until `is_proved`.

        Raises:
            OSError: the listener has hung up, or is not proved at the deadline (`time.monotonic`).
            ValueError: another program listens there.
        """
        while not self.is_proved():
            self.channel.wait(select.POLLIN, deadline)


# Rank 0's side. One thread, non-blocking: whatever one caller does or fails to do costs the others nothing.
_PROOF_S = 5.0
# What a caller without a proof has at least, however many wait behind it: many round trips.
_LEAST_PROOF_S = 1.0
_MOST_UNPROVED = 512
_BATCH = 64
_PAUSE_S = 0.05
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listen(point: MeetingPoint, *, family: socket.AddressFamily, address: str) -> socket.socket | None:
    """Returns a socket that listens at the first candidate port that is free, None where none is.

    Args:
        point: has the ports.
        family: of the addresses at which the others call.
        address: to listen at; "": at all of this machine.
    """
    for port in point.ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=4096)
    return None


class AuthenticatedListener:
    """Accepts connections and hands on those whose caller has proved to know the secret.

    A caller has seconds for its whole proof. Few may be without one at a time; then the oldest is dropped, so strangers
    cannot crowd out the ranks, nor keep all descriptors.

    Args:
        listener: where they call.
        point: what the proofs are about.
        ranks: which may come.
        admit: gets channel, rank and host of each caller after its proof.
    """

    def __init__(
        self,
        listener: socket.socket,
        point: MeetingPoint,
        *,
        ranks: range,
        admit: Callable[[Channel, int, str], None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._point = point
        self._ranks = ranks
        self._admit = admit
        self._unproved: dict[ListenerHandshake, float] = {}  # since when, oldest first
        self._most_unproved = max(8, min(_MOST_UNPROVED, _free_files() // 2))
        self.selector = selectors.DefaultSelector()
        self._accepts_from_s: float | None = 0.0

    def step(self, timeout_s: float) -> None:
        """Serves what is ready, and waits for it at most so long. Callbacks of the selector are called."""
        now_s = time.monotonic()
        if self._accepts_from_s is not None and now_s >= self._accepts_from_s:
            self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepts_from_s = None
        for caller, since_s in list(self._unproved.items()):
            if now_s - since_s <= _PROOF_S:
                timeout_s = min(timeout_s, since_s + _PROOF_S - now_s)
                break
            self._drop(caller)
        if self._accepts_from_s is not None:
            timeout_s = min(timeout_s, self._accepts_from_s - now_s)
        for key, events in self.selector.select(max(timeout_s, 0.0)):
            # One served before it may have closed this one.
            if self.selector.get_map().get(key.fd) == key:
                key.data(events)

    def close(self) -> None:
        """Hangs up on all who have proved nothing. The listening socket stays open, and is blocking again."""
        for caller in list(self._unproved):
            self._drop(caller)
        self.selector.close()
        with contextlib.suppress(OSError):
            self._listener.setblocking(True)

    def stop_accepting(self) -> None:
        """Leaves whoever calls from now on to the next one who listens on this socket."""
        if self._accepts_from_s is None:
            self.selector.unregister(self._listener)
        self._accepts_from_s = math.inf

    def _accept(self, _: int) -> None:
        # A batch at a time, so that those who have called already are served in between.
        for _ in range(_BATCH):
            if len(self._unproved) >= self._most_unproved:
                oldest, since_s = next(iter(self._unproved.items()))
                if time.monotonic() < since_s + _LEAST_PROOF_S:
                    self._pause(since_s + _LEAST_PROOF_S)
                    return
                self._check(oldest, 0)  # its proof may have arrived
                if oldest in self._unproved:
                    self._drop(oldest)
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                if err.errno in _NO_DESCRIPTORS:
                    for caller in list(self._unproved)[: max(1, len(self._unproved) // 2)]:
                        self._drop(caller)
                self._pause(time.monotonic() + _PAUSE_S)
                return
            channel = Channel(connection)
            try:
                caller = ListenerHandshake(channel, self._point)
            except OSError:
                channel.close()
                continue
            self._unproved[caller] = time.monotonic()
            self.selector.register(connection, selectors.EVENT_READ, partial(self._check, caller))

    def _pause(self, until_s: float) -> None:
        self.selector.unregister(self._listener)
        self._accepts_from_s = until_s

    def _check(self, caller: ListenerHandshake, _: int) -> None:
        try:
            proved = caller.caller()
            if proved is not None and proved[0] not in self._ranks:
                raise ValueError("no such rank")
        except (OSError, ValueError):
            self._drop(caller)  # a port scanner, a caller that hung up, or somebody who does not belong here
            return
        if proved is not None:
            rank, host = proved
            self._forget(caller)
            self._admit(caller.channel, rank, host)

    def _drop(self, caller: ListenerHandshake) -> None:
        self._forget(caller)
        caller.channel.close()

    def _forget(self, caller: ListenerHandshake) -> None:
        del self._unproved[caller]
        self.selector.unregister(caller.channel.connection)
        if self._accepts_from_s is not None and self._accepts_from_s < math.inf:
            self._accepts_from_s = 0.0  # there is room for the next one


def _free_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        return soft - len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names alone
    except OSError:
        return soft // 2


class Meeting:
    """Which ranks are connected, their reports, and messages to and from each. Rank 0 only.

    Args:
        listener: where the others call.
        point: what the proofs are about.
        world_size: number of ranks.
        host: of rank 0.
    """

    def __init__(self, listener: socket.socket, point: MeetingPoint, *, world_size: int, host: str) -> None:
        self.world_size = world_size
        self.hosts: dict[int, str] = {0: host}
        self.reports: dict[int, Any] = {}
        self._listener = AuthenticatedListener(listener, point, ranks=range(1, world_size), admit=self._admit)
        self._channels: dict[int, Channel] = {}
        self._inbox: dict[int, deque[Any]] = defaultdict(deque)
        self._last: list[Any] = []

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected."""
        return [rank for rank in range(self.world_size) if rank not in self.hosts]

    def gather(
        self, *, deadline: float, is_enough: Callable[[], bool] = lambda: False, look_every_s: float = 3600.0
    ) -> None:
        """Waits until all ranks are connected, `is_enough` returns true, or the deadline (`time.monotonic`).

        Args:
            deadline: the latest end.
            is_enough: called every `look_every_s` seconds at least.
            look_every_s: see there.
        """
        self._run(lambda: len(self.hosts) == self.world_size or is_enough(), deadline=deadline, step_s=look_every_s)

    def gather_reports(self, *, deadline: float) -> None:
        """Waits for the reports of those who are connected."""
        self._run(self._have_all_reported, deadline=deadline)

    def send(self, rank: int, value: Any) -> None:
        """Sends a value to a rank; one that has hung up gets nothing."""
        channel = self._channels.get(rank)
        if channel is None:
            return
        try:
            channel.write(json.dumps(value))
        except OSError:
            self._lose(rank)
        else:
            self._watch(rank, channel)

    def receive(self, rank: int, *, deadline: float) -> Any:
        """Returns the next value of a rank after its report, None if there is none at the deadline."""
        self._run(lambda: bool(self._inbox[rank]), deadline=deadline)
        return self._inbox[rank].popleft() if self._inbox[rank] else None

    def flush(self, *, deadline: float) -> None:
        """Sends what has not fitted into the connections yet, until the deadline."""
        self._run(lambda: not any(channel.has_unsent for channel in self._channels.values()), deadline=deadline)

    def close(self, last: Any = None) -> None:
        """Sends a last value to every rank that is connected, waits until each has it, and hangs up."""
        self._last.append(last)
        if not self.missing:
            # Whoever has the last value calls torch's store at this address: greeted here, it tries again much later.
            self._listener.stop_accepting()
        try:
            for rank in list(self._channels):
                self.send(rank, last)
            # Hanging up before the report was read would reset the connection, and the last value with it.
            self._run(self._is_all_exchanged, deadline=time.monotonic() + _close_timeout_s(self.world_size))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Hangs up on everybody. The listening socket stays open."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._listener.close()

    def _have_all_reported(self) -> bool:
        return len(self.reports) >= len(self._channels)

    def _is_all_exchanged(self) -> bool:
        has_unsent = any(channel.has_unsent for channel in self._channels.values())
        return self._have_all_reported() and not has_unsent

    def _run(self, is_done: Callable[[], bool], *, deadline: float, step_s: float = 3600.0) -> None:
        # Once at least: after a suspension the deadline is over, and what was sent meanwhile is waiting.
        self._listener.step(0.0)
        while not is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self._listener.step(min(left_s, step_s))

    def _admit(self, channel: Channel, rank: int, host: str) -> None:
        self._lose(rank)  # it connects again
        self._channels[rank] = channel
        self.hosts[rank] = host
        self._listener.selector.register(channel.connection, selectors.EVENT_READ, partial(self._serve, rank, channel))
        self._serve(rank, channel, 0)  # the report may have come with the proof
        for value in self._last:
            self.send(rank, value)

    def _serve(self, rank: int, channel: Channel, events: int) -> None:
        try:
            channel.flush()
            if events & selectors.EVENT_READ:
                channel.pull()
            line = channel.line()
            while line is not None:
                if rank in self.reports:
                    self._inbox[rank].append(json.loads(line))
                else:
                    self.reports[rank] = json.loads(line)
                line = channel.line()
        except (OSError, ValueError):
            self._lose(rank)
        else:
            self._watch(rank, channel)

    def _watch(self, rank: int, channel: Channel) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        self._listener.selector.modify(channel.connection, events, partial(self._serve, rank, channel))

    def _lose(self, rank: int) -> None:
        """Forgets a rank that has hung up: it has ended, or connects again."""
        channel = self._channels.pop(rank, None)
        if channel is None:
            return
        self._listener.selector.unregister(channel.connection)
        channel.close()
        self.hosts.pop(rank, None)
        self.reports.pop(rank, None)


# The other ranks' side.
_LONGEST_PAUSE_S = 0.25
# The first pause is this part of the longest one.
_STEPS = 50
_RARELY = 4
# A packet that is lost is sent again after a second.
_FIRST_CONNECT_S = 1.0
_LONGEST_CONNECT_S = 5.0
_ANSWER_S = 10.0
_SLOW_S = 0.5
_CALLERS_PER_S = 2000


@dataclass(slots=True)
class _Candidate:
    """One target, and how its calls went."""

    target: Target
    next_s: float
    pause_s: float
    tries: int = 0
    is_doubtful: bool = False
    """Another program has answered, or none for a while."""
    connect_s: float = _FIRST_CONNECT_S
    channel: Channel | None = None
    handshake: CallerHandshake | None = None
    began_s: float = 0.0

    @property
    def ends_s(self) -> float:
        """When the call under way is given up."""
        return self.began_s + (self.connect_s if self.handshake is None else _ANSWER_S)

    @property
    def wakes_s(self) -> float:
        """When to look at it again."""
        if self.channel is None:
            return self.next_s
        return self.ends_s if self.is_doubtful else min(self.ends_s, self.began_s + _SLOW_S)


class PortSearch:
    """A rank's search for its rank 0 among all that listen at the candidate ports.

    All candidates are tried at the same time, so a port that is silent, slow or another program's delays nothing. Rank
    0 takes the first port that it can bind: the first one is called often, the next ones rarely, unless another program
    has the first.

    Args:
        place: this rank.
        point: what they meet for; the ports are those of `set_targets`.
    """

    def __init__(self, place: RankPlace, point: MeetingPoint) -> None:
        self._place = place
        self._point = point
        self._selector = selectors.DefaultSelector()
        self._candidates: list[_Candidate] = []
        # Of a large job not too many call the head node in one second.
        self._longest_pause_s = max(_LONGEST_PAUSE_S, place.world_size / _CALLERS_PER_S)
        self._rare_pause_s = _RARELY * _LONGEST_PAUSE_S
        self.answers: dict[Target, str] = {}

    @property
    def tries(self) -> int:
        """How often the likeliest target has been called without an answer."""
        return self._candidates[0].tries if self._candidates else 0

    def set_targets(self, targets: Sequence[Target]) -> None:
        """Searches among these from now on, the likeliest first; calls that are under way go on."""
        previous = {candidate.target: candidate for candidate in self._candidates}
        # Nor by calling at all the ports where it probably is not.
        most_s = self._place.world_size * len(targets) / _CALLERS_PER_S
        self._rare_pause_s = max(_RARELY * self._longest_pause_s, min(most_s, self._point.timeout_s / _RARELY))
        for target in previous.keys() - set(targets):
            self._hang_up(previous[target])
        later_s = time.monotonic() + _LONGEST_PAUSE_S
        apart_s = max(0.01, self._place.world_size / _CALLERS_PER_S)
        self._candidates = []
        for number, target in enumerate(targets):
            candidate = previous.get(target)
            if candidate is None:
                # The likeliest is called at once, the others later and one after the other.
                next_s = later_s + number * apart_s if number else 0.0
                candidate = _Candidate(target, next_s=next_s, pause_s=self._longest_pause_s / _STEPS)
            self._candidates.append(candidate)

    def run(self, *, until: float) -> tuple[Channel, Target] | None:
        """Returns a channel to rank 0, which has proved itself, and where; None at `until` (`time.monotonic`)."""
        while True:
            now_s = time.monotonic()
            if now_s >= until:
                return None
            for candidate in self._candidates:
                self._advance(candidate, now_s)
            wakes_s = min([until, *(candidate.wakes_s for candidate in self._candidates)])
            for key, _ in self._selector.select(max(0.0, wakes_s - now_s)):
                candidate = key.data
                if candidate.channel is not None and self._reaches_rank_zero(candidate):
                    channel = candidate.channel
                    candidate.channel = None
                    self._selector.unregister(channel.connection)
                    return channel, candidate.target

    def close(self) -> None:
        """Gives up all calls."""
        for candidate in self._candidates:
            self._hang_up(candidate)
        self._selector.close()

    def describe(self) -> str:
        """Returns what was found at the ports, e.g. "port 20480: [Errno 111] Connection refused"."""
        return "; ".join(f"port {port}: {answer}" for (_, port), answer in self.answers.items())

    @property
    def _likely(self) -> _Candidate | None:
        for candidate in self._candidates:
            if not candidate.is_doubtful:
                return candidate
        return None

    def _advance(self, candidate: _Candidate, now_s: float) -> None:
        """Gives a call up or begins it where that is due."""
        if candidate.channel is not None and now_s >= candidate.ends_s:
            answer = "timed out" if candidate.handshake is None else "no proof (timed out)"
            self._fail(candidate, answer, is_doubtful=True)
        elif candidate.channel is not None and now_s >= candidate.began_s + _SLOW_S:
            candidate.is_doubtful = True
        if candidate is self._likely:
            candidate.next_s = min(candidate.next_s, now_s + self._longest_pause_s)
        if candidate.channel is None and now_s >= candidate.next_s:
            self._call(candidate, now_s)

    def _call(self, candidate: _Candidate, now_s: float) -> None:
        address, port = candidate.target
        candidate.began_s = now_s
        candidate.handshake = None
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            candidate.channel = Channel(connection)
            self._selector.register(connection, selectors.EVENT_WRITE, candidate)
            code = connection.connect_ex((address, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as err:
            self._fail(candidate, str(err))

    def _reaches_rank_zero(self, candidate: _Candidate) -> bool:
        """Continues a call; returns whether rank 0 has proved itself."""
        assert candidate.channel is not None
        connection = candidate.channel.connection
        try:
            if candidate.handshake is not None:
                return candidate.handshake.is_proved()
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._fail(candidate, str(OSError(code, os.strerror(code))))
                return False
            candidate.handshake = CallerHandshake(
                candidate.channel, self._point, rank=self._place.rank, host=self._place.host
            )
            self._selector.modify(connection, selectors.EVENT_READ, candidate)
        except OSError as err:
            self._fail(candidate, f"no proof ({err})", is_doubtful=True)  # rank 0 perhaps, crowded
        except ValueError as err:
            self._fail(candidate, str(err), is_doubtful=True, rarely=True)
        return False

    def _fail(self, candidate: _Candidate, answer: str, *, is_doubtful: bool = False, rarely: bool = False) -> None:
        self._hang_up(candidate)
        self.answers[candidate.target] = answer
        candidate.tries += 1
        candidate.is_doubtful = is_doubtful
        candidate.connect_s = min(candidate.connect_s * 1.5, _LONGEST_CONNECT_S)
        likely = self._likely
        rarely = rarely or not (is_doubtful or candidate is likely)
        pause_s = self._rare_pause_s if rarely else candidate.pause_s
        candidate.next_s = time.monotonic() + pause_s * random.uniform(0.5, 1.5)  # spreads the callers
        candidate.pause_s = min(candidate.pause_s * 1.5, self._longest_pause_s)
        if is_doubtful and likely is not None and likely.tries == 0:
            likely.next_s = 0.0

    def _hang_up(self, candidate: _Candidate) -> None:
        if candidate.channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(candidate.channel.connection)
            candidate.channel.close()
            candidate.channel = None
