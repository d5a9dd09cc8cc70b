"""Scores are compared with targets by the loss that their types, shapes and ranges mean, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError
from slurm_train.models.objective import Objective
from slurm_train.models.own_loss import IGNORED
from slurm_train.models.scores import IGNORED_VALUE, default_loss, default_sums, require_values

CLASSES = torch.arange(32) % 10


class Given(nn.Module):
    """Gives the scores that belong to its inputs, by a layer that needs no training here."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def looked(layer: nn.Module, inputs: Tensor, targets: Tensor) -> str | None:
    """Returns what is said of a first batch, as before a first step."""
    objective, batch = Objective(Given(layer)), (inputs, targets)
    objective.choose(batch).check_batch(batch)
    return objective.scores.check_scores((inputs[:2], targets[:2]), targets)


# --- float targets ---


def test_float_targets_that_only_pad_a_sample_are_in_neither_sum_count_nor_gradient() -> None:
    outputs = torch.randn(3, 4, requires_grad=True)
    targets = torch.randn(3, 4, dtype=torch.float64)
    padded = targets.clone()
    padded[0, 2:] = padded[2, 1:] = IGNORED_VALUE
    kept = padded != IGNORED_VALUE
    loss, count = default_loss(outputs, padded)
    expected = functional.mse_loss(outputs[kept], targets[kept].float(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert count == 7
    torch.testing.assert_close(
        torch.autograd.grad(loss, outputs)[0], torch.where(kept, 2 * (outputs - targets.float()), 0)
    )
    # What stands for a value or for a fault counts, to the last bit.
    whole, wholly = default_loss(outputs, torch.full((3, 4), -100.0))
    assert (
        torch.equal(whole, functional.mse_loss(outputs, torch.full((3, 4), -100.0), reduction="sum")) and wholly == 12
    )
    assert default_loss(outputs, torch.full((3, 4), torch.nan))[0].isnan()


def mixed(targets: Tensor) -> Tensor:
    return 0.7 * targets + 0.3 * targets.roll(1, 0)


ONE_HOT = functional.one_hot(CLASSES, 10).float()
MASKS = functional.one_hot(torch.randint(0, 3, (4, 5, 5)), 3).movedim(-1, 1).float()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (0.9 * ONE_HOT + 0.01, "probabilities of classes"),
        (mixed(ONE_HOT), "probabilities of classes"),
        (torch.randn(4, 7, 6).softmax(-1), "probabilities of classes"),
        (torch.randn(4, 6).softmax(-1).bfloat16(), "probabilities of classes"),
        (mixed(MASKS), "over dimension 1"),
        (ONE_HOT, "one-hot rows"),
        (MASKS, "one-hot rows"),
    ],
    ids=["smoothed", "mixup", "teacher's", "in 16 bits", "masks of cutmix", "one-hot", "one-hot masks"],
)
def test_float_targets_that_are_probabilities_are_refused_with_both_losses_named(targets: Tensor, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        looked(nn.Identity(), torch.randn_like(targets), targets)
    assert "cross_entropy" in caught.value.hint and "square()" in caught.value.hint


@pytest.mark.parametrize(
    "targets",
    [
        torch.randn(8, 4),
        torch.rand(8, 4),
        torch.rand(8),
        torch.ones(8, 1),
        torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        ONE_HOT[:2],
        functional.normalize(torch.rand(8, 4), dim=1),
        torch.randn(8, 4).log_softmax(1),
        CLASSES[:8],
    ],
    ids=[
        "values",
        "0 to 1",
        "one value",
        "ones",
        "several labels",
        "two samples",
        "of length 1",
        "logarithms",
        "whole",
    ],
)
def test_other_float_targets_are_values(targets: Tensor) -> None:
    require_values(targets)


# --- where the classes are ---


def conv(dims: int) -> nn.Module:
    torch.manual_seed(3)
    return (nn.Conv1d if dims == 1 else nn.Conv2d)(4, 8, 1)


@pytest.mark.parametrize("shape", [(9,), (8,), (8, 8), (7, 8)], ids=str)
def test_classes_in_dimension_1_are_found_where_there_are_as_many_places(shape: tuple[int, ...]) -> None:
    layer, inputs, labels = conv(len(shape)), torch.randn(6, 4, *shape), torch.randint(0, 8, (6, *shape))
    labels[0, 0] = IGNORED
    objective, batch = Objective(Given(layer)), (inputs, labels)
    note = objective.scores.check_scores((inputs[:2], labels[:2]), labels)
    assert (note is not None and "dimension 1" in note) == (set(shape) == {8})
    scores = layer(inputs)
    torch.testing.assert_close(objective(batch)[0], functional.cross_entropy(scores, labels, reduction="sum"))
    assert objective.evaluation_sums(batch)["correct"] == (scores.argmax(1) == labels).sum()


def test_classes_of_a_text_model_are_last_where_there_are_as_many_places() -> None:
    tokens = torch.randint(0, 8, (6, 9))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    layer = nn.Embedding(8, 8)
    objective = Objective(Given(layer))
    assert "last dimension" in str(objective.scores.check_scores((inputs[:2], labels[:2]), labels))
    expected = functional.cross_entropy(layer(inputs).movedim(-1, 1), labels, reduction="sum")
    torch.testing.assert_close(objective((inputs, labels))[0], expected)


def test_the_reading_of_the_first_batch_holds_for_all_and_one_that_nothing_tells_is_refused() -> None:
    class Square(nn.Module):
        """Gives (n, 8, places) for inputs from which no place can be seen."""

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.unflatten(1, (8, -1))

    objective = Objective(Given(Square()))
    for places in (5, 8):
        inputs, labels = torch.randn(3, 8 * places), torch.randint(0, 8, (3, places))
        expected = functional.cross_entropy(inputs.view(3, 8, places), labels, reduction="sum")
        torch.testing.assert_close(objective((inputs, labels))[0], expected)
    with pytest.raises(ConfigError, match=r"\(2, 8, 8\) for whole-number targets of \(2, 8\)") as caught:
        looked(Square(), torch.randn(3, 64), torch.randint(0, 8, (3, 8)))
    assert "training_loss" in caught.value.hint


# --- labels and scores ---


@pytest.mark.parametrize(
    ("labels", "num_scores", "found", "hint"),
    [
        (CLASSES % 2, 1, ("0 to 1", "one score"), "binary_cross_entropy_with_logits"),
        (torch.zeros(32, dtype=torch.int64), 1, ("0 to 0", "one score"), "for each class"),
        (CLASSES, 5, ("0 to 9", "5 scores"), "10 scores"),
        (CLASSES - 1, 10, ("-1 to 8", "10 scores"), "labels == -1"),
        (CLASSES.masked_fill(CLASSES == 3, 255).to(torch.uint8), 10, ("0 to 255",), "labels == 255"),
        (CLASSES + 1, 10, ("1 to 10", "10 scores"), "labels - 1"),
        (CLASSES * 64 % 256, 2, ("0 to 192", "2 scores"), "-100"),
    ],
    ids=["one score", "one class", "too few scores", "-1", "255", "from 1", "grey values"],
)
def test_labels_without_a_score_are_refused_before_the_first_step(
    labels: Tensor, num_scores: int, found: tuple[str, ...], hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        looked(nn.Linear(4, num_scores), torch.randn(32, 4), labels)
    assert [word for word in found if word not in caught.value.message] == []
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("inputs", "targets", "hint"),
    [
        (torch.randn(4, 10), ONE_HOT[:4].long(), "several labels"),
        (torch.randn(4, 1), CLASSES[:4, None], "binary_cross_entropy_with_logits"),
        (torch.randn(4, 10), CLASSES[:4, None], "squeeze(1)"),
        (torch.randn(4, 3, 5, 5), torch.zeros(4, 1, 5, 5, dtype=torch.int64), "squeeze(1)"),
        (torch.randn(4, 10), CLASSES[:4].float(), "targets.long()"),
    ],
    ids=["several labels", "one score", "a column", "a mask with a channel", "classes as floats"],
)
def test_what_makes_the_shapes_fit_is_said(inputs: Tensor, targets: Tensor, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        looked(nn.Identity(), inputs, targets)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("layer", "is_said"),
    [
        (nn.Softmax(-1), True),
        (nn.Sequential(nn.Linear(10, 10), nn.Softmax(-1)), True),
        (nn.LogSoftmax(-1), False),
        (nn.Sigmoid(), False),
        (nn.ReLU(), False),
        (nn.Identity(), False),
    ],
    ids=str,
)
def test_scores_that_are_probabilities_are_remarked(layer: nn.Module, is_said: bool) -> None:
    torch.manual_seed(0)
    note = looked(layer, torch.randn(32, 10), CLASSES)
    assert (note is not None and "softmax" in note) == is_said


def test_a_softmax_in_evaluation_mode_alone_is_remarked_once() -> None:
    class Head(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            scores = super().forward(inputs)
            return scores if self.training else scores.softmax(-1)

    objective, batch = Objective(Given(Head(10, 10))), (torch.randn(8, 10), CLASSES[:8])
    assert objective.scores.check_scores(batch, None) is None
    objective.eval()
    assert "in evaluation mode" in str(objective.scores.check_scores(batch, None))
    assert objective.scores.check_scores(batch, None) is None


def test_equal_scores_of_a_head_that_begins_at_zero_are_not_remarked() -> None:
    head = nn.Linear(10, 4)
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, 0.25)
    assert looked(head, torch.randn(32, 10), CLASSES % 4) is None


def test_the_sums_of_healthy_batches_are_those_of_torch_to_the_last_bit() -> None:
    outputs, labels, targets = torch.randn(6, 5), torch.arange(6) % 5, torch.randn(6, 5)
    expected: Any = {
        "loss": functional.cross_entropy(outputs, labels, reduction="sum"),
        "count": torch.tensor(6),
        "correct": (outputs.argmax(-1) == labels).sum(),
    }
    assert default_sums(outputs, labels) == expected
    loss, count = default_loss(outputs, targets)
    assert torch.equal(loss, functional.mse_loss(outputs, targets, reduction="sum")) and count == 30
