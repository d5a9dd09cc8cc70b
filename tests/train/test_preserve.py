"""A model that is looked at is left as it was, with all that it refers to."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slurm_train.train.preserve import modes_kept, preserved


class Schedule:
    def __init__(self) -> None:
        self.calls, self.history = 0, [0.5]


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(2).eval()
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.schedule, self.shared = Schedule(), [1]
        self.also = {"shared": self.shared, "set": {1}, "queue": deque([1], maxlen=2), "array": np.zeros(2)}
        self.own = (random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1))
        self.kept = torch.zeros(2)
        self.number = 1


def set_number(model: Everything) -> None:
    model.number += 1


def add_attribute(model: Everything) -> None:
    model.cache = 3


def change_object(model: Everything) -> None:
    model.schedule.calls += 1
    model.schedule.history.append(1.0)


def replace_object(model: Everything) -> None:
    model.schedule = Schedule()


def change_containers(model: Everything) -> None:
    model.shared.append(2)
    model.also["set"].clear()
    model.also["queue"].append(5)
    model.also["array"] += 1
    model.also["new"] = 1


def change_parameters(model: Everything) -> None:
    with torch.no_grad():
        model.layer.weight.mul_(2)
    model.frozen.data.add_(1)


def replace_memory(model: Everything) -> None:
    model.frozen.data = model.frozen.data + 1


def replace_parameter(model: Everything) -> None:
    model.layer.weight = nn.Parameter(torch.zeros(2, 2))


def replace_buffer(model: Everything) -> None:
    model.norm.running_mean = model.norm.running_mean + 1


def change_tensor(model: Everything) -> None:
    model.kept.add_(1)


def change_modes(model: Everything) -> None:
    model.train()
    model.layer.eval()


def draw(model: Everything) -> None:
    python, numpy, own = model.own
    python.random()
    numpy.random()
    torch.rand(1, generator=own)
    random.random()
    np.random.rand()
    torch.rand(1)


def seen(model: Everything) -> Any:
    python, numpy, own = model.own
    return [
        *[tensor.tolist() for tensor in (*model.parameters(), *model.buffers(), model.kept)],
        [part.training for part in model.modules()],
        [model.number, hasattr(model, "cache"), model.schedule.calls, list(model.schedule.history)],
        [list(model.shared), model.also["shared"] is model.shared, set(model.also["set"]), list(model.also["queue"])],
        [model.also["array"].tolist(), list(model.also)],
        [python.getstate(), numpy.bit_generator.state, own.get_state().tolist()],
        [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()],
        [id(value) for value in (model.schedule, model.shared, model.layer.weight, model.norm.running_mean)],
        [model.frozen.data_ptr()],
    ]


CHANGES = [
    set_number,
    add_attribute,
    change_object,
    replace_object,
    change_containers,
    change_parameters,
    replace_memory,
    replace_parameter,
    replace_buffer,
    change_tensor,
    change_modes,
    draw,
]


@pytest.mark.parametrize("change", CHANGES)
def test_everything_is_put_back(change: Any) -> None:
    model = Everything()
    before = seen(model)
    with preserved(model):
        change(model)
        assert seen(model) != before
    assert seen(model) == before


def test_arrays_that_are_read_only_are_left_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.arange(3))
    model = nn.Linear(1, 1)
    model.mapped = np.load(tmp_path / "table.npy", mmap_mode="r")
    model.bytes = np.frombuffer(b"abc", dtype=np.uint8)
    with preserved(model):
        model.bytes = None
    assert model.mapped.tolist() == [0, 1, 2] and model.bytes.tolist() == [97, 98, 99]


def test_it_is_put_back_after_an_error() -> None:
    model = Everything()
    with pytest.raises(ValueError, match="stop"), preserved(model):
        model.number = 5
        raise ValueError("stop")
    assert model.number == 1


def test_a_module_that_is_held_in_evaluation_mode_stays_in_it() -> None:
    model = Everything()
    with modes_kept(model):
        model.train()
    assert not model.norm.training and model.layer.training
