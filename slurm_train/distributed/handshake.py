"""The ranks of one attempt find their rank 0 before torch is asked to connect anywhere.

Rank 0 listens on the first candidate port that it can bind, and all are let go together when all are there. Two jobs on
one node, a zombie of an earlier attempt, a foreign service on the port and strangers are told apart by `greeting`.
torch's own client hangs at a silent port and fills the log at a talking one (seen with 2.13). Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from slurm_train.distributed.greeting import LONGEST_GREETING_TIMEOUT_S, Callers, MeetingPoint, call, gather, read_line
from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RendezvousError

_GREETING_TIMEOUT_S = 0.5


def serve_greeting(
    place: RankPlace,
    point: MeetingPoint,
    *,
    family: socket.AddressFamily,
    address: str = "",
    news: Callable[[Mapping[int, str]], Mapping[str, int]] | None = None,
) -> tuple[socket.socket, int]:
    """Returns the listening socket and its port after every other rank has called. Rank 0 only.

    The socket stays open: torch's store takes it over, so nobody else can get the port in between.

    Args:
        place: this rank.
        point: where to meet.
        family: of the addresses at which the others call.
        address: to listen at; "": at all of this machine.
        news: called when all have come, with the host of each rank; what it gives is told to them, see
            `hear_rank_zero`.

    Raises:
        RendezvousError: no candidate port is free, or ranks are missing when the time is over.
    """
    listener = _listen(point, family, address)
    callers = Callers(point, place.world_size, hosts={place.rank: place.host})
    deadline = time.monotonic() + point.timeout_s
    try:
        gather(listener, callers, deadline=deadline)
        verdict = _verdict(place, point, callers.hosts)
        told = verdict if verdict is not None or news is None else {"news": dict(news(callers.hosts))}
        for connection in callers.connections.values():
            with contextlib.suppress(OSError):  # a caller that died now is missed by the process group
                connection.sendall(json.dumps(told).encode() + b"\n")
    except BaseException:
        listener.close()
        raise
    finally:
        callers.close()
    if verdict is not None:
        listener.close()
        raise RendezvousError(**verdict)
    return listener, listener.getsockname()[1]


def _listen(point: MeetingPoint, family: socket.AddressFamily, address: str) -> socket.socket:
    for port in point.ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=4096)
    raise RendezvousError(
        f"rank 0 could bind none of the ports {', '.join(map(str, point.ports))} on {socket.gethostname()}",
        hint="start the job again: another attempt tries other ports",
    )


def _verdict(place: RankPlace, point: MeetingPoint, joined: dict[int, str]) -> dict[str, str] | None:
    """Returns None when all ranks are there, else the words of the error that every rank raises."""
    missing = [rank for rank in range(place.world_size) if rank not in joined]
    if not missing:
        return None
    here = ", ".join(f"{rank} ({joined[rank]})" for rank in sorted(joined))
    return {
        "message": f"{len(missing)} of {place.world_size} ranks did not come to {point.master_addr} within "
        f"{point.timeout_s:g} s: missing {', '.join(map(str, missing))}; there: {here}",
        "hint": "look at the missing ranks' logs; if they never started, at their nodes; if they wait for rank 0, at "
        "name resolution and firewall between the nodes",
    }


def call_rank_zero(place: RankPlace, point: MeetingPoint, *, addresses: Sequence[str]) -> tuple[str, int]:
    """Returns address and port of this attempt's rank 0 once all ranks are there. All ranks but 0.

    Args:
        place: this rank.
        point: where to look.
        addresses: what `point.master_addr` resolves to, e.g. ["10.0.0.7"].

    Raises:
        RendezvousError: nobody of this attempt answered in time, or rank 0 says that ranks are missing.
    """
    address, port, _ = _find_rank_zero(place, point, addresses)
    return address, port


def hear_rank_zero(place: RankPlace, point: MeetingPoint, *, addresses: Sequence[str]) -> dict[str, int]:
    """Returns what rank 0 tells all ranks once they are there. All ranks but 0; arguments and errors as above."""
    _, _, news = _find_rank_zero(place, point, addresses)
    return {str(key): int(value) for key, value in news.items()}


def _find_rank_zero(
    place: RankPlace, point: MeetingPoint, addresses: Sequence[str]
) -> tuple[str, int, Mapping[str, int]]:
    deadline = time.monotonic() + point.timeout_s
    patience_s, pause_s = _GREETING_TIMEOUT_S, 0.005
    answers: dict[int, str] = {}
    while time.monotonic() < deadline:
        for address in addresses:
            for port in point.ports:
                connection, answers[port] = call(address, port, place, point, patience_s=patience_s)
                if connection is not None:
                    return address, port, _wait_for_all(connection, place, deadline=deadline)
        time.sleep(pause_s)
        # Short at first, because rank 0 is usually milliseconds away; gentle on the head node of a large job later.
        pause_s, patience_s = min(pause_s * 1.5, 0.25), min(patience_s * 1.2, LONGEST_GREETING_TIMEOUT_S)
    found = "; ".join(f"port {port}: {answer}" for port, answer in answers.items())
    raise RendezvousError(
        f"rank {place.rank} on {place.host} found nobody of run {point.run_id}, attempt {point.attempt}, at "
        f"{point.master_addr} ({', '.join(addresses)}) within {point.timeout_s:g} s: {found}",
        hint="look at rank 0's log; if it waits for the others, at the firewall between the nodes",
    )


def _wait_for_all(connection: socket.socket, place: RankPlace, *, deadline: float) -> Mapping[str, int]:
    with connection:
        try:
            # Rank 0 began to wait after this rank at most; its verdict comes a little after this rank's deadline.
            connection.settimeout(max(deadline - time.monotonic(), 0.0) + 10.0)
            verdict = json.loads(read_line(connection))
        except (OSError, ValueError) as err:
            raise RendezvousError(
                f"rank {place.rank} on {place.host} met rank 0, which then fell silent ({err})",
                hint="look at rank 0's log: it ended while it waited for the others",
            ) from err
    if verdict is None or "news" in verdict:
        return {} if verdict is None else dict(verdict["news"])
    raise RendezvousError(**verdict)
