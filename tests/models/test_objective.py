from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError
from slurm_train.models.objective import IGNORED, Objective, bigram_bits_per_byte, default_loss, default_sums

NOT_A_SUM = ", not the sum of the loss as a scalar tensor and the number of items"


class Given(nn.Module):
    """A model whose output is its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class WithOwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def training_loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return self.weight * batch[0].sum(), torch.tensor(batch[0].numel())


class WithOwnSums(WithOwnLoss):
    def evaluation_sums(self, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"loss": batch[0].sum(), "count": torch.tensor(1), "blue": torch.tensor(3)}


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    logits, labels = torch.randn(10, 7, 5), torch.randint(0, 5, (10, 7))
    labels[3:6, 2:] = IGNORED
    whole = default_sums(logits, labels)
    parts = [default_sums(logits[part], labels[part]) for part in (slice(0, 4), slice(4, 10))]
    for key, value in whole.items():
        torch.testing.assert_close(sum(part[key] for part in parts), value)
    assert whole["count"] == 55


def test_cross_entropy_counts_what_is_not_passed_over() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, IGNORED, 4], [0, 2, IGNORED]])
    loss, count = Objective(Given())((logits, labels))
    kept = labels != IGNORED
    torch.testing.assert_close(loss, functional.cross_entropy(logits[kept], labels[kept], reduction="sum"))
    assert count == 4 and loss.dtype == torch.float32


def test_batch_with_nothing_to_count_is_zero() -> None:
    sums = default_sums(torch.randn(2, 5), torch.full((2,), IGNORED))
    assert {key: value.item() for key, value in sums.items()} == {"loss": 0, "count": 0, "correct": 0}


def test_correct_counts_the_highest_scores() -> None:
    logits = torch.eye(4)
    assert default_sums(logits, torch.tensor([0, 1, 3, 3]))["correct"] == 3


def test_classes_may_stand_second_as_in_torch() -> None:
    logits, labels = torch.randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4))
    loss, count = default_loss(logits, labels)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, labels, reduction="sum"))
    assert count == 24


def test_float_targets_give_squared_error() -> None:
    outputs, targets = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert {key: value.item() for key, value in default_sums(outputs, targets).items()} == {"loss": 5.0, "count": 2}


def test_low_precision_outputs_give_a_float32_loss() -> None:
    loss, _ = default_loss(torch.randn(4, 3, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 0]))
    assert loss.dtype == torch.float32


def test_model_may_bring_its_own() -> None:
    batch = (torch.ones(3),)
    loss, count = Objective(WithOwnLoss())(batch)
    assert (loss.item(), count.item()) == (6.0, 3)
    assert {k: v.item() for k, v in Objective(WithOwnLoss()).evaluation_sums(batch).items()} == {"loss": 6, "count": 3}
    assert set(Objective(WithOwnSums()).evaluation_sums(batch)) == {"loss", "count", "blue"}


def test_logits_inside_an_output_object_are_found() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class InObject(nn.Module):
        def forward(self, inputs: Tensor) -> Output:
            return Output(inputs)

    loss, _ = Objective(InObject())((torch.zeros(1, 2), torch.tensor([1])))
    torch.testing.assert_close(loss, torch.tensor(2.0).log())


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        ((4, 3), torch.zeros(5, dtype=torch.int64), "the model gave (4, 3) for whole-number targets of (5,)"),
        ((4, 3), torch.zeros(4), "the model gave (4, 3) for targets of (4,)"),
    ],
)
def test_message_of_shapes_that_do_not_fit(outputs: tuple[int, ...], targets: Tensor, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        default_loss(torch.zeros(outputs), targets)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("method", "made", "message"),
    [
        (
            "training_loss",
            torch.tensor(1.0),
            f"Made.training_loss gave tensor of (){NOT_A_SUM}",
        ),
        (
            "training_loss",
            (torch.zeros(4), torch.tensor(4)),
            f"Made.training_loss gave (tensor of (4,), tensor of ()){NOT_A_SUM}",
        ),
        (
            "training_loss",
            (1.0, 4),
            f"Made.training_loss gave (float, int){NOT_A_SUM}",
        ),
        (
            "evaluation_sums",
            {"loss": torch.tensor(1.0)},
            "Made.evaluation_sums gave dict with loss, not a dict with loss and count",
        ),
        (
            "evaluation_sums",
            torch.tensor(1.0),
            "Made.evaluation_sums gave tensor of (), not a dict with loss and count",
        ),
    ],
)
def test_message_of_what_an_own_loss_must_not_return(method: str, made: object, message: str) -> None:
    model = type("Made", (nn.Module,), {method: lambda _, __: made})()
    of_model = Objective(model)
    with pytest.raises(ConfigError) as caught:
        (of_model.evaluation_sums if method == "evaluation_sums" else of_model)((torch.zeros(4, 1), torch.zeros(4, 1)))
    assert caught.value.message == message


def test_plain_numbers_count_as_tensors_do() -> None:
    class WithNumbers(nn.Module):
        def training_loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
            return batch[0].sum(), batch[0].numel()

    class WithNumbersOfBoth(WithNumbers):
        def evaluation_sums(self, batch: tuple[Tensor, ...]) -> dict[str, float]:
            return {"loss": batch[0].sum().item(), "count": batch[0].numel()}

    batch = (torch.ones(4),)
    assert Objective(WithNumbers())(batch) == (torch.tensor(4.0), torch.tensor(4))
    for model in (WithNumbers(), WithNumbersOfBoth()):
        assert Objective(model).evaluation_sums(batch) == {"loss": torch.tensor(4.0), "count": torch.tensor(4)}


def test_batch_without_targets_needs_an_own_loss() -> None:
    with pytest.raises(ConfigError, match="a batch of 1 tensors has no"):
        Objective(Given())((torch.zeros(2),))


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
    objective.look_at(batch)
    expected = default_sums(logits, torch.tensor(targets))
    assert objective.evaluation_sums(batch) == expected
    assert objective(batch) == (expected["loss"], expected["count"])


def test_a_batch_that_tells_nothing_of_its_labels_does_not_decide_for_later_ones() -> None:
    objective = Objective(Scores(torch.randn(2, 4, 5)))
    nothing = torch.full_like(TOKENS, IGNORED)
    assert objective({"input_ids": TOKENS, "labels": nothing})[1] == 0
    assert objective({"input_ids": torch.ones_like(TOKENS), "labels": torch.ones_like(TOKENS)})[1] == 6
    assert objective({"input_ids": TOKENS, "labels": AHEAD})[1] == 7


def test_targets_that_are_the_inputs_are_refused_but_for_a_model_with_a_loss_of_its_own() -> None:
    batch = TOKENS, MASKED
    with pytest.raises(
        ConfigError, match=r"the targets are the inputs wherever they count.*\nhint: give \(tokens\[:-1"
    ):
        Objective(Given()).look_at(batch)
    Objective(WithOwnLoss()).look_at(batch)
    for other in ((TOKENS, AHEAD), (torch.ones_like(TOKENS), torch.ones_like(TOKENS)), (torch.ones(2, 3),) * 2):
        Objective(Given()).look_at(other)


def test_a_dict_without_whole_number_labels_is_scored_by_the_models_own_mean() -> None:
    class Own(nn.Module):
        def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
            return SimpleNamespace(loss=pixels.mean() if labels is None else labels.mean())

    pixels = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 2.0]])
    for batch, loss in (({"pixels": pixels}, 6.0), ({"pixels": pixels, "labels": torch.ones(3)}, 3.0)):
        assert [value.item() for value in Objective(Own())(batch)] == [loss, 3]
        assert {key: value.item() for key, value in Objective(Own()).evaluation_sums(batch).items()} == {
            "loss": loss,
            "count": 3,
        }


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": TOKENS, "idx": TOKENS, "labels": TOKENS},
            "a batch has idx, which Scores does not take (forward takes input_ids, attention_mask)",
        ),
        (
            {"input_ids": TOKENS},
            "a batch of input_ids has no whole-number labels, and Scores gives no loss of its own for it",
        ),
    ],
)
def test_message_of_a_dict_that_the_model_cannot_use(batch: dict[str, Tensor], message: str) -> None:
    objective = Objective(Scores(torch.zeros(2, 4, 5)))
    with pytest.raises(ConfigError) as caught:
        objective.look_at(batch)
        objective(batch)
    assert caught.value.message == message


def test_bigram_baseline_equals_counting_by_hand() -> None:
    train, held_out = np.array([0, 1, 0, 1, 1], dtype=np.uint16), np.array([0, 1, 1, 0], dtype=np.uint16)
    # after 0: 1 twice; after 1: 0 once, 1 once
    bits = -math.log2(2.1 / 2.2) - 2 * math.log2(1.1 / 2.2)
    assert bigram_bits_per_byte([train], [held_out], vocab_size=2) == pytest.approx(bits / 3)


def test_bigram_arrays_are_not_joined_and_bytes_divide() -> None:
    halves = [np.array([0, 1], dtype=np.uint16), np.array([1, 0], dtype=np.uint16)]
    one = bigram_bits_per_byte(halves, halves, vocab_size=2)
    assert one == pytest.approx(-math.log2(1.1 / 1.2))
    assert bigram_bits_per_byte(halves, halves, vocab_size=2, bytes_per_target=4.0) == pytest.approx(one / 4)


def test_long_bigram_arrays_are_counted_across_blocks() -> None:
    tokens = np.tile(np.array([0, 1, 2], dtype=np.uint16), 2**20)
    assert bigram_bits_per_byte([tokens], [tokens], vocab_size=3) < 1e-5


@pytest.mark.parametrize("output", [(torch.zeros(2, 3), None), {"scores": torch.zeros(2, 3)}, None])
def test_what_is_no_tensor_of_scores_is_refused_in_words(output: Any) -> None:
    class Odd(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return output

    with pytest.raises(ConfigError, match=f"Odd gave a {type(output).__name__}, not a tensor of scores"):
        Objective(Odd())((torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)))
