"""What torch says of a batch without naming the cause gets the cause, and other errors keep their words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_train.models.failures import cause_in_batch
from slurm_train.models.objective import Objective


class Net(nn.Module):
    """A batch norm and a layer, with labels that the model scores itself where it gets them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


LABELS = torch.tensor([0, 1, 2, 4])


def raised(layer: nn.Module, batch: Any) -> BaseException:
    with pytest.raises((RuntimeError, ValueError, IndexError)) as caught:
        Objective(Net(layer))(batch)
    return caught.value


@pytest.mark.parametrize(
    ("layer", "batch", "words"),
    [
        (nn.Linear(3, 5), (torch.randn(4, 3).double(), LABELS), ("float64 (4, 3)", "float32", "x.float() from")),
        (nn.Linear(3, 5), (torch.ones(4, 3, dtype=torch.uint8), LABELS), ("uint8", "/ 255")),
        (nn.Conv1d(3, 5, 1), (torch.ones(4, 3, 2, dtype=torch.uint8), LABELS), ("uint8", "/ 255")),
        (nn.Conv1d(3, 5, 1), (torch.ones(4, 3, 2).double(), LABELS), ("float64", "x.float()")),
        (nn.Linear(3, 5), (torch.ones(4, 3, dtype=torch.int64), LABELS), ("int64", "x.float()")),
        (nn.Linear(3, 4), (torch.randn(4, 3), LABELS), ("0 to 4", "Target 4 is out of bounds")),
        (nn.BatchNorm1d(3), (torch.randn(1, 3), LABELS[:1]), ("one sample", "batch.local_size")),
    ],
    ids=["float64", "bytes", "images of bytes", "float64 images", "whole numbers", "labels", "one sample"],
)
def test_the_cause_is_in_the_batch(layer: nn.Module, batch: Any, words: tuple[str, ...]) -> None:
    cause = cause_in_batch(raised(layer, batch))
    assert cause is not None
    assert [word for word in words if word not in str(cause)] == []


def test_other_errors_keep_their_words() -> None:
    class Inside(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(inputs, torch.ones(5, 3, dtype=torch.float64))

    batch = (torch.randn(4, 3), LABELS)
    assert cause_in_batch(raised(Inside(), batch)) is None
    assert cause_in_batch(raised(nn.Linear(4, 5), batch)) is None
    assert cause_in_batch(raised(nn.BatchNorm1d(4), batch)) is None
    assert cause_in_batch(ValueError("Expected more than 1 value per channel when training")) is None
