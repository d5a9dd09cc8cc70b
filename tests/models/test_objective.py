from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError
from slurm_train.models.failures import call_in
from slurm_train.models.objective import Objective
from slurm_train.models.own_loss import IGNORED
from slurm_train.models.scores import default_loss, default_sums


class Given(nn.Module):
    """Gives what it is made with, or its input."""

    def __init__(self, given: Any = None) -> None:
        super().__init__()
        self.given = given

    def forward(self, inputs: Tensor) -> Any:
        return inputs if self.given is None else self.given


def numbers(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


def own(**methods: Any) -> Objective:
    """Returns the objective of a model with these methods, which are given the batch."""
    named = {name: lambda _, batch, give=give: give(batch) for name, give in methods.items()}
    return Objective(type("Own", (nn.Module,), named)())


def test_parts_of_a_batch_add_up_to_the_cross_entropy_of_what_counts() -> None:
    logits, labels = torch.randn(10, 7, 5), torch.randint(0, 5, (10, 7))
    labels[3:6, 2:] = IGNORED
    kept = labels != IGNORED
    expected = functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    parts = [default_sums(logits[part], labels[part]) for part in (slice(0, 4), slice(4, 10))]
    loss, count, correct = (sum(part[key] for part in parts) for key in ("loss", "count", "correct"))
    torch.testing.assert_close(loss, expected)
    assert (count, correct) == (55, (logits.argmax(-1) == labels)[kept].sum())
    torch.testing.assert_close(Objective(Given())((logits, labels))[0], expected)


def test_nothing_to_count_is_zero_and_float_targets_give_the_squared_error() -> None:
    ignored = torch.full((2,), IGNORED)
    assert numbers(default_sums(torch.randn(2, 5), ignored)) == {"loss": 0, "count": 0, "correct": 0}
    outputs, targets = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert numbers(default_sums(outputs, targets)) == {"loss": 5, "count": 2}


def test_classes_may_stand_second_as_in_torch_and_low_precision_gives_a_float32_loss() -> None:
    logits, labels = torch.randn(2, 5, 3, 4).bfloat16(), torch.randint(0, 5, (2, 3, 4))
    loss, count = default_loss(logits, labels)
    torch.testing.assert_close(loss, functional.cross_entropy(logits.float(), labels, reduction="sum"))
    assert count == 24


def test_a_model_may_bring_its_own_loss_and_sums_as_tensors_or_numbers() -> None:
    batch = (torch.ones(3),)
    for count in (3, torch.tensor(3)):
        objective = own(training_loss=lambda batch, count=count: (2 * batch[0].sum(), count))
        assert [one.item() for one in objective(batch)] == [6, 3]
        assert numbers(objective.evaluation_sums(batch)) == {"loss": 6, "count": 3}
    sums = {"loss": 3.0, "count": torch.tensor(1), "blue": 2}
    assert numbers(own(evaluation_sums=lambda _: sums).evaluation_sums(batch)) == {"loss": 3, "count": 1, "blue": 2}


NOT_A_SUM = ", not the sum of the loss as a scalar tensor and the number of items"


@pytest.mark.parametrize(
    ("method", "made", "message"),
    [
        (
            "training_loss",
            (torch.zeros(4), torch.tensor(4)),
            f"Own.training_loss gave (tensor of (4,), tensor of ()){NOT_A_SUM}",
        ),
        ("training_loss", (1.0, 4), f"Own.training_loss gave (float, int){NOT_A_SUM}"),
        (
            "evaluation_sums",
            {"loss": torch.tensor(1.0)},
            "Own.evaluation_sums gave dict with loss, not a dict with loss and count",
        ),
    ],
)
def test_what_an_own_loss_must_not_return_is_refused(method: str, made: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own(**{method: lambda _: made}).evaluation_sums((torch.zeros(4, 1), torch.zeros(4, 1)))
    assert caught.value.message == message


LABELS = torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("output", "batch", "message"),
    [
        (None, (torch.zeros(4, 3), LABELS), "the model gave (4, 3) for whole-number targets of (5,)"),
        (None, (torch.zeros(4, 3), torch.zeros(4)), "the model gave (4, 3) for targets of (4,)"),
        (None, (torch.zeros(2),), "a batch of 1 tensors has no"),
        ((torch.zeros(2, 3), None), (torch.zeros(2, 4), LABELS[:2]), "Given gave a tuple, not a tensor of scores"),
    ],
)
def test_what_cannot_be_scored_is_refused(output: Any, batch: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Objective(Given(output))(batch)
    assert message in caught.value.message


class Scores(nn.Module):
    """Gives the same scores for any tokens, in an object as models of transformers do."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.logits[: len(input_ids)])


TOKENS = torch.tensor([[1, 2, 3, 4], [2, 0, 4, 1]])
MASKED = torch.tensor([[IGNORED, 2, 3, 4], [2, 0, 4, IGNORED]])
AHEAD = torch.tensor([[2, 3, 4, 0], [0, 4, 1, IGNORED]])
OTHERS = torch.tensor([[0, 1, 1, 0], [1, 0, 0, IGNORED]])


@pytest.mark.parametrize(
    ("labels", "targets"),
    [
        (TOKENS, [[2, 3, 4, IGNORED], [0, 4, 1, IGNORED]]),
        (MASKED, [[2, 3, 4, IGNORED], [0, 4, IGNORED, IGNORED]]),
        (AHEAD, AHEAD.tolist()),
        (OTHERS, OTHERS.tolist()),
    ],
    ids=["a copy of the inputs", "a copy, some ignored", "the next tokens", "tags of the tokens"],
)
def test_labels_of_a_dict_that_repeat_the_inputs_are_compared_with_the_next_token(
    labels: Tensor, targets: list[list[int]]
) -> None:
    logits = torch.randn(2, 4, 5)
    objective = Objective(Scores(logits))
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "labels": labels}
    objective.choose(batch).check_batch(batch)
    expected = default_sums(logits, torch.tensor(targets))
    assert objective.evaluation_sums(batch) == expected
    assert objective(batch) == (expected["loss"], expected["count"])


def test_a_batch_that_tells_nothing_of_its_labels_does_not_decide_for_later_ones() -> None:
    objective, same = Objective(Scores(torch.randn(2, 4, 5))), torch.ones_like(TOKENS)
    batches = [(TOKENS, torch.full_like(TOKENS, IGNORED)), (same, same), (TOKENS, AHEAD)]
    assert [objective({"input_ids": ids, "labels": labels})[1] for ids, labels in batches] == [0, 6, 7]


def test_targets_that_are_the_inputs_are_refused_but_for_a_model_with_a_loss_of_its_own() -> None:
    with pytest.raises(
        ConfigError, match=r"the targets are the inputs wherever they count.*\nhint: give \(tokens\[:-1"
    ):
        Objective(Given()).choose((TOKENS, MASKED)).check_batch((TOKENS, MASKED))
    own(training_loss=None).choose((TOKENS, MASKED)).check_batch((TOKENS, MASKED))
    for other in ((TOKENS, AHEAD), (torch.ones_like(TOKENS), torch.ones_like(TOKENS)), (torch.ones(2, 3),) * 2):
        Objective(Given()).choose(other).check_batch(other)


def test_a_model_with_a_training_step_is_refused_but_for_one_that_says_what_is_trained_here() -> None:
    batch = (torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ConfigError, match="Own has a training_step") as refused:
        own(training_step=None).choose(batch).check_batch(batch)
    assert "own-training-program.md" in str(refused.value)
    own(training_step=None, training_loss=None).choose(batch).check_batch(batch)


class Both(nn.Module):
    """Takes the targets as well, and gives a mean."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(x, y)


class Unpacks(nn.Module):
    """Takes its argument for the whole batch."""

    def forward(self, batch: Any) -> Tensor:
        x, y, z = batch
        return functional.cross_entropy(x + z, y)


def test_a_model_that_cannot_be_called_with_the_inputs_is_refused_before_the_first_step() -> None:
    batch = (torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ConfigError) as refused:
        Objective(Both()).choose(batch).check_batch(batch)
    assert "Both.forward takes x, y; of a batch (inputs, targets) it is called with the inputs" in str(refused.value)
    assert "training_loss(batch)" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="Module has no method forward"):
        Objective(nn.Module()).choose(batch).check_batch(batch)
    own(training_loss=None).choose(batch).check_batch(batch)


def test_a_model_that_raises_is_said_to_have_been_called_with_the_inputs() -> None:
    objective = Objective(Unpacks())
    with pytest.raises(ValueError, match="not enough values") as raised:
        objective((torch.ones(2, 3), torch.zeros(2, dtype=torch.long)))
    assert call_in(raised.value).startswith(
        "Unpacks was called with the inputs of a batch (inputs, targets): float32 (2, 3); a model that takes the"
    )
    with pytest.raises(ValueError, match="too many values") as raised:
        objective({"batch": torch.ones(4, 3)})
    assert call_in(raised.value) == "Unpacks was called with batch: float32 (4, 3)"
    assert call_in(ValueError()) == ""


def weighted() -> Given:
    """Returns a model with a loss that its forward does not use."""
    model = Given()
    model.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return model


CLASSES = (torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))
BITS = (torch.randn(4, 3), torch.eye(4)[:, :3])


