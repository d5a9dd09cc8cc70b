"""The other ranks' side of a meeting: finds rank 0 among all that listen at the candidate ports, and stays in touch.

All candidates are tried side by side, so a port that is silent, slow or somebody else's delays nothing. Rank 0 takes
the first port that it can bind: the first one is called often, the next ones rarely, unless somebody else is at the
first. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_train.distributed.greeting import Calling, Channel, MeetingPoint
from slurm_train.distributed.meeting import grace_s
from slurm_train.distributed.place import RankPlace

Target = tuple[str, int]
"""Address and port."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
_RARELY = 4
# A packet that is lost is sent again after a second.
_FIRST_CONNECT_S, _LONGEST_CONNECT_S = 1.0, 5.0
_PROOF_S = 10.0
_SLOW_S = 0.5
_CALLERS_PER_S = 2000


@dataclass(slots=True)
class _Candidate:
    """One target, and how its calls went."""

    target: Target
    next_s: float
    tries: int = 0
    is_somebody_else: bool = False
    """Answered as somebody else, or not at all for a while."""
    pause_s: float = _FIRST_PAUSE_S
    connect_s: float = _FIRST_CONNECT_S
    channel: Channel | None = None
    calling: Calling | None = None
    began_s: float = 0.0

    @property
    def ends_s(self) -> float:
        """When the call under way is given up."""
        return self.began_s + (self.connect_s if self.calling is None else _PROOF_S)


class Search:
    """A rank's search for its rank 0.

    Args:
        place: this rank.
        point: what they meet for; the ports are those of `aim`.
    """

    def __init__(self, place: RankPlace, point: MeetingPoint) -> None:
        self._place, self._point = place, point
        self._selector = selectors.DefaultSelector()
        self._candidates: list[_Candidate] = []
        # Of a large job not too many call the head node in one second.
        self._longest_pause_s = max(_LONGEST_PAUSE_S, place.world_size / _CALLERS_PER_S)
        self.answers: dict[Target, str] = {}

    @property
    def tries(self) -> int:
        """How often the likeliest target has been called in vain."""
        return self._candidates[0].tries if self._candidates else 0

    def aim(self, targets: Sequence[Target]) -> None:
        """Searches among these from now on, the likeliest first; calls that are under way go on."""
        known = {candidate.target: candidate for candidate in self._candidates}
        for candidate in known.keys() - set(targets):
            self._hang_up(known[candidate])
        later_s = time.monotonic() + _LONGEST_PAUSE_S
        self._candidates = [
            known.get(target) or _Candidate(target, next_s=later_s + number * 0.01 if number else 0.0)
            for number, target in enumerate(targets)
        ]

    def run(self, *, until: float) -> tuple[Channel, Target] | None:
        """Returns a channel to rank 0, which has proved itself, and where; None at `until` (`time.monotonic`)."""
        while (now_s := time.monotonic()) < until:
            self._begin_and_give_up(now_s)
            for key, _ in self._selector.select(max(0.0, self._wakes_s(until) - now_s)):
                candidate: _Candidate = key.data
                if candidate.channel is not None and self._is_found(candidate):
                    channel, candidate.channel = candidate.channel, None
                    self._selector.unregister(channel.connection)
                    return channel, candidate.target
        return None

    def close(self) -> None:
        """Gives up all calls."""
        for candidate in self._candidates:
            self._hang_up(candidate)
        self._selector.close()

    def in_words(self) -> str:
        """Returns what was found at the ports, e.g. "port 20480: [Errno 111] Connection refused"."""
        return "; ".join(f"port {port}: {answer}" for (_, port), answer in self.answers.items())

    @property
    def _likely(self) -> _Candidate | None:
        return next((one for one in self._candidates if not one.is_somebody_else), None)

    def _begin_and_give_up(self, now_s: float) -> None:
        for one in self._candidates:
            if one.channel is not None and now_s >= one.ends_s:
                self._fail(one, "timed out" if one.calling is None else "no proof (timed out)", is_somebody_else=True)
            elif one.channel is not None and now_s >= one.began_s + _SLOW_S:
                one.is_somebody_else = True
        likely = self._likely
        for one in self._candidates:
            if one is likely:
                one.next_s = min(one.next_s, now_s + self._longest_pause_s)
            if one.channel is None and now_s >= one.next_s:
                self._call(one, now_s)

    def _wakes_s(self, until: float) -> float:
        times = [until]
        for one in self._candidates:
            if one.channel is None:
                times.append(one.next_s)
            else:
                times.append(one.ends_s if one.is_somebody_else else min(one.ends_s, one.began_s + _SLOW_S))
        return min(times)

    def _call(self, one: _Candidate, now_s: float) -> None:
        address, port = one.target
        one.began_s, one.calling = now_s, None
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as err:
            self._fail(one, str(err))
            return
        one.channel = Channel(connection)
        self._selector.register(connection, selectors.EVENT_WRITE, one)
        try:
            code = connection.connect_ex((address, port))
        except OSError as err:
            self._fail(one, str(err))
            return
        if code not in (0, errno.EINPROGRESS):
            self._fail(one, str(OSError(code, os.strerror(code))))

    def _is_found(self, one: _Candidate) -> bool:
        """Goes on with a call; returns whether it has reached rank 0."""
        assert one.channel is not None
        connection = one.channel.connection
        try:
            if one.calling is None:
                if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._fail(one, str(OSError(code, os.strerror(code))))
                    return False
                one.calling = Calling(one.channel, self._point, rank=self._place.rank, host=self._place.host)
                self._selector.modify(connection, selectors.EVENT_READ, one)
                return False
            return one.calling.is_proved()
        except OSError as err:
            self._fail(one, f"no proof ({err})", is_somebody_else=True)  # rank 0 perhaps, crowded
        except ValueError as err:
            self._fail(one, str(err), is_somebody_else=True, rarely=True)
        return False

    def _fail(self, one: _Candidate, answer: str, *, is_somebody_else: bool = False, rarely: bool = False) -> None:
        self._hang_up(one)
        self.answers[one.target] = answer
        one.tries += 1
        one.is_somebody_else = is_somebody_else
        one.connect_s = min(one.connect_s * 1.5, _LONGEST_CONNECT_S)
        likely = self._likely
        rarely = rarely or not (is_somebody_else or one is likely)
        pause_s = self._longest_pause_s * _RARELY if rarely else one.pause_s
        one.next_s = time.monotonic() + pause_s * random.uniform(0.5, 1.5)  # spreads the callers
        one.pause_s = min(one.pause_s * 1.5, self._longest_pause_s)
        if is_somebody_else and likely is not None and likely.tries == 0:
            likely.next_s = 0.0

    def _hang_up(self, one: _Candidate) -> None:
        if one.channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one.channel.connection)
            one.channel.close()
            one.channel = None


