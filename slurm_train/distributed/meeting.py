"""Rank 0's side of a meeting: lets in whoever proves to be one of its ranks, and passes words to and from them.

One thread, non-blocking: whatever one caller does or leaves undone costs the others nothing. A caller has seconds for
its whole proof. Few may be without one at a time; then the oldest is dropped, so strangers cannot crowd out the ranks.
More ranks than this process may open files are sent away with the word when to come back. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurm_train.distributed.greeting import Channel, Listening, MeetingPoint

_PROOF_S = 5.0
# What a caller without a proof has at least, however many wait behind it: many round trips.
_LEAST_PROOF_S = 1.0
_MOST_UNPROVED = 512
_SPARE_FILES = 32
_BATCH = 64
_REST_S = 0.05
_RETURNS_PER_S = 500
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def grace_s(world_size: int) -> float:
    """Returns how many seconds the ranks are given to take the last word."""
    return 10.0 + world_size / 100


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


def raise_open_files(needed: int) -> int | None:
    """Raises this process's soft limit of open files to `needed`, as far as its hard limit allows.

    Returns:
        The limit that holds then, None for no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def _free_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        return soft - len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names alone
    except OSError:
        return soft // 2


class Door:
    """Accepts connections and hands on those whose caller has proved to know the secret.

    Args:
        listener: where they call.
        point: what the proofs are about.
        ranks: who may come.
        admit: gets channel, rank and host of each caller after its proof.
        relieve: gives descriptors back when there are no more, and no stranger holds any.
    """

    def __init__(
        self,
        listener: socket.socket,
        point: MeetingPoint,
        *,
        ranks: range,
        admit: Callable[[Channel, int, str], None],
        relieve: Callable[[], None] = lambda: None,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._point, self._ranks = listener, point, ranks
        self._admit, self._relieve = admit, relieve
        self._unproved: dict[Listening, float] = {}  # since when, oldest first
        self.most_unproved = max(8, min(_MOST_UNPROVED, _free_files() // 2))
        self.selector = selectors.DefaultSelector()
        self._accepts_from_s: float | None = 0.0

    def step(self, timeout_s: float) -> None:
        """Serves what there is to serve, and waits for it at most so long. Callbacks of the selector are called."""
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
        """Hangs up on all who have proved nothing. The listener stays open, and is blocking again."""
        for caller in list(self._unproved):
            self._drop(caller)
        self.selector.close()
        with contextlib.suppress(OSError):
            self._listener.setblocking(True)

    def _accept(self, _: int) -> None:
        # A batch at a time, so that those who have called already are served in between.
        for _ in range(_BATCH):
            if len(self._unproved) >= self.most_unproved:
                oldest, since_s = next(iter(self._unproved.items()))
                if time.monotonic() < since_s + _LEAST_PROOF_S:
                    self._rest(since_s + _LEAST_PROOF_S)
                    return
                self._hear(oldest, 0)  # its words may be waiting
                if oldest in self._unproved:
                    self._drop(oldest)
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                if err.errno in _SHORT:
                    self._free_some()
                self._rest(time.monotonic() + _REST_S)
                return
            self._greet(Channel(connection))

    def _rest(self, until_s: float) -> None:
        self.selector.unregister(self._listener)
        self._accepts_from_s = until_s

    def _free_some(self) -> None:
        if not self._unproved:
            self._relieve()
        for caller in list(self._unproved)[: max(1, len(self._unproved) // 2)]:
            self._drop(caller)

    def _greet(self, channel: Channel) -> None:
        try:
            caller = Listening(channel, self._point)
        except OSError:
            channel.close()
            return
        self._unproved[caller] = time.monotonic()
        self.selector.register(channel.connection, selectors.EVENT_READ, partial(self._hear, caller))

    def _hear(self, caller: Listening, _: int) -> None:
        try:
            found = caller.introduced()
            if found is not None and found[0] not in self._ranks:
                raise ValueError("no such rank")
        except (OSError, ValueError):
            self._drop(caller)  # a port scanner, a caller that hung up, or somebody who does not belong here
            return
        if found is not None:
            self._forget(caller)
            self._admit(caller.channel, *found)

    def _drop(self, caller: Listening) -> None:
        self._forget(caller)
        caller.channel.close()

    def _forget(self, caller: Listening) -> None:
        del self._unproved[caller]
        self.selector.unregister(caller.channel.connection)
        if self._accepts_from_s is not None:
            self._accepts_from_s = 0.0  # there is room for the next one


@dataclass(slots=True)
class _Member:
    """A rank that is connected."""

    rank: int
    channel: Channel
    has_reported: bool = False


class Meeting:
    """Who has come, what each has reported, and a mailbox for each rank. Rank 0 only.

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
        self._door = Door(listener, point, ranks=range(1, world_size), admit=self._admit, relieve=self._relieve)
        self._most_kept = max(8, _free_files() - self._door.most_unproved - _SPARE_FILES)
        # Few enough at a time for this process and for the door.
        rate = min(_RETURNS_PER_S, 4 * self._door.most_unproved)
        self._again_s = min(max(0.25, world_size / rate), grace_s(world_size) / 4)
        self._members: dict[int, _Member] = {}
        self._away: set[int] = set()
        self._outbox: dict[int, list[str]] = defaultdict(list)
        self._inbox: dict[int, deque[Any]] = defaultdict(deque)
        self._last: str | None = None
        self._untold: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self.world_size) if rank not in self.hosts]

    def gather(
        self, *, deadline: float, is_enough: Callable[[], bool] = lambda: False, look_every_s: float = 3600.0
    ) -> None:
        """Waits until all ranks have come, the deadline (`time.monotonic`) is over, or `is_enough` says so.

        Args:
            deadline: the latest end.
            is_enough: asked every `look_every_s` seconds at least.
            look_every_s: as said.
        """
        self._run(lambda: len(self.hosts) == self.world_size or is_enough(), deadline=deadline, step_s=look_every_s)

    def gather_reports(self, *, deadline: float) -> None:
        """Waits for the reports of those who have come."""
        self._run(lambda: len(self.reports) >= len(self.hosts) - 1, deadline=deadline)

    def send(self, rank: int, value: Any) -> None:
        """Sends a value to a rank, or keeps it until that comes back; one that has ended gets nothing."""
        member, line = self._members.get(rank), json.dumps(value)
        if member is not None and member.has_reported:
            self._write(member, line)
        elif member is not None or rank in self._away:
            self._outbox[rank].append(line)

    def receive(self, rank: int, *, deadline: float) -> Any:
        """Returns what a rank says next, None where it says nothing until the deadline (`time.monotonic`)."""
        self._run(lambda: bool(self._inbox[rank]), deadline=deadline)
        return self._inbox[rank].popleft() if self._inbox[rank] else None

    def close(self, last: Any = None) -> None:
        """Sends a last value to every rank that has come, waits until each has it, and hangs up."""
        self._last, self._untold = json.dumps(last), self.hosts.keys() - self._members.keys() - {0}
        try:
            for member in list(self._members.values()):
                self._write(member, self._last)
            self._run(self._is_all_sent, deadline=time.monotonic() + grace_s(self.world_size))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Hangs up on everybody. The listener stays open."""
        for member in self._members.values():
            member.channel.close()
        self._members.clear()
        self._door.close()

    def _run(self, is_done: Callable[[], bool], *, deadline: float, step_s: float = 3600.0) -> None:
        # Once at least: after a suspension the deadline is over, and what was sent meanwhile is waiting.
        self._door.step(0.0)
        while not is_done() and (left_s := deadline - time.monotonic()) > 0:
            self._door.step(min(left_s, step_s))

    def _is_all_sent(self) -> bool:
        return not self._untold and not any(member.channel.has_unsent for member in self._members.values())

    def _admit(self, channel: Channel, rank: int, host: str) -> None:
        if rank in self._members:
            self._hang_up(self._members[rank])
        self._members[rank] = member = _Member(rank, channel)
        self.hosts[rank] = host
        self._away.discard(rank)
        self._door.selector.register(channel.connection, selectors.EVENT_READ, partial(self._serve, member))
        self._serve(member, 0)  # the report may have come with the proof

    def _serve(self, member: _Member, events: int) -> None:
        try:
            member.channel.flush()
            if events & selectors.EVENT_READ:
                member.channel.pull()
            while self._members.get(member.rank) is member and (line := member.channel.line()) is not None:
                self._take(member, json.loads(line))
        except (OSError, ValueError):
            self._lose(member)
            return
        self._watch(member)

    def _take(self, member: _Member, value: Any) -> None:
        if member.has_reported:
            self._inbox[member.rank].append(value)
            return
        member.has_reported = True
        if value is not None:
            self.reports[member.rank] = value
        self.reports.setdefault(member.rank, None)
        waiting = self._outbox.pop(member.rank, [])
        if self._last is not None:
            waiting.append(self._last)
            self._untold.discard(member.rank)
        for line in waiting:
            member.channel.write(line)
        if not waiting and self._last is None and len(self._members) > self._most_kept:
            self._send_away(member)

    def _write(self, member: _Member, line: str) -> None:
        try:
            member.channel.write(line)
        except OSError:
            self._lose(member)
            return
        self._watch(member)

    def _watch(self, member: _Member) -> None:
        if self._members.get(member.rank) is member:
            write = selectors.EVENT_WRITE if member.channel.has_unsent else 0
            self._door.selector.modify(
                member.channel.connection, selectors.EVENT_READ | write, partial(self._serve, member)
            )

    def _send_away(self, member: _Member) -> None:
        with contextlib.suppress(OSError):
            member.channel.write(json.dumps({"again_s": self._again_s}))
        self._away.add(member.rank)
        self._hang_up(member)

    def _relieve(self) -> None:
        self._most_kept = len(self._members) // 2
        idle = [member for member in self._members.values() if member.has_reported and not member.channel.has_unsent]
        for member in idle[self._most_kept :]:
            self._send_away(member)

    def _lose(self, member: _Member) -> None:
        """Forgets a rank that has hung up without being sent away: it has ended, or comes again."""
        self._hang_up(member)
        self.hosts.pop(member.rank, None)
        self.reports.pop(member.rank, None)
        self._outbox.pop(member.rank, None)

    def _hang_up(self, member: _Member) -> None:
        del self._members[member.rank]
        self._door.selector.unregister(member.channel.connection)
        member.channel.close()
