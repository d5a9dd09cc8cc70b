"""The state of a model by names that are found out once, and again where the model is another one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_train.checkpoint import division
from slurm_train.checkpoint.division import Division
from slurm_train.checkpoint.state import extra_states, model_state, names_of_groups, structure_of, training_state
from slurm_train.checkpoint.switches import Switches
from slurm_train.checkpoint.tree import leaves_of


class Small(nn.Module):
    """Parameters in modules, one of them twice, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4), persistent=False)


class Counted(nn.Module):
    """A module with a state of its own."""

    def get_extra_state(self) -> int:
        return 5

    def set_extra_state(self, _state: int) -> None: ...


def replace_weight(model: Small) -> None:
    model.first.weight = nn.Parameter(torch.ones(4, 4))


def replace_buffer(model: Small) -> None:
    model.mean = torch.ones(4)


def grow_buffer(model: Small) -> None:
    model.mean.resize_(6)


def give_other_memory(model: Small) -> None:
    model.first.bias.data = torch.full((4,), 7.0)


def swap(model: Small) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def save_table(model: Small) -> None:
    model._non_persistent_buffers_set.clear()


def rename(model: Small) -> None:
    model.other = model.tied
    del model.tied


CHANGES: list[Callable[[Small], Any]] = [
    replace_weight,
    replace_buffer,
    grow_buffer,
    give_other_memory,
    swap,
    save_table,
    rename,
    lambda model: model.add_module("more", nn.Linear(2, 2)),
    lambda model: model.add_module("counted", Counted()),
    lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(2))),
    lambda model: model.first.register_parameter("bias", None),
    lambda model: model.blocks.__delitem__(2),
    lambda model: model.eval(),
]


def described(model: nn.Module) -> Any:
    tensors = {name: (value, getattr(value, "data_ptr", int)()) for name, value in model_state(model).items()}
    return {
        "tensors": {name: (str(value), place) for name, (value, place) in tensors.items()},
        "buffers": structure_of(model).buffer_shapes,
        "extra": extra_states(model),
        "switches": Switches(model, has_modes=True).at_start,
    }


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_saved_as_it_is_now(change: Callable[[Small], Any]) -> None:
    model = Small()
    before = described(model)
    assert described(model) == before
    change(model)
    found = described(model)
    assert found != before
    # A model of which nothing was found out before; it has the same tensors.
    fresh = copy.copy(model)
    assert fresh is not model and described(fresh) == found


def test_a_state_dict_that_gives_other_values_is_not_asked_for_them() -> None:
    model = Small()
    before = described(model)
    vars(model)["state_dict"] = lambda **_: {"first.weight": torch.full((4, 4), 9.0)}
    assert described(model) == before
    del model.state_dict
    model.register_state_dict_post_hook(lambda _module, given, *_: given.update(mean=torch.full((4,), 9.0)))
    assert described(model) == before


def test_names_are_found_out_once_for_all_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    model.first(torch.ones(4)).sum().backward()
    optimizer.step()
    first = training_state(model, optimizer)
    switches = Switches(model, has_modes=True)
    walked: list[str] = []
    for name in ("named_modules", "named_parameters", "state_dict"):
        usual = getattr(nn.Module, name)
        monkeypatch.setattr(nn.Module, name, lambda *a, u=usual, n=name, **k: (walked.append(n), u(*a, **k))[1])
    optimizer.param_groups[0]["lr"] = 0.5
    second = training_state(model, optimizer)
    structure = structure_of(model)
    assert structure.buffer_shapes == {"mean": (4,)}
    assert not switches.changed() and names_of_groups(model, optimizer)
    assert not walked
    assert second["optimizer"]["param_groups"][0]["lr"] == 0.5
    pairs = zip(leaves_of(first), leaves_of(second), strict=True)
    same = [(one, other) for (path, one), (again, other) in pairs if path == again and isinstance(one, Tensor)]
    assert len(same) == len(list(leaves_of(first["model"]))) + 6
    assert all(one.data_ptr() == other.data_ptr() for one, other in same)


def test_what_was_found_out_keeps_no_model_alive() -> None:
    model = Small()
    model_state(model)
    gone = weakref.ref(model.blocks[0].weight)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_held_is_described_again_where_it_differs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    usual = division.describe
    monkeypatch.setattr(division, "describe", lambda *a, **k: (calls.append(a), usual(*a, **k))[1])
    one = Division(group=None)

    def agree(**tensors: Any) -> int:
        before = len(calls)
        agreed = one.agree({"model": tensors}, values={"callback": {"count": len(calls)}})
        assert agreed.tensors == Division(group=None).agree({"model": tensors}, values={}).tensors
        return len(calls) - before - 1

    long = torch.zeros(1000)
    assert agree(a=long, b=torch.zeros(2, 3)) == 1
    assert agree(a=torch.ones(1000), b=torch.zeros(2, 3)) == 0
    for other in (
        {"a": long, "c": torch.zeros(2, 3)},
        {"a": long, "b": torch.zeros(3, 2)},
        {"a": long, "b": torch.zeros(3, 2).half()},
        {"a": long, "b": 5},
        {"a": long, "b": {"c": 5}},
        {"a": long},
    ):
        assert agree(**other) == 1, other
        assert agree(**other) == 0, other
