"""How convolutions are computed on a GPU: what is chosen, and that it changes the format and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from slurm_train.checkpoint.state import StagingBuffers, training_state
from slurm_train.models.cnn import CNN
from slurm_train.models.objective import Objective
from slurm_train.train.context import Rank
from slurm_train.train.convolutions import has_images, obstacle_to_channels_last, tune_convolutions
from slurm_train.train.device_copies import in_format, to_device
from slurm_train.train.inputs import ModelInputs


class Net(nn.Module):
    """Convolutions of the kinds whose formats are alike (one channel, one pixel), a norm with state, dropout."""

    def __init__(self, flatten: Callable[[Tensor], Tensor] = lambda x: x.flatten(1)) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.1), nn.Conv2d(8, 8, 1), nn.ReLU()
        )
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4 * 8 * 8, 5)
        self.flatten = flatten
        self.is_channels_last = False

    def forward(self, images: Tensor) -> Tensor:
        features = self.up(self.depthwise(self.layers(images)))
        self.is_channels_last = features.is_contiguous(memory_format=torch.channels_last)
        scores: Tensor = self.head(self.flatten(features))
        return scores


class Backward(torch.autograd.Function):
    """Fails in the backward pass alone where its input is not contiguous."""

    @staticmethod
    def forward(_ctx: Any, features: Tensor) -> Tensor:
        return features.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(memory_format=torch.channels_last).view(-1).view_as(gradients[0])


def batch(size: int = 2) -> tuple[Tensor, Tensor]:
    return torch.rand(size, 3, 4, 4), torch.arange(size)


def rank_of(**settings: Any) -> Rank:
    """Returns what is asked of a rank with a GPU."""
    facts: dict[str, Any] = {"autocast": torch.bfloat16, "replicated": True, "deterministic": False, "device": "cuda"}
    facts |= {"by_length": False, **settings}
    config = SimpleNamespace(
        train=SimpleNamespace(deterministic=facts["deterministic"]),
        batch=SimpleNamespace(by_length=facts["by_length"]),
    )
    return cast(
        "Rank",
        SimpleNamespace(
            config=config,
            device=torch.device(facts["device"]),
            layout=SimpleNamespace(is_replicated=facts["replicated"]),
            autocast=facts["autocast"],
        ),
    )


@pytest.fixture(autouse=True)
def benchmark_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.parametrize(
    ("settings", "model", "is_tuned", "image_format"),
    [
        ({}, Net, True, torch.channels_last),
        ({}, lambda: CNN(channels=3, side=4), True, torch.channels_last),
        ({}, lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5)), False, None),
        ({"deterministic": True}, Net, False, None),
        ({"device": "cpu"}, Net, False, None),
        ({"autocast": None}, Net, True, None),
        ({"replicated": False}, Net, True, None),
        ({"by_length": True}, Net, False, torch.channels_last),
    ],
    ids=["network", "included", "no convolution", "deterministic", "CPU", "float32", "shards", "shapes vary"],
)
def test_what_is_chosen_for_convolutions(
    settings: dict[str, Any], model: Callable[[], nn.Module], is_tuned: bool, image_format: Any
) -> None:
    rank = rank_of(**settings)
    inputs = ModelInputs(torch.device("cpu"))
    assert tune_convolutions(rank, Objective(model()), batch(), inputs=inputs) is None
    assert (torch.backends.cudnn.benchmark, inputs.image_format) == (is_tuned, image_format)


def test_a_model_that_needs_images_as_they_are_gets_them_and_a_line_says_so() -> None:
    rank = rank_of()
    model = Net(flatten=lambda features: features.view(len(features), -1))
    inputs = ModelInputs(torch.device("cpu"))
    note = tune_convolutions(rank, Objective(model), batch(), inputs=inputs)
    assert inputs.image_format is None
    assert note is not None and note.startswith("images stay as they are: Net cannot be computed with channels_last")
    assert "view size is not compatible" in note and note.endswith("write reshape in place of view")
    in_backward = Net(flatten=lambda features: cast("Any", Backward).apply(features).flatten(1))
    found = obstacle_to_channels_last(Objective(in_backward), batch(), autocast=None)
    assert found is not None and "view size is not compatible" in found


def test_the_trial_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = batch()
    numbers = torch.get_rng_state()
    assert obstacle_to_channels_last(Objective(model), samples, autocast=torch.bfloat16) is None
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_images_alone_are_laid_out_anew() -> None:
    images, labels = batch()
    masks = torch.zeros(2, 1, 4, 4, dtype=torch.int64)
    laid_out = to_device({"x": images, "labels": labels, "masks": masks}, torch.device("cpu"))
    assert isinstance(laid_out, dict) and laid_out["x"] is images
    laid_out = to_device(
        {"x": images, "labels": labels, "masks": masks}, torch.device("cpu"), image_format=torch.channels_last
    )
    assert isinstance(laid_out, dict)
    assert torch.equal(laid_out["x"], images) and laid_out["x"].stride() == (48, 1, 12, 3)
    assert laid_out["labels"] is labels and laid_out["masks"] is masks
    assert [has_images(samples) for samples in ((images, labels), (labels, labels), ([images], [labels]))] == [
        *(True, False, False)
    ]


def trained(image_format: torch.memory_format | None) -> tuple[Net, SGD]:
    torch.manual_seed(0)
    model = Net()
    # A mask of dropout is drawn in the order of the memory.
    model.layers[2] = nn.Identity()
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(3):
        samples: Any = batch(8)
        samples = samples[0], samples[1] % 5
        loss, _ = Objective(model)(samples if image_format is None else in_format(samples, image_format))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_training_gives_the_same_within_rounding_and_checkpoints_of_the_same_form() -> None:
    (plain, plain_optimizer), (model, optimizer) = trained(None), trained(torch.channels_last)
    assert model.is_channels_last and not plain.is_channels_last
    state, expected = training_state(model, optimizer), training_state(plain, plain_optimizer)
    assert state["model"].keys() == expected["model"].keys()
    for name, value in state["model"].items():
        assert value.stride() == expected["model"][name].stride(), name
        torch.testing.assert_close(value, expected["model"][name], rtol=1e-3, atol=1e-4)
    for name, values in state["optimizer"]["state"].items():
        assert values["momentum_buffer"].stride() == values["momentum_buffer"].contiguous().stride(), name
    staged = StagingBuffers(torch.device("cpu")).stage(state)
    other = Net()
    other.load_state_dict(staged["model"])
    assert all(torch.equal(value, state["model"][name]) for name, value in other.state_dict().items())
