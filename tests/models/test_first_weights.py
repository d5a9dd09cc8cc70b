"""First weights: every part of a parameter has the bits that it has in the whole, whoever fills it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError
from slurm_train.models import first_weights
from slurm_train.models.build import build_filled_model, build_model, build_names_and_shapes
from slurm_train.models.cnn import CNN
from slurm_train.models.first_weights import (
    begin_with,
    build_in_host_memory,
    build_without_memory,
    defines_init_weights,
    fill,
    first_values,
    is_without_memory,
    without_memory,
)
from slurm_train.models.gpt import GPT
from slurm_train.models.host_memory import available_bytes

CPU = torch.device("cpu")


class Sample(nn.Module):
    """Parameters of several sizes and kinds, a tied one and a buffer."""

    def __init__(self, *, later: int = 0) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(2, 2) for _ in range(later))
        self.plain = nn.Linear(40, 3000)
        self.embedding = nn.Embedding(50, 16)
        self.tied = nn.Linear(16, 50, bias=False)
        self.tied.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.lower = nn.Linear(6, 6).bfloat16()
        self.register_buffer("count", torch.arange(2))

    def init_weights(self, name: str, part: Tensor) -> None:
        if part.dim() == 2:
            nn.init.kaiming_uniform_(part, a=math.sqrt(5))
        else:
            nn.init.constant_(part, 2.0)


def filled(build: Any = Sample, *, seed: int = 5) -> Any:
    model = build_without_memory(build, seed=seed)
    assert all(parameter.is_meta for parameter in model.parameters())
    fill([model], first_values(model), device=CPU)
    return model


def test_the_method_gives_the_values() -> None:
    model = filled()
    assert model.plain.weight.abs().max() <= 40**-0.5
    assert model.plain.weight.std().item() == pytest.approx((3 * 40) ** -0.5, 0.02)
    assert model.plain.bias.tolist() == [2.0] * 3000 and model.scale.item() == 2.0
    assert model.tied.weight is model.embedding.weight
    assert model.lower.weight.dtype == torch.bfloat16
    assert model.count.tolist() == [0, 1]
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_every_part_has_the_bits_of_the_whole() -> None:
    whole = filled().state_dict()
    for name, read in first_values(build_without_memory(Sample, seed=5)).items():
        tensor = whole[name]
        for num_parts in (1, 3, 7):
            for dim, size in enumerate(tensor.shape):
                step = -(-size // num_parts)
                for start in range(0, size, step):
                    index = [slice(0, length) for length in tensor.shape]
                    index[dim] = slice(start, min(start + step, size))
                    assert read(tuple(index)).equal(tensor[tuple(index)]), (name, index)


def test_values_depend_on_seed_and_name_and_leave_other_random_numbers_alone() -> None:
    first = filled().plain.weight
    assert first.equal(filled().plain.weight)
    assert not first.equal(filled(seed=6).plain.weight)
    # A part that is put before changes nothing: the name counts and not the order.
    assert first.equal(filled(lambda: Sample(later=2)).plain.weight)
    model = build_without_memory(Sample, seed=5)
    stream = torch.get_rng_state()
    fill([model], first_values(model), device=CPU)
    assert torch.get_rng_state().equal(stream)


@pytest.mark.parametrize(
    ("kind", "name", "first"),
    [
        (GPT, "embedding.weight", [0.01349661, -0.00754674, 0.04273753]),
        (GPT, "blocks.0.attention.out.weight", [0.00707280, -0.00281060, 0.00050946]),
        (GPT, "blocks.3.attention_norm.weight", [1.0, 1.0, 1.0]),
        (CNN, "layers.0.weight", [0.08581682, 0.09846775, 0.02858730]),
        (CNN, "layers.12.bias", [-0.00629240, 0.02823492, -0.00096095]),
        (CNN, "layers.1.bias", [0.0, 0.0, 0.0]),
    ],
)
def test_the_included_models_begin_with_the_numbers_of_recorded_runs(kind: Any, name: str, first: list[float]) -> None:
    config = RunConfig(model={"_target_": f"{kind.__module__}.{kind.__name__}"}, seed=7)
    model = build_filled_model(config, device=CPU)
    assert model.get_parameter(name).flatten()[:3].tolist() == pytest.approx(first, rel=1e-4)


class Derived(GPT):
    """Adds what the method of its base knows nothing of."""


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.largest = self.layer.weight.max().item()
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.ones_(self.layer.bias)


@pytest.mark.parametrize(
    ("target", "expected"),
    [(GPT, True), (CNN, True), (Sample, True), (Derived, False), (Calls, False), (nn.Linear, False), (filled, False)],
)
def test_the_class_itself_has_to_define_the_method(target: Any, expected: bool) -> None:
    assert defines_init_weights(target) == expected


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


@pytest.mark.parametrize("kind", [Calls, ChannelsLast, OldWeightNorm, Scripted])
def test_any_other_model_is_built_as_it_is_written(kind: type[nn.Module]) -> None:
    notes: list[str] = []
    config = RunConfig(model={"_target_": f"{__name__}.{kind.__name__}"}, seed=3)
    built = build_model(config, note=notes.append)
    assert len(notes) == 1 and f"{__name__}.{kind.__name__} in host memory" in notes[0]
    torch.manual_seed(3)
    expected = kind().state_dict()
    for model in (built, build_filled_model(config, device=CPU)):
        assert not first_values(model)
        for name, tensor in model.state_dict().items():
            assert tensor.equal(expected[name]) and tensor.stride() == expected[name].stride()
    assert {name: tensor.shape for name, tensor in build_names_and_shapes(config).state_dict().items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


class Large(nn.Module):
    def __init__(self, *, allocates: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 << 50 if allocates else 1 << 20))


def test_a_model_that_does_not_fit_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_weights, "available_bytes", lambda: 1 << 24)
    build_in_host_memory(Large, name="mine.Large", ranks_on_node=4)
    with pytest.raises(ConfigError) as caught:
        build_in_host_memory(Large, name="mine.Large", ranks_on_node=8)
    assert "mine.Large" in str(caught.value) and "8 ranks" in str(caught.value)
    assert "init_weights(self, name, part)" in str(caught.value)
    with pytest.raises(ConfigError, match="can't allocate memory"):
        build_in_host_memory(lambda: Large(allocates=True), name="mine.Large", ranks_on_node=1)
    # The hook is gone.
    Large()


def test_free_memory_is_what_the_tightest_group_leaves(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:    1000 kB\n")
    assert available_bytes(tmp_path) == 1000 * 1024
    write("proc/self/cgroup", "0::/job_1/step_0\n")
    for group, limit in (("job_1", "9000"), ("job_1/step_0", "max")):
        write(f"sys/fs/cgroup/{group}/memory.max", limit)
        write(f"sys/fs/cgroup/{group}/memory.current", "5000\n")
        write(f"sys/fs/cgroup/{group}/memory.stat", "anon 1\ninactive_file 300\n")
    assert available_bytes(tmp_path) == 4300
    write("proc/self/cgroup", "3:cpu,cpuacct:/a\n2:memory:/slurm/job_1\n0::/\n")
    write("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "700\n")
    write("sys/fs/cgroup/memory/slurm/memory.usage_in_bytes", "800\n")
    write("sys/fs/cgroup/memory/slurm/memory.stat", "total_inactive_file 50\n")
    assert available_bytes(tmp_path) == 0


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))

    def init_weights(self, name: str, part: Tensor) -> None:
        pass


def test_a_parameter_that_the_method_leaves_out_is_refused_unless_it_gets_others() -> None:
    with pytest.raises(ConfigError, match=r"Forgets.*gives no values to weight"):
        filled(Forgets)
    values = torch.arange(6.0).reshape(2, 3)
    for model in (Forgets(), build_without_memory(Forgets, seed=0)):
        begin_with(model.weight, lambda index: values[index])
        fill([model], first_values(model), device=CPU)
        assert model.weight.equal(values)


def test_a_model_that_is_on_the_meta_device_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight is on the meta device, and nothing is known of its values"):
        first_values(nn.Linear(2, 2, device="meta"))


def test_a_parameter_in_two_places_stays_one_and_nothing_is_left_behind() -> None:
    shared = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ZeroDivisionError), without_memory():
        assert is_without_memory()
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first.weight = shared
        second.weight = shared
        assert first.weight is second.weight and first.weight.is_meta
        raise ZeroDivisionError
    assert not is_without_memory() and not nn.Linear(2, 2).weight.is_meta
