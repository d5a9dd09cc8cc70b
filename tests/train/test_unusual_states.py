"""Models and optimizers that keep more, later or under other names than torch's own: a resume gives all of it back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slurm_train.checkpoint.save import save_checkpoint
from slurm_train.checkpoint.state import (
    add_later_state,
    extra_states,
    make_buffers,
    model_state,
    require_known_state,
    require_loadable_states,
    restore_model_state,
    restore_training_state,
    take_extra_states,
    training_state,
)
from slurm_train.checkpoint.training import MADE_BUFFERS
from slurm_train.config.schema import RunConfig
from slurm_train.errors import CheckpointError, ConfigError, RunError
from slurm_train.evaluation.evaluate_checkpoint import load_model, require_same_weights
from slurm_train.models.build import build_model
from tests.support.small_checkpoints import make_header
from tests.train.small_runs import assert_resumes_bit_for_bit, config_of, finish, start
from tests.train.small_training import FEATURES, Branches, DoubleGPT, Net
from tests.train.test_layouts import layout_config


class MakesBuffers(Net):
    """Makes a buffer in its first step, registers another one there, and lets a third grow with each step."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.register_buffer("centre", None)
        self.register_buffer("memory", torch.zeros(0, FEATURES))
        self.register_buffer("zeros", torch.zeros(1, FEATURES, dtype=torch.float64).expand(4, FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        mean = inputs.detach().mean(0)
        if self.training:
            if self.centre is None:
                self.centre = mean.clone()
                self.register_buffer("scale", torch.ones(FEATURES, dtype=torch.float64))
            self.centre = 0.9 * self.centre + 0.1 * mean
            self.scale.mul_(1.01)
            self.memory = torch.cat([self.memory, self.centre[None].float()])
        return super().forward((inputs - self.centre + self.zeros[0]) * self.scale + self.memory.mean(0))


class Selects(Branches):
    """Gives a `state_dict` for others: without a layer, and with rounded values under other names."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.register_buffer("seen", torch.tensor(0))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # as it is written by many
        weight = self.layers[0].weight
        return {"encoder.weight": weight.detach().half(), "layers.0.weight": weight.detach().half().double()}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        raise AssertionError("a checkpoint of the toolkit is not of this kind")

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += self.training
        return super().forward(inputs) * (1.0 + 0.01 * self.seen)


class MakesParameters(Net):
    """Makes a parameter in its first step, which no optimizer gets."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))
        return super().forward(inputs) * self.gain


class CountsInItsLastBlock(DoubleGPT):
    """Makes a buffer in the last block, which only the last stage of a pipeline has."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self.blocks[-1].register_forward_pre_hook(lambda block, _: block.register_buffer("seen", torch.ones(1)))


class LateState(torch.optim.Optimizer):
    """Makes a part of its state in its third step; keeps a list, at one parameter only, and a tensor in its groups."""

    def __init__(self, params: Any, lr: float = 0.1, **_others: Any) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["count"] = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        norms = self.state[first].setdefault("norms", [])
        norms.append(first.grad.norm())
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                direction = parameter.grad * (1 + float(norms[len(norms) // 2]))
                if group["count"] == 3:
                    self.state[parameter]["late"] = {"mean": parameter.grad.clone(), "at": 3}
                if group["count"] >= 3:
                    direction += self.state[parameter]["late"]["mean"].lerp_(parameter.grad, 0.1)
                parameter.add_(direction, alpha=-group["lr"] / float(group["count"]))


class LateRows(torch.optim.Optimizer):
    """Keeps a number for each row of a matrix from its third step on."""

    def __init__(self, params: Any, lr: float = 0.1, **_others: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"] + self.param_groups[1]["params"]:
            kept = self.state[parameter]
            kept["count"] = kept.get("count", 0) + 1
            direction = parameter.grad
            if parameter.dim() == 2 and kept["count"] >= 3:
                rows = direction.mean(dim=1)
                kept["rows"] = kept["rows"].lerp(rows, 0.3) if "rows" in kept else rows
                direction = direction + kept["rows"][:, None]
            parameter.add_(direction, alpha=-0.1)


class OfItsRank(torch.optim.SGD):
    """Keeps another number under one name on each rank."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["part"] = parameter.detach()[:1] + torch.distributed.get_rank()
        return super().step(closure)


class Lookahead(torch.optim.SGD):
    """Has a number of its own in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow_steps": 3}


@pytest.mark.distributed
def test_what_a_model_and_an_optimizer_make_later_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    model = {"_target_": f"{__name__}.MakesBuffers"}
    assert_resumes_bit_for_bit(tmp_path, config_of(model=model, optim={"_target_": f"{__name__}.LateState"}))


class Centred(Net):
    """Has a buffer in its own type, which a number in bfloat16 takes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs - self.mean)


@pytest.mark.distributed
def test_a_buffer_that_shards_in_bfloat16_do_not_go_with_is_explained(tmp_path: Path) -> None:
    model = {"_target_": f"{__name__}.Centred"}
    config = config_of(model=model, parallel={"dp_shard": 2, "gather_dtype": "bfloat16"})
    _, text = finish(start(tmp_path / "run", config))
    assert "e.g. that of a buffer: cast it to the type of the inputs, buffer.to(x.dtype); or set parallel." in text
    assert "in forward" in text, "the line of the model"


class SparseNet(Net):
    """Looks up a row of a table, whose gradients are sparse."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.table = nn.Embedding(9, FEATURES, sparse=True).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + self.table((inputs[:, 0] > 0).long()))


@pytest.mark.distributed
def test_a_model_with_sparse_gradients_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    model = {"_target_": f"{__name__}.SparseNet"}
    assert_resumes_bit_for_bit(tmp_path, config_of(model=model, optim={"_target_": "torch.optim.SGD", "momentum": 0.9}))


@pytest.mark.distributed
def test_what_an_optimizer_makes_later_is_cut_as_its_parameters_are(tmp_path: Path) -> None:
    optim = {"_target_": f"{__name__}.LateRows"}
    assert_resumes_bit_for_bit(tmp_path, config_of(optim=optim, parallel={"dp_shard": 2}))


@pytest.mark.distributed
def test_what_a_state_dict_leaves_out_and_what_is_never_used_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    model = {"_target_": f"{__name__}.Selects"}
    assert_resumes_bit_for_bit(tmp_path, config_of(model=model, ddp={"find_unused_parameters": True}))


@pytest.mark.distributed
def test_a_parameter_that_the_first_step_makes_is_refused(tmp_path: Path) -> None:
    config = config_of(model={"_target_": f"{__name__}.MakesParameters"}, train={"max_steps": 2})
    codes, text = finish(start(tmp_path / "run", config, ranks=1))
    assert codes != [0]
    assert "the first step has made parameters that the optimizer does not have: gain" in text


@pytest.mark.distributed
def test_an_optimizer_that_keeps_a_part_on_each_rank_is_refused(tmp_path: Path) -> None:
    config = config_of(optim={"_target_": f"{__name__}.OfItsRank"}, train={"max_steps": 2})
    codes, text = finish(start(tmp_path / "run", config, ranks=2))
    assert codes != [0, 0]
    assert "the optimizer keeps another part of optimizer.state." in text


@pytest.mark.distributed
def test_a_buffer_that_the_first_step_makes_in_one_stage_is_refused(tmp_path: Path) -> None:
    config = layout_config({"pp": 2}, max_steps=3, tied=False)
    config["model"]["_target_"] = f"{__name__}.CountsInItsLastBlock"
    codes, text = finish(start(tmp_path / "run", config, ranks=2))
    assert codes != [0, 0]
    assert "CountsInItsLastBlock keeps statistics (blocks.3.seen) that stages do not share" in text


def test_a_parameter_without_a_shape_is_refused() -> None:
    config = RunConfig(model={"_target_": "torch.nn.LazyLinear", "out_features": 3})
    with pytest.raises(ConfigError, match=r"2 parameters of torch.nn.LazyLinear get their shapes in the first forward"):
        build_model(config)


class InFloat(torch.optim.Optimizer):
    """Keeps moments in float32 of parameters in bfloat16."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            if not kept:
                kept["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
                kept["parts"] = [torch.zeros(3)]
            kept["mean"].lerp_(parameter.grad.float(), 0.3)


def test_moments_keep_their_number_type() -> None:
    model, other = nn.Linear(4, 3).bfloat16(), nn.Linear(4, 3).bfloat16()
    optimizer, other_optimizer = InFloat(model.parameters()), InFloat(other.parameters())
    model(torch.randn(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    restore_training_state(other, other_optimizer, copy.deepcopy(training_state(model, optimizer)))
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert theirs["parts"][0].dtype == theirs["mean"].dtype == torch.float32
        assert torch.equal(mine["mean"], theirs["mean"])


class Packed(Tensor):
    """A tensor that holds another one, as quantized weights do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Packed:
        packed: Packed = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        packed.inner = inner
        return packed

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *_others: Any) -> Packed:
        return Packed(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*tree_map(lambda value: value.inner if isinstance(value, Packed) else value, args))
        return Packed(result) if isinstance(result, Tensor) else result


def test_a_quantized_weight_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(Packed(torch.ones(2, 2)), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"weight is a Packed of .*, which checkpoints cannot have"):
        require_loadable_states(model)


def test_a_quantized_state_of_an_optimizer_is_refused_by_name() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"momentum_buffer": Packed(torch.zeros(1))}
    with pytest.raises(CheckpointError, match="SGD keeps momentum_buffer as a Packed, which checkpoints cannot have"):
        require_known_state(optimizer)


def test_what_belongs_to_no_parameter_or_has_no_name_is_refused() -> None:
    weight = torch.zeros(1, requires_grad=True)
    require_known_state(torch.optim.SGD([weight]))
    optimizer = Lookahead([weight])
    optimizer.state["whole"] = 1
    optimizer.state[weight] = {"parts": {0: 1}}
    with pytest.raises(CheckpointError, match=r"keeps slow_steps, state\['whole'\], state\[...\]\[0\] beside"):
        require_known_state(optimizer)


def test_a_state_dict_of_a_users_own_takes_nothing_from_a_checkpoint() -> None:
    model, other = Selects(), Selects()
    state = model_state(model)
    assert state.keys() == {"seen", *(name for name, _ in model.named_parameters())}
    assert state["layers.0.weight"].data_ptr() == model.layers[0].weight.data_ptr()
    restore_model_state(other, state)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.parameters(), model.parameters(), strict=True))


class Counts(Selects):
    """Keeps a buffer that the training makes, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", None)
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_the_weights_of_a_checkpoint_are_read_whatever_a_state_dict_gives(tmp_path: Path) -> None:
    model = Counts()
    model.centre = torch.arange(3.0)
    model.count = 7
    tensors = model_state(model)
    take_extra_states(tensors)
    header = make_header(1, extra={MADE_BUFFERS: ["centre"]})
    rank_state = {"extra": extra_states(model)}
    saved = save_checkpoint(
        tmp_path, tensors={"model": tensors}, rank_state=rank_state, header=header, group=None, keep=1
    )
    path = saved.path
    torch.manual_seed(1)
    other = Counts()
    require_same_weights(other, path)
    load_model(other, path)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.parameters(), model.parameters(), strict=True))
    assert torch.equal(other.centre, model.centre) and other.count == 7
    with pytest.raises(RunError, match="do not fit the model as it is now"):
        require_same_weights(nn.Linear(2, 2), path)


def test_only_what_training_has_made_gets_another_shape() -> None:
    model = nn.BatchNorm1d(3)
    saved = {"running_mean": torch.zeros(5), "running_var": torch.zeros(5), "other.name": torch.zeros(1)}
    make_buffers(model, ["running_mean", "other.name"], saved=saved)
    assert (model.running_mean.shape, model.running_var.shape) == ((5,), (3,))


def test_state_that_is_there_already_is_not_replaced() -> None:
    weight = torch.zeros(2)
    kept = {"w": {"mean": weight, "q": None, "step": 1}}
    entries = {("mean",): (2,), ("q", 0): (3,), ("q", 1): (3,), ("step",): None, ("late",): None}
    paths = {".".join(map(str, key)): ("optimizer", "state", "w", *key) for key in entries}
    paths["others"] = ("optimizer", "state", "frozen", "mean")
    saved = {
        f"optimizer.state.w.{name}": torch.zeros(shape)
        for name, shape in zip(paths, entries.values(), strict=False)
        if shape
    }
    add_later_state(kept, parameters={"w": weight}, paths=paths, saved=saved, cuts={})
    assert kept["w"]["mean"] is weight
    assert [part.shape for part in kept["w"]["q"]] == [(3,), (3,)]
    assert {name: kept["w"][name] for name in ("step", "late")} == {"step": 1, "late": None}
    assert kept.keys() == {"w"}
