"""Ranks that do nothing but meet, many in one process: `meeting_ranks.py '{"first": 0, "last": 0, "world": 4, ...}'`.

Prints one line of JSON when all of them have ended: what each found, or its error.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slurm_train.distributed.meeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.distributed.rendezvous import host_meeting, join_meeting
from slurm_train.errors import RendezvousError

HERE = "127.0.0.1"


def meet(rank: int, world: int, point: MeetingPoint, secret_word: str) -> Any:
    """Returns what one rank finds: the port and what rank 0 decided; rank 0 the hosts as well."""
    place = RankPlace(
        rank=rank, local_rank=rank, node_rank=0, world_size=world, local_world_size=world, host=f"host{rank}"
    )
    try:
        if rank:
            return join_meeting(place, point, addresses=[HERE])[1:]
        seen: dict[int, str] = {}

        def decide(hosts: Any) -> str:
            seen.update(hosts)
            return secret_word

        listener, port = host_meeting(place, point, addresses=[HERE], decide=decide)
        listener.close()
        return port, secret_word, seen == {number: f"host{number}" for number in range(world)}
    except RendezvousError as err:
        return str(err)


def main() -> None:
    """Does what the command line says."""
    asked = json.loads(sys.argv[1])
    if asked.get("files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (asked["files"], asked["files"]))
    threading.stack_size(1 << 18)
    ranks = range(asked["first"], asked["last"] + 1)
    point = MeetingPoint(**asked["point"])
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(lambda rank: meet(rank, asked["world"], point, asked["word"]), ranks))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
