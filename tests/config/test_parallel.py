from __future__ import annotations

from itertools import chain

import pytest

from slurm_train.config.parallel import AXES, Coordinates, ParallelLayout, solve_layout, stage_blocks
from slurm_train.config.schema import ParallelSection
from slurm_train.errors import ConfigError
from tests.support.refusals import refusal

CUBE = ParallelLayout(dp_shard=8, tp=4, pp=2)


def test_what_is_left_open_is_solved() -> None:
    assert solve_layout(ParallelSection(tp=2), world_size=8) == ParallelLayout(dp_replicate=4, tp=2)
    cube = ParallelSection(dp_replicate=1, dp_shard=-1, tp=4, pp=2)
    assert solve_layout(cube, world_size=64) == CUBE
    for section, text in (
        (ParallelSection(dp_shard=-1), "dp_replicate -1 x dp_shard -1, and there are 4 ranks"),
        (ParallelSection(tp=3), "dp_replicate -1 x tp 3, and there are 4 ranks"),
        (ParallelSection(dp_replicate=1), "one rank, and there are 4 ranks"),
    ):
        error = refusal(ConfigError, solve_layout, section, world_size=4)
        assert error.message.startswith(f"parallel asks for {text}")


@pytest.mark.parametrize("axes", [("pp",), ("dp_replicate", "dp_shard"), AXES])
def test_groups_hold_every_rank_once(axes: tuple[str, ...]) -> None:
    layout = ParallelLayout(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2)
    assert sorted(chain(*layout.groups(axes))) == list(range(48))
    assert all(group == layout.members(axes, rank) for group in layout.groups(axes) for rank in group)
    assert all(layout.rank_at(layout.coordinates(rank)) == rank for rank in range(48))


def test_one_rank_owns_each_part_of_the_samples() -> None:
    assert CUBE.coordinates(5) == Coordinates(pp=0, dp_replicate=0, dp_shard=1, cp=0, tp=1)
    assert CUBE.members(("dp_shard",), 33) == tuple(range(33, 64, 4))
    speakers = [rank for rank in range(64) if CUBE.owns_samples(rank)]
    assert [CUBE.data_parallel_index(rank) for rank in speakers] == list(range(8)) and CUBE.data_parallel_size == 8
    assert CUBE.first_reader(3) == 12 and CUBE.first_reader(8) is None


@pytest.mark.parametrize(
    ("layout", "streams"),
    [
        (ParallelLayout(dp_replicate=4), [0, 1, 2, 3]),
        (ParallelLayout(dp_shard=2, tp=2, pp=2), [0, 0, 1, 1, 2, 2, 3, 3]),
        # Other positions, other dropout.
        (ParallelLayout(dp_shard=2, cp=2, tp=2), [0, 0, 2, 2, 1, 1, 3, 3]),
    ],
)
def test_ranks_that_compute_the_same_draw_the_same_and_others_do_not(
    layout: ParallelLayout, streams: list[int]
) -> None:
    assert [layout.random_stream(rank) for rank in range(len(streams))] == streams


def test_ranks_that_share_a_sequence_count_for_their_own_part_of_it() -> None:
    layout = ParallelLayout(dp_shard=2, cp=2, tp=2)
    assert (layout.data_parallel_size, layout.shard_size, layout.reducing_size) == (2, 4, 4)
    assert [rank for rank in range(8) if layout.owns_samples(rank)] == [0, 4]
    assert [rank for rank in range(8) if layout.owns_items(rank)] == [0, 2, 4, 6]
    # With positions dealt out over tp no two ranks have the same.
    assert len({layout.random_stream(rank, splits_positions=True) for rank in range(8)}) == 8


def test_stages_hold_every_block_once_and_evenly() -> None:
    held = [stage_blocks(7, stage=stage, num_stages=3) for stage in range(3)]
    assert list(chain(*held)) == list(range(7))
    assert max(map(len, held)) - min(map(len, held)) <= 1
