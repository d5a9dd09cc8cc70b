"""Named objects beside model and optimizers: whatever their states are made of, they come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurm_train.checkpoint.choice import choose_checkpoint
from slurm_train.checkpoint.division import OTHERS
from slurm_train.checkpoint.earlier import VALUES
from slurm_train.checkpoint.metadata import read_metadata
from slurm_train.checkpoint.parts import PER_RANK, Of, StateParts
from slurm_train.checkpoint.save import save_checkpoint
from tests.support.small_checkpoints import make_header


class Holder:
    """Has any state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.num_loads = state, 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.num_loads = state, self.num_loads + 1


def state_of(value: float) -> dict[str, Any]:
    return {
        "weights": [torch.full((3,), value), torch.full((2,), value)],
        "best": np.float32(value),
        "seen": np.full((2, 2), value),
        "by_number": {7: torch.full((1,), value), 1: value},
        "name": "x",
    }


def save(root: Path, parts: StateParts, *, step: int = 4) -> None:
    content = parts.content()
    save_checkpoint(
        root,
        tensors={"model": {"w": torch.ones(2)}, OTHERS: content.tensors},
        rank_state={VALUES: parts.own_values(content)},
        header=make_header(step, extra={PER_RANK: content.per_rank}),
        group=None,
        keep=1,
    )


def restore(root: Path, parts: StateParts) -> list[str]:
    choice = choose_checkpoint(root, group=None, attempt=1)
    assert choice is not None
    parts.require_ranks(choice.manifest)
    return parts.restore(choice, described=read_metadata(choice.path))


@pytest.mark.parametrize("of", ["run", None])
def test_lists_of_tensors_arrays_and_numbers_of_numpy_come_back_in_their_types(root: Path, of: Of) -> None:
    parts = StateParts(group=None)
    parts.add("part", Holder(state_of(2.0)), of=of)
    save(root, parts)
    save(root, parts, step=5)
    held = Holder(state_of(0.0))
    again = StateParts(group=None)
    again.add("part", held, of=of)
    assert restore(root, again) == []
    assert str(held.state) == str(state_of(2.0)) and held.num_loads == 1
    assert type(held.state["best"]) is np.float32 and type(held.state["seen"]) is np.ndarray


def test_what_is_new_left_out_or_held_by_another_rank_is_told(root: Path) -> None:
    parts = StateParts(group=None, noun="callback ")
    for name in ("kept", "old", "empty"):
        parts.add(name, Holder({"table": torch.ones(3), "rows": 3}), of="run")
    save(root, parts)
    kept, empty = Holder({"rows": 0}), Holder({})
    again = StateParts(group=None, noun="callback ")
    for name, holder in (("kept", kept), ("new", Holder({})), ("empty", empty)):
        again.add(name, holder, of="run")
    assert restore(root, again) == [
        "callback old: left out from step 4 on",
        "callback new: begins at step 4, where it has no state",
        "callback empty: no rank has its tensor table of step 4 any more",
        "callback kept: no rank has its tensor table of step 4 any more",
    ]
    assert (kept.state, empty.num_loads) == ({"rows": 3}, 0)
