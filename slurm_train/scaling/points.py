"""The runs of a scaling study: sizes from one rank up, at a fixed local and at a fixed global batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slurm_train.config.batch import recut_batch

Mode = Literal["local", "global"]


@dataclass(frozen=True, slots=True)
class Size:
    """So many nodes with so many ranks each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the study."""

    size: Size
    local_size: int
    """Samples per rank and micro-batch."""
    accumulation: int
    comm: str
    modes: tuple[Mode, ...]
    """What it is part of: each rank's batch as at full size ("local"), or the whole batch ("global"), or both."""

    @property
    def global_size(self) -> int:
        """Samples per step."""
        return self.local_size * self.size.ranks * self.accumulation

    def __str__(self) -> str:
        return f"{self.size}, {self.local_size} x {self.accumulation} samples per rank, {self.comm}"


def plan_sizes(nodes: int, per_node: int) -> list[Size]:
    """Returns one rank, one node, two nodes, four, ... up to all."""
    counts = [count for count in (2**power for power in range(20)) if count < nodes]
    sizes = [Size(1, 1), Size(1, per_node), *(Size(count, per_node) for count in (*counts, nodes) if count > 1)]
    return list(dict.fromkeys(sizes))


def plan_points(nodes: int, per_node: int, *, local_size: int, comms: Sequence[str]) -> list[Point]:
    """Returns the runs in the order in which they are made.

    Ways of exchanging after the first one are tried at the sizes that span nodes, at a fixed local batch; where all
    ranks are on one node, there.

    Args:
        nodes: of the largest size.
        per_node: ranks of a node.
        local_size: samples per rank and micro-batch at the largest size.
        comms: values of `ddp.comm`.
    """
    sizes = plan_sizes(nodes, per_node)
    whole = local_size * sizes[-1].ranks
    found: dict[tuple[Size, int, int, str], tuple[Mode, ...]] = {}
    for size in sizes:
        found[size, local_size, 1, comms[0]] = ("local",)
    for size in sizes:
        if whole % size.ranks:
            continue  # three nodes of four do not share every batch
        cut = recut_batch(whole, ranks=size.ranks, local_size=local_size)
        key = (size, cut.local_size, cut.accumulation, comms[0])
        found[key] = (*found.get(key, ()), "global")
    spanning = [size for size in sizes if size.nodes > 1] or sizes[-1:]
    for comm in comms[1:]:
        for size in spanning:
            found[size, local_size, 1, comm] = ("local",)
    return [Point(size, local, accumulation, comm, modes) for (size, local, accumulation, comm), modes in found.items()]
