from __future__ import annotations

from itertools import chain

import pytest

from slurm_train.config.parallel import AXES, Coordinates, ParallelLayout, solve_layout, stage_blocks
from slurm_train.config.schema import ParallelSection
from slurm_train.errors import ConfigError
from tests.support.refusals import refusal

CUBE = ParallelLayout(dp_shard=8, tp=4, pp=2)


@pytest.mark.parametrize(
    ("asked", "ranks", "expected"),
    [
        ({}, 6, ParallelLayout(dp_replicate=6)),
        ({"tp": 2}, 8, ParallelLayout(dp_replicate=4, tp=2)),
        ({"dp_replicate": 1, "dp_shard": -1, "tp": 4, "pp": 2}, 64, CUBE),
        ({"dp_shard": 2, "tp": 2, "pp": 2}, 8, ParallelLayout(dp_shard=2, tp=2, pp=2)),
    ],
)
def test_what_is_left_open_is_solved(asked: dict[str, int], ranks: int, expected: ParallelLayout) -> None:
    assert solve_layout(ParallelSection(**asked), world_size=ranks) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "ranks", "message"),
    [
        ({"dp_shard": -1}, 4, "parallel asks for dp_replicate -1 x dp_shard -1, and there are 4 ranks"),
        ({"tp": 3}, 4, "parallel asks for dp_replicate -1 x tp 3, and there are 4 ranks"),
        ({"dp_replicate": 2, "tp": 4}, 4, "parallel asks for dp_replicate 2 x tp 4, and there are 4 ranks"),
        ({"dp_replicate": 1}, 4, "parallel asks for one rank, and there are 4 ranks"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(asked: dict[str, int], ranks: int, message: str) -> None:
    assert str(refusal(ConfigError, solve_layout, ParallelSection(**asked), world_size=ranks)).startswith(message)


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_farthest() -> None:
    assert CUBE.coordinates(0) == Coordinates(0, 0, 0, 0, 0)
    assert CUBE.coordinates(5) == Coordinates(pp=0, dp_replicate=0, dp_shard=1, cp=0, tp=1)
    assert CUBE.coordinates(63) == Coordinates(pp=1, dp_replicate=0, dp_shard=7, cp=0, tp=3)
    assert CUBE.members(("tp",), 6) == (4, 5, 6, 7)
    assert CUBE.members(("pp",), 6) == (6, 38)
    assert CUBE.members(("dp_shard",), 33) == tuple(range(33, 64, 4))


@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("dp_replicate", "dp_shard"), AXES])
def test_groups_hold_every_rank_once(axes: tuple[str, ...]) -> None:
    layout = ParallelLayout(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2)
    assert sorted(chain(*layout.groups(axes))) == list(range(48))
    assert all(group == layout.members(axes, rank) for group in layout.groups(axes) for rank in group)
    assert all(layout.rank_at(layout.coordinates(rank)) == rank for rank in range(48))


def test_one_rank_owns_each_part_of_the_samples() -> None:
    speakers = [rank for rank in range(64) if CUBE.owns_samples(rank)]
    assert [CUBE.data_parallel_index(rank) for rank in speakers] == list(range(8)) and CUBE.data_parallel_size == 8
    assert CUBE.first_reader(3) == 12 and CUBE.first_reader(8) is None


def test_replicas_are_numbered_and_drawn_as_before_there_were_layouts() -> None:
    layout = ParallelLayout(dp_replicate=4)
    assert layout.is_replicated and layout.as_mapping == {"dp_replicate": 4} and str(layout) == "dp_replicate 4"
    for rank in range(4):
        assert layout.data_parallel_index(rank) == layout.random_stream(rank) == layout.first_reader(rank) == rank
        assert layout.owns_samples(rank)


def test_ranks_that_compute_the_same_draw_the_same_and_others_do_not() -> None:
    layout = ParallelLayout(dp_shard=2, tp=2, pp=2)
    streams = [layout.random_stream(rank) for rank in range(8)]
    assert streams == [0, 0, 1, 1, 2, 2, 3, 3]


def test_ranks_that_share_a_sequence_count_for_their_own_part_of_it() -> None:
    layout = ParallelLayout(dp_shard=2, cp=2, tp=2)
    assert (layout.data_parallel_size, layout.shard_size, layout.reducing_size) == (2, 4, 4)
    assert [rank for rank in range(8) if layout.owns_samples(rank)] == [0, 4]
    assert [rank for rank in range(8) if layout.owns_items(rank)] == [0, 2, 4, 6]
    # Other positions, other dropout; with positions dealt out over tp no two ranks have the same.
    assert [layout.random_stream(rank) for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert len({layout.random_stream(rank, splits_positions=True) for rank in range(8)}) == 8


@pytest.mark.parametrize(("blocks", "stages"), [(4, 2), (7, 3), (80, 8), (3, 3)])
def test_stages_hold_every_block_once_and_evenly(blocks: int, stages: int) -> None:
    held = [stage_blocks(blocks, stage=stage, num_stages=stages) for stage in range(stages)]
    assert list(chain(*held)) == list(range(blocks))
    assert max(map(len, held)) - min(map(len, held)) <= 1