@pytest.mark.parametrize(
    ("objective", "batch", "words"),
    [
        (Objective(weighted()), CLASSES, ("cross entropy", "criterion of Given", "training_loss")),
        (Objective(weighted()), {"inputs": CLASSES[0], "labels": CLASSES[1]}, ("cross entropy", "criterion of Given")),
        (own(compute_loss=None, loss=None), CLASSES, ("cross entropy", "loss, compute_loss of Own")),
        (Objective(weighted()), BITS, ("mean squared error", "criterion")),
        (Objective(Given()), BITS, ("0 and 1", "mean squared error", "binary cross entropy")),
    ],
)
def test_a_loss_that_a_person_may_have_meant_is_named(objective: Objective, batch: Any, words: tuple[str, ...]) -> None:
    line = objective.choose(batch).other_loss(batch)
    assert line is not None
    assert [word for word in words if word not in line] == []


def test_nothing_is_said_where_the_loss_is_plain_or_the_models_own() -> None:
    plain = Objective(Given())
    batches: list[Any] = [CLASSES, (torch.randn(4, 3), torch.randn(4, 3)), (torch.randn(4, 3),), {"inputs": CLASSES[0]}]
    assert [plain.choose(batch).other_loss(batch) for batch in batches] == [None] * 4
    assert own(training_loss=None, loss=None).choose(BITS).other_loss(BITS) is None


def test_a_dict_without_whole_number_labels_is_scored_by_the_models_own_mean() -> None:
    class Own(nn.Module):
        def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
            return SimpleNamespace(loss=pixels.mean() if labels is None else labels.mean())

    pixels = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 2.0]])
    for batch, loss in (({"pixels": pixels}, 6.0), ({"pixels": pixels, "labels": torch.ones(3)}, 3.0)):
        assert [value.item() for value in Objective(Own())(batch)] == [loss, 3]
        assert numbers(Objective(Own()).evaluation_sums(batch)) == {"loss": loss, "count": 3}


def test_a_dict_that_the_model_cannot_use_is_refused() -> None:
    objective = Objective(Scores(torch.zeros(2, 4, 5)))
    with pytest.raises(ConfigError, match=r"a batch has idx, which Scores does not take \(forward takes input_ids, "):
        objective.call.check_batch({"input_ids": TOKENS, "idx": TOKENS, "labels": TOKENS})
    with pytest.raises(ConfigError, match="a batch of input_ids has no whole-number labels, and Scores gives no loss"):
        objective({"input_ids": TOKENS})
