"""One rank's side of the preflight: who it is, what it reports, and its node's file in the shared folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_train.distributed.greeting import MeetingPoint
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.tools.doctor.facts import NodeFacts, RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """One rank in the exchange."""

    place: RankPlace
    point: MeetingPoint
    node: str
    nodes: tuple[str, ...]
    """All nodes in rank order."""
    ranks_per_node: tuple[int, ...]
    """Of each of them."""
    folder: Path
    """Shared by all nodes; the first rank of each has a file there."""
    report: RankFacts
    facts: NodeFacts | None
    """Of this node; None on other ranks than its first."""
    budget_s: float
    """Seconds for the questions after all have come."""

    def write(self, more: Mapping[str, Any]) -> None:
        """Puts this node's report into the shared folder; what cannot be written is seen by the others."""
        if self.facts is None:
            return
        value = {"rank": asdict(self.report), "node": asdict(self.facts), **more}
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            write_atomic(self.folder / file_name(self.place.node_rank), json.dumps(value), durable=False)


def file_name(node_rank: int) -> str:
    """Returns the name of a node's file in the shared folder."""
    return f"node_{node_rank}.json"


def read_file(folder: Path, node_rank: int) -> dict[str, Any]:
    """Returns what a node has written into the shared folder, {} where that is not to be seen."""
    try:
        return read_json(folder / file_name(node_rank)) or {}
    except OSError:
        return {}


def nodes_of(ranks: Sequence[int], participant: Participant) -> list[str]:
    """Returns the nodes of ranks that have said nothing, block after block."""
    nodes = [
        node for node, count in zip(participant.nodes, participant.ranks_per_node, strict=True) for _ in range(count)
    ]
    # Ranks that are told another number of ranks may count further than Slurm does.
    return list(dict.fromkeys(nodes[min(number, len(nodes) - 1)] for number in ranks))