class Caller:
    """A rank's connection to rank 0, made again where rank 0 asks for it.

    Args:
        channel: to rank 0, which has proved itself.
        target: where it listens.
        place: this rank.
        point: what they meet for.
        report: what rank 0 is told first.
        deadline: for the report to be sent (`time.monotonic`).

    Raises:
        OSError: rank 0 has hung up.
    """

    def __init__(
        self,
        channel: Channel,
        target: Target,
        place: RankPlace,
        point: MeetingPoint,
        *,
        report: Any = None,
        deadline: float,
    ) -> None:
        self.target, self._place, self._point, self._channel = target, place, point, channel
        channel.send_value(report, deadline=deadline)

    def send(self, value: Any, *, deadline: float) -> None:
        """Sends a value to rank 0.

        Raises:
            OSError: rank 0 has hung up.
        """
        self._channel.send_value(value, deadline=deadline)

    def receive(self, *, deadline: float) -> Any:
        """Returns what rank 0 says next, by a new connection where it wants this rank to come again later.

        Raises:
            OSError: rank 0 has hung up, or says nothing until the deadline (`time.monotonic`).
            ValueError: what it says is no JSON.
        """
        while True:
            value = json.loads(self._channel.read_line(deadline=deadline))
            if not isinstance(value, dict) or "again_s" not in value:
                return value
            self._channel.close()
            time.sleep(float(value["again_s"]) * random.uniform(0.5, 1.5))  # spreads the callers
            search = Search(self._place, self._point)
            search.aim([self.target])
            try:
                found = search.run(until=deadline)
            finally:
                search.close()
            if found is None:
                raise TimeoutError(f"rank 0 was not there again: {search.in_words()}")
            self._channel = found[0]
            self._channel.send_value(None, deadline=deadline)

    def close(self) -> None:
        """Hangs up."""
        self._channel.close()


def latest_word_s(point: MeetingPoint, world_size: int) -> float:
    """Returns how many seconds a rank may wait for rank 0's last word: rank 0 may have begun to wait after it."""
    return point.timeout_s + grace_s(world_size)
