"""The formulas against torch: parameters exactly, kept tensors to the byte, peaks within a tenth."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from slurm_train.models import footprint
from slurm_train.models.cnn import CNN
from slurm_train.models.footprint import footprint_of
from slurm_train.models.gpt import GPT
from slurm_train.models.objective import Objective

GPT_TARGET = "slurm_train.models.gpt.GPT"
CNN_TARGET = "slurm_train.models.cnn.CNN"


def kept_bytes(model: nn.Module, batch: tuple[torch.Tensor, ...], *, half: bool) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, parameters and buffers aside."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=half),
    ):
        Objective(model)(*batch)
    return sum(seen.values())


GPTS = [
    {"context": 128},
    {"context": 32, "num_layers": 1, "num_heads": 2, "width": 32, "vocab_size": 1000},
    {"context": 64, "num_layers": 3, "num_heads": 8, "width": 64, "hidden": 96, "tied": False},
    # The forms of Llama and of GPT-2.
    {"context": 64, "num_heads": 8, "num_kv_heads": 2, "width": 64, "norm": "rmsnorm", "activation": "swiglu"},
    {"context": 64, "width": 64, "positions": "learned", "activation": "gelu_tanh", "bias": True},
]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kwargs", GPTS)
def test_a_gpt_keeps_what_the_formula_says(kwargs: dict[str, Any], half: bool) -> None:
    model = GPT(**kwargs)
    vocabulary = int(kwargs.get("vocab_size", 257))
    tokens = torch.randint(0, vocabulary, (3, kwargs["context"]))
    found = footprint_of({"_target_": GPT_TARGET, **kwargs}, batch_size=3, positions=None, half=half)
    assert found is not None
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert found.buffer_bytes == sum(one.nbytes for one in model.buffers())
    # The loss keeps one number of its own.
    assert kept_bytes(model, (tokens, tokens.clone()), half=half) - found.activation_bytes == 4


@pytest.mark.parametrize("kwargs", [{}, {"features": 16, "side": 16, "channels": 3, "num_classes": 7}])
def test_a_cnn_keeps_what_the_formula_says(kwargs: dict[str, Any]) -> None:
    model = CNN(**kwargs)
    shape = {"side": 8, "channels": 1, "num_classes": 10} | kwargs
    images = torch.rand(5, shape["channels"], shape["side"], shape["side"])
    labels = torch.randint(0, shape["num_classes"], (5,))
    found = footprint_of({"_target_": CNN_TARGET, **kwargs}, batch_size=5, positions=None, half=False)
    assert found is not None
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert kept_bytes(model, (images, labels), half=False) - found.activation_bytes == 4


def test_a_cnn_in_bfloat16_keeps_copies_beside_its_norms() -> None:
    model = {"_target_": CNN_TARGET}
    whole, half = (footprint_of(model, batch_size=5, positions=None, half=half) for half in (False, True))
    assert whole is not None and half is not None and half.activation_bytes > whole.activation_bytes


def test_fewer_positions_than_the_context_take_less() -> None:
    whole = footprint_of({"_target_": GPT_TARGET}, batch_size=2, positions=None, half=False)
    part = footprint_of({"_target_": GPT_TARGET}, batch_size=2, positions=64, half=False)
    assert whole is not None and part is not None
    assert part.activation_bytes * 4 == whole.activation_bytes and part.buffer_bytes == whole.buffer_bytes


@pytest.mark.parametrize(("model", "defaults"), [(GPT, footprint._GPT), (CNN, footprint._CNN)])
def test_the_defaults_are_those_of_the_constructors(model: type[nn.Module], defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(model.__init__).parameters
    assert {name: one.default for name, one in parameters.items() if name != "self"} == defaults


def test_of_another_model_nothing_is_known() -> None:
    assert footprint_of({"_target_": "my.Model"}, batch_size=1, positions=None, half=False) is None
