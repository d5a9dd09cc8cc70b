"""The layout of a run: how many ranks share what, where each rank is, and which ranks exchange with each other.

Everything here is arithmetic on integers, so a plan for thousands of ranks needs no rank. The axes, outermost first,
are those of torch's DeviceMesh in row-major order: ranks that differ only in `tp` are neighbours and lie on one node,
where the links are fastest; `pp` sends least and spans the nodes farthest apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slurm_train.config.schema import ParallelSection
from slurm_train.errors import ConfigError


class Coordinates(NamedTuple):
    """A rank's place on each axis, from 0."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


AXES = Coordinates._fields
AUTO = "auto"
"""`parallel.dp_shard` where the plan chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The degree of each axis; their product is the world size."""

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Copies of the parameters that read different samples."""
    dp_shard: int = 1
    """Shards of the parameters, whose ranks read different samples, too."""
    cp: int = 1
    """Parts of each sequence."""
    tp: int = 1
    """Parts of each matrix."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.degrees)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different samples: what the global batch is cut by."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_size(self) -> int:
        """Ranks that parameters are sharded over: those that share a sequence share them, too."""
        return self.dp_shard * self.cp

    @property
    def reducing_size(self) -> int:
        """Ranks whose gradients are of different items, and are averaged."""
        return self.dp_replicate * self.shard_size

    @property
    def is_replicated(self) -> bool:
        """Whether every rank is a whole replica: plain data parallelism (DDP)."""
        return self.dp_replicate == self.world_size

    @property
    def as_mapping(self) -> dict[str, int]:
        """The degrees by name, those of one left out but for `dp_replicate`; what a checkpoint's manifest says."""
        named = dict(zip(AXES, self.degrees, strict=True))
        return {axis: degree for axis, degree in named.items() if degree > 1 or axis == "dp_replicate"}

    def __str__(self) -> str:
        parts = [f"{axis} {degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1]
        return " x ".join(parts) or "one rank"

    def coordinates(self, rank: int) -> Coordinates:
        """Returns a rank's place on each axis."""
        assert 0 <= rank < self.world_size, f"no rank {rank} in {self}"
        pairs = zip(self.degrees, self._strides, strict=True)
        return Coordinates(*(rank // stride % degree for degree, stride in pairs))

    def rank_at(self, places: Sequence[int]) -> int:
        """Returns the rank at these coordinates, in the order of `AXES`."""
        return sum(place * stride for place, stride in zip(places, self._strides, strict=True))

    def members(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Returns the ranks that differ from one in these axes only, itself among them, ascending."""
        coordinates = zip(AXES, self.degrees, self.coordinates(rank), strict=True)
        ranges = [range(degree) if axis in axes else (place,) for axis, degree, place in coordinates]
        return tuple(map(self.rank_at, itertools.product(*ranges)))

    def groups(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yields the groups of ranks that differ in these axes only; together they hold every rank once."""
        ranges = [(0,) if axis in axes else range(degree) for axis, degree in zip(AXES, self.degrees, strict=True)]
        return (self.members(axes, self.rank_at(first)) for first in itertools.product(*ranges))

    @property
    def _strides(self) -> list[int]:
        return [math.prod(self.degrees[axis + 1 :]) for axis in range(len(AXES))]

    def cuts_vocabulary(self, num_ids: int) -> bool:
        """Returns whether ranks of `tp` have a part of the rows of an embedding and a head each: equal parts only."""
        return self.tp > 1 and num_ids % (self.tp * self.shard_size) == 0

    def data_parallel_index(self, rank: int) -> int:
        """Returns whose samples a rank reads, 0 to `data_parallel_size` - 1."""
        coordinates = self.coordinates(rank)
        return coordinates.dp_replicate * self.dp_shard + coordinates.dp_shard

    def owns_samples(self, rank: int) -> bool:
        """Returns whether a rank counts for its samples: one of those that read the same ones, in the last stage."""
        coordinates = self.coordinates(rank)
        return coordinates.pp == self.pp - 1 and coordinates.cp == coordinates.tp == 0

    def owns_items(self, rank: int) -> bool:
        """Returns whether a rank counts for the items whose loss it computes: each part of a sequence has its own."""
        coordinates = self.coordinates(rank)
        return coordinates.pp == self.pp - 1 and coordinates.tp == 0

    def random_stream(self, rank: int, *, splits_positions: bool = False) -> int:
        """Returns the number of a rank's stream of dropout: ranks that compute the same draw the same.

        Args:
            rank: whose.
            splits_positions: whether tensor-parallel ranks have positions of their own (sequence parallelism).
        """
        coordinates = self.coordinates(rank)
        part = coordinates.cp * self.tp + coordinates.tp if splits_positions else coordinates.cp
        return self.data_parallel_index(rank) + (coordinates.pp + part * self.pp) * self.data_parallel_size

    def first_reader(self, data_parallel_index: int) -> int | None:
        """Returns the first rank that reads the samples of an index, None where there is no such index."""
        if data_parallel_index >= self.data_parallel_size:
            return None
        replica, shard = divmod(data_parallel_index, self.dp_shard)
        return self.rank_at((0, replica, shard, 0, 0))


def solve_layout(section: ParallelSection, *, world_size: int) -> ParallelLayout:
    """Returns the layout that was asked for on so many ranks; one degree may be -1: what is left.

    `dp_shard=auto` is what the plan has chosen (`plan.choice`), on other ranks the largest part of it that fits.

    Raises:
        ConfigError: two degrees are -1, or degrees that do not multiply up to the world.
    """
    degrees = {axis: getattr(section, axis) for axis in AXES}
    if degrees["dp_shard"] == AUTO:
        degrees["dp_shard"] = _automatic_shards(section, world_size=world_size)
    left = [axis for axis, degree in degrees.items() if degree == -1]
    given = math.prod(degree for degree in degrees.values() if degree != -1)
    if len(left) > 1 or (world_size % given if left else world_size != given):
        shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree != 1) or "one rank"
        raise ConfigError(
            f"parallel asks for {shown}, and there are {world_size} ranks",
            hint="the degrees multiply to the number of ranks, and one may be -1 (dp_replicate is, by default): "
            "change a degree, or the ranks (cluster.nodes, cluster.gpus_per_node, run.processes)",
        )
    return ParallelLayout(**degrees | dict.fromkeys(left, world_size // given))


def gathers_float8(layout: ParallelLayout, settings: ParallelSection, *, precision: str) -> bool:
    """Returns whether matrices that are multiplied in float8 are also gathered so: where no other type is asked for.

    Args:
        layout: the degrees.
        settings: shards in host memory are gathered in bfloat16, since torchao finds out their scale on a GPU.
        precision: `train.precision`.
    """
    is_open = settings.gather_dtype == "auto" and not settings.cpu_offload
    return precision == "fp8" and is_open and layout.shard_size > 1


def _automatic_shards(section: ParallelSection, *, world_size: int) -> int:
    """Returns the shards that the plan has chosen, as far as these ranks have so many."""
    degrees = (section.pp, section.cp, section.tp)
    if section.dp_replicate != -1 or -1 in degrees or world_size % math.prod(degrees):
        return 1
    return math.gcd(world_size // math.prod(degrees), section.auto_shards)


def stage_blocks(num_blocks: int, *, stage: int, num_stages: int) -> range:
    """Returns the numbers of the blocks that a pipeline stage holds; earlier stages have one more where they differ."""
    small, more = divmod(num_blocks, num_stages)
    first = stage * small + min(stage, more)
    return range(first, first + small + (stage < more))


def stages_of(place: int, *, num_ranks: int, per_rank: int) -> range:
    """Returns the numbers of the stages that a rank of a pipeline has: of two ranks the first has 0, 2, 4."""
    return range(place, num_ranks * per_rank, num_ranks)
