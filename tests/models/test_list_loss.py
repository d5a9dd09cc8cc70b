from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_train.errors import ConfigError
from slurm_train.models.objective import Objective
from tests.models.test_objective import Given, numbers


class Detector(nn.Module):
    """Gives the same for any images and targets."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        return self.given


BOXES: Any = (
    [torch.zeros(3, 4, 4), torch.zeros(3, 5, 4)],
    [{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(0, 4)}],
)
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


@pytest.mark.parametrize(
    "given",
    [{"loss_box": ONE, "loss_class": TWO}, {"loss": ONE + TWO, "boxes": torch.zeros(2, 4)}],
    ids=["sum", "loss"],
)
def test_the_losses_of_a_detector_are_added_and_count_for_each_image(given: Any) -> None:
    objective = Objective(Detector(given))
    objective.choose(BOXES).check_batch(BOXES)
    assert [value.item() for value in objective(BOXES)] == [6, 2]
    assert numbers(objective.evaluation_sums(BOXES)) == {"loss": 6, "count": 2}
    assert objective.gives_held_out_loss(BOXES)


class Either(Detector):
    """Gives losses of lists, and its input as scores."""

    def forward(self, images: Any, targets: Any = None) -> Any:
        return images if isinstance(images, Tensor) else self.given


def test_a_collate_function_may_give_lists_and_tensors_in_turn() -> None:
    objective = Objective(Either({"loss_box": ONE, "loss_class": TWO}))
    scores, labels = torch.randn(4, 5), torch.randint(0, 5, (4,))
    of_scores = functional.cross_entropy(scores, labels, reduction="sum")
    for batch, expected in [(BOXES, [6, 2]), ((scores, labels), [of_scores.item(), 4]), (BOXES, [6, 2])]:
        objective.choose(batch).check_batch(batch)
        assert [value.item() for value in objective(batch)] == expected


@pytest.mark.parametrize("given", [[{"boxes": ONE}], {}, {"loss_box": ONE, "boxes": torch.zeros(2)}], ids=str)
def test_predictions_of_a_detector_are_no_loss(given: Any) -> None:
    objective = Objective(Detector(given))
    assert objective.may_lack_held_out_loss and not objective.gives_held_out_loss(BOXES)
    with pytest.raises(ConfigError, match="gave no loss of a batch"):
        objective(BOXES)
    with pytest.raises(ConfigError, match="gives no loss of held-out samples"):
        objective.evaluation_sums(BOXES)


@pytest.mark.parametrize("batch", [{"images": BOXES[0]}, (*BOXES, BOXES[0])], ids=["dict", "three"])
def test_lists_in_other_batches_or_for_other_models_are_refused_before_the_first_step(batch: Any) -> None:
    for objective in (Objective(Detector({})), Objective(Given())):
        with pytest.raises(ConfigError, match="cannot be scored"):
            objective.choose(batch).check_batch(batch)
    with pytest.raises(ConfigError, match="cannot be scored"):
        Objective(Given()).choose(BOXES).check_batch(BOXES)
