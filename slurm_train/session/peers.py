"""How the ranks of a user's own program exchange values: by torch.distributed if it is open, else by sockets.

A program may call the session before it opens its process group, or have none at all. The sockets are those of
`distributed.meeting`: a star around rank 0, in which both ends have proved that they belong to the attempt.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import socket
import sys
import time
from typing import Any

from slurm_train.checkpoint.agreement import Group, Peers
from slurm_train.distributed.master import master_of, meeting_ports
from slurm_train.distributed.meeting import Channel, Meeting, MeetingPoint, PortSearch, listen
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import resolve_master
from slurm_train.errors import RendezvousError
from slurm_train.rundir.attempts import attempt_secret
from slurm_train.rundir.heartbeat import limits_of
from slurm_train.session.rank_run import LONGEST_SUSPENSION_S, RankRun

_PURPOSE = "session"
_LOOPBACK = "127.0.0.1"


class SocketPeers(Peers):
    """The ranks of an attempt, connected to rank 0. Made by all ranks at the same time.

    Args:
        place: this rank.
        point: where they connect, and how long they wait for each other.
        timeout_s: of an exchange.

    Raises:
        RendezvousError: ranks are missing.
    """

    def __init__(self, place: RankPlace, point: MeetingPoint, *, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._meeting: Meeting | None = None
        self._channel: Channel | None = None
        addresses = resolve_master(place, point.master_addr) if place.spans_nodes else [_LOOPBACK]
        if place.is_first:
            family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
            listener = listen(point, family=family, address="" if place.spans_nodes else _LOOPBACK)
            if listener is None:
                raise self._error("rank 0 could bind none of its ports")
            # It stays open until the process ends.
            self._listener = listener
            self._meeting = Meeting(listener, point, world_size=place.world_size, host=place.host)
            self._meeting.gather(deadline=time.monotonic() + point.timeout_s)
            missing = self._meeting.missing
            if missing:
                raise self._error(f"ranks {', '.join(map(str, missing))} have not come")
            return
        search = PortSearch(place, point)
        targets: list[tuple[str, int]] = []
        for port in point.ports:
            targets += [(address, port) for address in addresses]
        search.set_targets(targets)
        with contextlib.closing(search):
            reached = search.run(until=time.monotonic() + point.timeout_s)
        if reached is None:
            raise self._error(f"rank 0 was not found at {point.master_addr}: {search.describe()}")
        self._channel = reached[0]
        self._channel.send_value(None, deadline=time.monotonic() + point.timeout_s)

    def rank(self) -> int:
        """Returns this process's rank."""
        return self._place.rank

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._place.world_size

    def gather_values(self, value: Any) -> list[Any]:
        """Returns the values that the ranks have passed, in rank order. Collective.

        Raises:
            RendezvousError: a rank has ended, or does not come.
        """
        deadline = time.monotonic() + self._timeout_s
        if self._meeting is not None:
            texts = [_pack(value)]
            for rank in range(1, self.size()):
                text = self._meeting.receive(rank, deadline=deadline)
                if text is None:
                    raise self._error(f"rank {rank} has ended, or has not come to the exchange")
                texts.append(text)
            for rank in range(1, self.size()):
                self._meeting.send(rank, texts)
            # Data that does not fit into a socket's buffer must be sent before this rank continues.
            self._meeting.flush(deadline=deadline)
        else:
            assert self._channel is not None
            try:
                self._channel.send_value(_pack(value), deadline=deadline)
                texts = self._channel.receive_value(deadline=deadline)
            except (OSError, ValueError) as err:
                raise self._error(f"rank 0 has ended, or has not come to the exchange ({err})") from err
        return [_unpack(text) for text in texts]

    def _error(self, problem: str) -> RendezvousError:
        return RendezvousError(
            f"the ranks of the session do not meet: {problem} (seen by rank {self._place.rank} on {self._place.host})",
            hint="all ranks must call newest, should_stop and save alike, and as often; look at the logs of the others",
        )


class GroupChooser:
    """Returns the group by which this program's ranks exchange values at this moment.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: RankRun) -> None:
        self._rank = rank
        self._place = rank.place
        is_watched = limits_of(rank.config) is not None
        self._timeout_s = LONGEST_SUSPENSION_S if is_watched else rank.config.checkpoint.save_timeout_s
        self._sockets: SocketPeers | None = None
        self._world: Any = None
        self._group: Group | None = None

    def __call__(self) -> Group | None:
        """Returns the group; None for a world of one. Collective the first time, and when the program opens its own.

        Raises:
            RendezvousError: without torch.distributed, ranks are missing.
        """
        if self._place.world_size == 1:
            return None
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            place = self._place
            # A program may have worlds of other ranks, e.g. one for each of them.
            if (dist.get_rank(), dist.get_world_size()) == (place.rank, place.world_size):
                return self._side_group(dist)
        if self._sockets is None:
            self._sockets = SocketPeers(self._place, self._meeting_point(), timeout_s=self._timeout_s)
        return self._sockets

    def _side_group(self, dist: Any) -> Group:
        """Returns a gloo group of the program's ranks; a group of NCCL would use the GPUs."""
        world = dist.group.WORLD
        if self._world is not world:
            from slurm_train.distributed.group import open_side_group

            self._world = world
            self._group = open_side_group(self._timeout_s)
        assert self._group is not None
        return self._group

    def _meeting_point(self) -> MeetingPoint:
        rank = self._rank
        run = rank.run
        # MASTER_PORT is left to the program: its process group may use that port.
        env = {**rank.env, "MASTER_PORT": ""}
        return MeetingPoint(
            master_addr=master_of(env),
            ports=meeting_ports(f"{run.run_id} {_PURPOSE}", attempt=rank.attempt, env=env),
            run_id=f"{run.name}/{run.run_id}",
            attempt=rank.attempt,
            timeout_s=rank.config.train.start_timeout_s,
            secret=attempt_secret(run, rank.attempt, wait_s=60.0),
            purpose=_PURPOSE,
        )


# Only ranks of this attempt can send: each connection begins with a proof of its secret.
def _pack(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpack(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
