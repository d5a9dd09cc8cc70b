"""States of a program's objects, as they are before a save and after a resume."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from slurm_train.checkpoint.tree import decode, encode, merge_state, split_state


def as_loaded(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested tensors as a checkpoint gives them: by names, in another order."""
    return {str(key): as_loaded(item) if isinstance(item, dict) else item for key, item in reversed(tensors.items())}


def parts_of(value: Any) -> Any:
    """Returns a state as something that can be compared, with all types."""
    if isinstance(value, dict):
        return [(key, parts_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value), *map(parts_of, value)]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return [type(value), value.dtype, value.tolist()]
    return value


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.array(3),
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(5)[::-1],
        np.uint64(2**63 + 5),
        np.random.default_rng(3).bit_generator.state,
        np.random.Generator(np.random.MT19937(1)).bit_generator.state,
        {3: torch.ones(2), (1, 2): torch.zeros(1), "count": 4, 1: np.ones(2)},
        [[torch.ones(1), (np.float32(2), {"inner": [torch.zeros(2)]})], 3, []],
        {"plain": [1, "two", None, b"three"]},
    ],
    ids=repr,
)
def test_a_state_comes_back_as_it_was(value: Any) -> None:
    tensors, values = split_state(encode({"state": value}))
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    merged = merge_state(torch.load(file, weights_only=True), as_loaded(tensors))
    assert parts_of(decode(merged)) == parts_of({"state": value})


@pytest.mark.parametrize("value", [np.array(["a", None], object), np.arange(3, dtype=">i4"), np.longdouble(1)])
def test_what_torch_has_no_type_for_is_left_as_it_is(value: Any) -> None:
    assert encode({"state": value})["state"] is value
