"""The plan of a save: as torch makes it, in a time by the number of parts, and refused where parts do not fit."""

from __future__ import annotations

import io
import itertools
import pickle
import random

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from slurm_train.checkpoint.tensors import TensorPlan, is_grid, share_out
from slurm_train.errors import CheckpointError

SIZE = (4, 6)
ROWS = [((row, 0), (1, 6)) for row in range(4)]
GRID = [((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
BRICKS = [((0, 0), (2, 2)), ((0, 2), (2, 4)), ((2, 0), (2, 3)), ((2, 3), (2, 3))]


def part(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def plans_of(parts, *, size=SIZE):
    """Returns what each rank holds of one tensor: rank i the i-th part."""

    def item(offsets, sizes):
        data = TensorWriteData(part(offsets, sizes), TensorProperties(torch.float32), torch.Size(size))
        return WriteItem(MetadataIndex("w", torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)

    return [SavePlan([item(*one)], planner_data={"w": ("w",), rank: (rank,)}) for rank, one in enumerate(parts)]


def plan(parts, **changes):
    return share_out(plans_of(parts, **changes))


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        (ROWS, True),
        (GRID, True),
        ([((0, 0), (4, 1)), ((0, 1), (4, 5)), ((0, 6), (4, 0))], True),  # uneven, and nothing for the last rank
        ([((0, 0), SIZE)], True),
        (BRICKS, False),
        (ROWS[1:], False),
        (ROWS[:3], False),
        (GRID[:3], False),
        ([*GRID, GRID[0]], False),
        ([*ROWS[:3], ROWS[0]], False),
        ([((0, 0), (3, 6)), ((2, 0), (2, 6))], False),
        ([((0, 0), (4, 7))], False),
        ([((-1, 0), (5, 6))], False),
        ([], False),
    ],
)
def test_grid_fills_each_element_once(parts, wanted):
    assert is_grid(SIZE, [part(*one) for one in parts]) is wanted


def test_what_counts_as_a_grid_overlaps_nowhere_and_leaves_nothing_out():
    draw, found = random.Random(0), 0
    boxes = [
        ((row, column), (height, width))
        for row, column, height, width in itertools.product(range(3), range(3), range(1, 4), range(1, 4))
    ]
    for _ in range(8000):
        parts = draw.sample(boxes, draw.randint(1, 4))
        times = torch.zeros(6, 6, dtype=torch.int64)
        for (row, column), (height, width) in parts:
            times[row : row + height, column : column + width] += 1
        if is_grid((3, 3), [part(*one) for one in parts]):
            found += 1
            assert times[:3, :3].eq(1).all() and times.sum() == 9, parts
    assert found > 10


@pytest.mark.parametrize("parts", [ROWS, GRID, [*GRID, *GRID], BRICKS])
def test_plan_is_the_one_of_torch(parts):
    torchs = DefaultSavePlanner()
    wanted, described = torchs.create_global_plan(plans_of(parts))
    found = plan(parts)
    assert [one.items for one in found] == [one.items for one in wanted]
    assert len({one.number for one in found}) == 1
    parts = [[("w", item.index.index) for item in one.items] for one in wanted]
    assert pickle.loads(found[0].packed) == (described, parts)
    assert not any(one.packed for one in found[1:])


@pytest.mark.parametrize(
    "parts", [ROWS[:3], GRID[1:], [((0, 0), (3, 6)), ((2, 0), (2, 6))], [((0, 0), (2, 6)), ((2, 0), (3, 6))]]
)
def test_parts_that_overlap_or_are_missing_are_refused(parts):
    with pytest.raises(ValueError, match="Failed to validate global plan"):
        plan(parts)


@pytest.mark.parametrize(
    ("size", "dtype", "said"),
    [
        ((5, 6), torch.float32, r"w is float32\[4,6\] on rank 0 and float32\[5,6\] on rank 1"),
        (SIZE, torch.float64, r"w is float32\[4,6\] on rank 0 and float64\[4,6\] on rank 1"),
        (None, None, r"w is float32\[4,6\] on rank 0 and a value on rank 1"),
    ],
)
def test_one_name_for_different_things_is_refused(size, dtype, said):
    """Of what is replicated torch takes the first rank's and drops the others'."""
    (mine, other) = plans_of([((0, 0), SIZE)] * 2)
    data = None if size is None else TensorWriteData(part((0, 0), size), TensorProperties(dtype), torch.Size(size))
    kind = WriteItemType.BYTE_IO if data is None else WriteItemType.TENSOR
    other = SavePlan([WriteItem(MetadataIndex("w"), kind, tensor_data=data)], planner_data=other.planner_data)
    with pytest.raises(CheckpointError, match=said):
        share_out([mine, other])


def test_parts_of_a_grid_are_not_compared_with_each_other(monkeypatch):
    monkeypatch.setattr(DefaultSavePlanner, "create_global_plan", None)
    plan([((row, 0), (1, 8)) for row in range(4)], size=(4, 8))


def test_what_is_held_as_before_is_not_planned_again_by_torch(monkeypatch):
    def state_of(value, **more):
        model = {"w": torch.full((3,), float(value)), "history": list(range(value))}
        return {"model": model, "kept": [torch.full((2,), value), {"a": value}], **more}

    first = TensorPlan(state_of(1), group=None)
    first.settle([first.number])
    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", None)
    again = TensorPlan(state_of(2), group=None)
    assert again.number == first.number != ""
    data = {item.index.fqn: again.data_of(item) for item in first.items}
    assert data["model.w"].tolist() == [2.0] * 3 and data["kept.0"].tolist() == [2, 2]
    values = [torch.load(io.BytesIO(data[name].getbuffer())) for name in ("model.history", "kept.1.a")]
    assert values == [[0, 1], 2]
    wider = state_of(1)
    wider["kept"][1]["b"] = 1
    for other in (state_of(1, b=1), state_of(1) | {"kept": [torch.ones(2), {"a": 1}]}, wider):
        with pytest.raises(TypeError):
            TensorPlan(other, group=None)
