"""Models without memory: every part of a parameter has the bits that it has in the whole, whoever fills it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError
from slurm_train.models.first_weights import (
    NeedsMemoryError,
    begin_with,
    build_without_memory,
    fill,
    first_values,
)
from slurm_train.train.build import build_filled_model, build_model

CPU = torch.device("cpu")


class Sample(nn.Module):
    """Most ways in which constructors give their parameters values."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(40, 3000)
        self.cut_off = nn.Linear(30, 500)
        nn.init.trunc_normal_(self.cut_off.weight, std=0.5, a=-1.0, b=1.0)
        self.turning = nn.Linear(20, 20, bias=False)
        nn.init.orthogonal_(self.turning.weight)
        self.padded = nn.Embedding(50, 16, padding_idx=3)
        self.tied = nn.Linear(16, 50, bias=False)
        self.tied.weight = self.padded.weight
        self.scaled = nn.Parameter(torch.empty(300, 500).normal_() * 2)
        self.drawn = nn.Parameter(torch.randn(3, 3))
        self.copied = nn.Parameter(torch.empty(4))
        self.twin = copy.deepcopy(self.cut_off)
        self.lower = nn.Linear(6, 6).to("cpu").bfloat16()
        self.set = nn.Linear(5, 5)
        self.recurrent = nn.LSTM(5, 6)
        self.register_buffer("count", torch.empty(2).zero_())
        with torch.no_grad():
            self.copied.copy_(torch.arange(4.0))
            self.set.weight[1] = 0
            self.set.weight[torch.tensor([2, 3]), 1] = 7


def filled(build: Any = Sample, *, seed: int = 5) -> Any:
    torch.manual_seed(0)
    model = build_without_memory(build, seed=seed)
    fill([model], first_values(model), device=CPU)
    return model


def test_values_are_those_that_the_constructor_asks_for() -> None:
    model = filled()
    assert model.plain.weight.abs().max() <= 40**-0.5
    assert model.plain.weight.std().item() == pytest.approx((3 * 40) ** -0.5, 0.02)
    assert model.cut_off.weight.abs().max() <= 1.0 and model.cut_off.weight.std() > 0.4
    torch.testing.assert_close(model.turning.weight @ model.turning.weight.T, torch.eye(20))
    assert not model.padded.weight[3].any() and model.padded.weight[4].any()
    assert model.tied.weight is model.padded.weight
    assert model.scaled.std().item() == pytest.approx(2.0, 0.02)
    assert model.copied.tolist() == [0, 1, 2, 3] and model.count.tolist() == [0, 0]
    assert torch.equal(model.twin.weight, model.cut_off.weight) and model.twin.weight is not model.cut_off.weight
    assert model.lower.weight.dtype == torch.bfloat16
    assert not model.set.weight[1].any() and model.set.weight[2:4, 1].tolist() == [7, 7]
    assert model.recurrent(torch.ones(1, 2, 5))[0].shape == (1, 2, 6)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_every_part_has_the_bits_of_the_whole() -> None:
    whole = filled().state_dict()
    torch.manual_seed(0)
    for name, read in first_values(build_without_memory(Sample, seed=5)).items():
        tensor = whole[name]
        for parts in (1, 3, 7):
            for dim, size in enumerate(tensor.shape):
                for start in range(0, size, -(-size // parts)):
                    index = [slice(0, one) for one in tensor.shape]
                    index[dim] = slice(start, min(start + -(-size // parts), size))
                    assert read(tuple(index)).equal(tensor[tuple(index)]), (name, index)


def test_values_depend_on_seed_and_name_and_leave_other_random_numbers_alone() -> None:
    first, again, other = (filled(lambda: nn.ModuleList(nn.Linear(9, 9) for _ in range(2)), seed=s) for s in (5, 5, 6))
    assert first[0].weight.equal(again[0].weight)
    assert not first[0].weight.equal(other[0].weight) and not first[0].weight.equal(first[1].weight)
    # A part that is put before changes nothing: the name counts and not the order.
    longer = filled(lambda: nn.ModuleDict({"new": nn.Linear(3, 3), "0": nn.Linear(9, 9)}))
    assert longer["0"].weight.equal(first[0].weight)
    model, stream = build_without_memory(lambda: nn.Linear(9, 9), seed=5), torch.get_rng_state()
    fill([model], first_values(model), device=CPU)
    assert torch.get_rng_state().equal(stream)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.largest = self.layer.weight.max().item()


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, values = nn.ModuleList(nn.Linear(1, 2) for _ in range(2)), torch.zeros(2)
        for layer in self.layers:
            layer.bias.data.copy_(values.add_(1))


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scratch = nn.Linear(1, 1), torch.empty(3)


class Seeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", [Looks, Changes, Keeps, Seeds])
def test_what_cannot_be_recorded_is_built_in_memory_and_says_so(kind: type[nn.Module]) -> None:
    notes: list[str] = []
    config = RunConfig(model={"_target_": f"{__name__}.{kind.__name__}"}, seed=3)
    one, other = (build_model(config, note=notes.append) for _ in range(2))
    assert notes[0].startswith(f"each rank builds all of {__name__}.{kind.__name__} in host memory: ")
    assert not first_values(one)
    torch.manual_seed(3)
    expected = kind().state_dict()
    fill([one], {}, device=CPU)
    for model in (one, other):
        assert all(tensor.equal(expected[name]) for name, tensor in model.state_dict().items())


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))


def test_a_parameter_without_values_is_refused_unless_it_gets_others() -> None:
    with pytest.raises(ConfigError, match=r"weight is made by torch\.empty, and the model's constructor gives it"):
        filled(Forgets)
    values = torch.arange(6.0).reshape(2, 3)
    for model in (Forgets(), build_without_memory(Forgets, seed=0)):
        begin_with(model.weight, lambda index: values[index])
        fill([model], first_values(model), device=CPU)
        assert model.weight.equal(values)


def test_a_model_that_is_on_the_meta_device_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight is on the meta device, and nothing is known of its values"):
        first_values(nn.Linear(2, 2, device="meta"))


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 2, 3)
        self.to(memory_format=torch.channels_last)


class OldWeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.layer = nn.utils.weight_norm(nn.Linear(4, 4))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.layer = torch.jit.script(nn.Linear(4, 4))


@pytest.mark.parametrize("kind", [ChannelsLast, OldWeightNorm, Scripted])
def test_what_cannot_be_filled_in_is_built_in_memory(kind: type[nn.Module]) -> None:
    config = RunConfig(model={"_target_": f"{__name__}.{kind.__name__}"}, seed=3)
    model = build_filled_model(config, device=CPU)
    torch.manual_seed(3)
    expected = kind()
    for name, tensor in expected.state_dict().items():
        assert model.state_dict()[name].equal(tensor)
        assert model.state_dict()[name].stride() == tensor.stride()


def test_what_was_recorded_and_cannot_be_repeated_asks_for_memory() -> None:
    model = build_without_memory(lambda: nn.Linear(2, 2), seed=5)

    def fail(_: object) -> Tensor:
        raise RuntimeError("not here")

    with pytest.raises(NeedsMemoryError, match="RuntimeError: not here"):
        fill([model], dict.fromkeys(("weight", "bias"), fail), device=CPU)
